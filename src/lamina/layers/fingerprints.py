"""What tells one base from another: a hash of every weight that makes a stack's states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lamina.errors import ConfigError
from lamina.layers.adapters import adapter_modules, adapter_state, has_adapters
from lamina.layers.discovery import default_stack
from lamina.layers.stack import LayerStack, own_state


def fingerprint(model: nn.Module, stack_name: str) -> str:
    """Hash the weights up to a stack's last layer (SHA-256, in hexadecimal); see `fingerprint_of`.

    Nothing is remembered between calls, since a weight can change without a trace.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Hash a stack's weights, packed ones and those of the adapters it computes with too, but no counters.

    A backbone alone and inside a model with a head agree; so do a model whose adapters are off and one without any.
    """
    adapted = list(filter(has_adapters, stack.run))
    apart = {module for layer in adapted for module in adapter_modules(layer)}
    return fingerprint_of_tensors(
        item for module in stack.run if module not in apart for item in (*_state(module), *_adapters(module))
    )


def _state(module: nn.Module) -> Iterator[tuple[str, object]]:
    buffers = dict(module.named_buffers(recurse=False))
    for name, value in own_state(module).items():
        counter = buffers.get(name)
        if counter is None or counter.is_floating_point() or counter.numel() > 1:
            yield name, value


def _adapters(module: nn.Module) -> Iterator[tuple[str, object]]:
    if has_adapters(module):
        yield from adapter_state(module)


def fingerprint_of_tensors(values: Iterable[tuple[str, object]]) -> str:
    """Hash each tensor's name, dtype, shape and bytes, each tensor once; numbers and texts in between too."""
    digest = hashlib.sha256()
    seen = WeakIdKeyDictionary()
    for name, value in (plain for item in values for plain in _plain(*item)):
        if not isinstance(value, Tensor):
            digest.update(f"{name} {value!r}\n".encode())
        elif value.is_meta:
            raise ConfigError("fingerprint: the model has no weights, only an architecture. Load it with its weights.")
        elif value not in seen:
            seen[value] = True
            whole = value.detach().dequantize() if value.is_quantized else value.detach()
            content: Any = whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _plain(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The tensors that a value is made of, or the value itself where it is a number or text."""
    if hasattr(type(value), "__tensor_flatten__"):  # a quantised weight that only looks like a tensor
        for part in cast("Any", value).__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(cast("tuple[object, ...]", value)):
            yield from _plain(f"{name}.{number}", part)
    elif isinstance(value, (Tensor, bool, int, float, str)):
        yield name, value
