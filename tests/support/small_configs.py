"""A small config for any model type of transformers: its own config class, with fewer and narrower layers.

Settings are shrunk by the names that transformers uses for them. Configs inside a config (`text_config`,
`vision_config`, ...) are shrunk too. No model is loaded and no file is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

DEPTH, HEADS, GROUPS, HEAD, WIDTH, FFN, VOCABULARY, POSITIONS = 4, 4, 2, 16, 64, 128, 128, 1024
EXPERTS, CHOSEN, IMAGE = 4, 2, 4  # experts of a layer, experts of a token, patches along the side of an image
# How much is shrunk, from most to least. Some configs state widths that must fit each other in ways of their own: these
# keep their default widths and get fewer layers, experts and words only.
VARIANTS = ("small", "default width")
Settings = dict[str, Any]

_DEPTH = r"(^|_)(n_?layers?|num_layers|layers|depth|num_blocks|num_hidden_layers)$|_(num|n)_(hidden_)?layers$"
_RULES: tuple[tuple[str, int], ...] = (
    (_DEPTH, DEPTH),
    (r"(key_value|kv)_heads?$", GROUPS),
    (r"(^|_)heads?$", HEADS),
    (r"(head_dim|head_size|dim_head|d_kv|d_head|dim_key|dim_value|(nope|rope)_head_dim)$", HEAD),
    (r"(intermediate|ffn|mlp|feed_?forward|inner)(_hidden)?_?(size|dim)?$|ffn_dim$|d_ff$|d_inner$|n_inner$", FFN),
    (r"vocab_size|vocab_size_per_layer_input$|codebook_size$", VOCABULARY),
    (r"(lora|laurel)?_rank$", HEAD),
    (r"(experts?|n_routed_experts)$", EXPERTS),
    (r"(experts_per_tok|experts_per_token|(?<!index_)top_?k(_experts)?|moe_topk|moe_k)$", CHOSEN),
    (r"position_embeddings|n_positions|max_(source|target)_positions|max_seq_len|context_length$", POSITIONS),
    (r"hidden_size|hidden_dim|d_model|embed_dim|n_embd|emb_dim|embedding_size|embedding_dim|width|(^|_)dim$", WIDTH),
)
_WIDTHS = {HEAD, WIDTH, FFN}
_KEPT = re.compile(r"position_embeddings?_(type|dim)|kernel|stride|patch|temperature|conv|dropout|_type$|_id$|_index$")
_TOKEN = re.compile(r"_token_(id|index)$|^(pad|bos|eos)_index$|_token$|^image_newline_id$")
_FIXED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
# Settings that must fit each other in a way that no rule above knows; by model type.
ROWS: dict[str, Settings] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], DEPTH // 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": HEAD},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [2, 3],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_vision_model": {"intermediate_size": 4 * WIDTH},  # of four pixels that are joined
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 2 * WIDTH},
}


def small_config(cls: type[PreTrainedConfig], variant: str = "small") -> PreTrainedConfig:
    """Return a small config of the given class; `variant` is one of `VARIANTS`."""
    return cls(**_settings(cls, variant))


def _settings(cls: type[PreTrainedConfig], variant: str) -> Settings:
    """Return the settings of a small config; those that keep their default are left out."""
    default = _default_of(cls)
    depth_before = _first_int(default, ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"))
    settings: Settings = {}
    for name in _names(cls):
        value = default.get(name)
        inner = _inner(cls, name, value)
        if inner is not None:
            settings[name] = _settings(inner, variant) | {"model_type": inner.model_type}
        elif name == "rope_parameters" and isinstance(value, dict) and variant == "small":
            settings[name] = _shrunk_rope(value)
        elif name == "per_layer_config" and isinstance(value, dict):
            settings[name] = {layer: value[layer] for layer in value if int(layer) < DEPTH}
        elif value is None and name in _MISSING:
            settings[name] = _MISSING[name]
        elif (smaller := _shrunk(name, value, default, depth_before, variant)) != value:
            settings[name] = smaller
    return settings | ROWS.get(str(cls.model_type), {})


def _names(cls: type[PreTrainedConfig]) -> list[str]:
    """Return the names of a config's own settings, and of the configs inside it."""
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = [field.name for field in dataclasses.fields(cls) if field.name not in shared]
    return list(dict.fromkeys((*own, *(cls.sub_configs or {}))))


def _default_of(cls: type[PreTrainedConfig]) -> Settings:
    """Return the settings of a config with default values; those of its fields if it cannot be made without any."""
    try:
        made = cls()
        return {name: getattr(made, name, None) for name in (*_names(cls), *vars(made))}
    except Exception:  # some configs need an argument
        fields = [field for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING]
        return {field.name: field.default for field in fields}


def _inner(cls: type[PreTrainedConfig], name: str, value: object) -> type[PreTrainedConfig] | None:
    """Return the class of the config inside a config that the setting `name` holds; None if it holds none."""
    if isinstance(value, PreTrainedConfig):
        return type(value)
    if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
        return CONFIG_MAPPING[value["model_type"]]
    declared = (cls.sub_configs or {}).get(name)
    return declared if isinstance(declared, type) and declared is not AutoConfig and value is None else None


def _first_int(settings: Settings, names: Sequence[str]) -> int | None:
    return next((settings[name] for name in names if isinstance(settings.get(name), int)), None)


def _shrunk(name: str, value: Any, default: Settings, depth: int | None, variant: str) -> Any:
    """Return a smaller value of a setting, or the value itself."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, (list, tuple)):
        return _shrunk_list(name, list(value), depth, variant)
    if _TOKEN.search(name) and isinstance(value, int):
        return _token(name, value, default)
    if not isinstance(value, int):
        return value
    return _shrunk_int(name, value, default, variant)


def _shrunk_int(name: str, value: int, default: Settings, variant: str) -> int:
    if name == "image_size":
        return _image_size(value, default, variant)
    if name in _SMALL:
        return min(value, _SMALL[name])
    if _KEPT.search(name) and not re.search(r"position_embeddings$", name):
        return value
    for pattern, most in _RULES:
        if re.search(pattern, name):
            if variant != "small" and (most in _WIDTHS or "head" in name):
                return value
            same = default.get("num_attention_heads") == value and most == GROUPS
            return min(value, HEADS if same else most)
    return value


_MISSING = {  # what some configs leave to the checkpoint
    "vocab_size": VOCABULARY,
    "head_dim": HEAD,
    "num_key_value_heads": GROUPS,
    "num_experts_per_tok": CHOSEN,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SMALL = {  # settings that no rule fits
    "crop_size": 64,
    "first_k_dense_replace": 1,
    "frames_per_clip": 4,
    "index_topk": 128,
    "n_group": 1,
    "num_frames": 4,
    "num_kv_shared_layers": 2,
    "qk_head_dim": 2 * HEAD,
    "topk_group": 1,
}


def _image_size(value: int, default: Settings, variant: str) -> int:
    patch = default.get("patch_size")
    if variant != "small" or not isinstance(patch, int):
        return value
    return min(value, patch * IMAGE)


def _token(name: str, value: int, default: Settings) -> int:
    """Return a token id within the small vocabulary, another for each name."""
    if name in _FIXED:
        return _FIXED[name]
    others = sorted(key for key in default if _TOKEN.search(key) and key not in _FIXED)
    return value if 0 <= value < 4 or name not in others else VOCABULARY - 1 - others.index(name)


def _shrunk_rope(rope: Settings) -> Settings:
    """Return the settings of rotary embeddings, whose sections add up to half of what is rotated of a small head."""
    inner = {key: _shrunk_rope(value) if isinstance(value, dict) else value for key, value in rope.items()}
    if "rope_theta" in rope or "rope_type" in rope:  # otherwise the settings are those of several kinds of layers
        third, half = divmod(int(HEAD * (rope.get("partial_rotary_factor") or 1)) // 2, 3)
        inner["mrope_section"] = [third + half, third, third]  # models with other rotary embeddings ignore it
    return inner


def _shrunk_list(name: str, values: list[Any], depth: int | None, variant: str) -> list[Any]:
    """Return a list with an entry for each of the fewer layers, or with smaller entries."""
    if depth is not None and len(values) == depth > DEPTH and not name.endswith("_section"):
        head = values[: DEPTH - 1]
        other = [value for value in values[DEPTH - 1 :] if value not in head]
        return [*head, (other or values[DEPTH - 1 :])[0]]
    if re.search(r"(feature_layers?|indices|indexes|layer_ids?|layers_idx|attn_layer.*)$", name):
        inside = [value if isinstance(value, int) and -DEPTH <= value < DEPTH else DEPTH - 1 for value in values]
        return list(dict.fromkeys(inside))
    return values
