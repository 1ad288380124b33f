"""PEFT adapters in a model: find the layers with adapters, the active adapters, and their weights.

A PEFT layer lists its attributes by name: `adapter_layer_names` are those with weights, `other_param_names` those with
settings. Each such attribute is a mapping from the name of an adapter to its weight or setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, TypeGuard, cast

from torch import Tensor, nn

from lamina.errors import ConfigError

if TYPE_CHECKING:

    class PeftLayer(nn.Module):
        """The attributes of a PEFT layer that this module uses. PEFT itself is optional."""

        adapter_layer_names: tuple[str, ...]
        other_param_names: tuple[str, ...]
        active_adapters: list[str]
        disable_adapters: bool
        merged: bool

    class PeftModel(nn.Module):
        """The method of a PEFT model that this module calls."""

        def get_base_model(self) -> nn.Module:
            """Return the model without its PEFT wrapper."""
            ...


def has_adapters(module: nn.Module) -> TypeGuard[PeftLayer]:
    """Return whether a module is a PEFT layer, that is, a layer with adapters."""
    return hasattr(type(module), "adapter_layer_names")


def adapted_layers(model: nn.Module) -> list[PeftLayer]:
    """Return the PEFT layers of a model."""
    return [module for module in model.modules() if has_adapters(module)]


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model inside a PEFT wrapper; its layers still have the adapters.

    Any other model is returned unchanged.
    """
    return cast("PeftModel", model).get_base_model() if hasattr(model, "get_base_model") else model


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the original layer inside a PEFT layer; any other module is returned unchanged."""
    while has_adapters(module) and isinstance(inside := getattr(module, "base_layer", None), nn.Module):
        module = inside
    return module


def backbone(model: nn.Module) -> nn.Module:
    """Return a transformers model without its head and without a PEFT wrapper; any other module unchanged."""
    inside = without_wrapper(model)
    return cast("nn.Module", getattr(inside, "base_model", inside))


def active_adapters(layer: PeftLayer) -> tuple[str, ...]:
    """Return the names of a PEFT layer's active adapters, in order. Their outputs are added to the layer's own.

    The result is () if adapters are disabled, or merged into the layer's weight.
    """
    return () if layer.disable_adapters or getattr(layer, "merged", False) else tuple(layer.active_adapters)


def adapters_of(model: nn.Module) -> list[str]:
    """Return the names, each once, of the adapters that are active in any layer of a model; see `active_adapters`."""
    return list(dict.fromkeys(name for layer in adapted_layers(model) for name in active_adapters(layer)))


def adapter_modules(layer: PeftLayer) -> Iterator[nn.Module]:
    """Yield all modules inside a PEFT layer that belong to its adapters, active or not."""
    for name in (*layer.other_param_names, *layer.adapter_layer_names):
        if isinstance(attribute := getattr(layer, name, None), nn.Module):
            yield from attribute.modules()


def adapter_state(layer: PeftLayer) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for the weights ("lora_A.weight") and plain settings of a PEFT layer's active adapters.

    They come adapter by adapter, so names repeat if several are active. Disabled or merged adapters yield nothing.
    """
    for adapter in active_adapters(layer):
        for name in (*layer.other_param_names, *layer.adapter_layer_names):
            value = _of_adapter(layer, name, adapter)
            if isinstance(value, nn.Module):
                yield from ((f"{name}.{part}", tensor) for part, tensor in value.state_dict().items())
            elif isinstance(value, Tensor | bool | int | float | str):
                yield name, value


def _of_adapter(layer: PeftLayer, name: str, adapter: str) -> object:
    """Return what the attribute `name` of a PEFT layer holds for an adapter; None if it holds nothing."""
    mapping = cast("Mapping[str, object]", getattr(layer, name, {}))
    # some of these mappings cannot be iterated
    return mapping[adapter] if hasattr(mapping, "keys") and adapter in mapping.keys() else None  # noqa: SIM118


def adapter_settings(layer: PeftLayer) -> dict[str, object]:
    """Return "active_adapters" -> names of a PEFT layer's active adapters, and their settings as name -> value.

    A name is like "scaling of the adapter 'a'"; only numbers and strings count. {} if no adapter is active.
    """
    if not (active := active_adapters(layer)):
        return {}
    names = [(name, adapter) for adapter in active for name in layer.other_param_names]
    held = {f"{name} of the adapter '{adapter}'": _of_adapter(layer, name, adapter) for name, adapter in names}
    plain = {name: value for name, value in held.items() if isinstance(value, bool | int | float | str)}
    return {"active_adapters": active, **plain}


def settings_in_place(layer: PeftLayer) -> dict[str, object]:
    """Return name -> shallow copy, for the attributes of a PEFT layer that decide `adapter_settings`."""
    names = ("_active_adapter", "_disable_adapters", "merged_adapters", *layer.other_param_names)
    return {name: copy(vars(layer)[name]) for name in names if name in vars(layer)}


def has_peft(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model, or has PEFT layers."""
    return hasattr(model, "peft_config") or bool(adapted_layers(model))


def check_no_adapters(model: nn.Module, op: str) -> None:
    """Raise ConfigError, about the operation `op`, if a model has PEFT adapters."""
    if has_peft(model):
        hint = "Call merge_and_unload() of the PEFT model first, and use the model that it returns."
        raise ConfigError(f"{op}: the model carries adapters (PEFT), whose weights are apart from its own. {hint}")
