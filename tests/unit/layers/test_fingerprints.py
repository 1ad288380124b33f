from __future__ import annotations

import hashlib

import pytest
import torch
from tests.support.portions import one_in
from tests.support.stored import tiny_config, tiny_model
from tests.support.tiny import FAMILIES
from transformers import BertForMaskedLM, BertForTokenClassification, BertModel

from lamina import insert_
from lamina.errors import ConfigError, UnknownNameError
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_outside
from lamina.store import empty_model, fingerprint


def test_is_a_sha256_and_the_same_each_time():
    model = tiny_model()
    first = fingerprint(model, "main")
    assert first == fingerprint(model, "main") == fingerprint(tiny_model(), "main")
    assert len(bytes.fromhex(first)) == hashlib.sha256().digest_size


def test_every_weight_that_makes_the_states_counts():
    model = tiny_model()
    seen = {fingerprint(model, "main")}
    counted = [name for name, _ in model.named_parameters() if not name.startswith("pooler.")]
    for name in counted:
        model.get_parameter(name).data.view(-1)[-1] += 1e-3  # through .data, which leaves no trace on the parameter
        seen.add(fingerprint(model, "main"))
    assert len(seen) == len(counted) + 1


def test_weights_after_the_last_layer_do_not_count():
    model = tiny_model()
    before = fingerprint(model, "main")
    model.pooler.dense.weight.data += 1
    assert fingerprint(model, "main") == before


@pytest.mark.parametrize("name", one_in(8, [name for name, family in FAMILIES.items() if not family.refused]))
def test_every_weight_counts_inside_or_outside_the_layers(name: str):
    model = FAMILIES[name].known()

    def hashes() -> list[str]:
        return [*(fingerprint(model, stack) for stack in stacks(model)), fingerprint_outside(model)]

    before = hashes()
    for weight in (parameter for parameter in model.parameters() if parameter.numel()):
        old = weight.data.clone()
        weight.data.view(-1)[-1:] += 1
        assert hashes() != before
        weight.data.copy_(old)
    assert hashes() == before


def test_a_head_counts_outside_the_layers_also_if_it_is_tied():
    model = tiny_model(3, BertForMaskedLM)
    before = fingerprint_outside(model)
    model.bert.encoder.layer[0].output.dense.weight.data += 1
    assert fingerprint_outside(model) == before
    tied = model.get_output_embeddings()
    tied.weight = torch.nn.Parameter(tied.weight.detach().clone())
    assert fingerprint_outside(model) == before
    tied.weight.data += 1
    assert fingerprint_outside(model) != before


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForTokenClassification])
def test_a_model_with_a_head_agrees_with_its_backbone(kind: type):
    model = tiny_model(3, kind)
    alone = BertModel(tiny_config())
    alone.load_state_dict(model.bert.state_dict(), strict=False)
    assert fingerprint(model, "main") == fingerprint(alone, "main")


@pytest.mark.parametrize(
    "name", one_in(4, [name for name, family in FAMILIES.items() if family.base and not family.refused])
)
def test_every_family_with_a_head_agrees_with_its_backbone(name: str):
    family = FAMILIES[name]
    model, alone = family.build(), FAMILIES[family.base].build()
    alone.load_state_dict(model.base_model.state_dict(), strict=False)
    for stack in family.stacks:
        same = stack if stack in stacks(alone) else "encoder"
        assert fingerprint(model, stack) == fingerprint(alone, same)


def test_the_dtype_counts_and_the_order_of_equal_shapes_counts():
    model = tiny_model()
    plain = fingerprint(model, "main")
    attention = model.encoder.layer[0].attention.self
    query, key = attention.query.weight.data.clone(), attention.key.weight.data.clone()
    attention.query.weight.data, attention.key.weight.data = key, query
    swapped = fingerprint(model, "main")
    half = fingerprint(tiny_model().to(torch.bfloat16), "main")
    assert len({plain, swapped, half}) == 3


def test_an_unknown_stack_is_named():
    with pytest.raises(UnknownNameError, match="unknown stack 'decoder'; known: main"):
        fingerprint(tiny_model(), "decoder")


def test_a_model_without_weights_has_none():
    with pytest.raises(ConfigError, match="has no weights, only an architecture"):
        fingerprint(empty_model(tiny_config()), "main")


def test_saved_buffers_of_floats_count_and_others_do_not():
    model = tiny_model()
    plain = fingerprint(model, "main")
    norm = model.encoder.layer[1].output.LayerNorm
    norm.register_buffer("unsaved", torch.ones(2), persistent=False)
    norm.register_buffer("steps", torch.tensor(3))
    assert fingerprint(model, "main") == plain
    norm.register_buffer("mean", torch.ones(2))
    with_buffer = fingerprint(model, "main")
    norm.mean[1] = 2.0
    assert len({plain, with_buffer, fingerprint(model, "main")}) == 3


def test_a_saved_table_of_whole_numbers_counts():
    model = tiny_model()
    marks = {fingerprint(model, "main")}
    norm = model.encoder.layer[1].output.LayerNorm
    norm.register_buffer("order", torch.tensor([0, 1]))
    marks.add(fingerprint(model, "main"))
    norm.order[1] = 2
    assert len(marks | {fingerprint(model, "main")}) == 3


def test_a_tensor_that_modules_share_counts_once():
    model = tiny_model()
    first, second = (model.encoder.layer[number].output.LayerNorm for number in (0, 1))
    apart = fingerprint(model, "main")
    second.weight = first.weight
    assert fingerprint(model, "main") != apart  # equal numbers, and known to be one tensor


@pytest.mark.parametrize("how", [{"activation": "relu"}, {"activation": None}, {"placement": "output"}])
def test_what_an_inserted_layer_computes_counts(how):
    marks = set()
    for settings in ({}, how):
        model = tiny_model()
        layer_settings = {"position": "ffn", "init": "xavier", **settings}
        insert_(model, **layer_settings, generator=torch.Generator().manual_seed(0))
        marks.add(fingerprint(model, "main"))
    assert len(marks) == 2
