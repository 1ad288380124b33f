"""Which learning rate every parameter has."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.finetuned import albert, bert, t5

import lamina
from lamina.errors import ConfigError, LayerIndexError
from lamina.train.learner import learning_rates, parameter_groups
from lamina.train.options import FitOptions

RATE = 1.0


def rates(model: Any, **options: Any) -> dict[str, float]:
    return learning_rates(model, FitOptions.of(options), RATE)


def test_without_layers_all_are_the_same():
    model = bert()
    assert rates(model) == dict.fromkeys((name for name, _ in model.named_parameters()), RATE)


def test_every_layer_has_a_share_of_the_rate_of_the_one_above():
    found = rates(bert(), layer_decay=0.5)
    for name, rate in found.items():
        if ".layer." in name:
            assert rate == 0.5 ** (2 - int(name.split(".layer.")[1][0]))
        elif "embeddings" in name:
            assert rate == 0.5**3
        else:
            assert name.startswith(("bert.pooler", "classifier"))
            assert rate == RATE


def test_rates_by_name():
    given = {0: 0.1, "1-2": 0.2, "2": 0.3, -1: 0.4, "head": 0.5}
    found = rates(bert(), layer_rates=given)
    expected = {"embeddings": 0.1, "layer.0": 0.2, "layer.1": 0.3, "layer.2": 0.4, "pooler": 0.5, "classifier": 0.5}
    for name, rate in found.items():
        (key,) = [key for key in expected if f".{key}." in f".{name}" and (key != "embeddings" or "layer" not in name)]
        assert rate == expected[key], name


def test_a_named_rate_stands_in_place_of_the_decayed():
    found = rates(bert(), layer_rates={"1": 7.0}, layer_decay=0.5)
    assert {rate for name, rate in found.items() if "layer.0." in name} == {7.0}
    assert {rate for name, rate in found.items() if "layer.1." in name} == {0.5}


def test_both_stacks_of_an_encoder_and_decoder():
    found = rates(t5(), layer_decay=0.5)
    assert found.keys() == {name for name, _ in t5().named_parameters()}
    for stack in ("encoder", "decoder"):
        assert {rate for name, rate in found.items() if name.startswith(f"{stack}.block.0.")} == {0.5}
        assert {rate for name, rate in found.items() if name.startswith(f"{stack}.block.1.")} == {1.0}
        assert found[f"{stack}.final_layer_norm.weight"] == 1.0
    assert found["shared.weight"] == 0.25
    named = rates(t5(), layer_rates={1: 9.0})
    assert {name.split(".")[0] for name, rate in named.items() if rate == 9.0} == {"encoder", "decoder"}


def test_a_block_that_layers_share_has_the_rate_of_the_highest():
    found = rates(albert(), layer_decay=0.5)
    assert {rate for name, rate in found.items() if "albert_layers" in name} == {1.0}
    assert {rate for name, rate in found.items() if "embeddings.word" in name} == {0.5**3}


def test_inserted_layers_have_the_rate_of_their_block_or_their_own():
    model = bert()
    lamina.insert_(model, "ffn")
    own = {name for name, _ in model.named_parameters() if name not in dict(bert().named_parameters())}
    assert len(own) == 3
    decayed = rates(model, layer_decay=0.5)
    assert sorted(decayed[name] for name in own) == [0.25, 0.5, 1.0]
    named = rates(model, layer_decay=0.5, layer_rates={"inserted": 5.0, 1: 2.0})
    assert {named[name] for name in own} == {5.0}
    assert {rate for name, rate in named.items() if "layer.0." in name and name not in own} == {2.0}


def test_groups_leave_out_what_is_frozen_or_has_no_rate():
    model = bert()
    lamina.freeze_(model, "bottom:2")
    options = FitOptions(weight_decay=0.1, layer_decay=0.5, layer_rates={3: 0.0})
    groups = parameter_groups(model, options, 2e-5, "fit")
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {named[id(one)]: (group["lr"], group["weight_decay"]) for group in groups for one in group["params"]}
    expected = {
        name: (1e-5 if ".layer.1." in name else 2e-5, 0.1 if one.ndim >= 2 else 0.0)
        for name, one in model.named_parameters()
        if ".layer.1." in name or name.startswith(("bert.pooler", "classifier"))
    }
    assert found == expected
    assert len(groups) == 4


def test_a_model_that_is_frozen_throughout():
    model = bert()
    model.requires_grad_(False)
    with pytest.raises(
        ConfigError, match="finetune: every parameter is frozen or has the learning rate 0; at least one must"
    ):
        parameter_groups(model, FitOptions(), 1.0, "finetune")
    free = FitOptions(layer_rates={"all": 0.0, "head": 0.0})
    with pytest.raises(ConfigError, match="finetune: every parameter is frozen or has the learning rate 0"):
        parameter_groups(bert(), free, 1.0, "finetune")


def test_a_rate_for_inserted_layers_that_are_not_there():
    with pytest.raises(
        ConfigError, match="fit: layer_rates: 'inserted' has a learning rate; the model has no inserted"
    ):
        rates(bert(), layer_rates={"inserted": 1.0})


def test_a_rate_for_a_layer_that_is_not_there():
    with pytest.raises(LayerIndexError, match="fit: layer_rates: layer 4 does not exist; the model has 4 layers"):
        rates(bert(), layer_rates={4: 1.0})
    with pytest.raises(ConfigError, match="layer_rates"):
        rates(bert(), layer_rates={"hea": 1.0})


def test_a_layer_that_only_the_deeper_stack_has():
    model = t5()
    lamina.truncate_(model, 1, stack="decoder")
    found = rates(model, layer_rates={2: 9.0})
    assert {name.split(".")[0] for name, rate in found.items() if rate == 9.0} == {"encoder"}
