"""Facts on which hidden states depend: fingerprints (hashes) of weights, the config, and settings of modules."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lamina.errors import ConfigError
from lamina.layers.discovery import default_stack
from lamina.layers.stack import LayerStack, children_of, own_state
from lamina.layers.wrappers import adapter_modules, adapter_state, has_adapters, weights_in_place, without_adapters
from lamina.utils import JSONObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    class WrapperTensor(Protocol):
        """A subclass of Tensor that consists of other tensors, such as a quantised weight."""

        def __tensor_flatten__(self) -> tuple[list[str], object]:
            """Return the names of the attributes that hold the inner tensors, and everything else."""
            ...


def fingerprint(model: nn.Module, stack_name: str) -> str:
    """Return the SHA-256 hash, in hexadecimal, of all weights up to the last layer of a stack; see `fingerprint_of`.

    Raises:
        ConfigError: If the model has no weights.
        UnknownNameError: If the model has no stack of that name.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Return the SHA-256 hash of all weights of a stack, in hexadecimal.

    Quantised weights and the weights of active adapters are included; buffers that only count something are not. A head
    around the backbone, disabled adapters, and offloading of the weights do not change the hash. Raises ConfigError if
    there are no weights (the meta device).
    """
    return fingerprint_of_modules(stack.run)


def fingerprint_of_modules(modules: Iterable[nn.Module]) -> str:
    """Return the hash of the weights that the given modules hold directly, not in submodules; see `fingerprint_of`."""
    modules = list(modules)
    in_adapters = {part for layer in filter(has_adapters, modules) for part in adapter_modules(layer)}
    plain = [module for module in modules if module not in in_adapters]
    state = (item for module in plain for part in (_state, _adapters) for item in part(module))
    return fingerprint_of_tensors(state, tied_by_value=any(parameter.is_meta for parameter in _parameters(plain)))


def _parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters(recurse=False))


def _state(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for a module's own part of the state dict, without integer counters.

    An inserted layer's settings (`fingerprint_facts`) are yielded too.
    """
    if facts := getattr(module, "fingerprint_facts", ""):  # an inserted layer has settings besides its weight
        yield "facts", str(facts)
    buffers = dict(module.named_buffers(recurse=False))
    with weights_in_place(module):
        for name, value in own_state(module).items():
            counter = buffers.get(name)
            if counter is None or counter.is_floating_point() or counter.numel() > 1:
                yield name, value


def _adapters(module: nn.Module) -> Iterator[tuple[str, object]]:
    if has_adapters(module):
        yield from adapter_state(module)


def fingerprint_of_tensors(values: Iterable[tuple[str, object]], *, tied_by_value: bool = False) -> str:
    """Return the SHA-256 hash of named values, in hexadecimal.

    For a tensor its name, dtype, shape and bytes are hashed, for a plain value its name and repr.

    Args:
        values: Pairs of a name and a tensor, a plain value, or a tuple or list of these. Each tensor object is hashed
            once.
        tied_by_value: Whether matrices with equal content are hashed once too. Offloaded models need this, because
            their tied weights are copies.

    Raises:
        ConfigError: If a tensor is on the meta device.
    """
    digest = hashlib.sha256()
    seen, contents = WeakIdKeyDictionary(), set[bytes]()
    for name, value in (plain for item in values for plain in _parts(*item)):
        if not isinstance(value, Tensor):
            digest.update(f"{name} {value!r}\n".encode())
        elif value.is_meta:
            raise ConfigError("fingerprint: the model has no weights, only an architecture. Load it with its weights.")
        elif value not in seen:
            seen[value] = True
            dense = value.detach().dequantize() if value.is_quantized else value.detach()
            content: memoryview = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            if tied_by_value and value.ndim == 2:
                if (key := hashlib.sha256(content).digest()) in contents:
                    continue
                contents.add(key)
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (name, value), or such a pair for each inner tensor of a quantised weight and each item of a tuple or list.

    Values that are not tensors, numbers or strings are left out.
    """
    if hasattr(type(value), "__tensor_flatten__"):  # a tensor subclass that wraps others, such as a quantised weight
        for part in cast("WrapperTensor", value).__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(cast("tuple[object, ...]", value)):
            yield from _parts(f"{name}.{number}", part)
    elif isinstance(value, (Tensor, bool, int, float, str)):
        yield name, value


# Settings of a config on which no hidden state depends in eval mode. All others count. The names of special tokens are
# among them because modules that compute with one, as RoBERTa does for positions, keep it as an attribute.
UNRELATED = frozenset(
    {
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "tokenizer_class"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "forced_bos_token_id"),
        *("forced_eos_token_id", "return_dict", "use_return_dict", "output_hidden_states", "output_attentions"),
        *("use_cache", "torchscript", "gradient_checkpointing", "chunk_size_feed_forward", "tie_word_embeddings"),
        *("is_encoder_decoder", "tie_encoder_decoder", "add_pooling_layer", "classifier_activation", "max_length"),
        *("min_length", "num_beams", "do_sample", "early_stopping", "no_repeat_ngram_size", "length_penalty"),
        *("temperature", "top_k", "top_p", "repetition_penalty", "keys_to_ignore_at_inference"),
        *("decoder_start_token_id", "forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens"),
        *("max_new_tokens", "return_dict_in_generate", "output_scores", "output_router_logits"),
        *("router_aux_loss_coef", "apply_spec_augment", "ctc_loss_reduction", "ctc_zero_infinity"),
        "lamina_learnt",
    }
)
# Names that belong to dropout, initialisation or the choice of a kernel: they change nothing beyond rounding.
_UNRELATED = re.compile(
    r"^_|drop|^init|^mask_(time|feature)_|^classif|^summary_|attn_implementation|experts_implementation|_cached$"
)
_MODES = frozenset({"training", "gradient_checkpointing", "name_or_path", "p"})  # of modules; `p` is dropout's
_SCALARS = (bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class StackSettings:
    """The settings, beside weights, on which a stack's states depend: `config_facts` and `module_facts`."""

    config: JSONObject
    modules: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, stack: LayerStack) -> StackSettings:
        """Return the present settings of a stack of a model."""
        return cls(config_facts(model, stack), module_facts(model, stack))


def config_facts(model: nn.Module, stack: LayerStack) -> JSONObject:
    """Return the settings of a model's config that may change a stack's hidden states, JSON-ready.

    The config is that of the innermost model around the stack, so the settings are the same for an encoder alone,
    inside a model with a head, and inside a PEFT wrapper.
    """
    return settings_of(cast("PreTrainedModel", around(model, stack)).config)


def settings_of(config: PretrainedConfig) -> JSONObject:
    """Return the settings of a config that may change hidden states, JSON-ready."""
    return _related(json.loads(json.dumps(config.to_dict(), default=str)))


def _related(settings: Mapping[str, object]) -> JSONObject:
    """Return `settings` without those that cannot change hidden states; nested configs are treated in the same way."""
    return {
        name: _related(cast("Mapping[str, object]", value)) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in UNRELATED and not _UNRELATED.search(name)
    }


def module_facts(model: nn.Module, stack: LayerStack) -> dict[str, str]:
    """Return short digests of the classes and scalar attributes of a stack's modules.

    Adapters do not count here, because the fingerprint tells which adapters are active.

    Returns:
        Path -> class name and digest. Modules whose paths differ only in a block's number share an entry, with `*` in
        place of the number ("encoder.layer.*.output.dense"); its digest covers all of them, in order.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    names: dict[str, str] = {}
    for path, module in modules_around(around(model, stack), set(stack.run)):
        key = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        groups[key].append(f"{type(module).__name__} {_attributes(module)}")
        names[key] = type(module).__name__
    return {
        key: f"{names[key]} {hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}" for key, facts in groups.items()
    }


def around(model: nn.Module, stack: LayerStack) -> nn.Module:
    """Return the innermost module around a stack that has a config, and is a model or holds the whole stack.

    The stack's scope alone does not decide: in some wrappers it is a part of a model, such as BertEncoder.
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


def _attributes(module: nn.Module) -> str:
    """Return a module's scalar attributes as text: numbers, strings, functions, and tuples and lists of these.

    Functions that replace methods of nn.Module, other than `forward`, do not count: accelerate replaces `to`.
    """
    kept: list[str] = []
    for name, value in sorted(vars(module).items()):
        if not is_setting(name):
            continue
        if isinstance(value, FunctionType):
            if name != "forward" and hasattr(nn.Module, name):
                continue
            kept.append(f"{name}={value.__qualname__}")
        elif is_value(value):
            kept.append(f"{name}={value!r}")
    return ", ".join(kept)


def is_setting(name: str) -> bool:
    """Return whether an attribute with this name may change what a module computes in eval mode."""
    return name not in _MODES and not _UNRELATED.search(name)


def is_value(value: object) -> bool:
    """Return whether a value is a number, a string or a dtype, or a tuple or list of these."""
    parts = cast("tuple[object, ...]", value) if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(part, _SCALARS) for part in parts)
