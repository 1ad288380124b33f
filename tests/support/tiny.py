"""One tiny random model per family, built from a config: no hub, no files, the same weights every time."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.bert.modeling_bert import BertLayer

from lamina.layers.discovery import same_stacks

VOCABULARY = 99
MAIN, BOTH = ("main",), ("encoder", "decoder")


@dataclass(frozen=True)
class Family:
    """A row of the registry.

    Attributes:
        name: Key in `FAMILIES`.
        model_type: As in `config.model_type`.
        settings: Arguments of the config.
        modality: "text", "vision" or "speech".
        stacks: Names of its stacks.
        causal: Whether a token sees only those before it (of a decoder-only model).
        refused: A part of the reason why it cannot be read; None if it can.
        auto: The class of transformers that builds it.
        blocks: False if the model has no module per block.
        base: Key of the same model without a head; None if it has none itself.
        architectures: What the config states, where the class cannot be chosen otherwise.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any]
    modality: str = "text"
    stacks: tuple[str, ...] = MAIN
    causal: bool = False
    refused: str | None = None
    auto: str = "AutoModel"
    blocks: bool = True
    base: str | None = None
    architectures: list[str] = field(default_factory=list)

    def config(self) -> Any:
        """A fresh config."""
        return AutoConfig.for_model(self.model_type, **self.settings, architectures=self.architectures)

    def build(self) -> PreTrainedModel:
        """A fresh model in eval mode; the same weights on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.model_type.encode()))
            return getattr(transformers, self.auto).from_config(self.config()).eval()

    def known(self) -> PreTrainedModel:
        """A fresh model whose layers are known already: looking for them takes five times as long as building it."""
        model = self.build()
        if self.refused is None and model.device.type != "meta":
            same_stacks(model_of(self.name), model)
        return model

    def inputs(self, model: PreTrainedModel, batch: int = 2, tokens: int = 9, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs; every row after the first ends in padding (text, sound).

        Args:
            model: A model of this family.
            batch: Count of rows.
            tokens: Length of a text, or count of a sound's frames.
            seed: Seeds the values.
        """
        rng = torch.Generator().manual_seed(seed)
        kwargs = _MODALITIES[self.modality](model, batch, tokens, rng)
        if self.model_type in ("fnet", "rwkv"):  # they take no mask
            del kwargs["attention_mask"]
        if self.stacks == BOTH:
            kwargs["decoder_input_ids"] = torch.randint(5, VOCABULARY, (batch, max(2, tokens - 3)), generator=rng)
        return kwargs


def _text(_model: PreTrainedModel, batch: int, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (batch, tokens), generator=rng)
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[1:, -max(1, tokens // 3) :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _vision(model: PreTrainedModel, batch: int, _tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    size = model.config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(batch, 3, height, width, generator=rng)}


def _speech(model: PreTrainedModel, batch: int, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    if model.main_input_name == "input_features":
        config = model.config
        return {
            "input_features": torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=rng)
        }
    samples = 4 * tokens + 8  # two convolutions of stride 2
    mask = torch.ones(batch, samples, dtype=torch.long)
    mask[1:, -samples // 3 :] = 0
    return {"input_values": torch.randn(batch, samples, generator=rng) * mask, "attention_mask": mask}


_MODALITIES: dict[str, Callable[..., dict[str, Tensor]]] = {"text": _text, "vision": _vision, "speech": _speech}

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    **{key: value for key, value in _SEQ2SEQ.items() if key != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
_SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_length": 2,
}
_XLM = {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "pad_index": 0}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
_NEO = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4}
_OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
_MPT = {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}
_XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64, "pad_token_id": 0}
_FUNNEL = {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "pad_token_id": 0}
_DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}


def _encoders() -> list[Family]:
    plain = (
        "bert roberta xlm-roberta electra camembert mpnet roformer fnet convbert nystromformer ibert rembert ernie "
        "megatron-bert big_bird data2vec-text roberta-prelayernorm esm"
    )
    more: dict[str, dict[str, Any]] = {
        "deberta": _DEBERTA,
        "deberta-v2": _DEBERTA | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        "albert": {"embedding_size": 16},
        "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        "squeezebert": {"embedding_size": 32},
        "modernbert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    }
    blockless = ("squeezebert",)
    rows = [
        Family(name, name, {**_ENCODER, "mask_token_id": 4} if name == "esm" else _ENCODER) for name in plain.split()
    ]
    rows += [Family(name, name, _ENCODER | extra, blocks=name not in blockless) for name, extra in more.items()]
    rows += [Family(name, name, _XLM, blocks=False) for name in ("xlm", "flaubert")]
    return [*rows, Family("distilbert", "distilbert", _DISTILBERT), Family("xlnet", "xlnet", _XLNET)]


def _decoders() -> list[Family]:
    plain = (
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 stablelm starcoder2 olmo olmo2 cohere granite "
        "nemotron glm helium smollm3 persimmon biogpt gpt_neox mixtral"
    )
    plain_settings = {key: _ENCODER[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
    more: dict[str, dict[str, Any]] = {
        "gpt2": _GPT2,
        "gptj": _GPT2 | {"rotary_dim": 4},
        "codegen": _GPT2 | {"rotary_dim": 4},
        "gpt_bigcode": _GPT2,
        "openai-gpt": _GPT2,
        "gpt_neo": {key: _ENCODER[key] for key in ("vocab_size", "hidden_size", "max_position_embeddings")} | _NEO,
        "opt": _ENCODER | _OPT,
        "bloom": plain_settings | {"n_head": 4},
        "falcon": plain_settings | {"num_attention_heads": 4},
        "mpt": {"vocab_size": VOCABULARY} | _MPT,
    }
    rows = [
        Family(name, name, _DECODER | ({"num_local_experts": 2} if name == "mixtral" else {}), causal=True)
        for name in plain.split()
    ]
    rows += [Family(name, name, settings, causal=True) for name, settings in more.items()]
    # these return no embeddings: their layer 0 is what the first block gives
    return rows + [Family(name, name, plain_settings, causal=True, blocks=False) for name in ("mamba", "rwkv")]


def _encoder_decoders() -> list[Family]:
    bart_like = "bart mbart pegasus marian blenderbot blenderbot-small m2m_100 plbart mvp"
    rows = [Family(name, name, _SEQ2SEQ, stacks=BOTH) for name in bart_like.split()]
    rows += [Family(name, name, _T5, stacks=BOTH) for name in ("t5", "mt5", "umt5", "longt5")]
    return [*rows, Family("whisper", "whisper", _WHISPER, "speech", BOTH)]


def _seeing_and_hearing() -> list[Family]:
    seeing = "vit deit beit dinov2 dinov3_vit data2vec-vision siglip_vision_model clip_vision_model"
    hearing = "wav2vec2 hubert wavlm data2vec-audio sew unispeech"
    rows = [Family(name, name, _VISION, "vision") for name in seeing.split()]
    return rows + [Family(name, name, _SPEECH, "speech") for name in hearing.split()]


def _refused() -> list[Family]:
    swin = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    convnext = {"image_size": 32, "depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}
    funnel = _FUNNEL | {"block_sizes": [1, 1], "block_repeats": [1, 1]}
    return [
        Family("funnel", "funnel", funnel, refused="layer 2 of its main stack", architectures=["FunnelModel"]),
        Family("swin", "swin", swin, "vision", refused="layer 1 of its main stack"),
        Family("convnext", "convnext", convnext, "vision", refused="as in convolutional networks"),
    ]


def _headed(headless: Mapping[str, Family]) -> list[Family]:
    heads = {
        "bart": ("AutoModelForSeq2SeqLM",),
        "t5": ("AutoModelForSeq2SeqLM", "AutoModelForTokenClassification"),
        "whisper": ("AutoModelForSpeechSeq2Seq",),
        "bert": ("AutoModelForSequenceClassification",),
        "roberta": ("AutoModelForMaskedLM", "AutoModelForTokenClassification"),
        "deberta-v2": ("AutoModelForSequenceClassification",),
        "albert": ("AutoModelForMaskedLM",),
        "xlm": ("AutoModelForTokenClassification",),
        "gpt2": ("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
        "llama": ("AutoModelForCausalLM",),
        "mixtral": ("AutoModelForCausalLM",),
        "vit": ("AutoModelForImageClassification",),
        "wav2vec2": ("AutoModelForCTC",),
    }
    rows = []
    for name, autos in heads.items():
        twin = headless[name]
        for auto in autos:
            key = f"{name}-{auto.removeprefix('AutoModelFor')}"
            stacks = MAIN if name == "t5" and "Token" in auto else twin.stacks
            rows.append(
                Family(
                    key,
                    twin.model_type,
                    twin.settings,
                    twin.modality,
                    stacks,
                    twin.causal,
                    None,
                    auto,
                    twin.blocks,
                    name,
                )
            )
    return rows


def _registry() -> dict[str, Family]:
    headless = [*_encoders(), *_decoders(), *_encoder_decoders(), *_seeing_and_hearing(), *_refused()]
    by_name = {family.name: family for family in headless}
    return by_name | {family.name: family for family in _headed(by_name)}


FAMILIES: dict[str, Family] = _registry()
READABLE: dict[str, Family] = {name: family for name, family in FAMILIES.items() if family.refused is None}
REFUSED: dict[str, Family] = {name: family for name, family in FAMILIES.items() if family.refused is not None}
HEADED: dict[str, Family] = {name: family for name, family in FAMILIES.items() if family.base is not None}


@functools.cache
def model_of(name: str) -> Any:
    """A family's model, made once per process; for tests that leave it as it is."""
    return FAMILIES[name].build()


class Passing(BertLayer):
    """A block without weights; transformers knows blocks by their class."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(self, states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return states + 1


# family whose models write texts -> the auto class of transformers with the head
WRITERS = {
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "qwen2": "AutoModelForCausalLM",
    "gemma": "AutoModelForCausalLM",
    "gemma3_text": "AutoModelForCausalLM",
    "bart": "AutoModelForSeq2SeqLM",
    "mbart": "AutoModelForSeq2SeqLM",
    "t5": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
