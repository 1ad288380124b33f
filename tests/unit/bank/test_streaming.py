"""One pass over one stack: which mask, what if a state never comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES

from lamina.bank import Reader, ReaderBank
from lamina.bank.streaming import StackPass
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers import stacks
from lamina.layers.hooks import token_mask

TWO = SequenceClassification(("a", "b"))


def bank_of(name: str, stack: str | None = None, fusion: Any = None) -> tuple[ReaderBank, dict[str, torch.Tensor]]:
    model = FAMILIES[name].build()
    bank = ReaderBank(model)
    bank.add("r", Reader(fusion or AdaLayers(dim=8), TWO, stack))
    return bank.eval(), FAMILIES[name].inputs(model, batch=2, tokens=7)


def test_without_a_mask_every_token_is_real():
    bank, batch = bank_of("bert")
    out = bank(input_ids=batch["input_ids"])
    assert bool(out["r"].mask.all())


def test_the_mask_of_the_batch_is_the_mask_of_the_readers():
    bank, batch = bank_of("bert")
    assert torch.equal(bank(**batch)["r"].mask, batch["attention_mask"].bool())


def test_a_row_without_a_real_token_keeps_its_first():
    bank, batch = bank_of("bert")
    batch["attention_mask"][0] = 0
    mask = bank(**batch)["r"].mask
    assert mask[0].tolist() == [True] + [False] * 6
    assert torch.equal(mask[1], batch["attention_mask"][1].bool())
    assert not batch["attention_mask"][0].any()  # the batch itself is left as it was


@pytest.mark.parametrize("shape", [(2, 6), (1, 7), (3, 7)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]):
    bank, _ = bank_of("bert")
    one = bank._passes(["r"], grad=False)[0]
    for layer in one.layers:
        one.take(layer, torch.randn(2, 7, 32))
    one.mask = torch.ones(shape)
    with pytest.raises(ConfigError, match=r"bank: the attention mask is .*; the states have batch and tokens \(2, 7\)"):
        one.finish(bank.model)


def test_the_mask_of_sound_is_that_of_its_frames():
    bank, batch = bank_of("wav2vec2")
    out = bank(**batch)["r"]
    frames = bank.model._get_feature_vector_attention_mask(out.mask.shape[1], batch["attention_mask"])
    assert torch.equal(out.mask, frames.bool())
    assert not out.mask.all()
    assert batch["attention_mask"].shape[1] > out.mask.shape[1]


def test_a_pass_that_never_reached_its_layers_says_so():
    bank, batch = bank_of("bart-Seq2SeqLM", "encoder")
    encoded = bank.model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
    with pytest.raises(ConfigError, match="bank: the pass never reached layer 1, so no state was read"):
        bank(
            encoder_outputs=encoded, attention_mask=batch["attention_mask"], decoder_input_ids=torch.tensor([[3], [3]])
        )


def test_a_decoder_has_the_decoders_mask():
    bank, batch = bank_of("bart-Seq2SeqLM", "decoder")
    length = batch["decoder_input_ids"].shape[1]
    assert bool(bank(**batch)["r"].mask.all())
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, -2:] = 0
    assert torch.equal(bank(**batch, decoder_attention_mask=mask)["r"].mask, mask.bool())


def test_where_a_mask_is_found():
    stack = stacks(FAMILIES["bert"].build())["main"]
    mask, other = torch.ones(2, 3), torch.zeros(2, 3)
    assert token_mask(stack, {"attention_mask": mask}, (), {"attention_mask": other}) is mask
    assert token_mask(stack, {}, (), {"attention_mask": other}) is other
    assert token_mask(stack, {}, (torch.ones(2, 3, dtype=torch.long), other), {}) is other  # after input_ids
    assert token_mask(stack, {}, (), {}) is None
    square = torch.ones(2, 1, 3, 3)
    assert token_mask(stack, {"input_ids": mask}, (), {"attention_mask": square}) is None  # made by the model
    assert token_mask(stack, {"attention_mask": mask}, (), {"attention_mask": square}) is mask


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (torch.ones(2, 1, 3, 3), r"torch\.float32 \[2, 1, 3, 3\]"),
        (torch.tensor([[0.0, -1e9]]), r"torch\.float32 \[1, 2\]"),
        ({"full_attention": None}, "dict"),
    ],
    ids=["4-D", "additive", "mapping"],
)
def test_a_mask_that_cannot_be_understood_is_refused(mask: Any, form: str):
    stack = stacks(FAMILIES["bert"].build())["main"]
    for batch, kwargs in (({"attention_mask": mask}, {}), ({}, {"attention_mask": mask})):
        with pytest.raises(ConfigError, match=f"mask: the attention mask is {form}; it must be \\[batch, tokens\\]"):
            token_mask(stack, batch, (), kwargs)


def test_only_layers_that_count_are_asked_for():
    bank, _ = bank_of("bert", fusion=AdaLayers(dim=8, alpha=1.0, cutoff=0.2))
    with torch.no_grad():
        bank["r"].fusion.scores.copy_(torch.tensor([0.0, 9.0, 0.0]))
    assert bank._passes(["r"], grad=False)[0].layers == [2]


def test_readers_are_grouped_by_shape_and_layers():
    model = FAMILIES["bert"].build()
    bank = ReaderBank(model)
    fusions = {
        "a": AdaLayers(dim=8),
        "b": AdaLayers(dim=8, entropy=1.0),
        "c": AdaLayers(dim=16),
        "d": AdaLayers(dim=8, layers="2-"),
        "e": SingleLayer(layer=1, dim=8),
        "f": SingleLayer(layer=1, dim=8),
        "g": SingleLayer(layer=2, dim=8),
    }
    for name, fusion in fusions.items():
        bank.add(name, Reader(fusion, TWO))
    one = StackPass(stacks(model)["main"], {name: bank[name] for name in bank}, grad=False)
    assert [names for names, _ in one._streams] == [["a", "b"], ["c"], ["d"], ["e", "f"], ["g"]]
    assert one.layers == [1, 2, 3]
