"""Estimates: parameters, steps and operations of a recipe, with no weights and no network."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from tests.support.stored import save_base
from transformers import ResNetConfig, ResNetForImageClassification, ResNetModel

from lamina.editing.insert import insert_
from lamina.errors import ConfigError, LaminaError, LayerIndexError, ModelNotFoundError, UnknownNameError
from lamina.layers import stacks
from lamina.layers.discovery import same_stacks
from lamina.recipes.edits import config_of
from lamina.recipes.estimate import Estimate, estimate, readable
from lamina.recipes.model_size import ModelSize, Sizes
from lamina.recipes.schema import Recipe, parse_recipe
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
T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "vocab_size": 50,
}
LINEAR = {"pooling": "mean"}
ADA = {"fusion": {"name": "ada_layers", "dim": 8}, "head": LINEAR}
LAST = {"fusion": "last_layer", "head": LINEAR}
ROWS, VALIDATION = 8551, 1043  # of CoLA
BLOCK = 4 * (WIDTH**2 + WIDTH) + 2 * WIDTH * 48 + WIDTH + 48 + 2 * 2 * WIDTH
BASE = 40 * WIDTH + 32 * WIDTH + 2 * WIDTH + 2 * WIDTH  # words, positions, segments and a norm
HEAD = WIDTH**2 + WIDTH + 2 * WIDTH + 2  # pooler and classifier
WHOLE = BASE + DEPTH * BLOCK + HEAD
ACTIVE = 2 * WIDTH + DEPTH * BLOCK + HEAD  # without embeddings


def recipe(tasks: dict[str, Any], **fields: Any) -> Recipe:
    return parse_recipe({"model": "nobody/no-such-model", "architecture": TINY, "tasks": tasks, **fields})


def task(readers: dict[str, Any], preset: str = "cola", **fields: Any) -> dict[str, Any]:
    return {"preset": preset, "readers": readers, **fields}


# The model


def test_a_model_that_the_hub_does_not_give():
    found = estimate(recipe({"a": task({"Ada": ADA})}))
    assert found.model["name"] == "nobody/no-such-model"
    assert found.model["config"] == "that of the recipe, since the hub cannot be reached"
    assert "the config of nobody/no-such-model is that of the recipe, since the hub cannot be reached" in found.notes
    assert not found.model["trained"]


def test_a_model_that_is_there(tmp_path: Path):
    base = save_base(tmp_path / "base")
    found = estimate(recipe({"a": task({"Ada": ADA})}, model=str(base), architecture=None))
    assert found.model["config"] == "its own"
    assert [row["parameters"] for row in found.runs] == [DEPTH * WIDTH * 8 + DEPTH + 2 * 8 + 2]


def test_a_model_that_is_nowhere():
    with pytest.raises(ModelNotFoundError, match=r"(?s)no-such-model.*may carry its model's config as 'architecture'"):
        estimate(recipe({"a": task({"Ada": ADA})}, architecture=None))


@pytest.mark.parametrize(("family", "key"), [("deberta-v2", "position_buckets"), ("t5", "decoder_start_token_id")])
def test_keys_that_a_family_reads_though_its_config_does_not_list_them(family: str, key: str):
    assert getattr(config_of({"model_type": family, key: 7}), key) == 7
    with pytest.raises(UnknownNameError, match=f"unknown key '{key}'"):
        config_of({"model_type": "bert", key: 7})


# Rows


def test_published_numbers_stand_for_the_data():
    (row,) = estimate(recipe({"a": task({"Ada": ADA}, epochs=2)}, fit={"batch_size": 100})).tasks
    assert (row["rows"], row["validation"], row["runs"], row["repeats"]) == (ROWS, VALIDATION, 1, 1)
    assert (row["steps_per_epoch"], row["steps"], row["tokens"]) == (86, 172, TOKENS)


@pytest.mark.parametrize(
    ("preset", "fields", "rows", "validation"),
    [
        ("cola", {"limit": 100, "limit_validation": 50}, 100, 50),
        ("cola", {"hold_out": True}, 7696, 855),
        ("cola", {"hold_out": True, "limit": 2000, "limit_validation": 1000}, 1800, 200),
        ("imdb", {}, 22500, 2500),
        ("imdb", {"hold_out": True}, 22500, 2500),
        ("conll2003", {"subsample": {"per_class": 8}}, 32, 3250),
        ("wikiann/de", {"subsample": {"per_class": 8}}, 24, 10000),
        ("cola", {"subsample": {"fraction": 0.1}}, 855, VALIDATION),
        ("cola", {"subsample": {"rows": 77, "repeats": 3}}, 77, VALIDATION),
    ],
)
def test_rows_of_parts_of_a_set(preset: str, fields: dict[str, Any], rows: int, validation: int):
    (row,) = estimate(recipe({"a": task({"last": {"fusion": "last_layer"}}, preset, **fields)})).tasks
    assert (row["rows"], row["validation"]) == (rows, validation)


def test_texts_are_no_longer_than_the_model_reads():
    (row,) = estimate(recipe({"a": task({"Ada": ADA}, "imdb")})).tasks
    assert row["tokens"] == TINY["max_position_embeddings"]
    (row,) = estimate(recipe({"a": task({"Ada": ADA}, "imdb")}, fit={"max_length": 9})).tasks
    assert row["tokens"] == 9


def test_local_data_is_counted(tmp_path: Path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "one two three\tyes\nfour five six\tno\n" * 10)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "one\tyes\n" * 3)
    files = {"files": {"train": "train.tsv", "validation": "dev.tsv"}, "readers": {"Ada": ADA}}
    found = estimate(recipe({"a": files}, fit={"batch_size": 4, "epochs": 2}), data=tmp_path)
    (row,) = found.tasks
    assert (row["rows"], row["validation"], row["tokens"], row["steps"]) == (20, 3, 6, 10)
    assert not any("published" in note for note in found.notes)


def test_masked_language_modelling_is_trained_on_blocks():
    preset = PRESETS["wikitext2"]
    found = estimate(recipe({"a": task({"last": {"fusion": "last_layer"}}, "wikitext2")}, fit={"batch_size": 10}))
    (run,), (row,) = found.runs, found.tasks
    assert run["parameters"] == WIDTH * WIDTH + WIDTH + 2 * WIDTH + TINY["vocab_size"]
    blocks = [ceil(preset.rows[part] * preset.length / 32) for part in ("train", "validation")]
    assert (row["kind"], [row["rows"], row["validation"]], row["tokens"]) == ("masked_lm", blocks, 32)
    assert run["steps"] == 3 * ceil(blocks[0] / 10)


def test_hidden_tokens_of_a_preset_are_predicted():
    found = tuned({"plain": {}}, {"a": {"preset": "mrpc", "masked_lm": True}})
    (row,), (run,) = found.tasks, found.runs
    assert (row["kind"], row["tokens"], row["rows"]) == ("masked_lm", 32, ceil(3668 * 53 / 32))  # both texts of a pair
    assert run["parameters"] == BASE + DEPTH * BLOCK + WIDTH**2 + WIDTH + 2 * WIDTH + TINY["vocab_size"]


# Readers: a reader of the last layer whose head is a linear map has 66 parameters, the other one 789


def test_operations_are_two_per_parameter_and_token():
    found = estimate(recipe({"a": task({"last": LAST}, epochs=5)}))
    learnt, scored = 5 * ROWS * TOKENS, 5 * VALIDATION * TOKENS
    assert found.flops["runs"] == found.runs[0]["flops"] == 66 * (6 * learnt + 2 * scored)
    assert found.flops["base"] == DEPTH * BLOCK * 2 * (learnt + scored)
    assert found.flops["total"] == found.flops["base"] + found.flops["runs"]


def test_a_pass_ends_after_the_highest_layer_that_is_read():
    low = {"fusion": {"name": "single_layer", "layer": 1}, "head": LINEAR}
    one, both = (
        estimate(recipe({"a": task(readers)})).flops["base"] for readers in ({"low": low}, {"low": low, "last": LAST})
    )
    assert both == DEPTH * one


def test_of_an_encoder_and_decoder_only_what_is_read_is_run():
    bart = {
        "model_type": "bart",
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "vocab_size": 50,
    }
    encoder, decoder = (
        estimate(recipe({"a": task({"last": {**LAST, "stack": stack}})}, architecture=bart)).flops["base"]
        for stack in ("encoder", "decoder")
    )
    assert encoder == 2 * 3 * (ROWS + VALIDATION) * TOKENS * 2 * BLOCK
    assert decoder > 2 * encoder  # its blocks are larger, and it runs after the encoder


def test_readers_of_the_same_texts_share_their_passes():
    readers = {"a": LAST, "b": LAST, "c": ADA}
    one = estimate(recipe({"a": task({"a": LAST})}))
    more = estimate(recipe({"a": task(readers), "b": task(readers)}, seeds=[0, 1]))
    assert more.flops["base"] == one.flops["base"]
    assert [row["count"] for row in more.runs] == [2] * 6
    assert more.tasks[0]["steps"] == one.tasks[0]["steps"]


def test_the_longest_reader_decides_how_often_the_model_runs():
    grid = {**LAST, "grid": {"epochs": [1, 4]}}
    found = estimate(recipe({"a": task({"m": grid})}))
    assert found.flops["base"] == estimate(recipe({"a": task({"m": LAST}, epochs=4)})).flops["base"]
    assert [row["epochs"] for row in found.runs] == [1, 4]


def test_separate_readers_share_no_pass():
    readers = {"a": LAST, "b": LAST}
    together, apart = (estimate(recipe({"a": task(readers)}, separately=way)) for way in (False, True))
    assert apart.flops["base"] == 2 * together.flops["base"]
    assert apart.flops["runs"] == together.flops["runs"]
    assert apart.tasks[0]["steps"] == 2 * together.tasks[0]["steps"]


def test_repeats_learn_apart_and_validate_together():
    rows: dict[str, Any] = {"subsample": {"rows": 64, "repeats": 3}}
    fields: dict[str, Any] = {"fit": {"epochs": 1, "batch_size": 32}}
    found = estimate(recipe({"a": task({"last": LAST}, **rows)}, **fields))
    assert found.flops["base"] == 2 * DEPTH * BLOCK * TOKENS * (3 * 64 + VALIDATION)
    assert (found.tasks[0]["steps"], found.tasks[0]["repeats"]) == (3 * 2, 3)
    two = estimate(recipe({"a": task({"last": LAST, "ada": ADA}, **rows)}, **fields))
    assert [(row["method"], row["runs"]) for row in two.parts] == [(None, 6), ("last", 3), ("ada", 3)]


def test_a_trained_base_costs_three_times_its_forward_in_training_and_has_no_cache():
    frozen, trained = (estimate(recipe({"a": task({"last": LAST})}, train_base=base)) for base in (False, True))
    assert trained.flops["base"] * (ROWS + VALIDATION) == frozen.flops["base"] * (3 * ROWS + VALIDATION)
    assert trained.model["trained"]
    assert trained.cache_bytes == 0 < frozen.cache_bytes


def test_the_test_part_is_read_once_and_not_cached():
    held = task({"last": LAST}, hold_out=True, epochs=3)
    without, with_test = (estimate(recipe({"a": held}, evaluate=evaluate)) for evaluate in (None, "test"))
    rows = 3 * (7696 + 855)
    assert with_test.flops["base"] * rows == without.flops["base"] * (rows + VALIDATION)
    assert with_test.cache_bytes == without.cache_bytes


def test_a_cache_holds_every_layer_that_is_read_once_in_half_precision():
    low = {"fusion": {"name": "single_layer", "layer": 1}, "head": LINEAR}
    found = estimate(recipe({"a": task({"low": low, "again": low, "last": LAST})}))
    assert found.cache_bytes == (ROWS + VALIDATION) * TOKENS * 2 * WIDTH * 2


@pytest.mark.parametrize(
    ("fields", "trained", "base"),
    [({}, 2 * 66 + 789, 1), ({"separately": True}, 789, 1), ({"train_base": True}, 2 * 66 + 789, 4)],
)
def test_weights_gradients_and_moments(fields: dict[str, Any], trained: int, base: int):
    found = estimate(recipe({"a": task({"last": LAST, "again": LAST, "Ada": ADA})}, **fields))
    assert found.memory_bytes == 4 * (4 * trained + base * found.model["parameters"])


# Fine-tuned models

INSERT = {"insert": {"position": "attention"}}
ATTENTION = 3 * 4 * 8 * 8  # three projections of four heads, per block


def tuned(methods: dict[str, Any], tasks: dict[str, Any] | None = None, **fields: Any) -> Estimate:
    return estimate(recipe(tasks or {"a": {"preset": "cola"}}, methods=methods, **fields))


def test_a_model_that_is_fine_tuned_as_it_is():
    found = tuned({"plain": {}}, fit={"epochs": 2, "batch_size": 100})
    (row,), (of_task,) = found.runs, found.tasks
    assert (row["added"], row["parameters"], row["trained"], found.model["parameters"]) == (0, WHOLE, WHOLE, WHOLE)
    assert (row["epochs"], row["steps"], row["count"]) == (2, 172, 1)
    assert row["flops"] == ACTIVE * TOKENS * 2 * (6 * ROWS + 2 * VALIDATION)
    assert found.flops == {"base": 0, "runs": row["flops"], "total": row["flops"]}
    assert (of_task["runs"], of_task["steps"], of_task["steps_per_epoch"], of_task["rows"]) == (1, 172, 86, ROWS)
    assert (of_task["tokens"], of_task["target"]) == (TOKENS, 0)
    assert (found.cache_bytes, found.model["trained"]) == (0, True)


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
    (row,) = tuned({"edited": {"edits": edits}}).runs
    assert (row["added"], row["parameters"], row["trained"]) == (added, WHOLE + added, trained)


@pytest.mark.parametrize(
    ("edits", "active", "times"),
    [
        ([INSERT], ACTIVE + DEPTH * ATTENTION, 6),
        ([{"truncate": {"keep": 1}}], ACTIVE - 2 * BLOCK, 6),
        ([{"freeze": {}}], ACTIVE, 2),  # a probe needs no way back through the layers
        ([INSERT, {"freeze": {"train": "inserted"}}], ACTIVE + DEPTH * ATTENTION, 6),
    ],
)
def test_operations_of_edited_models(edits: list[Any], active: int, times: int):
    (row,) = tuned({"edited": {"edits": edits}}, fit={"epochs": 1}).runs
    assert row["flops"] == active * TOKENS * (times * ROWS + 2 * VALIDATION)


def test_shared_blocks_count_as_often_as_they_run():
    albert = {
        "model_type": "albert",
        "hidden_size": 32,
        "embedding_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    size = Sizes(config_of(albert)).model("AutoModel")
    (blocks,) = size.blocks.values()
    assert len(blocks) == 3
    assert size.row(1, 0) > size.parameters - 30_000 * 8  # the vocabulary is no part of it


@pytest.mark.parametrize(
    ("options", "moments"), [({}, 2), ({"optimizer": "sgd"}, 1), ({"optimizer": "sgd", "momentum": 0.0}, 0)]
)
def test_weights_gradients_and_moments_of_the_largest_run(options: dict[str, Any], moments: int):
    edits = [INSERT, {"freeze": {"train": "inserted"}}]
    found = tuned({"frozen": {"edits": edits}, "plain": {}}, fit=options)
    assert found.memory_bytes == 4 * (2 + moments) * WHOLE


def test_runs_of_a_grid_of_seeds_and_repeats():
    grid = {"learning_rate": [0.1, 0.2], "insert.layers": [None, "1-2", "1-3"]}
    tasks = {"a": {"preset": "cola", "subsample": {"rows": 64, "repeats": 2}}, "b": {"preset": "stsb"}}
    found = tuned({"m": {"edits": [INSERT], "grid": grid}}, tasks, seeds=[0, 1, 2])
    assert [row["count"] for row in found.runs] == [6] * 6 + [3] * 6
    assert found.runs[1]["settings"] == {"learning_rate": 0.1, "insert.layers": "1-2"}
    assert [row["added"] for row in found.runs] == [0, 2 * ATTENTION, 3 * ATTENTION] * 4
    assert {row["parameters"] - row["added"] for row in found.runs} == {WHOLE, WHOLE - WIDTH - 1}
    assert [(row["runs"], row["repeats"], row["rows"]) for row in found.tasks] == [(36, 2, 64), (18, 1, 5749)]
    assert found.tasks[0]["steps"] == 36 * 3 * 2
    assert found.flops["total"] == sum(row["flops"] for row in found.runs)


@pytest.mark.parametrize(
    ("options", "steps", "epochs", "rows"),
    [
        ({"max_steps": 10}, 10, 1, 10 * 32),
        ({"max_steps": 300, "epochs": 1}, 300, 2, ROWS + 32 * 32),
        ({"gradient_accumulation_steps": 4, "epochs": 2}, 134, 2, 2 * ROWS),
        ({"gradient_accumulation_steps": 4, "max_steps": 67}, 67, 1, ROWS),
    ],
)
def test_steps(options: dict[str, Any], steps: int, epochs: int, rows: int):
    (row,) = tuned({"plain": {}}, fit={"batch_size": 32, **options}).runs
    assert (row["steps"], row["epochs"]) == (steps, epochs)
    assert row["flops"] == ACTIVE * TOKENS * (6 * rows + 2 * epochs * VALIDATION)


def test_the_test_part_of_a_fine_tuned_model():
    held = {"a": {"preset": "cola", "hold_out": True}}
    with_test, without = (
        tuned({"plain": {}}, held, evaluate=evaluate, fit={"epochs": 2}).flops["total"] for evaluate in ("test", None)
    )
    assert with_test - without == 2 * ACTIVE * TOKENS * VALIDATION


def test_texts_that_are_written():
    tasks, options = {"a": {"preset": "wmt16_en_ro"}}, {"epochs": 1, "max_target_length": 16}
    found, wide = (
        tuned({"plain": {}}, tasks, architecture=T5, fit=fit) for fit in (options, {**options, "num_beams": 3})
    )
    tokens = PRESETS["wmt16_en_ro"].length
    assert (found.tasks[0]["tokens"], found.tasks[0]["target"]) == (tokens, 16)
    block = 4 * 32 * 32 + 2 * 32 * 48 + 2 * 32
    decoder = 2 * (block + 4 * 32 * 32 + 32) + 50 * 32 + 2 * 32  # cross-attention, the vocabulary, two last norms
    row = 2 * block * tokens + decoder * 16
    assert found.flops["total"] == row * (6 * 610320 + 2 * 1999)
    assert wide.flops["total"] == row * (6 * 610320 + 2 * 1999 * 3)


def test_images_are_as_many_tokens_as_they_have_patches():
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}
    vit["patch_size"] = 8
    one, two = (tuned({"plain": {}}, {"a": {"preset": name}}, architecture=vit) for name in ("cifar10", "cifar100"))
    assert (two.tasks[0]["tokens"], two.tasks[0]["rows"], two.tasks[0]["validation"]) == (17, 45000, 5000)
    assert two.runs[0]["parameters"] - one.runs[0]["parameters"] == 90 * 33


def test_a_network_without_layers_can_be_fine_tuned():
    resnet = {"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8}
    plain, probe = tuned(
        {"plain": {}, "again": {}}, {"a": {"preset": "cifar10"}}, architecture=resnet, fit={"epochs": 1}
    ).runs
    assert plain["flops"] == probe["flops"] > 0


def test_local_data_is_fine_tuned_on(tmp_path: Path):
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "one two\tyes\nthree four\tno\nfive\tmaybe\n" * 5)
    files = {"a": {"files": {"train": "train.tsv", "validation": "dev.tsv"}}}
    found = estimate(recipe(files, methods={"plain": {}}), data=tmp_path, batch_size=4)
    assert (found.runs[0]["parameters"], found.tasks[0]["rows"]) == (WHOLE + WIDTH + 1, 15)
    assert found.tasks[0]["steps_per_epoch"] == 4


def test_a_copy_has_the_stacks_of_its_model():
    model = empty_model(config_of(TINY))
    copied = copy.deepcopy(model)
    same_stacks(model, copied)
    own, other = stacks(copied)["main"], stacks(model)["main"]
    assert [point.path for point in own.points] == [point.path for point in other.points]
    assert list(own.blocks) == list(copied.get_submodule("encoder.layer").children())
    insert_(copied, layers="1")
    assert len(stacks(copied)["main"].run) == len(other.run) + 3  # looked for anew, since there are other modules


def test_the_model_stays_as_it_is():
    size = Sizes(config_of(TINY)).model("AutoModelForSequenceClassification", ("a", "b"))
    size.edited((("insert", {}), ("freeze", {"train": "inserted"})), where="here")
    assert size.model.num_parameters() == WHOLE
    assert all(parameter.requires_grad for parameter in size.model.parameters())


# What the run would refuse


@pytest.mark.parametrize(
    ("reader", "kind", "message"),
    [
        ({**ADA, "grid": {"cutoff": [0.5]}}, ConfigError, r"(?s)would remove every layer.*run a-Ada_0001-0"),
        ({"fusion": {"name": "concat", "layers": [9]}}, LayerIndexError, r"(?s)layer 9 does not exist.*run a-Ada-0"),
        ({**ADA, "stack": "decoder"}, UnknownNameError, "unknown stack 'decoder'"),
        ({"fusion": {"name": "ada_layers", "dim": 9}}, ConfigError, "attention_heads is 8 for features of size 9"),
    ],
)
def test_a_reader_that_does_not_fit_the_model(reader: dict[str, Any], kind: type[Exception], message: str):
    refused(recipe({"a": task({"Ada": reader})}), kind, message)


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ({"edits": [{"insert": {"layers": "9"}}]}, LayerIndexError, r"(?s)layer 9 does not exist.*run a-m-0"),
        ({"edits": [{"insert": {"layers": "9"}}], "grid": {"epochs": [1]}}, LayerIndexError, r"(?s)run a-m_0001-0"),
        ({"edits": [{"truncate": {}}]}, ConfigError, r"(?s)truncate lacks 'keep'.*methods\.m"),
        ({"edits": [{"freeze": {"train": "inserted"}}]}, ConfigError, "the model has no inserted layers"),
        ({"edits": [{"truncate": {"keep": 7}}]}, LaminaError, "keep is 7"),
    ],
)
def test_an_edit_that_does_not_fit_the_model(method: dict[str, Any], kind: type[Exception], message: str):
    refused(recipe({"a": {"preset": "cola"}}, methods={"m": method}), kind, message)


@pytest.mark.parametrize("data", [True, False])
def test_a_test_part_that_is_not_there(tmp_path: Path, data: bool):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\none\tyes\ntwo\tno\n")
    local: dict[str, Any] = {"files": {"train": "train.tsv", "validation": "train.tsv"}, "readers": {"last": LAST}}
    made = recipe({"a": local if data else task({"last": LAST})}, evaluate="test")
    with pytest.raises(ConfigError, match="evaluate is test, but task 'a' has only train, validation"):
        estimate(made, data=tmp_path if data else None)


def refused(made: Recipe, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        estimate(made)
    assert re.search(message, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))


def test_as_json():
    found = estimate(recipe({"a": task({"Ada": {**ADA, "grid": {"layers": [[1, 2], "1-"]}}})}))
    assert json.loads(json.dumps(asdict(found)))["runs"][0]["settings"] == {"fusion.layers": [1, 2]}


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0"),
        (1, "1"),
        (999, "999"),
        (999.6, "1 k"),
        (999_500, "1 M"),
        (1000, "1 k"),
        (1234, "1.23 k"),
        (1e6, "1 M"),
        (2.5e15, "2.5 P"),
        (1e26, "100 Y"),
    ],
)
def test_large_numbers_are_readable(count: float, said: str):
    assert readable(count) == said


def test_tasks_over_one_file_count_their_shared_steps_once(tmp_path: Path):
    file = tmp_path / "train.csv"
    file.write_text("text,mood,place\n" + "".join(f"{row},{row % 2},{row % 3}\n" for row in range(30)))
    common = {"kind": "sequence_classification", "files": {"train": str(file)}, "text": "text"}
    tasks = {name: {**common, "label": name, "readers": {"last": LAST}} for name in ("mood", "place")}
    one, both = (
        estimate(recipe(some, fit={"epochs": 1, "batch_size": 9})) for some in ({"mood": tasks["mood"]}, tasks)
    )
    assert [found.steps for found in (one, both)] == [3, 3]
    assert [row["steps"] for row in both.tasks] == [3, 3]
    assert one.flops["base"] == both.flops["base"]


def test_a_dry_run_of_very_many_readers_is_refused_with_their_number():
    grid = {"fusion.alpha": [float(value) for value in range(1, 2002)]}
    with pytest.raises(ConfigError, match=r"2,001 readers besides seeds; .* takes at most 2,000"):
        estimate(recipe({"a": task({"Ada": {**ADA, "grid": grid}})}))


@pytest.mark.parametrize("kind", [ResNetModel, ResNetForImageClassification])
def test_training_inside_a_model_without_stacks_goes_back_through_it(kind: type[Any]):
    model = kind(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]))
    size = ModelSize(model, model.num_parameters())
    assert size.edited([("freeze", {"train": ["encoder"]})], where="here").deep
