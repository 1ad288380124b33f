"""Dry runs: parameters, steps and costs of a recipe, with no weights and no network."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.stored import save_base

from lamina.editing.insert import insert_
from lamina.errors import ConfigError, LayerIndexError, ModelNotFoundError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.layers import stacks
from lamina.layers.discovery import same_stacks
from lamina.recipes.costs import RowSize, open_config, row_cost
from lamina.recipes.dry_run import DryRun, dry_run
from lamina.recipes.dry_run.facts import Facts
from lamina.recipes.dry_run.methods import cost_of, edited_model, plain_model
from lamina.recipes.methods import Variant
from lamina.recipes.schema import Recipe
from lamina.store import empty_model
from lamina.tasks.presets import PRESETS

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


# Recipes that fine-tune the model itself

BASE = 40 * WIDTH + 32 * WIDTH + 2 * WIDTH + 2 * WIDTH  # words, positions, segments and a norm
BLOCK = 4 * (WIDTH**2 + WIDTH) + 2 * WIDTH * 48 + WIDTH + 48 + 2 * 2 * WIDTH
HEAD = WIDTH**2 + WIDTH + 2 * WIDTH + 2  # pooler and classifier
WHOLE = BASE + DEPTH * BLOCK + HEAD
INSERT = {"insert": {"position": "attention"}}
ATTENTION = 3 * 4 * 8 * 8  # three projections of four heads, per block


def tuned(methods: dict[str, Any], tasks: dict[str, Any] | None = None, **fields: Any) -> DryRun:
    return dry_run(recipe(tasks or {"a": {"preset": "cola"}}, methods=methods, **fields))


def test_a_model_that_is_fine_tuned_as_it_is():
    found = tuned({"plain": {}}, fit={"epochs": 2, "batch_size": 100})
    (row,), (of_task,) = found.methods, found.tasks
    assert (row["before"], row["parameters"], row["trained"]) == (WHOLE, WHOLE, WHOLE)
    assert (row["epochs"], row["steps_per_epoch"], row["steps"], row["count"]) == (2, 86, 172, 1)
    one = DEPTH * (2 * TOKENS * (4 * WIDTH**2 + 2 * WIDTH * 48) + 4 * TOKENS**2 * WIDTH) + 2 * (WIDTH**2 + 2 * WIDTH)
    assert (row["flops_per_row"], row["counted"]) == (one, True)
    assert found.flops == {
        "training": 2 * 3 * 8551 * one,
        "scoring": 2 * 1043 * one,
        "total": 2 * (3 * 8551 + 1043) * one,
    }
    assert (of_task["runs"], of_task["steps"], of_task["rows"]) == (1, 172, 8551)
    assert of_task["input"] == {"tokens": TOKENS, "target": 0, "pixels": None}
    assert (found.readers, found.cache_bytes, found.model["trained"]) == ([], 0, True)
    assert json.loads(json.dumps(found.to_json()))["methods"][0]["before"] == WHOLE


@pytest.mark.parametrize(
    ("edits", "added", "trained"),
    [
        ([INSERT], DEPTH * ATTENTION, WHOLE + DEPTH * ATTENTION),
        ([{"insert": {"position": "ffn", "layers": "1-2"}}], 2 * WIDTH**2, WHOLE + 2 * WIDTH**2),
        ([INSERT, {"freeze": {"train": "inserted"}}], DEPTH * ATTENTION, DEPTH * ATTENTION + HEAD),
        ([INSERT, {"merge": {}}], 0, WHOLE),
        ([{"reinit": {"layers": [3]}}], 0, WHOLE),
        ([{"truncate": {"keep": 1}}], -2 * BLOCK, WHOLE - 2 * BLOCK),
        ([{"truncate": {"keep": 1}}, {"freeze": {}}], -2 * BLOCK, HEAD),
        ([{"freeze": {"layers": [0, 1]}}], 0, WHOLE - BASE - BLOCK),
    ],
)
def test_what_edits_add_and_leave_to_train(edits: list[Any], added: int, trained: int):
    (row,) = tuned({"edited": {"edits": edits}}).methods
    assert (row["before"], row["parameters"], row["trained"]) == (WHOLE, WHOLE + added, trained)


def test_inserted_matrices_take_two_operations_per_entry_and_token():
    plain, edited = tuned({"plain": {}, "edited": {"edits": [INSERT]}}).methods
    assert edited["flops_per_row"] - plain["flops_per_row"] == 2 * TOKENS * DEPTH * ATTENTION


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": TINY,
    "deberta-v2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 40,
        "relative_attention": True,
        "position_buckets": 8,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "albert": {
        "hidden_size": 32,
        "embedding_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_added_is_what_would_be_counted(family: str):
    config, _ = open_config("nobody/none", {**FAMILIES[family], "model_type": family})
    known = Facts("sequence_classification", "classification", ("no", "yes"), 10, 10, 0, 9)
    edits = (("insert", {"position": "both", "stack": "all"}),)
    variant = Variant("one", "a", 0, {"method": "m", "seed": 0}, edits, {})
    plain = plain_model(config, known)
    edited = edited_model(plain, variant)
    assert cost_of(plain, edited, RowSize(9)) == row_cost(edited.model, RowSize(9)) > row_cost(plain.model, RowSize(9))
    assert edited.by_token == (family != "albert")  # whose block serves as every layer


def test_of_a_shorter_model_passes_are_shorter():
    plain, cut = tuned({"plain": {}, "cut": {"edits": [{"truncate": {"keep": 1}}]}}).methods
    head = 2 * (WIDTH**2 + 2 * WIDTH)
    assert (plain["flops_per_row"] - head) == DEPTH * (cut["flops_per_row"] - head)


def test_a_probe_needs_no_way_back_through_the_layers():
    probe, inserted = tuned(
        {"probe": {"edits": [{"freeze": {}}]}, "inserted": {"edits": [INSERT, {"freeze": {"train": "inserted"}}]}},
        fit={"epochs": 1},
    ).methods
    assert probe["training_flops"] == 8551 * probe["flops_per_row"]
    assert inserted["training_flops"] == 3 * 8551 * inserted["flops_per_row"]


@pytest.mark.parametrize(
    ("options", "moments"), [({}, 2), ({"optimizer": "sgd"}, 1), ({"optimizer": "sgd", "momentum": 0}, 0)]
)
def test_weights_gradients_and_moments_of_the_largest_run(options: dict[str, Any], moments: int):
    edits = [INSERT, {"freeze": {"train": "inserted"}}]
    found = tuned({"frozen": {"edits": edits}, "plain": {}}, fit=options)
    frozen, plain = found.methods
    assert frozen["memory_bytes"] == 4 * (frozen["parameters"] + (1 + moments) * frozen["trained"])
    assert found.weights_bytes == plain["memory_bytes"] == 4 * (2 + moments) * WHOLE


def test_runs_of_a_grid_of_seeds_and_draws():
    grid = {"learning_rate": [0.1, 0.2], "insert.layers": [None, "1-2", "1-3"]}
    tasks = {"a": {"preset": "cola", "draw": {"rows": 64, "trials": 2}}, "b": {"preset": "stsb"}}
    found = tuned({"m": {"edits": [INSERT], "grid": grid}}, tasks, seeds=[0, 1, 2])
    assert [row["count"] for row in found.methods] == [6] * 6 + [3] * 6
    assert found.methods[1]["settings"] == {"learning_rate": 0.1, "insert.layers": "1-2"}
    assert [row["parameters"] - row["before"] for row in found.methods] == [0, 2 * ATTENTION, 3 * ATTENTION] * 4
    assert {row["before"] for row in found.methods} == {WHOLE, WHOLE - WIDTH - 1}
    assert [(row["runs"], row["draws"], row["rows"]) for row in found.tasks] == [(36, 2, 64), (18, 1, 5749)]
    assert found.tasks[0]["steps"] == 36 * 3 * 2
    assert found.flops["training"] == sum(row["training_flops"] for row in found.methods)


@pytest.mark.parametrize(
    ("options", "steps", "epochs", "rows"),
    [
        ({"max_steps": 10}, 10, 1, 10 * 32),
        ({"max_steps": 300, "epochs": 1}, 300, 2, 8551 + 32 * 32),
        ({"accumulate": 4, "epochs": 2}, 134, 2, 2 * 8551),
        ({"accumulate": 4, "max_steps": 67}, 67, 1, 8551),
    ],
)
def test_steps(options: dict[str, Any], steps: int, epochs: int, rows: int):
    (row,) = tuned({"plain": {}}, fit={"batch_size": 32, **options}).methods
    assert (row["steps"], row["epochs"]) == (steps, epochs)
    assert row["training_flops"] == 3 * rows * row["flops_per_row"]
    assert row["scoring_flops"] == epochs * 1043 * row["flops_per_row"]


def test_the_test_part_of_a_fine_tuned_model():
    held = {"a": {"preset": "cola", "hold_out": True}}
    (row,) = tuned({"plain": {}}, held, evaluate="test", fit={"epochs": 2}).methods
    assert row["scoring_flops"] == (2 * 855 + 1043) * row["flops_per_row"]


SUMMARIES = {
    "architecture": {**FAMILIES["t5"], "model_type": "t5", "vocab_size": 50},
    "tasks": {"a": {"preset": "wmt16_en_ro"}},
}


def test_texts_that_are_written():
    found, wide = (
        tuned({"plain": {}, "edited": {"edits": [{"insert": {"stack": "all"}}]}}, fit=fit, **SUMMARIES)
        for fit in ({"epochs": 1, "max_target_length": 16}, {"epochs": 1, "max_target_length": 16, "beams": 3})
    )
    tokens = PRESETS["wmt16_en_ro"].length
    assert found.tasks[0]["input"] == {"tokens": tokens, "target": 16, "pixels": None}
    plain, edited = found.methods
    sites = 2 * 3 * tokens + 2 * (
        3 * 16 + 16 + 2 * tokens
    )  # 2 blocks each: their own attention, and the decoder's other
    assert edited["flops_per_row"] - plain["flops_per_row"] == 2 * sites * 4 * 8 * 8
    assert wide.methods[0]["flops_per_row"] == plain["flops_per_row"]
    assert plain["scoring_flops"] == 1999 * plain["flops_per_row"] < wide.methods[0]["scoring_flops"]
    assert wide.methods[0]["scoring_flops"] < 3 * plain["scoring_flops"]
    assert any("a pass of the decoder per beam" in note for note in found.notes)


def test_images_are_as_large_as_the_model_says():
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}
    found = tuned({"plain": {}}, {"a": {"preset": "cifar100"}}, architecture={**vit, "patch_size": 8})
    assert found.tasks[0]["input"]["pixels"] == (3, 32, 32)
    assert (found.tasks[0]["rows"], found.tasks[0]["validation"]) == (45000, 5000)
    one, two = (
        dry_run(recipe({"a": {"preset": name}}, methods={"plain": {}}, architecture={**vit, "patch_size": 8})).methods[
            0
        ]
        for name in ("cifar10", "cifar100")
    )
    assert two["parameters"] - one["parameters"] == 90 * 33


def test_hidden_tokens_of_a_preset_are_guessed():
    found = tuned({"plain": {}}, {"a": {"preset": "mrpc", "masked_lm": True}})
    (task,) = found.tasks
    assert (task["kind"], task["rows"], task["validation"]) == ("masked_lm", 2 * 3668, 2 * 408)  # both texts of a pair
    assert task["input"]["tokens"] == 27
    single = tuned({"plain": {}}, {"a": {"preset": "cola", "masked_lm": True, "limit": 100}})
    assert (single.tasks[0]["rows"], single.tasks[0]["input"]["tokens"]) == (100, TOKENS)
    (row,) = found.methods
    assert row["parameters"] == BASE + DEPTH * BLOCK + WIDTH**2 + WIDTH + 2 * WIDTH + TINY["vocab_size"]


def test_local_data_is_fine_tuned_on(tmp_path: Path):
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "one two\tyes\nthree four\tno\nfive\tmaybe\n" * 5)
    files = {"a": {"files": {"train": "train.tsv", "validation": "dev.tsv"}}}
    found = dry_run(recipe(files, methods={"plain": {}}), data=tmp_path, batch_size=4)
    assert (found.methods[0]["before"], found.tasks[0]["rows"]) == (WHOLE + WIDTH + 1, 15)
    assert found.tasks[0]["steps_per_epoch"] == 4


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ({"edits": [{"insert": {"layers": "9"}}]}, LayerIndexError, r"(?s)layer 9 does not exist.*run a-m-0"),
        ({"edits": [{"insert": {"layers": "9"}}], "grid": {"epochs": [1]}}, LayerIndexError, r"(?s)run a-m-0000-0"),
        ({"edits": [{"truncate": {}}]}, ConfigError, "methods.m, truncate: .*'keep'"),
        ({"edits": [{"instert": {}}]}, UnknownNameError, "unknown edit 'instert'"),
        ({"fit": {"epoch": 1}}, UnknownNameError, "unknown option 'epoch'"),
    ],
)
def test_a_method_that_cannot_be(method: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind) as raised:
        tuned({"m": method})
    assert re.search(message, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))


def test_a_copy_has_the_stacks_of_its_model():
    config, _ = open_config("nobody/none", TINY)
    model = empty_model(config)
    copied = copy.deepcopy(model)
    same_stacks(model, copied)
    own, other = stacks(copied)["main"], stacks(model)["main"]
    assert [point.path for point in own.points] == [point.path for point in other.points]
    assert list(own.blocks) == list(copied.get_submodule("encoder.layer").children())
    insert_(copied, layers="1")
    assert len(stacks(copied)["main"].run) == len(other.run) + 3  # looked for anew, since there are other modules
