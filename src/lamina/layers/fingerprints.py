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
    """Hash the weights up to a stack's last layer (SHA-256, in hexadecimal); see `fingerprint_of`.

    Nothing is remembered between calls, since a weight can change without a trace.
    """
    return fingerprint_of(default_stack(model, stack_name, op="fingerprint"))


def fingerprint_of(stack: LayerStack) -> str:
    """Hash a stack's weights, buffers of integers aside; a backbone alone and inside a model with a head agree."""
    return fingerprint_of_tensors(
        (name, tensor)
        for module in stack.run
        for name, tensor in (*module.named_parameters(recurse=False), *saved_buffers(module).items())
        if isinstance(tensor, nn.Parameter) or tensor.is_floating_point()
    )


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash each tensor's name, dtype, shape and bytes, each tensor once."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ConfigError("fingerprint: the model has no weights, only an architecture. Load it with its weights.")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(values)
    return digest.hexdigest()
