"""Grids: every combination once, from the template, and nothing wrong let through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.training import names, reader, tiny_bank, weights, yes_no

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.train.grid import RunSpec, expand, expand_into, undo_grid_on_error

TEMPLATE = Reader(
    AdaLayers(dim=8, dropout=0.0), SequenceClassification(("no", "yes"), attention_heads=2), stack="main", seed=5
)


def test_every_combination_once_the_last_key_fastest():
    found = expand(TEMPLATE, {"fusion.alpha": [1.0, 8.0], "head.dropout": [0.0, 0.2, 0.4]}, name="cola")
    assert [one.name for one in found] == [f"cola_000{number}" for number in range(1, 7)]
    assert [(one.reader.fusion.alpha, one.reader.head.dropout) for one in found] == [  # pyright: ignore
        (alpha, dropout) for alpha in (1.0, 8.0) for dropout in (0.0, 0.2, 0.4)
    ]
    assert found[4].settings == {"fusion.alpha": 8.0, "head.dropout": 0.2}
    assert {one.task for one in found} == {"cola"}


def test_what_the_grid_does_not_name_stays_as_it_was():
    (found,) = expand(TEMPLATE, {"fusion.entropy": [0.1]})
    assert found.reader == replace(TEMPLATE, fusion=replace(TEMPLATE.fusion, entropy=0.1))  # pyright: ignore
    assert (found.epochs, found.learning_rate) == (None, None)


def test_a_grid_without_keys_is_the_template_alone():
    (found,) = expand(TEMPLATE, {}, name="a")
    assert (found.reader, found.settings) == (TEMPLATE, {})


@pytest.mark.parametrize(("seeds", "rate"), [([1, 2], 0.1), ([np.int64(1), torch.tensor(2)], np.float64(0.1))])
def test_the_reader_s_own_keys_and_its_training(seeds: list[Any], rate: float):
    found = expand(TEMPLATE, {"seed": seeds, "learning_rate": [rate], "epochs": [3], "stack": [None]})
    assert [one.reader.seed for one in found] == [1, 2]
    assert [(one.learning_rate, one.epochs, one.reader.stack) for one in found] == [(0.1, 3, None)] * 2
    assert found[1].settings == {"seed": 2, "learning_rate": 0.1, "epochs": 3, "stack": None}


def test_a_short_key_is_shown_in_full():
    (found,) = expand(TEMPLATE, {"alpha": [2.0], "pooling": ["mean"]})
    assert found.settings == {"fusion.alpha": 2.0, "head.pooling": "mean"}
    assert found.reader.fusion.alpha == 2.0  # pyright: ignore[reportAttributeAccessIssue]


def test_methods_by_name_by_fields_and_as_configs():
    methods = ["mean", {"name": "single_layer", "layer": 1, "dim": 8}, AdaLayers(dim=16, layers=(1, 2))]
    found = expand(TEMPLATE, {"fusion": methods})
    assert [one.reader.fusion for one in found] == [
        Mean(),
        SingleLayer(layer=1, dim=8),
        AdaLayers(dim=16, layers=(1, 2)),
    ]
    assert [one.settings["fusion"] for one in found] == [
        "Mean()",
        "SingleLayer(layer=1, dim=8)",
        "AdaLayers(dim=16, layers=(1, 2))",
    ]


def test_fields_are_set_on_each_method_whatever_the_order_of_the_keys():
    methods = [{"name": "single_layer", "layer": 1}, "ada_layers"]
    found = expand(TEMPLATE, {"fusion.dim": [4, 8], "fusion": methods})
    assert {(type(one.reader.fusion).__name__, one.reader.fusion.dim) for one in found} == {  # pyright: ignore
        (name, dim) for name in ("SingleLayer", "AdaLayers") for dim in (4, 8)
    }
    assert all(one.reader.fusion.layer == 1 for one in found if isinstance(one.reader.fusion, SingleLayer))


def test_lists_of_layers_become_tuples_and_stay_plain_in_the_settings():
    found = expand(TEMPLATE, {"layers": [[1, 2], "1-"]})
    assert [one.reader.fusion.layers for one in found] == [(1, 2), "1-"]  # pyright: ignore
    assert [one.settings["fusion.layers"] for one in found] == [[1, 2], "1-"]


def test_names_stay_in_order_beyond_four_digits():
    found = expand(TEMPLATE, {"seed": list(range(10_000))})
    assert (found[0].name, found[-1].name) == ("reader_00001", "reader_10000")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"fusion.alfa": [1]}, r"grid of 'reader', AdaLayers: unknown key 'fusion.alfa'; known: fusion.alpha, "),
        ({"fusion.alfa": [1]}, r"fields of the fusion and head, and seed, .*epochs\)\. Did you mean 'fusion.alpha'"),
        ({"beta": [1]}, "unknown key 'beta'"),
        ({"head.labels": [["a"]]}, "unknown key 'head.labels'"),
        ({"fusion": ["mean"], "alpha": [1.0]}, "grid of 'reader', Mean: unknown key 'alpha'"),
        ({"fusion": ["ada_layers", "mean"], "alpha": [1.0]}, "grid of 'reader', Mean: unknown key 'alpha'"),
        ({"fusion": ["men"]}, "fusion: unknown name 'men'.*Did you mean 'mean'"),
        ({"fusion": [{"name": "mean", "dim": 3}]}, "fusion 'mean': unknown key 'dim'"),
    ],
)
def test_a_key_or_name_that_does_not_exist(grid: dict[str, list[Any]], message: str):
    with pytest.raises(UnknownNameError, match=message):
        expand(TEMPLATE, grid)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"dropout": [0.1]}, r"'dropout' may mean fusion.dropout or head.dropout; it must mean one"),
        ({"alpha": []}, "fusion.alpha has no values; a grid needs at least one"),
        ({"fusion": []}, "fusion has no values"),
        (5, r"grid of 'reader': it is 5; a mapping of keys to lists of values is needed"),
        ({"alpha": torch.tensor(3)}, "fusion.alpha is 3; a grid needs a list of values"),
        ({"seed": range(10**12)}, "seed has more than 100,000 values"),
        ({"alpha": 3}, r"fusion.alpha is 3; a grid needs a list of values\. Write \[3\]"),
        ({"head.pooling": "mean"}, "head.pooling is 'mean'; a grid needs a list of values"),
        ({"alpha": [1, 2, 1]}, "fusion.alpha has 1 twice"),
        ({"alpha": [1.0], "fusion.alpha": [2.0]}, "'fusion.alpha' is set twice"),
        ({"fusion": [3]}, "fusion is 3; it must be a name, a dict with a name, or a config"),
        ({"fusion": [{"dim": 3}]}, "fusion: no 'name' among"),
        ({"alpha": [64.0, -1.0]}, r"alpha is -1.0; .*\n.*reader reader_0002: fusion.alpha=-1.0"),
        ({"dim": [{"x": 1}]}, r"dim is a dict; it must be a whole number.*reader reader_0001: fusion.dim={'x': 1}"),
        ({"dim": ["8"]}, r"dim is '8'; it must be a whole number.*\n.*reader reader_0001: fusion.dim=8"),
        (
            {"fusion": [{"name": "ada_layers", "dim": "8"}]},
            r"must be a whole number.*\n.*fusion {'name': 'ada_layers', 'dim': '8'}",
        ),
        ({"seed": [1.5]}, r"seed is 1.5; it must be a whole number.*\n.*reader reader_0001"),
        ({"seed": [True]}, "seed is True; it must be a whole number"),
        ({"epochs": [0]}, r"epochs is 0; it must be at least 1.*\n.*reader reader_0001: epochs=0"),
        ({"learning_rate": ["1e-3"]}, "learning_rate is '1e-3'; it must be a number"),
    ],
)
def test_a_value_that_cannot_be(grid: Any, message: str):
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        expand(TEMPLATE, grid)


@pytest.fixture
def bank() -> ReaderBank:
    return tiny_bank({"cola": reader(yes_no()), "ner": reader(names())})


RATES, EPOCHS = {"cola": 0.5, "ner": 0.2}, {"cola": 2, "ner": 7}


def test_readers_take_their_template_s_place(bank: ReaderBank):
    before = weights(bank, "ner")
    grid = {"cola": {"alpha": [1.0, 2.0], "epochs": [3, 4]}}
    with undo_grid_on_error(bank, grid) as settle:
        found = expand_into(bank, ["cola", "ner"], grid, RATES, EPOCHS)
        settle()
    made = [f"cola_000{number}" for number in (1, 2, 3, 4)]
    assert list(bank) == ["ner", *made]
    assert {name: spec.task for name, spec in found.items()} == {**dict.fromkeys(made, "cola"), "ner": "ner"}
    assert [found[name].epochs for name in made] == [3, 4, 3, 4]
    assert {found[name].learning_rate for name in made} == {0.5}
    assert bank["cola_0003"].config == found["cola_0003"].reader
    assert found["cola_0003"].settings == {"fusion.alpha": 2.0, "epochs": 3}
    assert found["ner"] == RunSpec("ner", "ner", bank["ner"].config, {}, 0.2, 7)
    assert all(torch.equal(value, before[key]) for key, value in weights(bank, "ner").items())


def test_the_bank_is_as_it_was_if_something_is_wrong_before_they_can_train(bank: ReaderBank):
    grid = {"cola": {"alpha": [1.0, 2.0]}}

    def goes_wrong() -> None:
        with undo_grid_on_error(bank, grid):
            expand_into(bank, ["cola"], grid, RATES, EPOCHS)
            assert len(bank) == 4
            raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        goes_wrong()
    assert list(bank) == ["cola", "ner"]


def test_the_template_s_epochs_and_rate_hold_for_readers_that_name_none(bank: ReaderBank):
    grid = {"cola": {"seed": [1], "learning_rate": [0.3]}, "ner": {"seed": [1]}}
    found = expand_into(bank, ["cola", "ner"], grid, RATES, EPOCHS)
    assert {name: (spec.epochs, spec.learning_rate) for name, spec in found.items()} == {
        "cola_0001": (2, 0.3),
        "ner_0001": (7, 0.2),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_a_grid_cannot_make_a_reader_whose_name_is_taken(order: int):
    bank = tiny_bank({"cola": reader(yes_no()), "cola_0001": reader(yes_no())})
    with pytest.raises(ConfigError, match="reader 'cola_0001' already"):
        expand_into(bank, [*bank][::order], {"cola": {"seed": [1, 2]}}, *[dict.fromkeys(bank, 1)] * 2)
    assert list(bank) == ["cola", "cola_0001"]


def test_a_cutoff_that_would_remove_every_layer_leaves_the_bank_as_it_was(bank: ReaderBank):
    with pytest.raises(ConfigError, match=r"(?s)would remove every layer.*reader cola_0002: fusion.cutoff=0.5") as told:
        expand_into(bank, ["cola"], {"cola": {"cutoff": [0.1, 0.5]}}, RATES, EPOCHS)
    assert isinstance(told.value, LaminaError)
    assert list(bank) == ["cola", "ner"]


def test_a_reader_whose_name_is_taken_leaves_the_bank_as_it_was(bank: ReaderBank):
    bank.add("cola_0002", reader(yes_no()))
    with pytest.raises(ConfigError, match="there is a reader 'cola_0002' already"):
        expand_into(bank, ["cola"], {"cola": {"alpha": [1.0, 2.0]}}, RATES, EPOCHS)
    assert list(bank) == ["cola", "ner", "cola_0002"]


def test_a_grid_for_a_reader_that_has_no_task(bank: ReaderBank):
    with pytest.raises(UnknownNameError, match="grid: unknown reader 'nerr'; known: cola, ner"):
        expand_into(bank, ["cola", "ner"], {"nerr": {"alpha": [1.0]}}, RATES, EPOCHS)
    with pytest.raises(ConfigError, match="fit: grid is 5; a mapping of readers' names to their grids is needed"):
        expand_into(bank, ["cola", "ner"], cast("Any", 5), RATES, EPOCHS)
