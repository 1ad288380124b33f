"""Finds the stacks of a model once per process, and lets models that are equal to it in every bit use what was found.

Finding them runs a model four times, which takes a sixth of the time of all tests, mostly on the same tiny models.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from lamina.layers import discovery
from lamina.layers.stack import LayerStack, by_path

LARGE = 1_000_000  # weights that are read more slowly than the model runs
_WHERE = "name_or_path"  # where a model came from decides nothing
_find = discovery._discover
_found: dict[tuple[Any, ...], dict[str, LayerStack]] = {}  # the modules of these stacks are paths


def find_anew(anew: bool) -> None:
    """Let `stacks` search every model that it has not seen, or only those that differ from all it has seen."""
    discovery._discover = _find if anew else _find_once


def _find_once(model: Any) -> dict[str, LayerStack]:
    key = _all_that_decides(model)
    if key is None:
        return _find(model)
    if key not in _found:
        stacks = _find(model)
        paths = {module: path for path, module in by_path(model).items()}
        _found[key] = {name: discovery._map_modules(stack, paths.__getitem__) for name, stack in stacks.items()}
        return stacks
    modules = by_path(model)
    return {name: discovery._map_modules(stack, modules.__getitem__) for name, stack in _found[key].items()}


def _all_that_decides(model: Any) -> tuple[Any, ...] | None:
    """Return the config, modules, settings and weights of a model; None if something else may decide: a hook."""
    first, modules = {}, []
    for path, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        if "forward" in own or module._forward_hooks or module._forward_pre_hooks:
            return None
        plain = tuple((key, own[key]) for key in own if isinstance(own[key], (bool, int, float, str)) and key != _WHERE)
        modules.append((path, first.setdefault(id(module), path), type(module), type(module).forward, plain))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plain_tensors = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for _, tensor in tensors)
    size = sum(tensor.numel() for _, tensor in tensors)
    if not plain_tensors or not 0 < size < LARGE or not hasattr(getattr(model, "config", None), "to_dict"):
        return None
    weights = tuple(
        (name, tensor.shape, tensor.dtype, tensor.device.type, _checksum(tensor)) for name, tensor in tensors
    )
    config = {key: value for key, value in model.config.to_dict().items() if key != f"_{_WHERE}"}
    return repr(config), tuple(modules), weights


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number that changes with the values of a tensor; 0 if it has none."""
    if tensor.device.type == "meta":
        return 0
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
