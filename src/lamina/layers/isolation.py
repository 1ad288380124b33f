"""Run a model and leave it as it was; run one that has no weights."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def preserve_model(model: nn.Module) -> Generator[None]:
    """Put the model in eval mode without gradients, and put everything back at the end.

    Back come: the mode of each module, its parameters, buffers (and their values), submodules, hooks and plain
    attributes, and the random number generators. Some models change themselves when run: BigBird replaces its
    attention on short inputs, position tables grow, transformers installs hooks of its own.
    """
    with ExitStack() as exits:
        exits.enter_context(_same_randomness(model))
        exits.enter_context(torch.inference_mode(False))
        exits.enter_context(torch.no_grad())
        device = main_device(model).type
        exits.enter_context(torch.autocast("cpu" if device == "meta" else device, enabled=False))
        saved = [_Saved(module) for module in model.modules()]
        changeable = [buffer for buffer in model.buffers() if not (buffer.is_meta or buffer.is_inference())]
        buffers = [(buffer, buffer._version, buffer.clone()) for buffer in changeable]
        try:
            model.eval()
            yield
        finally:
            for state in saved:
                state.restore()
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def main_device(model: nn.Module) -> torch.device:
    """Where inputs go: the device of the first parameter; "meta" if there are no weights.

    Without weights some parameters may still be real, since old constructors ignore the device that is asked for.
    Where weights are offloaded, on the other hand, only some are in place, and the model runs.
    """
    devices = {parameter.device: None for parameter in model.parameters()}
    meta = torch.device("meta")
    if meta in devices and not hasattr(model, "hf_device_map"):
        return meta
    return next((device for device in devices if device != meta), torch.device("cpu"))


def first_line(error: Exception) -> str:
    """An error's type and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


@contextmanager
def _same_randomness(model: nn.Module) -> Generator[None]:
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    fork: Callable[..., AbstractContextManager[None]] = vars(torch.random)["fork_rng"]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with fork(devices=[device.index or 0 for device in devices], device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class MetaValues(TorchFunctionMode):
    """Answer questions about values that do not exist (on the meta device) with 0, so that models run on.

    Models look at values to warn, or to choose a faster way to the same result.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Answer."""
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


class _Saved:
    """The attributes of one module; containers are restored in place, since handles of hooks point at them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes: dict[str, Any] = dict(module.__dict__)
        self.contents: dict[str, Any] = {
            name: value.copy() for name, value in self.attributes.items() if type(value) in _CONTAINERS
        }

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for name, content in self.contents.items():
            container = self.attributes[name]
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


_CONTAINERS = frozenset[type]((dict, OrderedDict, set, list))
