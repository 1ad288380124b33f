"""The device on which a model computes, even if its weights are elsewhere: offloaded, or absent (meta device)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lamina.errors import ConfigError


def usable_device(device: str | torch.device) -> torch.device:
    """Return `device` as a `torch.device`, a GPU with its index; "auto" is "cuda" if torch finds one, else the CPU.

    Raises ConfigError if torch cannot use the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
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


def check_has_weights(op: str, model: nn.Module) -> None:
    """Raise ConfigError, about the operation `op`, if a model is on the meta device: it has shapes and no weights."""
    if main_device(model).type == "meta":
        raise ConfigError(f"{op}: the model has no weights, only an architecture. Load it with its weights.")


def _add_devices(module: nn.Module, devices: dict[torch.device, None], seen: set[nn.Module]) -> None:
    """Add the devices of all parameters in a module to `devices`, and the module and its submodules to `seen`.

    This is many times faster than `module.parameters()`, which also builds names.
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
    """Load a module's own weights to the CPU inside the `with` block, if accelerate has offloaded them.

    They are for reading: changes may be lost.
    """
    if not hasattr(module, "_hf_hook"):
        yield
        return
    utils = import_module("accelerate.utils")  # imported by name, because the package has no type stubs
    with utils.align_module_device(module, torch.device("cpu")):
        yield


class MetaValues(TorchFunctionMode):
    """A context manager: inside it, converting a meta tensor to a Python number gives 0 (or False), not an error.

    Models read values to warn, or to choose a faster way to the same result.
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
