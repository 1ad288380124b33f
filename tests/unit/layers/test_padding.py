from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.training import WORDS
from transformers import (
    AutoModel,
    BertConfig,
    ConvBertConfig,
    DebertaV2Config,
    FNetConfig,
    GPT2Config,
    MobileBertConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
    XLNetConfig,
    YosoConfig,
)

from lamina.layers.padding import reads_padding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "max_position_embeddings": 32}
READ = {  # config -> whether padding changes the states of tokens
    "fnet": (FNetConfig(**SIZES, max_position_embeddings=32, pad_token_id=3), True),
    "yoso": (YosoConfig(**HEADS), True),
    "convbert": (ConvBertConfig(**HEADS, embedding_size=16), True),
    "mobilebert": (MobileBertConfig(**HEADS, embedding_size=16, intra_bottleneck_size=8), True),
    "bert": (BertConfig(**HEADS), False),
    "deberta-v2": (DebertaV2Config(**HEADS), False),
    "gpt2": (GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=32), False),
    "rwkv": (RwkvConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16), False),
    "t5": (T5Config(vocab_size=40, d_model=16, d_ff=16, d_kv=8, num_layers=2, num_heads=2), False),
    "xlnet": (XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=16), False),
    "vit": (ViTConfig(**SIZES, num_attention_heads=2, image_size=8, patch_size=4), False),
}


def built(family: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModel.from_config(READ[family][0]).eval()


@pytest.mark.parametrize("family", READ)
def test_models_that_read_padding_are_found(family: str):
    assert reads_padding(built(family)) == READ[family][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["convbert", "yoso", "deberta-v2", "xlnet", "bert"])
def test_half_precision_hides_no_padding(family: str, dtype: torch.dtype):
    assert reads_padding(built(family).to(dtype)) == READ[family][1]


def test_models_without_weights_are_not_run():
    assert not reads_padding(built("fnet").to("meta"))
    assert reads_padding(built("fnet"))
