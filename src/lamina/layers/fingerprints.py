"""What tells one base from another: a hash of every weight that makes a stack's states."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.layers import default_stack
from lamina.layers.stack import saved_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedModel

    from lamina.layers import LayerStack


def fingerprint(model: PreTrainedModel, stack_name: str) -> str:
    """Hash the weights that take part up to the stack's last layer.

    A backbone alone and the same backbone inside a model with a head agree; one changed number changes it. Nothing
    is remembered between calls, since a weight can change without a trace.

    Args:
        model: The model.
        stack_name: Name of one of its stacks.

    Returns:
        SHA-256 in hexadecimal over each tensor's name in its module, dtype, shape and bytes.

    Raises:
        UnknownNameError: If the model has no such stack.
        ConfigError: If the model has an architecture but no weights.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Hash the weights of a stack; see `fingerprint`."""
    return fingerprint_of_tensors(pair for module in stack.run for pair in _own(module))


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash tensors with their names, each once."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of floats that are the module's own, not those of modules inside."""
    yield from module.named_parameters(recurse=False)
    yield from ((name, buffer) for name, buffer in saved_buffers(module).items() if buffer.is_floating_point())


def _bytes(tensor: Tensor) -> Any:
    if tensor.is_meta:
        raise ConfigError(
            "fingerprint: the model has no weights, only an architecture; a fingerprint is a hash of weights. "
            "Load the model with its weights."
        )
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
