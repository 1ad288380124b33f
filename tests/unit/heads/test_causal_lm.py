"""The causal language modelling head: its initialisation, what is saved, and what it refuses to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.causal import causal_model, causal_tokenizer
from tests.support.tiny import model_of
from transformers import AutoConfig, AutoModelForCausalLM

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean
from lamina.heads.causal_lm import CausalLM

if TYPE_CHECKING:
    from pathlib import Path

IDS = torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_on_the_last_layer_it_starts_as_the_models_own_head():
    gptj = AutoConfig.for_model("gptj", vocab_size=30, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=32)
    for model in (causal_model(), AutoModelForCausalLM.from_config(gptj).eval()):  # GPT-J's has a bias
        if getattr(model.lm_head, "bias", None) is not None:
            model.lm_head.bias.normal_()
        bank = ReaderBank(model).eval()
        bank.add("next", Reader(LastLayer(), CausalLM()))
        torch.testing.assert_close(bank(input_ids=IDS)["next"].logits, model(input_ids=IDS).logits, rtol=0, atol=1e-5)


def test_features_of_another_size_are_mapped_and_the_vocabulary_is_not_saved(tmp_path: Path):
    bank = ReaderBank(causal_model())
    bank.add("next", Reader(AdaLayers(dim=8), CausalLM())).eval()
    assert set(bank["next"].head.state_dict()) == {"dense.weight", "dense.bias", "bias"}
    head: Any = bank["next"].head
    assert head.dense.weight.shape == (16, 8)
    with torch.no_grad():
        before = bank(input_ids=IDS)["next"].logits
        bank.save_pretrained(tmp_path / "bank")
        after = ReaderBank.from_pretrained(tmp_path / "bank", model=causal_model())(input_ids=IDS)["next"].logits
    assert torch.equal(before, after)


def refused(model: Any, reader: Reader, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ReaderBank(model, causal_tokenizer()).add("next", reader)


def test_what_sees_later_tokens_is_refused():
    reader = Reader(Mean(), CausalLM())
    refused(model_of("bert"), reader, "causal_lm: in Bert.* states of a token change with later tokens.*MaskedLM")
    refused(
        model_of("t5"), reader, "the stack 'encoder' belongs to an encoder-decoder or a tower; only 'main' is allowed"
    )
    refused(model_of("t5"), Reader(Mean(), CausalLM(), stack="decoder"), "the stack 'decoder' belongs")
    for fusion in (AdaLayers(dim=8, positions=True), ExtraLayers()):
        refused(causal_model(), Reader(fusion, CausalLM()), f"the fusion {type(fusion).__name__}, as it is set, looks")


def test_settings_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"causal_lm: labels are \('a',\); the classes are the base's vocabulary"):
        CausalLM(("a",))
    with pytest.raises(ConfigError, match="causal_lm: only the size 8 of the features was given"):
        CausalLM().build(8)
    with pytest.raises(ConfigError, match="causal_lm: the family 'vit' has no vocabulary"):
        CausalLM().build_on(model_of("vit"), 8)
