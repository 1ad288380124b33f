"""Law 7, an identity insertion is invisible and a merged one leaves the original architecture, for every family."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, Family
from transformers import AutoModel

from lamina.editing.insert import insert_
from lamina.editing.merge import merge_
from lamina.errors import UnsupportedModelError
from lamina.layers.discovery import same_stacks, stacks
from lamina.layers.roles import CONVOLUTIONS, ROLES, modules_at, roles_of

NAMED = {
    *("bert", "roberta", "xlm-roberta", "electra", "distilbert", "albert", "deberta", "deberta-v2", "modernbert"),
    *("mpnet", "bart", "mbart", "marian", "t5", "mt5", "vit", "deit", "beit", "dinov2", "wav2vec2", "hubert"),
    *("whisper", "gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "gemma"),
}
CONVNEXT = {"image_size": 32, "depths": [1, 2], "hidden_sizes": [8, 16], "num_stages": 2, "layer_scale_init_value": 1.0}
RESNET = {"image_size": 32, "depths": [1, 2], "hidden_sizes": [8, 16], "embedding_size": 8}
CONVOLUTIONAL = {  # their layers cannot be read, and need not be for this
    "convnext": Family("convnext", "convnext", CONVNEXT, "vision"),
    "convnextv2": Family("convnextv2", "convnextv2", CONVNEXT, "vision"),
    "resnet": Family("resnet", "resnet", RESNET, "vision"),
}
UNTIED = ("deberta-v2", "attention")  # its queries and keys share a weight
APART = ("convnext", "convnextv2")  # their convolutions keep channels apart, and nothing folds into them


@functools.cache
def untouched(name: str) -> tuple[Any, dict[str, Any], torch.Tensor]:
    family = CONVOLUTIONAL.get(name) or FAMILIES[name]
    model = family.build()
    inputs = family.inputs(model)
    return model, inputs, run(model, inputs)


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def copied(model: Any) -> Any:
    """A copy whose layers are known already, where they can be read."""
    own = copy.deepcopy(model)
    if model.config.model_type not in CONVOLUTIONAL:
        same_stacks(model, own)
    return own


def test_the_promised_families_have_a_row():
    assert set(ROLES) >= NAMED


@pytest.mark.parametrize("name", one_in(6, ROLES, 0))
def test_without_activation_it_is_bit_equal(name):
    model, inputs, expected = untouched(name)
    model = copied(model)
    insert_(model, "both", activation=None, stack="all")
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize(("name", "activation"), one_in(12, itertools.product(ROLES, ["gelu", "relu"]), 1))
def test_with_an_activation_it_is_within_a_hundred_thousandth(name, activation):
    model, inputs, expected = untouched(name)
    model = copied(model)
    insert_(model, "both", activation=activation, stack="all")
    torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "position"), one_in(15, itertools.product(ROLES, ["attention", "ffn"]), 2, [UNTIED]))
def test_merging_keeps_what_a_random_layer_does(name, position, tmp_path):
    model, inputs, expected = untouched(name)
    keys = list(model.state_dict())
    model = copied(model)
    insert_(model, position, init="xavier", stack="all", generator=torch.Generator().manual_seed(0))
    inserted = run(model, inputs)
    assert (inserted - expected).abs().max() > 1e-3  # the model goes through the new layers
    merge_(model)
    if (name, position) == UNTIED:  # positions get the projections that they shared
        assert not model.config.share_att_key
    assert [key for key in model.state_dict() if (name, position) != UNTIED or ".pos_" not in key] == keys
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    plain, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(run(plain.eval(), inputs), inserted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", one_in(3, ROLES))
def test_every_path_of_the_row_is_there(name):
    model, _, _ = untouched(name)
    row = roles_of(model, op="test")
    for stack in stacks(model).values():
        for attention in (row.attention, row.cross if stack.name == "decoder" else None):
            if attention is not None:
                for path in (*attention.projections(), attention.output):
                    assert modules_at(stack.blocks[0], path, family=name, op="test")
        for path in (*row.ffn_in, row.ffn_out):
            assert modules_at(stack.blocks[0], path, family=name, op="test")


@pytest.mark.parametrize("name", [name for name, row in ROLES.items() if row.ffn_norm])
def test_layers_on_the_input_of_the_ffn_start_invisible_and_merge(name, tmp_path):
    model, inputs, expected = untouched(name)
    keys = list(model.state_dict())
    start = copied(model)
    insert_(start, "both_input", activation=None, stack="all")
    assert torch.equal(run(start, inputs), expected)
    model = copied(model)
    insert_(model, "ffn_input", init="xavier", stack="all", generator=torch.Generator().manual_seed(0))
    inserted = run(model, inputs)
    assert (inserted - expected).abs().max() > 1e-3
    merge_(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    plain = AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(run(plain, inputs), inserted, rtol=0, atol=1e-5)


def test_a_family_without_a_norm_before_its_ffn_says_so():
    model, _, _ = untouched("bert")
    with pytest.raises(UnsupportedModelError, match="names no norm before the feed-forward network"):
        insert_(copied(model), "ffn_input")


def test_the_promised_families_have_a_row_of_convolutions():
    assert set(CONVOLUTIONS) >= {"wav2vec2", "hubert", "convnext", "convnextv2"}


@pytest.mark.parametrize(
    ("convolutional", "activation"), one_in(6, itertools.product(CONVOLUTIONS, [None, "gelu", "relu"]))
)
def test_a_dirac_kernel_after_every_convolution_is_invisible(convolutional, activation):
    model, inputs, expected = untouched(convolutional)
    model = copied(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    edit = insert_(model, "convolution", activation=activation)
    after = model.state_dict()
    assert set(after) - set(before) == set(edit.parameters)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    tolerance = 1e-5 if activation == "gelu" else 0
    torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("convolutional", one_in(3, CONVOLUTIONS))
def test_a_kernel_of_one_merges_where_channels_mix(convolutional, tmp_path):
    model, inputs, expected = untouched(convolutional)
    keys = list(model.state_dict())
    model = copied(model)
    insert_(model, "convolution", init="xavier", kernel=1, generator=torch.Generator().manual_seed(0))
    inserted = run(model, inputs)
    assert (inserted - expected).abs().max() > 1e-3
    if convolutional in APART:
        with pytest.raises(UnsupportedModelError, match="groups of channels apart"):
            merge_(model)
        return
    merge_(model)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    plain, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(run(plain.eval(), inputs), inserted, rtol=0, atol=1e-5)
