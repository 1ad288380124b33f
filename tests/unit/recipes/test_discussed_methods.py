"""The recipes of methods that the papers discuss: their sizes, rows and settings, and what they leave to others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import shipped

if TYPE_CHECKING:
    from lamina.recipes.estimate import Estimate
    from lamina.recipes.schema import Recipe

PAPERS = Path(__file__).parents[3] / "recipes" / "papers"
ROUTING, HEAD2TOE = "adalayers/imdb-routing", "adalayers/imdb-head2toe"
MIXES = "dwatt/figure-3-discussed-mixes"
WIDTH, LAYERS, VECTORS, TAGS = 1024, 25, 64, 9


def recipe(name: str) -> Recipe:
    return shipped.recipe(f"papers/{name}")


def tried(name: str) -> Estimate:
    return shipped.tried(f"papers/{name}")


def header(name: str) -> str:
    lines = (PAPERS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def stage(inputs: int, outputs: int, size: int, linear: bool) -> int:
    """Parameters of one stage of routing into vectors of `size`; its inputs share theirs where they vary in number."""
    worth = 2 * outputs * (WIDTH + 1) if linear else 2 * inputs * outputs
    votes = outputs * WIDTH + WIDTH * size + outputs * size
    guesses = size * WIDTH + 2 * outputs * WIDTH
    return inputs * (WIDTH + 1) + votes + guesses + 2 * inputs * outputs + worth


@pytest.mark.long
def test_routing_ends_in_the_classes_and_has_no_head():
    """As the author's code: 25 layers, 64 vectors of 1,024 twice, one output of size 1 per class."""
    (row,) = tried(ROUTING).runs
    norms = 2 * LAYERS * WIDTH
    stages = stage(1, VECTORS, WIDTH, True) + stage(VECTORS, VECTORS, WIDTH, False) + stage(VECTORS, 2, 1, False)
    assert (row["parameters"], row["trained"]) == (norms + stages, norms + stages)
    task = recipe(ROUTING).tasks["imdb"]
    reader = task.readers["Routing"].template(task.outline())
    assert (reader.fusion.dim, reader.fusion.layers, reader.fusion.iterations) == (2, "all", 2)  # pyright: ignore
    head = reader.head.build(2)
    assert list(head.parameters()) == []


@pytest.mark.long
def test_routing_is_trained_as_its_author_does():
    found = recipe(ROUTING)
    expected = {"batch_size": 5, "learning_rate": 1e-3, "schedule": "cosine", "warmup_ratio": 0.3, "max_grad_norm": 0}
    assert {key: found.fit[key] for key in expected} == expected
    (row,) = tried(ROUTING).tasks
    assert row["steps"] == pytest.approx(100_000, rel=0.11)  # a tenth of the rows is held out
    assert all(word in header(ROUTING) for word in ("96.2 %", "mixup", "RAdam", "512", "validates on the test part"))


@pytest.mark.long
def test_head2toe_learns_a_linear_map_of_every_layer_s_mean():
    found = tried(HEAD2TOE)
    assert {row["parameters"] for row in found.runs} == {LAYERS * WIDTH * 2 + 2}
    settings = {tuple(row["settings"].items()) for row in found.runs}
    assert len(settings) == 9
    assert {dict(one)["fusion.fraction"] for one in settings} == {0.01, 0.05, 0.1}
    assert {dict(one)["fusion.group_lasso"] for one in settings} == {1e-5, 1e-4, 1e-3}
    assert recipe(HEAD2TOE).tasks["imdb"].readers["Head2Toe"].head == {"pooling": "first", "dropout": 0}


@pytest.mark.long
@pytest.mark.parametrize("name", [ROUTING, HEAD2TOE])
def test_what_their_papers_leave_open_is_as_for_ada_layers(name: str):
    found, ada = recipe(name), recipe("adalayers/imdb-roberta-large")
    assert (found.model, found.architecture, found.evaluate) == (ada.model, ada.architecture, "test")
    assert {key: found.fit[key] for key in ("max_length", "precision", "optimizer", "max_grad_norm")} == {
        key: ada.fit[key] for key in ("max_length", "precision", "optimizer", "max_grad_norm")
    }
    assert [(row["rows"], row["validation"]) for row in tried(name).tasks] == [
        (row["rows"], row["validation"]) for row in tried("adalayers/imdb-roberta-large").tasks
    ]


def test_steps_of_head2toe_are_those_of_ada_layers():
    fit, ada = recipe(HEAD2TOE).fit, recipe("adalayers/imdb-roberta-large").fit
    assert fit["batch_size"] * fit["gradient_accumulation_steps"] == ada["batch_size"] == 1200
    keys = ("schedule", "plateau_factor", "plateau_patience", "early_stopping_patience", "epochs", "min_learning_rate")
    assert {key: fit[key] for key in keys} == {key: ada[key] for key in keys}
    kept = fit["batch_size"] * fit["max_length"] * LAYERS * WIDTH * 4
    assert kept < 3 * 2**30  # bytes of all states of a batch


@pytest.mark.long
def test_the_mixes_have_the_few_shot_set_of_figure_3():
    found, printed = recipe(MIXES), recipe("dwatt/figure-3")
    assert (found.fit, found.model, found.architecture) == (printed.fit, printed.model, printed.architecture)
    rows: list[Any] = [
        [(row["rows"], row["repeats"]) for row in tried(name).tasks] for name in (MIXES, "dwatt/figure-3")
    ]
    assert rows[0] == rows[1] == [(count, 5) for count in (32, 64, 128, 256, 512)]
    shown = {(row["method"], row["epochs"], row["count"]) for row in tried(MIXES).runs}
    methods = ("ScalarMix", "Elementwise", "Gated", "DepthLSTM")
    assert shown == {(method, epochs, 5) for method in methods for epochs in (25, 50, 75, 100)}


@pytest.mark.long
def test_sizes_of_the_mixes():
    """Over 24 layers, and with a head of nine tags each."""
    head, blocks = TAGS * (WIDTH + 1), LAYERS - 1
    sizes = {row["method"]: row["parameters"] - head for row in tried(MIXES).runs}
    assert sizes == {
        "ScalarMix": blocks + 1,
        "Elementwise": blocks * WIDTH,
        "Gated": 128 * (WIDTH + 1) + 128 + 1,
        "DepthLSTM": 4 * (2 * WIDTH * WIDTH + 2 * WIDTH),
    }
    assert "aims at no printed number" in header(MIXES)
