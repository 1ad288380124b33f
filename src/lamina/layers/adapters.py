"""PEFT adapters in a model: which layers have them, which are active, and their weights.

A PEFT layer lists its attributes by name: `adapter_layer_names` are those with weights, `other_param_names` those with
settings. Each such attribute is a mapping from the name of an adapter to its weight or setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor, nn

from lamina.errors import ConfigError


def has_adapters(module: nn.Module) -> TypeGuard[Any]:
    """Return whether a module is a PEFT layer, to which adapters were added."""
    return hasattr(type(module), "adapter_layer_names")


def adapted_layers(model: nn.Module) -> list[Any]:
    """Return the PEFT layers of a model, to which adapters were added."""
    return [module for module in model.modules() if has_adapters(module)]


def backbone(model: nn.Module) -> nn.Module:
    """Return a transformers model without its head; a PEFT wrapper around it is removed too."""
    wrapped: Any = model
    inside = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    return getattr(inside, "base_model", inside)


def active_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the adapters that a PEFT layer adds to its output, in order.

    Empty if adapters are disabled, or merged into the layer's weight.
    """
    return () if layer.disable_adapters or getattr(layer, "merged", False) else tuple(layer.active_adapters)


def adapter_modules(layer: Any) -> Iterator[nn.Module]:
    """Yield all modules that hold adapters of a PEFT layer, active or not."""
    for name in (*layer.other_param_names, *layer.adapter_layer_names):
        if isinstance(attribute := getattr(layer, name, None), nn.Module):
            yield from attribute.modules()


def adapter_state(layer: Any) -> Iterator[tuple[str, object]]:
    """Yield the weights and plain settings of the active adapters of a PEFT layer, each with a name."""
    for adapter in active_adapters(layer):
        for name in (*layer.other_param_names, *layer.adapter_layer_names):
            mapping = getattr(layer, name, {})
            if not hasattr(mapping, "keys") or adapter not in mapping.keys():  # noqa: SIM118  some of these mappings cannot be iterated
                continue
            value = mapping[adapter]
            if isinstance(value, nn.Module):
                yield from ((f"{name}.{part}", tensor) for part, tensor in value.state_dict().items())
            elif isinstance(value, Tensor | bool | int | float | str):
                yield name, value


def check_no_adapters(model: nn.Module, op: str) -> None:
    """Raise ConfigError if a model has PEFT adapters; `op` begins the message."""
    if hasattr(model, "peft_config") or adapted_layers(model):
        raise ConfigError(
            f"{op}: the model carries adapters (PEFT), whose weights are apart from its own. Call merge_and_unload() "
            "of the PEFT model first, and use the model that it returns."
        )
