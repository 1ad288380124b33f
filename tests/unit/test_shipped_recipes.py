"""The recipes that come along: each loads, dry-runs with no network, and has the sizes that its paper prints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lamina.dry_run import DryRun, dry_run
from lamina.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
PATHS = sorted(path.relative_to(ROOT / "recipes").as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))
ADA, DWATT = "papers/adalayers", "papers/dwatt"
LINEAR = 1024 * 9 + 9  # the head of every reader of CoNLL-2003 in the second paper


@cache
def recipe(path: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / path)


@cache
def tried(path: str) -> DryRun:
    return dry_run(recipe(path))


def sizes(path: str) -> dict[str, int]:
    return {row["method"]: row["parameters"] for row in tried(path).readers}


def test_the_tables_and_figures_that_there_are():
    models = ("roberta-large", "bart")
    thesis = {f"{ADA}/{task}-{model}.yaml" for task in ("imdb", "cola", "conll") for model in models}
    figures = ("figure-2", "figure-3", "figure-4", "figure-5", "figure-6-feature-extraction", "figure-6-finetuning")
    more = ("figure-7-base", "figure-7-large", "figures-8-and-9", "table-2", "table-3")
    small = {f"small/{name}.yaml" for name in ("three-tasks", "few-shot-conll", "cola-sweep")}
    assert thesis | {f"{DWATT}/{name}.yaml" for name in (*figures, *more)} | small <= set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_a_recipe_dry_runs_without_network(path: str):
    found = tried(path)
    assert found.flops["base"] > 0
    assert min(row["steps"] for row in found.tasks) > 0
    assert min(row["flops_per_text"] for row in found.readers) > 0
    assert {row["task"] for row in found.readers} == {row["task"] for row in found.tasks} == set(recipe(path).tasks)


@pytest.mark.parametrize("path", PATHS)
def test_a_recipe_begins_with_its_command(path: str):
    lines = (ROOT / "recipes" / path).read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[: len(header)] == header
    assert sum(f"lamina train recipes/{path} " in line for line in header) == 1


@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("papers/")])
def test_a_paper_s_recipe_carries_its_architecture(path: str):
    assert tried(path).model["config"] == "that of the recipe, since the hub cannot be reached"


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("roberta-large", 355_359_744),
        ("bart", 406_290_432),
    ],
)
def test_the_bases_are_the_published_ones(model: str, parameters: int):
    assert tried(f"{ADA}/imdb-{model}.yaml").model["parameters"] == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("imdb-roberta-large", 1_589_658),
        ("imdb-bart", 868_751),
        ("cola-roberta-large", 1_589_658),
        ("cola-bart", 868_751),
        ("conll-roberta-large", 3_739_937),
        ("conll-bart", 2_298_134),
    ],
)
def test_parameters_of_the_thesis(name: str, parameters: int):
    assert sizes(f"{ADA}/{name}.yaml")["AdaLayers"] == parameters


# Tables 7, 11 and 15 as printed; dropout as published with the code, where the thesis prints another.
THESIS: dict[str, dict[str, Any]] = {
    "imdb-roberta-large": {"batch_size": 1200, "weight_decay": 1e-3, "plateau_patience": 5, "alpha": 70, "entropy": 0,
                           "cutoff": 5e-3, "dim": 64, "positions": False, "attention_heads": 16, "dropout": 0.3},
    "imdb-bart": {"batch_size": 588, "weight_decay": 1e-3, "plateau_patience": 5, "alpha": 70, "entropy": 0,
                  "cutoff": 5e-3, "dim": 64, "positions": False, "attention_heads": 16, "dropout": 0.005},
    "cola-roberta-large": {"batch_size": 600, "weight_decay": 0, "plateau_patience": 25, "alpha": 64, "entropy": 0,
                           "cutoff": 1e-2, "dim": 64, "positions": True, "attention_heads": 8, "dropout": 0.3},
    "cola-bart": {"batch_size": 900, "weight_decay": 0, "plateau_patience": 16, "alpha": 64, "entropy": 0,
                  "cutoff": 1e-2, "dim": 64, "positions": True, "attention_heads": 8, "dropout": 0.1},
    "conll-roberta-large": {"batch_size": 356, "weight_decay": 1e-3, "plateau_patience": 16, "alpha": 128,
                            "entropy": 1e-3, "cutoff": 1e-2, "dim": 128, "positions": True, "attention_heads": 8,
                            "dropout": 0.2, "encoder_layers": 1, "feedforward": 2048},
    "conll-bart": {"batch_size": 356, "weight_decay": 1e-3, "plateau_patience": 16, "alpha": 128, "entropy": 1e-3,
                   "cutoff": 1e-2, "dim": 128, "positions": True, "attention_heads": 8, "dropout": 0.2,
                   "encoder_layers": 1, "feedforward": 2048},
}  # fmt: skip


@pytest.mark.parametrize("name", THESIS)
def test_settings_of_the_thesis(name: str):
    found = recipe(f"{ADA}/{name}.yaml")
    (task,) = found.tasks.values()
    ada, single = task.readers["AdaLayers"], task.readers["single layer"]
    written = {**found.fit, **ada.fusion, **ada.head}
    expected = {
        "learning_rate": 1e-4,
        "optimizer": "adam",
        "schedule": "plateau",
        "plateau_factor": 0.5,
        **THESIS[name],
    }
    written.setdefault("positions", False)
    assert {key: written[key] for key in expected} == expected
    assert ada.fusion["dropout"] == ada.head["dropout"] == single.fusion["dropout"]
    assert single.head == ada.head
    assert found.fit["precision"] == "float16"


@pytest.mark.parametrize("name", THESIS)
def test_every_layer_of_the_base_is_a_baseline(name: str):
    layers = [row["settings"]["fusion.layer"] for row in tried(f"{ADA}/{name}.yaml").readers if row["settings"]]
    assert layers == list(range(13 if name.endswith("bart") else 25))


@pytest.mark.parametrize(("method", "parameters"), [("Base", 0), ("RoBERTa+2", 25_192_448), ("Average", 0),
                                                    ("Concat", 25_165_824), ("DWAtt", 26_326_528)])  # fmt: skip
def test_parameters_of_table_2(method: str, parameters: int):
    assert sizes(f"{DWATT}/table-2.yaml")[method] == parameters + LINEAR


def test_the_few_shot_runs_are_those_of_figure_3():
    found = tried(f"{DWATT}/figure-3.yaml")
    assert [row["rows"] for row in found.tasks] == [32, 64, 128, 256, 512]
    assert {row["draws"] for row in found.tasks} == {5}
    shown = {(row["method"], row["epochs"], row["count"]) for row in found.readers}
    assert shown == {(m, e, 5) for m in ("RoBERTa+2", "Concat", "DWAtt") for e in (25, 50, 75, 100)}
    assert [row["rows"] for row in tried(f"{DWATT}/figure-5.yaml").tasks] == [24, 48, 96, 192, 384]


@pytest.mark.parametrize("name", ["figure-6-finetuning", "table-3"])
def test_fine_tuned_methods_have_bases_of_their_own(name: str):
    found = recipe(f"{DWATT}/{name}.yaml")
    assert (found.train_base, found.separately, found.fit["base_learning_rate"]) == (True, True, 5e-5)


def test_masked_language_modelling_is_tested_on_the_test_part():
    found = recipe(f"{DWATT}/table-3.yaml")
    assert (found.evaluate, found.fit["batch_size"]) == ("test", 8)
    assert {row["kind"] for row in tried(f"{DWATT}/table-3.yaml").tasks} == {"masked_lm"}


def test_the_small_twins():
    few, sweep = tried("small/few-shot-conll.yaml"), tried("small/cola-sweep.yaml")
    assert [row["rows"] for row in few.tasks] == [32, 128, 512]
    assert {(row["method"], row["count"]) for row in few.readers} == {
        (method, 5) for method in ("last layer", "Base+1", "Concat", "DWAtt", "AdaLayers")
    }
    assert len(sweep.readers) == 27
    assert sweep.readers[0]["settings"].keys() == {"fusion.alpha", "fusion.entropy", "fusion.dim"}
