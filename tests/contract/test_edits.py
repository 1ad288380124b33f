"""Law 8, an edit touches what it names and nothing else, for every family and every edit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, HEADED, READABLE
from transformers import AutoModel

from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.keep import truncate_
from lamina.editing.record import Edit, edits
from lamina.editing.reinit import reinit_
from lamina.errors import ConfigError
from lamina.layers import stacks
from lamina.layers.roles import ROLES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

EDITABLE = [name for name, family in READABLE.items() if family.blocks]
INSERTABLE = [name for name, family in READABLE.items() if family.model_type in ROLES]
ONE_BLOCK = ("albert",)  # one block serves as all layers: it is edited as a whole
OWN_START = ("openai-gpt",)  # the initialiser of these leaves their maps as their constructor made them
DEEP = ("esm",)  # a part of these has a shape that follows from the depth
STACKS = {"main": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}


# Each edit is tried on every fifth family in every run, so that each family is edited; on all with `-m full`.


def values(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def changed(model: Any, before: dict[str, Tensor]) -> set[str]:
    after = model.state_dict()
    assert list(after) == list(before)
    return {name for name in before if not torch.equal(before[name], after[name])}


def within(model: Any, stack: str, layer: int) -> set[str]:
    inside = {id(parameter) for parameter in stacks(model)[stack].blocks[layer - 1].parameters()}
    return {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) in inside}


def trainable(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers_of(name: str) -> Any:
    return "all" if READABLE[name].model_type in ONE_BLOCK else 2


def same_names(model: Any, edit: Edit) -> set[str]:
    """The names in the state dict of what an edit names; tied weights have several."""
    named = dict(model.named_parameters())
    meant = {id(named[name]) for name in edit.parameters}
    return {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) in meant}


@pytest.mark.parametrize("name", one_in(20, EDITABLE, 0, ONE_BLOCK))
def test_reinit_changes_the_maps_of_the_named_block_alone(name):
    model = READABLE[name].known()
    for stack in READABLE[name].stacks:
        before = values(model)
        edit = reinit_(model, layers_of(name), stack=stack)
        assert changed(model, before) == same_names(model, edit)
        assert same_names(model, edit) <= within(model, stack, 2)
        named = dict(model.named_parameters())
        assert all(named[each].abs().max() <= 0.04 for each in edit.parameters)
        assert sum(named[each].ndim >= 2 for each in edit.parameters) == len(edit.parameters) > 1


@pytest.mark.parametrize("name", one_in(30, EDITABLE, 1, (*ONE_BLOCK, *OWN_START)))
def test_reinit_of_a_block_sets_all_of_it(name):
    model = READABLE[name].known()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01  # away from the ones and zeros it began with
    for stack in READABLE[name].stacks:
        before = values(model)
        if READABLE[name].model_type in OWN_START:
            with pytest.raises(ConfigError, match=r"leaves .* as it is; nothing was changed"):
                reinit_(model, layers_of(name), scope="block", stack=stack)
            assert changed(model, before) == set()
            continue
        edit = reinit_(model, layers_of(name), scope="block", stack=stack)
        whole = {n for n in within(model, stack, 2) if n in dict(model.named_parameters(remove_duplicate=False))}
        assert changed(model, before) == same_names(model, edit) == whole


@pytest.mark.parametrize("name", one_in(40, EDITABLE, 2, DEEP))
@torch.no_grad()
def test_truncate_keeps_the_rest_and_reloads(name, tmp_path: Path):
    family = READABLE[name]
    for stack in family.stacks:
        model = family.known()
        if family.model_type in DEEP:
            with pytest.raises(ConfigError, match=r"the shape of .* depends on the number of blocks"):
                truncate_(model, 1, stack=stack)
            continue
        inputs, before = family.inputs(model), values(model)
        full = getattr(model(**inputs, output_hidden_states=True), STACKS[stack])
        depth = stacks(model)[stack].depth
        edit = truncate_(model, depth - 1, stack=stack)
        assert stacks(model)[stack].depth == depth - 1
        assert edit.layers == (depth,)
        after = model.state_dict()
        assert set(before) - set(after) >= set(edit.parameters)
        assert all(torch.equal(before[key], value) for key, value in after.items())
        output = model(**inputs, output_hidden_states=True)
        assert all(
            torch.equal(one, other) for one, other in zip(getattr(output, STACKS[stack])[:-1], full, strict=False)
        )
        model.save_pretrained(tmp_path / stack)
        again = type(model).from_pretrained(tmp_path / stack)
        assert_same_outputs(output, again(**inputs, output_hidden_states=True))
        assert told(again.config.to_dict()) == told(model.config.to_dict())


def told(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what every reload fills in."""
    kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "dtype")}
    return {key: told(value) if isinstance(value, dict) else value for key, value in kept.items()}


def assert_same_outputs(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key in one:
        for mine, theirs in zip(parts(one[key]), parts(other[key]), strict=True):
            assert torch.equal(mine, theirs), key


def parts(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [part for each in value for part in parts(each)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize("name", one_in(20, READABLE, 3, ONE_BLOCK))
def test_freeze_stops_the_named_layers_alone(name):
    family = READABLE[name]
    for stack in family.stacks:
        model = family.known()
        before, free = values(model), trainable(model)
        choice = (1 if layers_of(name) != "all" else "all") if family.blocks else "all"
        edit = freeze_(model, choice, stack=stack)
        assert free - trainable(model) == set(edit.parameters) & free != set()
        assert changed(model, before) == set()
        if choice != "all":
            assert set(edit.parameters) == within(model, stack, 1) & set(dict(model.named_parameters()))


@pytest.mark.parametrize("name", one_in(10, INSERTABLE, 4))
def test_insert_adds_what_it_names_and_changes_nothing(name):
    model = READABLE[name].known()
    before, config = values(model), model.config.to_dict()
    edit = insert_(model, "both", layers_of(name))
    after = model.state_dict()
    assert after.keys() - before.keys() >= set(edit.parameters) != set()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert model.config.to_dict() == config
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_edits_are_recorded_in_order(name):
    model = FAMILIES[name].known()
    made = [reinit_(model, 1), truncate_(model, 2), freeze_(model, "0-1")]
    assert edits(model) == made
    assert [Edit.from_dict(json.loads(json.dumps(each.to_dict()))) for each in made] == made


def test_a_truncated_backbone_loads_with_plain_auto_model(tmp_path: Path):
    model = HEADED["bert-SequenceClassification"].known()
    truncate_(model, 1)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert loaded.config.num_hidden_layers == len(loaded.encoder.layer) == 1
