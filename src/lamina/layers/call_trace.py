"""What goes into and comes out of every module during one run of a model."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lamina.layers.hooks import arguments
from lamina.layers.stack import Side, Swap, by_path

Key = tuple[object, ...]


@dataclass(eq=False)
class Call:
    """One call of a module."""

    module: nn.Module
    path: str
    number: int  # which of the module's calls, from 0
    started: int  # a count of events
    ended: int = -1
    mask: Tensor | None = None  # [batch, tokens], if there is one among the arguments


@dataclass(eq=False)
class Event:
    """A value that entered or left a call."""

    call: Call
    side: Side
    index: int | str | None
    time: int
    key: Key
    tensor: Callable[[], Tensor | None]
    version: int
    swap: Swap | None = None


Seen = dict[Event, bool]  # where a state was, and whether as the very same tensor or as one that looks equal


@dataclass(eq=False)
class Trace:
    """One run: every call, and every value of three axes that entered or left one, in order."""

    calls: list[Call] = field(default_factory=list[Call])
    events: list[Event] = field(default_factory=list[Event])
    counts: Counter[str] = field(default_factory=Counter[str])  # path -> how often the module was called
    copies: list[Tensor] = field(default_factory=list[Tensor])  # of what was seen, where it is kept

    def seen_as(self, state: Tensor) -> Seen:
        """Find where a state was seen."""
        key = key_of(state)
        like = [event for event in self.events if event.key == key]
        seen = {event: event.tensor() is state and event.version == state._version for event in like}
        return {event: is_same for event, is_same in seen.items() if is_same or not state.is_meta}


@contextmanager
def trace_calls(model: nn.Module, *, keep: bool = False) -> Generator[Trace]:
    """Record every module's calls while the model runs; `keep` copies the values, to be had afterwards."""
    trace, open_calls = Trace(), list[Call]()
    copies: list[Tensor] = trace.copies

    def copied(value: object) -> object:
        if not keep or not isinstance(value, Tensor):
            return value
        copies.append(value.clone())
        return copies[-1]

    clock = itertools.count()
    paths = {module: path for path, module in by_path(model).items()}

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        path = paths[module]
        mask = arguments(module, args, kwargs).get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        call = Call(module, path, trace.counts[path], next(clock), mask=mask)
        trace.counts[path] += 1
        trace.calls.append(call)
        open_calls.append(call)
        for index, value in (*enumerate(args), *kwargs.items()):
            _note(trace, call, "input", index, copied(value), call.started)

    def after(module: nn.Module, _args: tuple[object, ...], output: object) -> None:
        call = open_calls.pop()
        while call.module is not module:  # a call inside raised and was caught
            call = open_calls.pop()
        call.ended = next(clock)
        for index, value in _parts(output):
            _note(trace, call, "output", index, copied(value), call.ended)

    with ExitStack() as handles:
        for module in paths:
            handles.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.enter_context(module.register_forward_hook(after))
        yield trace


def _parts(output: object) -> Iterable[tuple[int | str | None, object]]:
    if isinstance(output, Tensor):
        return [(None, output)]
    if hasattr(output, "to_tuple"):  # a ModelOutput: positions also hold where a tuple comes instead
        output = cast("Any", output).to_tuple()
    if isinstance(output, Mapping):
        return cast("Mapping[str, object]", output).items()
    return enumerate(cast("tuple[object, ...]", output)) if isinstance(output, (tuple, list)) else ()


def _note(trace: Trace, call: Call, side: Side, index: int | str | None, value: object, time: int) -> None:
    if not isinstance(value, Tensor) or value.ndim != 3 or not value.is_floating_point():
        return
    held = (lambda: value) if value.is_meta else weakref.ref(value)
    trace.events.append(Event(call, side, index, time, key_of(value), held, value._version))
    for swap in () if value.is_meta else _SWAPS:  # some models keep the axes in another order inside
        trace.events.append(Event(call, side, index, time, key_of(value.transpose(*swap)), lambda: None, 0, swap))


_SWAPS = ((1, 2), (0, 1))


def key_of(tensor: Tensor) -> Key:
    """Shape, type and a sample of the values: tensors that are equal have the same key."""
    kind = (tuple(tensor.shape), tensor.dtype)
    if tensor.is_meta or tensor.ndim != 3:
        return kind
    steps = [max(1, size // many) for size, many in zip(tensor.shape, (2, 6, 6), strict=True)]
    sample = tensor[:: steps[0], :: steps[1], :: steps[2]].to("cpu", torch.float64)
    return *kind, (sample + 0.0).numpy().tobytes()  # + 0.0: -0.0 equals 0.0
