"""Facts other than weights on which hidden states depend: the model's config, and the settings of its modules."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from lamina.layers.adapters import without_adapters
from lamina.layers.stack import LayerStack, children_of
from lamina.utils import JSONObject

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

# Settings of a config on which no result depends: notes, the names of classes (which tasks and heads have too), and how
# results are computed or returned.
_NOTES = frozenset(
    {
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "tokenizer_class"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "lamina_learnt"),
        *("return_dict", "use_return_dict", "output_hidden_states", "output_attentions", "use_cache", "torchscript"),
        *("gradient_checkpointing", "chunk_size_feed_forward", "keys_to_ignore_at_inference"),
        *("return_dict_in_generate", "output_scores"),
        "pad_token_id",  # a classifier's config gets the tokenizer's; modules that compute with one keep it
    }
)
# Settings of a config on which no hidden state depends in eval mode. All others count. The names of special tokens are
# among them because modules that compute with one, as RoBERTa does for positions, keep it as an attribute.
UNRELATED = _NOTES | frozenset(
    {
        *("model_type", "task_specific_params", "prefix", "bos_token_id", "eos_token_id"),
        *("sep_token_id", "cls_token_id", "forced_bos_token_id", "forced_eos_token_id", "tie_word_embeddings"),
        *("is_encoder_decoder", "tie_encoder_decoder", "add_pooling_layer", "classifier_activation", "max_length"),
        *("min_length", "num_beams", "do_sample", "early_stopping", "no_repeat_ngram_size", "length_penalty"),
        *("temperature", "top_k", "top_p", "repetition_penalty"),
        *("decoder_start_token_id", "forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens"),
        *("max_new_tokens", "output_router_logits", "router_aux_loss_coef", "apply_spec_augment"),
        *("ctc_loss_reduction", "ctc_zero_infinity"),
    }
)
# Names that belong to dropout, initialisation or the choice of a kernel: they change nothing beyond rounding. But token
# dropout (ESM, NLLB-MoE) scales states in eval mode too, and an initial prior (MRA) chooses what is attended to.
_UNRELATED = re.compile(
    r"^_|(?<!token_)drop(?!ping)|^init(?!ial_prior)|^mask_(time|feature)_|^classif|^summary_|attn_implementation|experts_implementation|_cached$"
)
# Names of settings that change nothing beyond rounding; and of attributes and modules that passes set or replace.
_KERNELS = re.compile(r"^_|attn_implementation|experts_implementation|_cached$")
_RUNNING = re.compile(rf"{_KERNELS.pattern}|^attention_type$|^layers_are_rescaled$|^input_dtype$")
_REPLACED = re.compile(r"^BigBird\w*Attention$")
# Earlier versions took token dropout and initial priors for such names too, so their banks lack them.
EARLIER_UNRELATED = re.compile(rf"{_UNRELATED.pattern}|drop|^init")
_MODES = frozenset({"training", "gradient_checkpointing", "name_or_path", "p"})  # of modules; `p` is dropout's
_SCALARS = (bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class StackSettings:
    """The settings, beside weights, on which a stack's states depend.

    Attributes:
        config: Settings of the config of the innermost model around the stack, JSON-ready. So they are the same for an
            encoder alone, inside a model with a head, and inside a PEFT wrapper.
        modules: See `module_facts`.
    """

    config: JSONObject
    modules: dict[str, str]

    @property
    def digest(self) -> str:
        """A hash of the settings."""
        return hashlib.sha256(json.dumps([self.config, self.modules], sort_keys=True).encode()).hexdigest()

    @classmethod
    def of(cls, model: nn.Module, stack: LayerStack, unrelated: re.Pattern[str] = _UNRELATED) -> StackSettings:
        """Return the present settings of a stack; for `unrelated` see `settings_of` and `module_facts`."""
        config = cast("PreTrainedModel", around(model, stack)).config
        return cls(settings_of(config, unrelated), module_facts(model, stack, unrelated))


def hash_settings(model: nn.Module) -> str:
    """Return a hash of a model's settings, beside weights, on which its results or its training may depend.

    A run that stopped may only go on with a model that has the same hash. The settings are those of the config and of
    generation, and the classes and settings of all modules. Settings of adapters are part of `fingerprint_of`.
    """
    configs = [getattr(model, name, None) for name in ("config", "generation_config")]
    facts: list[object] = [_related(_plain(config), _KERNELS, _NOTES) for config in configs if config is not None]
    replaced = {p for m in model.modules() if _REPLACED.search(type(m).__name__) for p in m.modules()}
    modules = (module for module in model.modules() if module not in replaced)
    facts += [f"{type(module).__name__} {_attributes(module, _RUNNING)}" for module in modules]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def settings_of(config: PretrainedConfig, unrelated: re.Pattern[str] = _UNRELATED) -> JSONObject:
    """Return a config's settings, JSON-ready and with nested configs, but without those that `_related` leaves out."""
    return _related(_plain(config), unrelated, UNRELATED)


def _plain(config: PretrainedConfig | GenerationConfig) -> JSONObject:
    return json.loads(json.dumps(config.to_dict(), default=str))


def _related(settings: Mapping[str, object], unrelated: re.Pattern[str], names: frozenset[str]) -> JSONObject:
    """Return `settings` without those whose names are in `names` or match `unrelated`, in nested configs too."""
    return {
        name: _related(cast("Mapping[str, object]", value), unrelated, names) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in names and not unrelated.search(name)
    }


def module_facts(model: nn.Module, stack: LayerStack, unrelated: re.Pattern[str] = _UNRELATED) -> dict[str, str]:
    """Return the classes of a stack's modules, with digests of their settings: numbers, strings, names of functions.

    Attributes whose names `unrelated` matches are left out. Adapters do not count here, because the fingerprint tells
    which adapters are active.

    Returns:
        Path from the module that `around` returns -> class name, space, and digest. Modules whose paths differ only in
        a block's number share an entry, with `*` in place of the number ("encoder.layer.*.output.dense"); the digest
        covers these modules, in order.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    names: dict[str, str] = {}
    for path, module in modules_around(around(model, stack), set(stack.run)):
        key = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        groups[key].append(f"{type(module).__name__} {_attributes(module, unrelated)}")
        names[key] = type(module).__name__
    return {
        key: f"{names[key]} {hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}" for key, facts in groups.items()
    }


def around(model: nn.Module, stack: LayerStack) -> nn.Module:
    """Return the innermost module with a config that is or contains a stack's scope; `model` if there is none.

    A module such as BertEncoder, which is no `PreTrainedModel` and lacks some of the stack's modules, does not count.
    """
    names = stack.scope_path.split(".") if stack.scope_path else []
    parts = [model.get_submodule(".".join(names[:count])) for count in range(len(names) + 1)]
    has_config = (part for part in reversed(parts) if hasattr(getattr(part, "config", None), "to_dict"))
    whole = (p for p in has_config if hasattr(p, "base_model_prefix") or set(stack.run) <= set(p.modules()))
    return next(whole, model)


def modules_around(module: nn.Module, run: set[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for `module` and the modules in it that a stack computes with, with or without weights.

    `run` has the stack's modules with weights; `path` is the path of `module`, "" at the top. A module without weights
    (an activation) is included if its parent is. Adapters, and parts of the model with other weights, such as a pooler,
    are left out.
    """
    module = without_adapters(module)
    yield path, module
    for name, child in children_of(module).items():
        inside = list(child.modules())
        if not run.isdisjoint(inside) or not any(vars(part)["_parameters"] for part in inside):
            yield from modules_around(child, run, f"{path}.{name}".lstrip("."))


def _attributes(module: nn.Module, unrelated: re.Pattern[str]) -> str:
    """Return a module's settings (see `is_setting`) as text, sorted: values (see `is_value`), and names of functions.

    Functions that replace methods of nn.Module, other than `forward`, do not count: accelerate replaces `to`.
    """
    kept: list[str] = []
    for name, value in sorted(vars(module).items()):
        if not is_setting(name, unrelated):
            continue
        if isinstance(value, FunctionType) and (name == "forward" or not hasattr(nn.Module, name)):
            kept.append(f"{name}={value.__qualname__}")
        elif is_value(value):
            kept.append(f"{name}={value!r}")
    return ", ".join(kept)


def is_setting(name: str, unrelated: re.Pattern[str] = _UNRELATED) -> bool:
    """Return whether an attribute may change a module's results in eval mode; not if `unrelated` matches its name."""
    return name not in _MODES and not unrelated.search(name)


def is_value(value: object) -> bool:
    """Return whether a value is a number, a string or a dtype, or a tuple or list of these."""
    parts = cast("tuple[object, ...]", value) if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(part, _SCALARS) for part in parts)
