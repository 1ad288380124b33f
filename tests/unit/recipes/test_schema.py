"""Recipes: what is not understood is an error that says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError, LaminaError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads import HEADS
from lamina.recipes.schema import build, load_recipe, slug

GOOD = """
model: minilm
seeds: [0, 1]
fit: {epochs: 3}
tasks:
  cola:
    preset: cola
    epochs: 2
    readers:
      Ada: {fusion: {name: ada_layers, dim: 32}, head: {pooling: mean}, learning_rate: 1.0e-3}
      plain: {fusion: mean}
  mine:
    files: {train: a.tsv, validation: b.tsv}
    readers:
      last: {fusion: last_layer, stack: encoder}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write(text: str) -> Any:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return load_recipe(tmp_path / "recipe.yaml")

    return write


def test_a_recipe(load: Any):
    recipe = load(GOOD)
    assert (recipe.model, recipe.seeds, recipe.fit) == ("minilm", [0, 1], {"epochs": 3})
    cola, mine = recipe.tasks["cola"], recipe.tasks["mine"]
    assert (cola.preset, cola.files, cola.epochs) == ("cola", None, 2)
    assert cola.readers["Ada"].fusion == {"name": "ada_layers", "dim": 32}
    assert cola.readers["Ada"].learning_rate == 0.001
    assert cola.readers["plain"].fusion == {"name": "mean"}
    assert cola.readers["plain"].head == {}
    assert mine.files == {"train": "a.tsv", "validation": "b.tsv"}
    assert mine.readers["last"].stack == "encoder"


WIDE = """
model: roberta
architecture: {model_type: roberta, hidden_size: 8}
train_base: true
separately: true
evaluate: test
tasks:
  cola:
    preset: cola
    metric: accuracy
    hold_out: true
    limit: 50
    limit_validation: 20
    draw: {per_class: 8, stratified: true, trials: 5}
    readers:
      Ada: {fusion: ada_layers, grid: {fusion.dim: [8, 16], seed: [1]}}
  rte:
    preset: rte
    draw: {fraction: 0.5}
    readers:
      Ada: {fusion: ada_layers}
"""


def test_a_recipe_with_everything(load: Any):
    recipe = load(WIDE)
    assert (recipe.train_base, recipe.separately, recipe.evaluate) == (True, True, "test")
    assert recipe.architecture == {"model_type": "roberta", "hidden_size": 8}
    cola, rte = recipe.tasks["cola"], recipe.tasks["rte"]
    assert (cola.metric, cola.hold_out, cola.limit, cola.limit_validation) == ("accuracy", True, 50, 20)
    assert (cola.draw.size(), cola.draw.stratified, cola.draw.trials) == ({"per_class": 8}, True, 5)
    assert (rte.draw.size(), rte.draw.stratified, rte.draw.trials) == ({"fraction": 0.5}, False, 1)
    assert cola.readers["Ada"].grid == {"fusion.dim": [8, 16], "seed": [1]}
    assert rte.readers["Ada"].grid == {}


def test_what_a_recipe_does_not_say(load: Any):
    recipe = load(GOOD)
    assert (recipe.architecture, recipe.train_base, recipe.separately, recipe.evaluate) == (None, False, False, None)
    assert (recipe.tasks["cola"].draw, recipe.tasks["cola"].hold_out) == (None, False)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "per_class: 8, ",
            "per_class: 8, rows: 9, ",
            "tasks.cola.draw: give one of 'per_class', 'fraction' and 'rows'",
        ),
        ("per_class: 8, ", "", "tasks.cola.draw: give one of 'per_class', 'fraction' and 'rows'"),
        ("per_class: 8, ", "per_class: 0, ", "tasks.cola.draw.per_class: input should be greater than 0"),
        ("trials: 5", "trials: 0", "tasks.cola.draw.trials: input should be greater than 0"),
        ("fraction: 0.5", "fraction: 0", "tasks.rte.draw.fraction: input should be greater than 0"),
        ("fraction: 0.5", "fraction: 1.5", "tasks.rte.draw.fraction: input should be less than or equal to 1"),
        ("limit: 50", "limit: 0", "tasks.cola.limit: input should be greater than 0"),
        ("limit_validation: 20", "limit_validation: -1", "tasks.cola.limit_validation: input should be greater than 0"),
        ("evaluate: test", "evaluate: tset", "evaluate: input should be 'test'"),
        ("fusion.dim: [8, 16]", "fusion.dim: 8", "grid.fusion.dim: input should be a valid list"),
        ("model_type: roberta, ", "", "top level: 'architecture' has no 'model_type'; it says which family"),
        ("    metric: accuracy", "    labels: [a]", "tasks.cola: 'labels' is for files; the preset 'cola' has its own"),
        ("    metric: accuracy", "    text: sentence", "tasks.cola: 'text' is for files"),
        (
            "    readers:\n      Ada: {fusion: ada_layers}\n",
            "    readers: {}\n",
            "top level: task 'rte' has no readers; give it some, or give the run 'methods'",
        ),
    ],
)
def test_a_value_that_cannot_be_in_a_wide_recipe(load: Any, right: str, wrong: str, message: str):
    assert right in WIDE
    with pytest.raises(ConfigError, match=message):
        load(WIDE.replace(right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "trials: 5",
            "trails: 5",
            r"tasks\.cola\.draw: unknown key 'trails'; known: per_class,.*Did you mean 'trials'",
        ),
        ("grid: {", "gird: {", r"readers\.Ada: unknown key 'gird';.*Did you mean 'grid'"),
        ("hold_out", "holdout", r"tasks\.cola: unknown key 'holdout';.*Did you mean 'hold_out'"),
        ("train_base", "trainbase", r"top level: unknown key 'trainbase';.*Did you mean 'train_base'"),
    ],
)
def test_a_misspelt_key_of_a_wide_recipe(load: Any, right: str, wrong: str, message: str):
    assert right in WIDE
    with pytest.raises(UnknownNameError, match=message):
        load(WIDE.replace(right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "model:",
            "modle:",
            r"recipe .*recipe\.yaml, top level: unknown key 'modle'; known: model, .*Did you mean 'model'",
        ),
        (
            "    readers:\n      Ada",
            "    reader:\n      Ada",
            r"tasks\.cola: unknown key 'reader';.*Did you mean 'readers'",
        ),
        ("seeds:", "seed:", r"top level: unknown key 'seed';.*Did you mean 'seeds'"),
        ("    epochs: 2", "    epoch: 2", r"tasks\.cola: unknown key 'epoch';.*Did you mean 'epochs'"),
        ("preset: cola", "preset: cola\n    lable: x", r"tasks\.cola: unknown key 'lable';.*Did you mean 'label'"),
        ("{fusion: mean}", "{fusion: mean, haed: {}}", r"tasks\.cola\.readers\.plain: unknown key 'haed';.*'head'"),
    ],
)
def test_a_misspelt_key_is_named_with_its_place(load: Any, right: str, wrong: str, message: str):
    assert right in GOOD
    with pytest.raises(UnknownNameError, match=message):
        load(GOOD.replace(right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("model: minilm", "", r"recipe\.yaml, (top level|model): field required"),
        ("seeds: [0, 1]", "seeds: []", r"seeds: list should have at least 1 item"),
        ("seeds: [0, 1]", "seeds: [x]", r"seeds\.0: input should be a valid integer"),
        ("    preset: cola\n", "", r"tasks\.cola: .*give either 'preset' or 'files'"),
        ("    preset: cola\n", "    preset: cola\n    files: {train: a}\n", r"give either 'preset' or 'files'"),
        (
            "learning_rate: 1.0e-3",
            "learning_rate: fast",
            r"readers\.Ada\.learning_rate: input should be a valid number",
        ),
        ("learning_rate: 1.0e-3", "learning_rate: 0", r"readers\.Ada\.learning_rate: input should be greater than 0"),
        ("    epochs: 2", "    epochs: 0", r"tasks\.cola\.epochs: input should be greater than 0"),
        ("{fusion: mean}", "{head: {}}", r"readers\.plain\.fusion: field required"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_place(load: Any, right: str, wrong: str, message: str):
    assert right in GOOD
    with pytest.raises(ConfigError, match=message):
        load(GOOD.replace(right, wrong))


METHODS = """
model: minilm
tasks:
  cola: {preset: cola}
methods:
  plain: {}
  unit:
    edits: [{insert: {init: unit}}, {freeze: {train: inserted}}]
    fit: {epochs: 2}
    grid: {insert.layers: [null, "1-2"]}
"""


def test_a_recipe_with_methods(load: Any):
    recipe = load(METHODS)
    assert list(recipe.methods) == ["plain", "unit"]
    unit = recipe.methods["unit"]
    assert unit.edits == [{"insert": {"init": "unit"}}, {"freeze": {"train": "inserted"}}]
    assert (unit.fit, unit.grid) == ({"epochs": 2}, {"insert.layers": [None, "1-2"]})
    assert recipe.methods["plain"] == type(unit)()
    assert recipe.tasks["cola"].readers == {}


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "{preset: cola}",
            "{preset: cola, readers: {a: {fusion: mean}}}",
            "top level: task 'cola' has readers and the run has methods; give one or the other",
        ),
        ("model: minilm", "model: minilm\ntrain_base: true", "'train_base' and 'separately' are for readers"),
        ("model: minilm", "model: minilm\nseparately: true", "'train_base' and 'separately' are for readers"),
        ("unit}}, {freeze", "unit}, freeze", "methods.unit.edits: each edit is one name with its arguments"),
        ("{init: unit}", "unit", "methods.unit.edits.0.insert: input should be a valid dictionary"),
        ('[null, "1-2"]', "[]", "methods.unit.grid: 'insert.layers' has no values; give it some, or leave it out"),
        ('[null, "1-2"]', "1", "methods.unit.grid.insert.layers: input should be a valid list"),
    ],
)
def test_a_value_that_cannot_be_in_methods(load: Any, right: str, wrong: str, message: str):
    assert right in METHODS
    with pytest.raises(ConfigError, match=message):
        load(METHODS.replace(right, wrong))


def test_a_misspelt_key_of_a_method(load: Any):
    with pytest.raises(UnknownNameError, match=r"methods\.unit: unknown key 'edit'; known: edits, fit, grid"):
        load(METHODS.replace("edits:", "edit:"))


def test_a_misspelt_fusion_or_head_is_named_with_its_place(load: Any):
    reader = load(GOOD).tasks["cola"].readers["Ada"]
    assert build(FUSIONS, reader.fusion, "here") == AdaLayers(dim=32)
    with pytest.raises(UnknownNameError, match=r"fusion: unknown name 'ada_layer'.*Did you mean 'ada_layers'"):
        build(FUSIONS, {"name": "ada_layer"}, "here")
    with pytest.raises(UnknownNameError, match=r"fusion 'ada_layers': unknown key 'alfa'.*Did you mean 'alpha'"):
        build(FUSIONS, {"name": "ada_layers", "alfa": 1}, "here")
    with pytest.raises(UnknownNameError, match=r"head 'token_classification': unknown key 'droput'.*'dropout'"):
        build(HEADS, {"name": "token_classification", "labels": ["a"], "droput": 0.1}, "here")


def test_lists_become_tuples():
    assert build(FUSIONS, {"name": "mean", "layers": [1, 2]}, "here").layers == (1, 2)


def test_a_value_of_the_wrong_type_is_named_with_its_place():
    with pytest.raises(ConfigError, match=r"recipe, tasks\.a\.fusion: .*Correct the value there"):
        build(FUSIONS, {"name": "ada_layers", "entropy": "1e-3"}, "tasks.a.fusion")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML; .*Correct it there"),
        ("- a", "holds no keys; it needs 'model' and 'tasks'"),
        ("", "holds no keys"),
        ("just words", "holds no keys"),
    ],
)
def test_what_is_no_recipe(load: Any, text: str, message: str):
    with pytest.raises(DataError, match=message):
        load(text)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path):
    with pytest.raises(DataError, match=r"recipe: .*none\.yaml cannot be read \(No such file or directory\)"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(DataError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(DataError, match="is not YAML"):
        load_recipe(tmp_path / "x.yaml")


def test_no_code_is_run_from_a_recipe(load: Any):
    with pytest.raises(LaminaError, match="is not YAML"):
        load("model: !!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    ("name", "expected"), [("last layer + linear", "last-layer-linear"), ("AdaLayers", "AdaLayers"), (" é! a ", "a")]
)
def test_slugs(name: str, expected: str):
    assert slug(name) == expected
