"""Dry runs: parameters, steps and costs of a recipe, with no weights and no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.made import save_base

from lamina.data.presets import PRESETS
from lamina.dry_run import DryRun, dry_run
from lamina.errors import ConfigError, ModelNotFoundError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.recipe import Recipe

WIDTH, DEPTH = 32, 3  # of the base
TOKENS = PRESETS["cola"].length
TINY = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
LINEAR = {"pooling": "mean"}
ADA = {"fusion": {"name": "ada_layers", "dim": 8}, "head": LINEAR}
LAST = {"fusion": "last_layer", "head": LINEAR}


def recipe(tasks: dict[str, Any], **fields: Any) -> Recipe:
    return Recipe.model_validate({"model": "nobody/no-such-model", "architecture": TINY, "tasks": tasks, **fields})


def task(readers: dict[str, Any], preset: str = "cola", **fields: Any) -> dict[str, Any]:
    return {"preset": preset, "readers": readers, **fields}


def test_a_model_that_the_hub_does_not_give():
    found = dry_run(recipe({"a": task({"Ada": ADA})}))
    assert found.model["name"] == "nobody/no-such-model"
    assert found.model["config"] == "that of the recipe, since the hub cannot be reached"
    assert "the config of nobody/no-such-model is that of the recipe, since the hub cannot be reached" in found.notes
    assert not found.model["trained"]


def test_a_model_that_is_there(tmp_path: Path):
    base = save_base(tmp_path / "base")
    found = dry_run(recipe({"a": task({"Ada": ADA})}, model=str(base), architecture=None))
    assert found.model["config"] == "its own"
    assert [row["parameters"] for row in found.readers] == [DEPTH * WIDTH * 8 + DEPTH + 2 * 8 + 2]


def test_a_model_that_is_nowhere():
    with pytest.raises(ModelNotFoundError, match=r"(?s)no-such-model.*may carry its model's config as 'architecture'"):
        dry_run(recipe({"a": task({"Ada": ADA})}, architecture=None))


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ({"model_type": "berd"}, ConfigError, "architecture: transformers has no family 'berd'"),
        (
            {"model_type": "bert", "hiden_size": 8},
            UnknownNameError,
            r"of 'bert': unknown key 'hiden_size';.*'hidden_size'",
        ),
    ],
)
def test_an_architecture_that_cannot_be(architecture: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        dry_run(recipe({"a": task({"Ada": ADA})}, architecture=architecture))


def test_published_numbers_stand_for_the_data():
    (row,) = dry_run(recipe({"a": task({"Ada": ADA}, epochs=2)}, fit={"batch_size": 100})).tasks
    assert (row["rows"], row["validation"], row["readers"], row["draws"]) == (8551, 1043, 1, 1)
    assert (row["steps_per_epoch"], row["steps"]) == (86, 172)
    assert row["tokens"] == TOKENS


@pytest.mark.parametrize(
    ("preset", "fields", "rows", "validation"),
    [
        ("cola", {"limit": 100, "limit_validation": 50}, 100, 50),
        ("cola", {"hold_out": True}, 7696, 855),
        ("imdb", {}, 22500, 2500),
        ("conll2003", {"draw": {"per_class": 8}}, 32, 3250),
        ("wikiann/de", {"draw": {"per_class": 8}}, 24, 10000),
        ("cola", {"draw": {"fraction": 0.1}}, 855, 1043),
        ("cola", {"draw": {"rows": 77, "trials": 3}}, 77, 1043),
    ],
)
def test_rows_of_parts_of_a_set(preset: str, fields: dict[str, Any], rows: int, validation: int):
    readers = {"last": {"fusion": "last_layer"}}
    (row,) = dry_run(recipe({"a": task(readers, preset, **fields)})).tasks
    assert (row["rows"], row["validation"]) == (rows, validation)


def test_texts_are_no_longer_than_the_model_reads():
    (row,) = dry_run(recipe({"a": task({"Ada": ADA}, "imdb")})).tasks
    assert row["tokens"] == TINY["max_position_embeddings"]
    (row,) = dry_run(recipe({"a": task({"Ada": ADA}, "imdb")}, fit={"max_length": 9})).tasks
    assert row["tokens"] == 9


def test_local_data_is_counted(tmp_path: Path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "one two three\tyes\nfour five six\tno\n" * 10)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "one\tyes\n" * 3)
    files = {"files": {"train": "train.tsv", "validation": "dev.tsv"}, "readers": {"Ada": ADA}}
    found = dry_run(recipe({"a": files}, fit={"batch_size": 4, "epochs": 2}), data=tmp_path)
    (row,) = found.tasks
    assert (row["rows"], row["validation"], row["tokens"], row["steps"]) == (20, 3, 6, 10)
    assert not any("published" in note for note in found.notes)


# Costs, on a reader of the last layer whose head is a linear map of the mean


def flops(found: DryRun, name: str = "last") -> int:
    return next(row["flops_per_text"] for row in found.readers if row["method"] == name)


def test_operations_of_a_run():
    found = dry_run(recipe({"a": task({"last": LAST}, epochs=5)}))
    one = flops(found)
    assert one == 2 * 2 * WIDTH
    assert found.flops["readers"] == 5 * (3 * 8551 + 1043) * one
    per_text = found.flops["base"] / (5 * (8551 + 1043))
    block = 2 * TOKENS * (4 * WIDTH**2 + 2 * WIDTH * TINY["intermediate_size"]) + 4 * TOKENS**2 * WIDTH
    assert per_text == DEPTH * block
    assert found.flops["total"] == found.flops["base"] + found.flops["readers"]


def test_readers_of_the_same_texts_share_the_model_s_passes():
    alone = dry_run(recipe({"a": task({"last": LAST})}))
    many = dry_run(recipe({"a": task({"last": LAST, "Ada": ADA}), "b": task({"last": LAST})}, seeds=[0, 1, 2]))
    assert many.flops["base"] == alone.flops["base"]
    assert many.flops["readers"] > 6 * alone.flops["readers"]
    assert [row["count"] for row in many.readers] == [3, 3, 3]


def test_the_longest_reader_decides_how_often_the_model_runs():
    longer = dry_run(recipe({"a": task({"last": {**LAST, "grid": {"epochs": [1, 4]}}})}))
    assert longer.flops["base"] == 4 * dry_run(recipe({"a": task({"last": LAST})}, fit={"epochs": 1})).flops["base"]
    assert [(row["epochs"], row["settings"]) for row in longer.readers] == [(1, {"epochs": 1}), (4, {"epochs": 4})]


def test_a_pass_ends_after_the_last_layer_that_anyone_reads():
    low = {"fusion": {"name": "single_layer", "layer": 1}, "head": LINEAR}
    whole, part = (dry_run(recipe({"a": task({"one": one})})).flops["base"] for one in (LAST, low))
    assert part * DEPTH == whole


def test_every_draw_runs_by_itself_and_all_validate_together():
    drawn = dry_run(recipe({"a": task({"last": LAST}, draw={"rows": 100, "trials": 4})}, fit={"epochs": 1}))
    one = flops(drawn)
    base = drawn.flops["base"] / (4 * 100 + 1043)
    assert base == drawn.flops["base"] // (4 * 100 + 1043)
    assert drawn.flops["readers"] == 4 * (3 * 100 + 1043) * one
    assert drawn.tasks[0]["steps"] == 4 * drawn.tasks[0]["steps_per_epoch"]
    assert (drawn.tasks[0]["draws"], drawn.tasks[0]["readers"]) == (4, 4)


def test_what_runs_separately_shares_nothing():
    both = {"last": LAST, "Ada": ADA}
    together, apart = (dry_run(recipe({"a": task(both)}, separately=separately)) for separately in (False, True))
    assert apart.flops["base"] == 2 * together.flops["base"]
    assert apart.flops["readers"] == together.flops["readers"]
    assert apart.tasks[0]["steps"] == 2 * together.tasks[0]["steps"]


def test_a_trained_base_costs_three_times_its_forward_in_training_and_has_no_cache():
    frozen, trained = (dry_run(recipe({"a": task({"last": LAST})}, train_base=base)) for base in (False, True))
    assert trained.flops["base"] * (8551 + 1043) == frozen.flops["base"] * (3 * 8551 + 1043)
    assert trained.model["trained"]
    assert trained.cache_bytes == 0 < frozen.cache_bytes


def test_the_test_part_is_read_once_and_not_cached():
    held = task({"last": LAST}, hold_out=True, epochs=3)
    without, with_test = (dry_run(recipe({"a": held}, evaluate=evaluate)) for evaluate in (None, "test"))
    rows = 3 * (7696 + 855)
    assert with_test.flops["base"] * rows == without.flops["base"] * (rows + 1043)
    assert with_test.cache_bytes == without.cache_bytes


def test_a_cache_holds_every_layer_that_is_read_once_in_half_precision():
    low = {"fusion": {"name": "single_layer", "layer": 1}, "head": LINEAR}
    found = dry_run(recipe({"a": task({"low": low, "again": low, "last": LAST})}))
    assert found.cache_bytes == (8551 + 1043) * TOKENS * 2 * WIDTH * 2


@pytest.mark.parametrize(
    ("fields", "trained", "base"),
    [
        ({}, 2 * 66 + 789, 1),
        ({"separately": True}, 789, 1),
        ({"train_base": True}, 2 * 66 + 789, 4),
    ],
)
def test_weights_gradients_and_moments(fields: dict[str, Any], trained: int, base: int):
    found = dry_run(recipe({"a": task({"last": LAST, "again": LAST, "Ada": ADA})}, **fields))
    assert found.weights_bytes == 4 * (4 * trained + base * found.model["parameters"])


def test_states_that_a_fusion_keeps_during_a_step():
    lstm = {"fusion": {"name": "depth_lstm"}, "head": LINEAR}
    found = dry_run(recipe({"a": task({"last": LAST, "lstm": lstm})}, fit={"batch_size": 50}))
    kept = {row["method"]: row["states_bytes"] for row in found.readers}
    streams = FUSIONS.get("depth_lstm").streams
    assert kept == {"last": 0, "lstm": 0 if streams else 50 * TOKENS * WIDTH * DEPTH * 4}


def test_masked_language_modelling_has_the_model_s_vocabulary():
    found = dry_run(recipe({"a": task({"last": {"fusion": "last_layer"}}, "wikitext2")}))
    (row,) = found.readers
    assert row["parameters"] == WIDTH * WIDTH + WIDTH + 2 * WIDTH + TINY["vocab_size"]
    assert found.tasks[0]["kind"] == "masked_lm"


def test_a_cutoff_that_would_remove_every_layer():
    with pytest.raises(ConfigError, match=r"(?s)would remove every layer.*reader a-Ada_0001-0"):
        dry_run(recipe({"a": task({"Ada": {**ADA, "grid": {"cutoff": [0.5]}}})}))


def test_a_fit_option_that_does_not_exist():
    with pytest.raises(UnknownNameError, match="fit: unknown option 'epoch'"):
        dry_run(recipe({"a": task({"Ada": ADA})}, fit={"epoch": 1}))


def test_epochs_that_cannot_be():
    with pytest.raises(ConfigError, match=r"fit: epochs is .*; it must be at least 1"):
        dry_run(recipe({"a": task({"Ada": ADA})}, fit={"epochs": 0}))


def test_as_json():
    found = dry_run(recipe({"a": task({"Ada": {**ADA, "grid": {"layers": [[1, 2], "1-"]}}})}))
    assert json.loads(json.dumps(found.to_json()))["readers"][0]["settings"] == {"fusion.layers": [1, 2]}
