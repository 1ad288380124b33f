"""Families whose blocks are of several kinds: dense and sparse, with attention and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from transformers import AutoConfig, AutoModelForCausalLM

import lamina
from lamina.errors import ConfigError

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DENSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
WIDE = {"attention_hidden_size": 64, "attention_head_dim": 16, "head_dim": 16, "num_key_value_heads": 4}
MAMBA2 = {"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "num_mem_blocks": 1, "adapter_rank": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1]},
    "deepseek_v3": {**DENSE, **LATENT, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {**WIDE, "layers_block_type": ["linear_attention", "hybrid"] * 2},  # both have the same attention
    "zamba2": {
        **WIDE,
        **MAMBA2,
        "layers_block_type": ["hybrid", *["linear_attention"] * 3] * 2,
        "num_hidden_layers": 8,
    },
}
REFUSED = {  # family -> an order that it cannot have, and a part of the reason
    "qwen3_next": ([1, 2, 3], "no block with attention would stay"),
    "bamba": ([1, 3], "no block with attention would stay"),
    "gemma4_text": ([1, 2, 3], "the config is not consistent"),  # its last block has full attention
    "jamba": ([2, 3], "block 2 cannot become block 1: there a block of 'jamba'"),
    "zamba": ([1, 3], "no block with attention would stay"),
    "zamba2": ([1, 2, 3, 4], "block 1 cannot become block 1: there a block of 'zamba2' has no '.*adapter_list.1"),
}


def build(family: str) -> Any:
    torch.manual_seed(0)
    settings = {**COMMON, **FAMILIES[family]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()


@pytest.mark.parametrize("family", one_in(len(FAMILIES), FAMILIES, 1, ("qwen3_next", "jamba", "zamba2")))
@torch.no_grad()
def test_blocks_of_several_kinds_are_moved_with_their_settings_or_refused(family, tmp_path: Path):
    ids = torch.randint(5, 99, (1, 7), generator=torch.Generator().manual_seed(0))
    if family in REFUSED:
        model, (order, reason) = build(family), REFUSED[family]
        with pytest.raises(ConfigError, match=reason):
            lamina.keep_(model, order)
    if family == "jamba":
        return  # the kinds follow from two periods
    model = build(family)
    before = model(ids).logits
    lamina.duplicate_(model, 4)
    assert torch.equal(model(ids).logits, before)
    lamina.drop_(model, 3)
    lamina.save(model, tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(model(ids).logits, again(ids).logits)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    cached, plain = (model.generate(ids, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
