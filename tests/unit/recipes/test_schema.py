"""Recipes: what is not understood is an error that names the line, the place and the nearest name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError, LaminaError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.recipes.schema import load_recipe, parse_recipe, slug
from lamina.tasks.stratify import SampleSize

GOOD = """\
model: minilm
seeds: [0, 1]
fit: {epochs: 3}
tasks:
  cola:
    preset: cola
    epochs: 2
    readers:
      Ada: {fusion: {name: ada_layers, dim: 32, layers: [1, 2]}, head: {pooling: mean}, learning_rate: 1.0e-3}
      plain: {fusion: mean}
  mine:
    files: {train: a.tsv, validation: b.tsv}
    readers:
      last: {fusion: last_layer, stack: encoder}
"""
WIDE = """\
model: roberta
architecture: {model_type: roberta, hidden_size: 8}
train_base: true
separately: true
evaluate: test
fit:
  schedule: plateau
  plateau_patience: 3
tasks:
  cola:
    preset: cola
    metric: accuracy
    hold_out: true
    limit: 50
    limit_validation: 20
    subsample: {per_class: 8, stratified: true, repeats: 5}
    readers:
      Ada: {fusion: ada_layers, grid: {fusion.dim: [8, 16], alpha: [1], seed: [1]}}
  rte:
    preset: rte
    subsample: {fraction: 0.5}
    readers:
      Ada: {fusion: ada_layers}
"""
METHODS = """\
model: minilm
tasks:
  cola: {preset: cola}
methods:
  plain: {}
  unit:
    edits:
      - insert: {init: unit, kernel: 1}
      - freeze: {train: inserted}
    fit: {epochs: 2}
    grid:
      insert.layers: [null, "1-2"]
      learning_rate: [0.1, 0.2]
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write(text: str) -> Any:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return load_recipe(tmp_path / "recipe.yaml")

    return write


def test_what_is_no_path_of_a_recipe_is_named():
    with pytest.raises(ConfigError, match=r"^load_recipe: path is 3; it must be a text or a path"):
        load_recipe(3)  # pyright: ignore[reportArgumentType]


def test_a_recipe(load: Any):
    recipe = load(GOOD)
    assert (recipe.model, recipe.seeds, recipe.fit) == ("minilm", [0, 1], {"epochs": 3})
    cola, mine = recipe.tasks["cola"], recipe.tasks["mine"]
    assert (cola.preset, cola.files, cola.epochs) == ("cola", None, 2)
    assert (cola.readers["Ada"].learning_rate, cola.readers["plain"].fusion) == (0.001, {"name": "mean"})
    assert mine.files == {"train": "a.tsv", "validation": "b.tsv"}
    assert mine.readers["last"].stack == "encoder"
    assert (recipe.architecture, recipe.train_base, recipe.separately, recipe.evaluate) == (None, False, False, None)
    assert (cola.subsample, cola.hold_out) == (None, False)


def test_the_reader_of_a_recipe(load: Any):
    cola = load(GOOD).tasks["cola"]
    made = cola.readers["Ada"].template(cola.outline())
    assert made.fusion == AdaLayers(dim=32, layers=(1, 2))
    assert made.head == SequenceClassification(("unacceptable", "acceptable"), pooling="mean")
    assert cola.readers["plain"].template(cola.outline()).fusion == Mean()


def test_a_recipe_with_everything(load: Any):
    recipe = load(WIDE)
    assert (recipe.train_base, recipe.separately, recipe.evaluate) == (True, True, "test")
    assert recipe.architecture == {"model_type": "roberta", "hidden_size": 8}
    cola, rte = recipe.tasks["cola"], recipe.tasks["rte"]
    assert (cola.metric, cola.hold_out, cola.limit, cola.limit_validation) == ("accuracy", True, 50, 20)
    assert (cola.subsample.size(), cola.subsample.stratified, cola.subsample.repeats) == (
        SampleSize(per_class=8),
        True,
        5,
    )
    assert (rte.subsample.size(), rte.subsample.stratified, rte.subsample.repeats) == (
        SampleSize(fraction=0.5),
        False,
        1,
    )
    assert cola.readers["Ada"].grid == {"fusion.dim": [8, 16], "alpha": [1], "seed": [1]}


def test_a_recipe_with_methods(load: Any):
    recipe = load(METHODS)
    assert list(recipe.methods) == ["plain", "unit"]
    unit = recipe.methods["unit"]
    assert unit.edits == [{"insert": {"init": "unit", "kernel": 1}}, {"freeze": {"train": "inserted"}}]
    assert (unit.fit, unit.grid) == ({"epochs": 2}, {"insert.layers": [None, "1-2"], "learning_rate": [0.1, 0.2]})
    assert recipe.methods["plain"] == type(unit)()


TYPOS = [
    (GOOD, "model:", "modle:", 1, "", "key 'modle'", "model"),
    (GOOD, "seeds:", "seed:", 2, "", "key 'seed'", "seeds"),
    (GOOD, "{epochs: 3}", "{epoch: 3}", 3, "fit", "option 'epoch'", "epochs"),
    (GOOD, "    preset: cola", "    preset: coal", 6, "tasks.cola.preset", "preset 'coal'", "cola"),
    (GOOD, "    epochs: 2", "    epoch: 2", 7, "tasks.cola", "key 'epoch'", "epochs"),
    (GOOD, "    readers:\n      Ada", "    reader:\n      Ada", 8, "tasks.cola", "key 'reader'", "readers"),
    (GOOD, "name: ada_layers", "name: ada_layer", 9, "tasks.cola.readers.Ada.fusion.name", "name 'ada_layer'", None),
    (GOOD, "dim: 32", "dmi: 32", 9, "tasks.cola.readers.Ada.fusion", "key 'dmi'", "dim"),
    (GOOD, "{pooling:", "{poling:", 9, "tasks.cola.readers.Ada.head", "key 'poling'", "pooling"),
    (GOOD, "pooling: mean", "pooling: maen", 9, "tasks.cola.readers.Ada.head.pooling", "pooling 'maen'", "mean"),
    (GOOD, "{fusion: mean}", "{fusion: mean, haed: {}}", 10, "tasks.cola.readers.plain", "key 'haed'", "head"),
    (GOOD, "files:", "kind: sequence_clasification\n    files:", 12, "tasks.mine.kind", "name 'sequence_cl", None),
    (GOOD, "files:", "lable: x\n    files:", 12, "tasks.mine", "key 'lable'", "label"),
    (GOOD, "files:", "problem_type: regresion\n    files:", 12, "tasks.mine.problem_type", "problem type", None),
    (GOOD, "files:", "metric: acuracy\n    files:", 12, "tasks.mine.metric", "metric 'acuracy'", "accuracy"),
    (GOOD, "validation: b", "valid: b", 12, "tasks.mine.files", "key 'valid'", "validation"),
    (WIDE, "hidden_size", "hiden_size", 2, "architecture", "key 'hiden_size'", "hidden_size"),
    (WIDE, "train_base", "trainbase", 3, "", "key 'trainbase'", "train_base"),
    (WIDE, "evaluate: test", "evaluate: tset", 5, "evaluate", "evaluate 'tset'", "test"),
    (WIDE, "schedule: plateau", "schedule: platau", 7, "fit.schedule", "schedule 'platau'", "plateau"),
    (WIDE, "metric: accuracy", "metric: acuracy", 12, "tasks.cola.metric", "metric 'acuracy'", "accuracy"),
    (WIDE, "hold_out", "holdout", 13, "tasks.cola", "key 'holdout'", "hold_out"),
    (WIDE, "repeats: 5", "repeat: 5", 16, "tasks.cola.subsample", "key 'repeat'", "repeats"),
    (WIDE, "grid: {", "gird: {", 18, "tasks.cola.readers.Ada", "key 'gird'", "grid"),
    (WIDE, "fusion.dim:", "fusion.dmi:", 18, "tasks.cola.readers.Ada.grid", "key 'fusion.dmi'", "fusion.dim"),
    (METHODS, "    edits:", "    edit:", 7, "methods.unit", "key 'edit'", "edits"),
    (METHODS, "- insert:", "- inset:", 8, "methods.unit.edits.0", "edit 'inset'", "insert"),
    (METHODS, "init:", "inti:", 8, "methods.unit.edits.0.insert", "key 'inti'", "init"),
    (METHODS, "init: unit", "init: unti", 8, "methods.unit.edits.0.insert.init", "init 'unti'", "unit"),
    (METHODS, "train: inserted", "train: insert", 9, "methods.unit.edits.1.freeze.train", "train 'ins", "inserted"),
    (METHODS, "{epochs: 2}", "{epoch: 2}", 10, "methods.unit.fit", "option 'epoch'", "epochs"),
    (METHODS, "insert.layers:", "insert.layer:", 12, "methods.unit.grid", "key 'insert.layer'", "insert.layers"),
    (METHODS, "      learning_rate:", "      learning_rat:", 13, "methods.unit.grid", "key 'lear", "learning_rate"),
]


@pytest.mark.parametrize(("text", "right", "wrong", "line", "place", "what", "nearest"), TYPOS)
def test_a_typo_names_line_place_and_nearest(  # noqa: PLR0913
    load: Any, text: str, right: str, wrong: str, line: int, place: str, what: str, nearest: str | None
):
    assert right in text
    with pytest.raises(UnknownNameError) as raised:
        load(text.replace(right, wrong, 1))
    message = str(raised.value)
    assert f"recipe.yaml, line {line}{', ' * bool(place)}{place}: unknown {what}" in message
    assert nearest is None or f"Did you mean '{nearest}'?" in message


VALUES = [
    (GOOD, "model: minilm\n", "", 1, "model: field required"),
    (GOOD, "seeds: [0, 1]", "seeds: []", 2, "seeds: list should have at least 1 item"),
    (GOOD, "seeds: [0, 1]", "seeds: [x]", 2, "seeds.0: input should be a valid integer"),
    (GOOD, "seeds: [0, 1]", "seeds: [0, -1]", 2, "seeds.1: input should be greater than or equal to 0"),
    (GOOD, "seeds: [0, 1]", f"seeds: [{2**64}]", 2, f"seeds.0: input should be less than {2**63}"),
    (GOOD, "{epochs: 3}", "{seed: -1}", 3, "fit.seed: fit: seed is -1; it must be at least 0"),
    (WIDE, "seed: [1]", "seed: [0, -1]", 18, "seed is -1; it must be at least 0"),
    (GOOD, "{epochs: 3}", "{epochs: 0}", 3, "fit.epochs: fit: epochs is 0; it must be at least 1"),
    (GOOD, "{epochs: 3}", "{epochs: {a: 1}}", 3, "fit.epochs: .*give one number here"),
    (GOOD, "{epochs: 3}", "{weight_decay: '1e-2'}", 3, "fit.weight_decay: .*it must be a number, such as 0.001"),
    (GOOD, "    preset: cola\n", "", 5, "tasks.cola: give either 'preset' or 'files'"),
    (GOOD, "    preset: cola\n", "    preset: cola\n    files: {train: a}\n", 5, "give either 'preset' or 'files'"),
    (GOOD, "    preset: cola\n", "    preset: cnn_dailymail\n", 5, "of kind summarization have no readers; give"),
    (GOOD, "    preset: cola\n", "    preset: wikiann/DE\n", 6, "tasks.cola.preset: .*names the language 'DE'"),
    (GOOD, "    epochs: 2", "    epochs: 0", 7, "tasks.cola.epochs: input should be greater than 0"),
    (GOOD, "learning_rate: 1.0e-3", "learning_rate: fast", 9, "Ada.learning_rate: input should be a valid number"),
    (GOOD, "learning_rate: 1.0e-3", "learning_rate: 0", 9, "Ada.learning_rate: input should be greater than 0"),
    (GOOD, "dim: 32", "dim: 0", 9, "tasks.cola.readers.Ada.fusion.dim: .*dim is 0"),
    (GOOD, "dim: 32", "entropy: '1e-3'", 9, "readers.Ada.fusion.entropy: ada_layers: entropy is '1e-3'; it must be a"),
    (GOOD, "layers: [1, 2]", "layers: one", 9, "readers.Ada.*layers is 'one', which is not a layer selector"),
    (GOOD, "pooling: mean", "dropout: 1.5", 9, "readers.Ada.head.dropout: .*dropout is 1.5"),
    (GOOD, "{fusion: mean}", "{head: {}}", 10, "readers.plain.fusion: field required"),
    (WIDE, "model_type: roberta, ", "", 2, "architecture: 'architecture' has no 'model_type'; it says which"),
    (WIDE, "model_type: roberta", "model_type: [roberta]", 2, "architecture.model_type: .*must be the name of"),
    (WIDE, "hidden_size: 8", "hidden_size: big", 2, "architecture.hidden_size: .*expected int"),
    (GOOD, "pooling: mean", "class_weights: 3", 9, "readers.Ada.head.class_weights: .*class_weights are 3"),
    (GOOD, "pooling: mean", "dropout: '1e-1'", 9, "readers.Ada.head.dropout: .*dropout is '1e-1'; it must be a number"),
    (WIDE, "model_type: roberta", "model_type: robert", 2, "architecture.model_type: .*no family 'robert'"),
    (WIDE, "    metric: accuracy", "    labels: [a]", 10, "tasks.cola: 'labels' is for files; the preset 'cola' has"),
    (WIDE, "    metric: accuracy", "    text: sentence", 10, "tasks.cola: 'text' is for files"),
    (WIDE, "hold_out: true", "hold_out: maybe", 13, "tasks.cola.hold_out: input should be a valid boolean"),
    (WIDE, "limit: 50", "limit: 0", 14, "tasks.cola.limit: input should be greater than 0"),
    (WIDE, "limit_validation: 20", "limit_validation: -1", 15, "limit_validation: input should be greater than 0"),
    (WIDE, "per_class: 8, ", "per_class: 8, rows: 9, ", 16, "cola.subsample.per_class: .*per_class and rows given"),
    (WIDE, "per_class: 8, ", "", 16, "tasks.cola.subsample: .*nothing given; exactly one of per_class"),
    (WIDE, "per_class: 8, ", "per_class: 0, ", 16, "subsample.per_class: .*per_class is 0; it must be a whole number"),
    (WIDE, "repeats: 5", "repeats: 0", 16, "tasks.cola.subsample.repeats: input should be greater than 0"),
    (WIDE, "[8, 16]", "8", 18, "readers.Ada.grid.fusion.dim: input should be a valid list"),
    (WIDE, "[8, 16]", "[]", 18, "readers.Ada.grid.fusion.dim: .*has no values"),
    (WIDE, "[8, 16]", "[8, 0]", 18, "readers.Ada.grid.fusion.dim: .*dim is 0"),
    (WIDE, "fraction: 0.5", "fraction: 0", 21, "rte.subsample.fraction: .*fraction is 0.0; it must be above 0"),
    (WIDE, "fraction: 0.5", "fraction: 1.5", 21, "subsample.fraction: .*fraction is 1.5; it must be above 0"),
    (WIDE, "    readers:\n      Ada: {fusion: ada_layers}\n", "    readers: {}\n", 1, "task 'rte' has no readers"),
    (WIDE, "evaluate: test", "evaluate: test\nkeep: all", 6, "keep: .*it is about models that methods fine-tune"),
    (GOOD, "    files:", "    stratify: true\n    files:", 12, "stratify: .*it is about held-out rows"),
    (METHODS, "{preset: cola}", "{preset: cola, readers: {a: {fusion: mean}}}", 1, "has readers and the run has meth"),
    (METHODS, "model: minilm", "model: minilm\ntrain_base: true", 1, "'train_base' and 'separately' are for readers"),
    (METHODS, "model: minilm", "model: minilm\nseparately: true", 1, "'train_base' and 'separately' are for readers"),
    (METHODS, "plain: {}", "plain: {fit: {seed: 1}}", 5, "methods.plain.fit.seed: seed is 1; methods take theirs"),
    (METHODS, "model: minilm", "model: minilm\nseeds: [0, 1, 0]", 2, "seeds: 'seeds' has 0 twice"),
    (METHODS, "model: minilm", "model: minilm\nfit: {seed: 1}", 2, "fit.seed: seed is 1; methods take theirs from"),
    (METHODS, "kernel: 1}\n      - ", "kernel: 1}\n        ", 8, "edits.0: each edit is one name with its arguments"),
    (METHODS, "{init: unit, kernel: 1}", "unit", 8, "edits.0.insert: input should be a valid dictionary"),
    (METHODS, "kernel: 1", "kernel: wide", 8, "edits.0.insert.kernel: input should be a valid integer, not 'wide'"),
    (METHODS, '[null, "1-2"]', "[]", 12, "methods.unit.grid.insert.layers: 'insert.layers' has no values"),
    (METHODS, '[null, "1-2"]', "1", 12, "methods.unit.grid.insert.layers: input should be a valid list"),
    (METHODS, '[null, "1-2"]', '["1_2"]', 12, "grid.insert.layers.0: .*is '1_2', which is not a layer selector"),
    (METHODS, "[0.1, 0.2]", "[0.1, '2e-5']", 13, "grid.learning_rate.1: fit: learning_rate is '2e-5'"),
    (METHODS, "[0.1, 0.2]", "[0.1, 1.0e-1]", 13, "grid.learning_rate: 'learning_rate' has 0.1 twice"),
    (METHODS, "[0.1, 0.2]", "[0.1]\n      seed: [3, 3]", 14, "grid.seed: 'seed' has 3 twice"),
    (METHODS, "[0.1, 0.2]", "[0.1]\n      init: [he]\n      insert.init: [he]", 14, "'init' and 'insert.init' are"),
]


@pytest.mark.parametrize(("text", "right", "wrong", "line", "message"), VALUES)
def test_a_value_that_does_not_fit_is_named_with_its_line(
    load: Any, text: str, right: str, wrong: str, line: int, message: str
):
    assert right in text
    with pytest.raises(ConfigError, match=rf"(?s)recipe\.yaml, line {line}\b.*{message}"):
        load(text.replace(right, wrong, 1))


def test_a_key_that_comes_twice(load: Any):
    with pytest.raises(DataError, match=r"recipe\.yaml, line 12: the key 'mine' is also in line 11") as raised:
        load(GOOD.replace("    files:", "  mine:\n    files:"))
    assert raised.value.row == 12
    with pytest.raises(DataError, match="line 3: the key 'epochs' is also in line 3"):
        load(GOOD.replace("{epochs: 3}", "{epochs: 3, epochs: 4}"))


def test_merged_keys_may_be_replaced_and_their_lines_are_found(load: Any):
    text = METHODS + "  more:\n    fit: &fit {epochs: 1}\n  again:\n    fit: {<<: *fit, epochs: 2, batch_size: 3}\n"
    assert load(text).methods["again"].fit == {"epochs": 2, "batch_size": 3}
    with pytest.raises(UnknownNameError, match=r"line 15, methods\.more\.fit: unknown option 'epoch'"):
        load(text.replace("{epochs: 1}", "{epoch: 1}"))


def test_fields_that_come_from_no_file():
    with pytest.raises(UnknownNameError, match=r"recipe, tasks\.a: unknown key 'presett'.*Did you mean 'preset'"):
        parse_recipe({"model": "m", "tasks": {"a": {"presett": "cola"}}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
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
    (tmp_path / "one.yaml").write_text("")
    with pytest.raises(DataError, match=r"Did you mean '.*one\.yaml'\?$"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(DataError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(DataError, match="is not YAML"):
        load_recipe(tmp_path / "x.yaml")


def test_no_code_is_run_from_a_recipe(load: Any):
    with pytest.raises(LaminaError, match=r"the tag !!python.* is not known"):
        load("model: !!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    ("name", "expected"), [("last layer + linear", "last-layer-linear"), ("AdaLayers", "AdaLayers"), (" é! a ", "a")]
)
def test_slugs(name: str, expected: str):
    assert slug(name) == expected


def test_names_without_latin_letters_have_slugs_of_their_own():
    slugs = [slug(name) for name in ("情感", "主题", "тема", "?")]
    assert all(re.fullmatch("[0-9a-f]+", text) for text in slugs)
    assert len({*slugs}) == 4
