"""What tells one base from another: a hash of every weight that makes a stack's states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.layers.discovery import default_stack
from lamina.layers.stack import LayerStack, saved_buffers


def fingerprint(model: nn.Module, stack_name: str) -> str:
    """Hash the weights that take part up to a stack's last layer.

    A backbone alone and the same backbone inside a model with a head agree; one changed number changes it. Nothing
    is remembered between calls, since a weight can change without a trace.

    Returns:
        SHA-256 in hexadecimal over each tensor's name in its module, dtype, shape and bytes.

    Raises:
        UnknownNameError: If the model has no such stack.
        ConfigError: If the model has an architecture but no weights.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Hash the weights of a stack (buffers of integers aside); see `fingerprint`."""
    buffers = ((module, saved_buffers(module).items()) for module in stack.run)
    return fingerprint_of_tensors(
        pair
        for module, saved in buffers
        for pair in (*module.named_parameters(recurse=False), *(pair for pair in saved if pair[1].is_floating_point()))
    )


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash tensors with their names, each once."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    if tensor.is_meta:
        raise ConfigError("fingerprint: the model has no weights, only an architecture. Load it with its weights.")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
