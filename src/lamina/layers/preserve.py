"""Run a model and leave it as it was; run one that has no weights."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lamina.layers.devices import main_device
from lamina.layers.pass_lock import exclusive
from lamina.layers.wrappers import uncompiled


@contextmanager
def preserve_randomness(**devices: Any) -> Generator[None]:
    """Give every global generator back as it was; `devices` are arguments of torch's `fork_rng`."""
    before = random.getstate(), np.random.get_state()
    fork: Callable[..., AbstractContextManager[None]] = vars(torch.random)["fork_rng"]
    try:
        with fork(**devices):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def preserve_model(model: nn.Module) -> Generator[None]:
    """Put the model in eval mode without gradients, and put everything back at the end.

    Some models change themselves when run: BigBird replaces its attention on short inputs, position tables grow,
    transformers installs hooks of its own. So modes, parameters, buffers and their values, submodules, hooks and plain
    attributes come back, and the random number generators. Where the model has a `pass_lock`, this
    waits for their passes, and they for it.
    """
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    main = main_device(model).type
    with (
        exclusive(model),
        preserve_randomness(devices=[device.index or 0 for device in devices], device_type=kind),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu" if main == "meta" else main, enabled=False),
        uncompiled(),
        ExitStack() as exits,
    ):
        for module in model.modules():
            exits.callback(_snapshot(module))
        for buffer in model.buffers():
            if not (buffer.is_meta or buffer.is_inference()):
                exits.callback(_restore_buffer, buffer, buffer._version, buffer.clone())
        model.eval()
        yield


@contextmanager
def evaluating(*modules: nn.Module) -> Generator[None]:
    """Put modules in eval mode; they get their modes back when the last of these contexts, in any thread, ends."""
    every = [part for module in modules for part in module.modules()]
    with _switching:
        # as they are found, with nobody about to change them back: nothing is noted
        parts = every if _open or any(part.training for part in every) else []
        _open.extend(parts[:1])
        for part in parts:
            _modes.setdefault(part, []).append(part.training)
        for module in modules if parts else ():
            module.eval()
    try:
        yield
    finally:
        with _switching:
            del _open[: len(parts[:1])]
            for part in parts:
                part.training = _modes[part].pop()  # the last to end takes what the first to begin has found
            for part in every if not parts else ():
                part.training = False


_switching, _modes = Lock(), WeakKeyDictionary[nn.Module, list[bool]]()
_open: list[nn.Module] = []  # one for each context that has modes to give back


def _restore_buffer(buffer: Tensor, version: int, value: Tensor) -> None:
    if buffer._version != version:
        buffer.copy_(value)


def _snapshot(module: nn.Module) -> Callable[[], None]:
    """What puts a module's attributes back; containers in place, since handles of hooks point at them."""
    attributes = dict(module.__dict__)
    contents = {name: value.copy() for name, value in attributes.items() if type(value) in _CONTAINERS}

    def restore() -> None:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for name, content in contents.items():
            container = attributes[name]
            container.clear()
            getattr(container, "extend" if type(content) is list else "update")(content)

    return restore


_CONTAINERS = frozenset[type]((dict, OrderedDict, set, list))
