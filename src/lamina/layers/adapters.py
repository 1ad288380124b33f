"""Adapters in a model, PEFT's own or those that transformers adds with it: which of them its layers compute with.

A layer of PEFT lists by name what it holds: weights as `adapter_layer_names` and settings as `other_param_names`; each
is a mapping whose keys are the names of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor, nn

from lamina.errors import ConfigError


def has_adapters(module: nn.Module) -> TypeGuard[Any]:
    """Whether a module is a layer that adapters were added to."""
    return hasattr(type(module), "adapter_layer_names")


def adapted_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that adapters were added to."""
    return [module for module in model.modules() if has_adapters(module)]


def backbone(model: nn.Module) -> nn.Module:
    """A transformers model without its head, also where PEFT has wrapped it."""
    whole: Any = model
    inside = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    return getattr(inside, "base_model", inside)


def active_adapters(layer: Any) -> tuple[str, ...]:
    """The adapters a layer computes with, in their order; one that is merged into its weight is part of that."""
    return () if layer.disable_adapters or getattr(layer, "merged", False) else tuple(layer.active_adapters)


def adapter_modules(layer: Any) -> Iterator[nn.Module]:
    """The modules that hold what a layer's adapters consist of, used or not."""
    for name in (*layer.other_param_names, *layer.adapter_layer_names):
        if isinstance(held := getattr(layer, name, None), nn.Module):
            yield from held.modules()


def adapter_state(layer: Any) -> Iterator[tuple[str, object]]:
    """What the adapters a layer computes with consist of, as name and tensor or plain setting."""
    for adapter in active_adapters(layer):
        for name in (*layer.other_param_names, *layer.adapter_layer_names):
            mapping = getattr(layer, name, {})
            if not hasattr(mapping, "keys") or adapter not in mapping.keys():  # noqa: SIM118 not all iterate over keys
                continue
            value = mapping[adapter]
            if isinstance(value, nn.Module):
                yield from ((f"{name}.{part}", tensor) for part, tensor in value.state_dict().items())
            elif isinstance(value, Tensor | bool | int | float | str):
                yield name, value


def check_no_adapters(model: nn.Module, op: str) -> None:
    """Raise ConfigError if adapters were added to a model."""
    if hasattr(model, "peft_config") or adapted_layers(model):
        raise ConfigError(
            f"{op}: the model carries adapters (PEFT), which are kept apart from its weights. Call merge_and_unload() "
            "of the PEFT model first, and give what that returns."
        )
