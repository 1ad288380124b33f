"""The parts of a model outside of its blocks follow an edit of the blocks, and the saved model loads again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    ModernBertForMaskedLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
)

import lamina
from lamina.errors import ConfigError

_SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LOCAL_FIRST = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def of_two_rotary_types(family: str) -> PreTrainedModel:
    """A small model with full and local attention, each with rotary frequencies of its own."""
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "layer_types": _LOCAL_FIRST}
    global_first = {"global_attn_every_n_layers": 3, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, **heads)).eval()
    if family == "olmo3":
        return Olmo3ForCausalLM(Olmo3Config(**_SIZES, **heads)).eval()
    if family == "modernbert":
        return ModernBertForMaskedLM(ModernBertConfig(**_SIZES, **global_first)).eval()
    return ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**_SIZES, **global_first)).eval()


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("gemma3", [1, 2]),
        ("gemma3", [3, 6]),
        ("gemma3", [1, 3]),
        ("olmo3", [4]),
        ("modernbert", [1, 4]),
        ("modernbert", [1]),
        ("moderndecoder", [1, 4]),
    ],
)
@torch.no_grad()
def test_a_model_that_loses_a_rotary_type_loads_again(family: str, kept: list[int], tmp_path: Path):
    model, inputs = of_two_rotary_types(family), {"input_ids": torch.arange(5, 14)[None]}
    lamina.keep_(model, kept)
    expected = model(**inputs).logits
    fresh = type(model)(model.config)
    assert dict(model.named_buffers()).keys() == dict(fresh.named_buffers()).keys()
    assert model.state_dict().keys() == fresh.state_dict().keys()
    lamina.save(model, tmp_path)
    for again in (lamina.load(tmp_path, type(model))[0], type(model).from_pretrained(tmp_path).eval()):
        assert torch.equal(again(**inputs).logits, expected)


@torch.no_grad()
def test_truncated_models_lose_a_rotary_type_too(tmp_path: Path):
    model, inputs = of_two_rotary_types("gemma3"), {"input_ids": torch.arange(5, 14)[None]}
    lamina.truncate_(model, 2)
    lamina.save(model, tmp_path)
    assert torch.equal(lamina.load(tmp_path, type(model))[0](**inputs).logits, model(**inputs).logits)


def test_a_saved_buffer_that_the_config_does_not_describe_is_refused(tmp_path: Path):
    model = of_two_rotary_types("gemma3")
    rotary = model.get_submodule("model.rotary_emb")
    rotary.register_buffer("by_hand", torch.ones(2), persistent=False)
    lamina.save(model, tmp_path / "not_saved")
    rotary.register_buffer("by_hand", torch.ones(2))
    with pytest.raises(ConfigError, match=r"'model\.rotary_emb\.by_hand' has no place in the model"):
        lamina.save(model, tmp_path / "refused")
