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
from lamina.layers.devices import weights_in_place
from lamina.layers.discovery import default_stack
from lamina.layers.stack import LayerStack, own_state


def fingerprint(model: nn.Module, stack_name: str) -> str:
    """Hash the weights up to a stack's last layer (SHA-256, in hexadecimal); see `fingerprint_of`.

    Nothing is remembered between calls, since a weight can change without a trace. ConfigError if the model has no
    weights, UnknownNameError if it has no such stack.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Hash a stack's weights, packed ones and those of the adapters it computes with too, but no counters.

    A backbone alone and inside a model with a head agree; so do a model whose adapters are off and one without any,
    and one whose weights are offloaded.
    """
    return fingerprint_of_modules(stack.run)


def fingerprint_of_modules(modules: Iterable[nn.Module]) -> str:
    """Hash the weights that modules themselves have, as `fingerprint_of` does; not those of modules inside them."""
    modules = list(modules)
    apart = {part for layer in filter(has_adapters, modules) for part in adapter_modules(layer)}
    own = [module for module in modules if module not in apart]
    state = (item for module in own for part in (_state, _adapters) for item in part(module))
    return fingerprint_of_tensors(state, tied_by_value=any(parameter.is_meta for parameter in _parameters(own)))


def _parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters(recurse=False))


def _state(module: nn.Module) -> Iterator[tuple[str, object]]:
    if facts := getattr(module, "fingerprint_facts", ""):  # of an inserted layer
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
    """Hash each tensor's name, dtype, shape and bytes, each tensor once; numbers and texts in between too.

    With `tied_by_value` matrices that are equal count once: offloaded weights that are tied come as copies.
    """
    digest = hashlib.sha256()
    seen, contents = WeakIdKeyDictionary(), set[bytes]()
    for name, value in (plain for item in values for plain in _plain(*item)):
        if not isinstance(value, Tensor):
            digest.update(f"{name} {value!r}\n".encode())
        elif value.is_meta:
            raise ConfigError("fingerprint: the model has no weights, only an architecture. Load it with its weights.")
        elif value not in seen:
            seen[value] = True
            whole = value.detach().dequantize() if value.is_quantized else value.detach()
            content: Any = whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            if tied_by_value and value.ndim == 2:
                if (key := hashlib.sha256(content).digest()) in contents:
                    continue
                contents.add(key)
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
