from __future__ import annotations

import pytest
import torch
from tests.support.tiny import FAMILIES

import lamina
from lamina.errors import ConfigError
from lamina.fusion.mean import Mean

INPUTS = {"input_ids": torch.arange(5, 15)[None], "attention_mask": torch.ones(1, 10, dtype=torch.long)}
HEAD = lamina.SequenceClassification(("no", "yes"), pooling="mean")


def bank_on(name: str, **fusions):
    bank = lamina.ReaderBank(FAMILIES[name].known())
    for key, fusion in fusions.items():
        bank.add(key, lamina.Reader(fusion, HEAD))
    return bank.eval()


def logits(bank):
    with torch.no_grad():
        output = bank(**INPUTS)
    return {name: output[name].logits for name in bank}


def test_readers_follow_identity_copies():
    bank = bank_on("llama", whole=lamina.ScalarMix(), top=lamina.SingleLayer(layer=-1), low=lamina.SingleLayer(layer=2))
    before = logits(bank)
    lamina.duplicate_(bank.model, [1, 3])
    with pytest.raises(ConfigError, match=r"no longer those that were found.*bank\.remap_\(\)"):
        logits(bank)
    assert bank.remap_() == {"whole": (0, 1, 3, 5), "top": (5,), "low": (3,)}
    after = logits(bank)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


class Inside(Mean):
    site = "ffn"


def test_a_reader_inside_the_blocks_cannot_follow():
    bank = bank_on("llama", inside=Inside())
    lamina.duplicate_(bank.model, [1, 3])
    with pytest.raises(ConfigError, match=r"'inside' .*, and its fusion cannot read them under other numbers"):
        bank.remap_()


def test_readers_below_a_cut_stay_and_others_are_refused():
    bank = bank_on("bert", low=lamina.ScalarMix(layers=[0, 1]))
    before = logits(bank)
    lamina.drop_(bank.model, 2)
    assert bank.remap_() == {"low": (0, 1)}
    assert torch.equal(logits(bank)["low"], before["low"])
    bank = bank_on("bert", high=lamina.ScalarMix(layers=[1, 3]))
    lamina.drop_(bank.model, 2)
    with pytest.raises(ConfigError, match=r"'high' reads layers 1, 3 of the main stack; layer 3 is gone or has other"):
        bank.remap_()


def test_a_layer_that_a_norm_now_follows_has_other_values():
    bank = bank_on("llama", low=lamina.SingleLayer(layer=2))
    lamina.drop_(bank.model, 3)
    with pytest.raises(ConfigError, match="layer 2 is gone or has other values"):
        bank.remap_()


def test_copies_that_were_trained_and_changed_weights_are_refused():
    bank = bank_on("llama", top=lamina.SingleLayer(layer=3))
    lamina.duplicate_(bank.model, 1)
    with torch.no_grad():
        bank.model.layers[1].mlp.down_proj.weight += 1
    with pytest.raises(ConfigError, match="an identity copy was trained"):
        bank.remap_()
    bank = bank_on("llama", top=lamina.SingleLayer(layer=3))
    lamina.duplicate_(bank.model, 1)
    with torch.no_grad():
        bank.model.layers[0].mlp.down_proj.weight += 1
    with pytest.raises(ConfigError, match="weights have changed since the bank was made"):
        bank.remap_()


def test_a_layer_among_the_convolutions_below_changes_all_states():
    bank = bank_on("wav2vec2", low=lamina.SingleLayer(layer=0))
    lamina.insert_(bank.model, "convolution")
    with pytest.raises(ConfigError, match="layer 0 is gone or has other values"):
        bank.remap_()


def test_a_repeated_top_block_changes_the_state_after_the_norm_until_it_is_dropped():
    bank = bank_on("llama", top=lamina.SingleLayer(layer=-1))
    before = logits(bank)
    lamina.duplicate_(bank.model, 3, identity=False)
    with pytest.raises(ConfigError, match="layer 3 is gone or has other values"):
        bank.remap_()
    lamina.drop_(bank.model, 4)
    assert bank.remap_() == {"top": (3,)}
    assert torch.equal(logits(bank)["top"], before["top"])


def test_readers_follow_when_copies_are_dropped_and_an_order_is_restored():
    bank = bank_on("llama", whole=lamina.ScalarMix())
    lamina.duplicate_(bank.model, 1)
    lamina.drop_(bank.model, 2)
    for _ in range(2):
        lamina.keep_(bank.model, [2, 1, 3])
    assert bank.remap_() == {"whole": (0, 1, 2, 3)}


def test_blocks_that_other_code_moved_are_refused():
    bank = bank_on("llama", low=lamina.SingleLayer(layer=1))
    layers = bank.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    with pytest.raises(ConfigError, match="were changed, and not by edits"):
        bank.remap_()
