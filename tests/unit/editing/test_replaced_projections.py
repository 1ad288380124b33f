"""Inserted layers whose projection another library replaces or wraps: refused at once, never lost in silence."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES
from torch import nn

import lamina
from lamina.editing.merge import merge_
from lamina.editing.record import edits
from lamina.errors import ConfigError

IDS = torch.tensor([[5, 6, 7, 8]])


def inserted() -> Any:
    model: Any = FAMILIES["bert"].known()
    lamina.insert_(model, "attention", generator=torch.Generator().manual_seed(0))
    return model


def states(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).last_hidden_state


def test_an_adapter_around_an_inserted_projection_is_refused_and_one_elsewhere_is_not():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(inserted(), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(ConfigError, match="peft wraps the projection 'query', after which a layer is inserted"):
        states(wrapped)
    merged = inserted()
    merge_(merged)
    states(peft.get_peft_model(merged, peft.LoraConfig(target_modules=["query"])))
    states(peft.get_peft_model(inserted(), peft.LoraConfig(target_modules=["output.dense"])))
    lora = peft.LoraConfig(target_modules=["output.dense"], modules_to_save=["query"])
    assert len(edits(peft.get_peft_model(inserted(), lora).base_model.model)) == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_a_bank_takes_a_peft_model_whose_inserted_layers_are_there(mixed: bool):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(inserted(), peft.LoraConfig(target_modules=["output.dense"]), mixed=mixed)
    assert len(edits(lamina.ReaderBank(wrapped).model)) == 1
    query = wrapped.base_model.model.encoder.layer[1].attention.self
    query.query = nn.Linear(query.query.in_features, query.query.out_features)
    with pytest.raises(ConfigError, match=r"^bank: .* is no longer in the model"):
        lamina.ReaderBank(wrapped)


def test_a_quantised_projection_has_lost_its_inserted_layers():
    quantised = torch.ao.quantization.quantize_dynamic(inserted(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ConfigError, match="has replaced a projection, and the layers that were inserted after it"):
        states(quantised)
    with pytest.raises(ConfigError, match=r"^edits: .* no longer in the model.*\. Load the model again, call merge_,"):
        edits(quantised)
    merged = inserted()
    merge_(merged)
    assert len(edits(torch.ao.quantization.quantize_dynamic(merged, {nn.Linear}, dtype=torch.qint8))) == 2


def test_a_projection_that_is_replaced_without_its_hooks_is_missed_by_the_record():
    model = inserted()
    attention = model.encoder.layer[0].attention.self
    attention.query = nn.Linear(attention.query.in_features, attention.query.out_features)
    calls = {
        "edits": edits,
        "merge_": merge_,
        "truncate_": lambda it: lamina.truncate_(it, 2),
        "bank": lamina.ReaderBank,
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=rf"^{name}: .*query\.inserted_0\.weight' is no longer in the model"):
            call(model)


def test_copies_of_an_edited_model_run():
    model = inserted()
    expected = states(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(states(again), expected)
        assert len(edits(again)) == 1
    lamina.truncate_(model, 2)
    states(model)
    assert len(edits(model)) == 2
