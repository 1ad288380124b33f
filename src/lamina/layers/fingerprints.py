"""Fingerprints: hashes of all weights on which a stack's hidden states depend. They identify base models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lamina.errors import ConfigError
from lamina.layers.adapters import adapted_layers, adapter_modules, adapter_state, has_adapters
from lamina.layers.devices import weights_in_place
from lamina.layers.discovery import default_stack, stacks
from lamina.layers.stack import LayerStack, bytes_of, own_state

if TYPE_CHECKING:

    class WrapperTensor(Protocol):
        """A subclass of Tensor that consists of other tensors, such as a quantised weight."""

        def __tensor_flatten__(self) -> tuple[list[str], object]:
            """Return the names of the attributes that hold the inner tensors, and everything else."""
            ...


def fingerprint(model: nn.Module, stack_name: str) -> str:
    """Return the SHA-256 hash, in hexadecimal, of all weights of the stack `stack_name`; see `fingerprint_of`.

    Raises:
        ConfigError: If the model has no weights, or `model` is not a model.
        UnknownNameError: If the model has no stack of that name.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Return the SHA-256 hash, in hexadecimal, of all weights on which the last layer of a stack depends.

    Quantised weights and the weights of active adapters are included; buffers that only count something are not. A head
    around the backbone, disabled adapters, and offloading of the weights do not change the hash. Raises ConfigError if
    there are no weights (the meta device).
    """
    return fingerprint_of_modules(stack.run)


def fingerprint_outside(model: nn.Module) -> str:
    """Return the SHA-256 hash, in hexadecimal, of all weights of a model on which no layer depends, such as its head.

    A head that is tied to the embeddings counts with their weights. All else is as in `fingerprint_of`. Without such
    weights, the result is the hash of nothing. Raises UnsupportedModelError if the model's layers cannot be found, and
    ConfigError for weights on the meta device.
    """
    inside = {module for stack in stacks(model).values() for module in stack.run}
    inside |= {part for layer in adapted_layers(model) if layer in inside for part in adapter_modules(layer)}
    return fingerprint_of_modules(module for module in model.modules() if module not in inside)


def fingerprint_of_modules(modules: Iterable[nn.Module]) -> str:
    """Return the hash of the weights that modules hold directly, not in submodules; for details see `fingerprint_of`.

    Raises ConfigError if a weight is on the meta device, unless accelerate has offloaded it.
    """
    modules = list(modules)
    in_adapters = {part for layer in filter(has_adapters, modules) for part in adapter_modules(layer)}
    plain = [module for module in modules if module not in in_adapters]
    is_offloaded = any(parameter.is_meta for module in plain for parameter in module.parameters(recurse=False))
    return fingerprint_of_tensors((item for module in plain for item in _state(module)), tied_by_value=is_offloaded)


def _state(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for a module's own part of the state dict, without buffers of one integer (counters).

    An inserted layer's settings (`fingerprint_facts`) come first, and the active adapters of a PEFT layer last.
    """
    if facts := getattr(module, "fingerprint_facts", ""):  # an inserted layer has settings besides its weight
        yield "facts", str(facts)
    buffers = dict(module.named_buffers(recurse=False))
    with weights_in_place(module):
        for name, value in own_state(module).items():
            counter = buffers.get(name)
            if counter is None or counter.is_floating_point() or counter.numel() > 1:
                yield name, value
    if has_adapters(module):
        yield from adapter_state(module)


def fingerprint_of_tensors(values: Iterable[tuple[str, object]], *, tied_by_value: bool = False) -> str:
    """Return the SHA-256 hash of named values in their order, in hexadecimal.

    For a tensor its name, dtype, shape and bytes are hashed, for a plain value its name and repr.

    Args:
        values: Pairs of a name and a tensor, number or string, or a tuple or list of these; other values are left out.
            Each tensor object is hashed once.
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
            content = bytes_of(value.dequantize() if value.is_quantized else value)
            if tied_by_value and value.ndim == 2:
                if (key := hashlib.sha256(content).digest()) in contents:
                    continue
                contents.add(key)
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for a tensor, number or string; leave out other values.

    A quantised weight gives a pair per inner tensor, and a tuple or list one per item ("name.0").
    """
    if hasattr(type(value), "__tensor_flatten__"):  # a tensor subclass that wraps others, such as a quantised weight
        for part in cast("WrapperTensor", value).__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(cast("tuple[object, ...]", value)):
            yield from _parts(f"{name}.{number}", part)
    elif isinstance(value, (Tensor, bool, int, float, str)):
        yield name, value
