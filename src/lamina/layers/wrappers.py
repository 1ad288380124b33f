"""Look inside wrappers of a model and its layers (torch's, PEFT adapters), and at how and where weights are stored.

The device on which a model computes is known even if its weights are offloaded, or absent (meta device). A PEFT layer
lists its attributes by name: `adapter_layer_names` are those with weights, `other_param_names` those with settings.
Each such attribute is a mapping from the name of an adapter to its weight or setting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

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


def usable_device(device: str | torch.device) -> torch.device:
    """Return `device` as a `torch.device`; "auto" is a GPU if there is one, else the CPU.

    Raises ConfigError if torch cannot use the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(f"device: '{device}' cannot be used; torch does not find it. Use 'cpu' or 'auto'.") from None


def main_device(model: nn.Module) -> torch.device:
    """Return the device for a model's inputs: the device of its first parameter, or the CPU if it has none.

    For a model that accelerate offloads, it is the device on which accelerate's hooks run the model. For a model
    without weights it is "meta", even if an old constructor gave some parameters values.
    """
    devices: dict[torch.device, None] = {}
    _add_devices(model, devices, set())
    meta = torch.device("meta")
    if meta in devices:
        return next(_execution_devices(model), meta)
    return next(iter(devices), torch.device("cpu"))


def _add_devices(module: nn.Module, devices: dict[torch.device, None], seen: set[nn.Module]) -> None:
    """Add the devices of a module's parameters to `devices`, and the module and all that it contains to `seen`.

    This is many times faster than `module.parameters()`, which also builds the names of all parameters.
    """
    seen.add(module)
    parameters: dict[str, nn.Parameter | None] = vars(module)["_parameters"]
    children: dict[str, nn.Module | None] = vars(module)["_modules"]
    for parameter in parameters.values():
        if parameter is not None:
            devices[parameter.device] = None
    for child in children.values():
        if child is not None and child not in seen:
            _add_devices(child, devices, seen)


def _execution_devices(model: nn.Module) -> Iterator[torch.device]:
    """Yield the devices on which accelerate's hooks run the modules of a model, outer modules first."""
    for module in model.modules():
        hook: object = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if (device := getattr(part, "execution_device", None)) is not None:
                yield torch.device(device)


@contextmanager
def weights_in_place(module: nn.Module) -> Generator[None]:
    """Load a module's own weights to the CPU inside the `with` block, if accelerate has offloaded them."""
    if not hasattr(module, "_hf_hook"):
        yield
        return
    utils = import_module("accelerate.utils")  # imported by name, because the package has no type stubs
    with utils.align_module_device(module, torch.device("cpu")):
        yield


class MetaValues(TorchFunctionMode):
    """A context manager: inside it, converting a meta tensor to a Python number gives 0 instead of an error.

    Models read values to warn, or to choose a faster way to the same result. On the meta device this would fail.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _CONVERSIONS and isinstance(args[0], Tensor) and args[0].is_meta:
            return _CONVERSIONS[func](0)
        return func(*args, **kwargs or {})


_CONVERSIONS: dict[Callable[..., object], type[float]] = {
    Tensor.__bool__: bool,
    Tensor.item: int,
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
}


M = TypeVar("M")


def unwrapped(model: M) -> M:
    """Return the model inside torch's wrappers (torch.compile, DataParallel, DistributedDataParallel).

    Anything else is returned unchanged.
    """
    inside: object = model
    while True:
        if hasattr(inside, "_orig_mod"):
            inside = cast("nn.Module", inside)._orig_mod
        elif isinstance(inside, (nn.DataParallel, DistributedDataParallel)):
            inside = cast("nn.Module", inside.module)
        else:
            return cast("M", inside)


def checked_model(got: M, op: str, wanted: str = "a transformers model") -> M:
    """Return the model inside torch's wrappers, after checking that `got` can be a model.

    A class whose instances hold a model, or belong to one, has the attribute `instead_of_model`: it says what to pass
    instead of an instance.

    Raises:
        ConfigError: If `got` is not a torch module, was compiled by torch.jit, or has such an attribute. The message
            begins with `op` and says that it must be `wanted`.
    """
    model = unwrapped(got)
    hint = getattr(type(model), "instead_of_model", None)
    if isinstance(model, torch.jit.ScriptModule):
        hint = "It was compiled by torch.jit: give the model that was traced or scripted"
    if isinstance(model, nn.Module) and hint is None:
        return model
    name, hint = f"a {type(model).__name__}", hint or "Give the first value that lamina.load returns"
    if isinstance(model, (str, PathLike)):
        name, hint = f"'{model}'", "Load it first, by lamina.load, or a bank by ReaderBank.from_pretrained"
    raise ConfigError(f"{op}: got {name}, which is not a model; {wanted} is needed. {hint}.")


def is_bitsandbytes(model: nn.Module) -> bool:
    """Return whether transformers quantised a model's weights with bitsandbytes."""
    config: object = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = cast("dict[str, object]", config if isinstance(config, dict) else getattr(config, "__dict__", {}))
    return settings.get("quant_method") == "bitsandbytes"


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
    """Return a transformers model without its head and without a PEFT wrapper."""
    inside = without_wrapper(model)
    return cast("nn.Module", getattr(inside, "base_model", inside))


def active_adapters(layer: PeftLayer) -> tuple[str, ...]:
    """Return the names of a PEFT layer's active adapters, in order. Their outputs are added to the layer's own.

    The result is () if adapters are disabled, or merged into the layer's weight.
    """
    return () if layer.disable_adapters or getattr(layer, "merged", False) else tuple(layer.active_adapters)


def adapter_modules(layer: PeftLayer) -> Iterator[nn.Module]:
    """Yield all modules inside a PEFT layer that belong to its adapters, active or not."""
    for name in (*layer.other_param_names, *layer.adapter_layer_names):
        if isinstance(attribute := getattr(layer, name, None), nn.Module):
            yield from attribute.modules()


def adapter_state(layer: PeftLayer) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for the weights and settings of the active adapters of a PEFT layer."""
    for adapter in active_adapters(layer):
        for name in (*layer.other_param_names, *layer.adapter_layer_names):
            mapping = cast("Mapping[str, object]", getattr(layer, name, {}))
            if not hasattr(mapping, "keys") or adapter not in mapping.keys():  # noqa: SIM118  some of these mappings cannot be iterated
                continue
            value = mapping[adapter]
            if isinstance(value, nn.Module):
                yield from ((f"{name}.{part}", tensor) for part, tensor in value.state_dict().items())
            elif isinstance(value, Tensor | bool | int | float | str):
                yield name, value


def check_no_adapters(model: nn.Module, op: str) -> None:
    """Raise ConfigError, about the operation `op`, if a model has PEFT adapters."""
    if hasattr(model, "peft_config") or adapted_layers(model):
        raise ConfigError(
            f"{op}: the model carries adapters (PEFT), whose weights are apart from its own. Call merge_and_unload() "
            "of the PEFT model first, and use the model that it returns."
        )


def first_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity; None if all numbers are finite.

    `tensors` are (name, tensor) pairs. Integers, tensors without values (on the meta device) and tensor subclasses
    (quantised weights) are skipped.
    """
    detached = [(name, tensor.detach()) for name, tensor in tensors]
    floats = [(name, part) for name, part in detached if type(part) is Tensor and part.is_floating_point()]
    present = [(name, part) for name, part in floats if part.numel() and not part.is_meta]
    present = [(name, part.float() if part.dtype.itemsize == 1 else part) for name, part in present]
    if not present:
        return None
    # it is enough to test the smallest and the largest number, which takes 1/20 of the time of `isfinite` on all
    finite = [torch.stack(torch.aminmax(part)).isfinite().all() for _, part in present]
    bad = (~torch.stack([flag.to(finite[0].device) for flag in finite])).nonzero()  # only this waits for the device
    return present[int(bad[0])][0] if len(bad) else None
