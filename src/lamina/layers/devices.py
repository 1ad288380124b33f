"""On which device a model runs, and models whose weights are elsewhere: offloaded, or absent (the meta device)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def main_device(model: nn.Module) -> torch.device:
    """Where inputs go: the device of the first parameter; "meta" if there are no weights.

    Without weights some parameters may still be real: old constructors ignore the device. Of offloaded weights only
    some are in place, or none, and the model runs where accelerate's hooks take its inputs.
    """
    devices = {parameter.device: None for parameter in model.parameters()}
    meta = torch.device("meta")
    if meta in devices:
        return next(_execution_devices(model), meta)
    return next(iter(devices), torch.device("cpu"))


def _execution_devices(model: nn.Module) -> Iterator[torch.device]:
    """Where accelerate's hooks have modules run, outermost first."""
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if (device := getattr(part, "execution_device", None)) is not None:
                yield torch.device(device)


@contextmanager
def weights_in_place(module: nn.Module) -> Generator[None]:
    """Have a module's own weights at hand where accelerate offloads them, to memory or a disk."""
    if not hasattr(module, "_hf_hook"):
        yield
        return
    utils: Any = import_module("accelerate.utils")  # it has no types
    with utils.align_module_device(module, torch.device("cpu")):
        yield


class MetaValues(TorchFunctionMode):
    """Answer questions about values that are not there (on the meta device) with 0, so that models run on.

    Models look at values to warn, or to choose a faster way to the same result.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func in _QUESTIONS and args[0].is_meta:
            return _QUESTIONS[func](0)
        return func(*args, **kwargs or {})


_QUESTIONS: dict[Any, type] = {
    Tensor.__bool__: bool,
    Tensor.item: int,
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
}
