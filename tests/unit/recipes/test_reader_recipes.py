"""The recipes of the thesis and of DWAtt: what they start from, read, train and keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.portions import one_in

from lamina.recipes.expand import expand_recipe
from lamina.recipes.schema import Recipe, load_recipe
from lamina.train.options import FitOptions

FOLDER = Path(__file__).parents[3] / "recipes/papers"
LARGE, BART = "FacebookAI/roberta-large", "facebook/bart-large-cnn"
NAMES = [path.relative_to(FOLDER).as_posix()[: -len(".yaml")]
         for room in ("adalayers", "dwatt") for path in sorted((FOLDER / room).glob("*.yaml"))
         if path.stem != "published"]  # fmt: skip
OTHER_BASES = {
    **dict.fromkeys(("adalayers/cola-bart", "adalayers/conll-bart", "adalayers/imdb-bart"), BART),
    "dwatt/figure-7-base": "FacebookAI/roberta-base",
    "dwatt/figures-8-and-9": "FacebookAI/xlm-roberta-large",
}
TRAIN_BASE = {"dwatt/figure-6-finetuning", "dwatt/table-3"}  # as the paper fine-tunes there


def recipe(name: str) -> Recipe:
    return load_recipe(FOLDER / f"{name}.yaml")


@pytest.mark.parametrize("name", one_in(4, NAMES))
def test_the_checkpoint_and_what_is_trained(name: str):
    found = recipe(name)
    assert found.model == OTHER_BASES.get(name, LARGE)
    assert found.train_base == found.separately == (name in TRAIN_BASE)
    assert not found.methods


@pytest.mark.parametrize("name", one_in(4, NAMES))
def test_the_best_epoch_on_other_rows_than_those_that_are_learnt_is_kept(name: str):
    found = recipe(name)
    assert {FitOptions.of(spec.options).keep for spec in expand_recipe(found, {}).values()} == {"best"}
    thesis = name.startswith("adalayers")
    assert found.evaluate == ("test" if thesis or name == "dwatt/table-3" else None)
    for task in found.tasks.values():
        assert task.hold_out == (thesis and task.preset == "cola")  # IMDB has no published validation part


@pytest.mark.parametrize("name", one_in(4, NAMES))
def test_texts_are_read_as_far_as_the_model_can(name: str):
    texts = {task.preset for task in recipe(name).tasks.values()}
    lengths = {spec.options.get("max_length") for spec in expand_recipe(recipe(name), {}).values()}
    assert lengths == ({1024 if name.endswith("bart") else 512} if "imdb" in texts else {None})
    limited = {key: task.limit for key, task in recipe(name).tasks.items() if task.limit or task.limit_validation}
    of_low_resource = {key: 100 for key in recipe(name).tasks if key.startswith("low-")}
    assert limited == of_low_resource  # which have no more rows


@pytest.mark.parametrize("name", NAMES)
def test_the_header_names_the_command_and_the_aim(name: str):
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    header = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    assert f"lamina train recipes/papers/{name}.yaml --output out/" in header
    aims = ("It aims at", "The text of the paper says that", "96.2 % accuracy that the thesis quotes")
    assert sum(aim in header for aim in aims) == 1
