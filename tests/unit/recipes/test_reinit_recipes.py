"""The recipes of the paper on partial re-initialisation: what they start from, read, train and keep."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support import shipped
from tests.support.portions import one_in, set_apart
from transformers import AutoModelForSequenceClassification

from lamina.recipes.edits import apply_edits, config_of
from lamina.recipes.expand import expand_recipe
from lamina.studies.run_study import load_study_recipe
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.recipes.schema import Recipe
    from lamina.train.grid import RunSpec

FOLDER = Path(__file__).parents[3] / "recipes/papers/partial-reinit"
FIGURES = ("figure-1a", "figure-1b", "figure-1c", "figure-1d")
LINEAR = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
          "intermediate.dense", "output.dense")  # fmt: skip


def recipe(name: str) -> Recipe:
    return shipped.recipe(f"papers/partial-reinit/{name}")


@cache
def specs(name: str) -> list[RunSpec]:
    return list(expand_recipe(recipe(name), {}).values())


def header(name: str) -> str:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


@cache
def bert(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config_of(recipe(name).architecture or {}))


def edited(name: str, key: str, value: object) -> PreTrainedModel:
    """The model that a run of this setting starts to train."""
    model = copy.deepcopy(bert(name))
    spec = next(spec for spec in specs(name) if spec.settings[key] == value)
    apply_edits(model, spec.edits, seed=0, where="here")
    return model


@pytest.mark.parametrize("name", [*FIGURES, "figure-2"])
def test_what_they_start_from_and_how_they_learn(name: str):
    found = recipe(name)
    assert (found.model, found.evaluate) == ("google-bert/bert-base-uncased", None)
    assert {spec.settings["seed"] for spec in specs(name)} == {0, 1, 2}
    assert all(spec.settings["seed"] == spec.settings.get("repeat", spec.settings["seed"]) for spec in specs(name))
    assert bert(name).num_parameters() == 109_483_778
    for spec in specs(name):
        options = FitOptions.of(spec.options)
        epochs = 40 if name == "figure-2" else 3
        assert (options.learning_rate, options.epochs, options.max_length) == (2e-5, epochs, 128)
        assert options.batch_size == 8
        assert options.keep == "last"  # the score is that of the end of training


ROWS = {
    "figure-1a": {"sst2": 67_349, "sst2-10": 6_735, "sst2-1": 673},
    "figure-1b": {"qnli": 104_743, "qnli-10": 10_474, "qnli-1": 1_047},
    "figure-1c": {"sst2-1": 673, "qnli-06": 628},
    "figure-1d": {"cola": 8_551, "cola-10": 855, "cola-1": 86},
    "figure-2": {"sst2": 67_349, "qnli": 104_743, "cola": 8_551},
}
SCORED = {"sst2": 872, "qnli": 5_463, "cola": 1_043}


@pytest.mark.long
@pytest.mark.parametrize("name", set_apart(ROWS, *(name for name in ROWS if name != "figure-1a")))
def test_rows_to_learn_from_and_to_score(name: str):
    tasks = shipped.tried(f"papers/partial-reinit/{name}").tasks
    assert {task["task"]: task["rows"] for task in tasks} == ROWS[name]
    assert [task["validation"] for task in tasks] == [SCORED[task["task"].partition("-")[0]] for task in tasks]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("figure-1a", 117),
        ("figure-1b", 117),
        ("figure-1c", 78),
        ("figure-1d", 117),
        ("figure-2", 108),
        ("finetuned-for-drift", 9),
    ],
)
def test_how_many_models_are_trained(name: str, runs: int):
    assert len(specs(name)) == runs
    assert len({(spec.task, str(spec.settings)) for spec in specs(name)}) == runs


@pytest.mark.parametrize("name", FIGURES)
def test_every_number_of_top_blocks_is_tried(name: str):
    layers = list(dict.fromkeys(spec.settings["reinit.layers"] for spec in specs(name)))
    assert layers == [None, "12", *(f"{13 - top}-12" for top in range(2, 13))]
    arguments = {str({**dict(spec.edits)["reinit"], "layers": ""}) for spec in specs(name) if spec.edits}
    assert arguments == {str({"scope": "linear", "std": 0.02, "bound": 2, "norms": "reset", "layers": ""})}


@pytest.mark.parametrize(("layers", "blocks"), one_in(3, [("12", [11]), ("10-12", [9, 10, 11]), ("1-12", range(12))]))
def test_the_six_maps_of_the_top_blocks_start_anew_and_everything_learns(layers: str, blocks):
    model = edited("figure-1a", "reinit.layers", layers)
    (edit,) = model._lamina_edits
    drawn = {name for name in edit.parameters if "LayerNorm" not in name}
    assert drawn == {f"bert.encoder.layer.{block}.{role}.weight" for block in blocks for role in LINEAR}
    assert len(edit.parameters) - len(drawn) == 4 * len(blocks)  # weights and biases of two norms
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("keep", one_in(4, [12, 11, 6, 1]))
def test_a_probe_trains_the_classifier_alone_on_what_is_left(keep: int):
    model = edited("figure-2", "truncate.keep", keep)
    assert len(model.bert.encoder.layer) == model.config.num_hidden_layers == keep
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"classifier.weight", "classifier.bias"}
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 1_538


@pytest.mark.parametrize("name", FIGURES)
def test_headers_name_the_departures_from_the_authors_code(name: str):
    told = header(name)
    assert "The paper draws its curves and prints no numbers" in told
    assert "gets weights with one of 0.00046" in told
    assert "after the last epoch" in told


@pytest.mark.parametrize(("figure", "task"), [("3a", "sst2"), ("3b", "qnli"), ("5b", "cola")])
def test_the_figures_of_drift_compare_models_that_the_recipe_trains(figure: str, task: str):
    study = load_study_recipe(FOLDER / "studies" / f"figure-{figure}.yaml")
    trained = {f"out/finetuned-for-drift/models/{spec.name}": spec.task for spec in specs("finetuned-for-drift")}
    drift = study.studies["drift"] or {}
    assert (study.model, drift["roles"]) == (recipe("figure-2").model, "ffn_out")
    assert [trained[place] for place in drift["others"].values()] == [task, f"{task}-10", f"{task}-1"]
    assert recipe("finetuned-for-drift").keep == "all"
    small = load_study_recipe(FOLDER.parents[1] / "small" / "studies" / f"drift-{task}.yaml").studies["drift"] or {}
    twins = expand_recipe(shipped.recipe("small/finetuned-for-drift"), {}).values()
    places = [
        [f"out/small-drift/models/{spec.name}" for spec in twins if spec.task == f"{task}{part}"]
        for part in ("", "-10", "-1")
    ]
    assert (small["roles"], [*small["others"].values()]) == ("ffn_out", places)
