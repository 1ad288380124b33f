"""Record the inputs and outputs of every module while a model is called."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from lamina.layers.hooks import arguments
from lamina.layers.stack import Side, Swap, by_path

Key = tuple[object, ...]


@dataclass(eq=False)
class Call:
    """One call of a module in a traced run. Calls and events share one clock that counts 0, 1, 2, ..."""

    module: nn.Module
    path: str
    number: int  # which of the module's calls in this run, from 0
    started: int  # time at which the call began
    ended: int = -1  # time at which it returned; -1 until then
    mask: Tensor | None = None  # its argument `attention_mask`, if that is [batch, tokens]


@dataclass(eq=False)
class Event:
    """A three-dimensional tensor that was an argument or a result of a module's call."""

    call: Call
    side: Side
    index: int | str | None  # position or key among the arguments or results; None if it is the result itself
    time: int
    key: Key  # see `key_of`
    tensor: Callable[[], Tensor | None]  # returns the tensor, or None once it was freed
    version: int  # the tensor's in-place version when it was seen
    swap: Swap | None = None  # axes of the tensor that were exchanged before `key` was computed


Seen = dict[Event, bool]  # an event at which a state was seen -> whether it was the same tensor or only an equal one


@dataclass(eq=False)
class Trace:
    """A traced run: one forward pass of a model, with all module calls and all events in the order of time."""

    calls: list[Call] = field(default_factory=list[Call])
    events: list[Event] = field(default_factory=list[Event])
    counts: Counter[str] = field(default_factory=Counter[str])  # path -> how often the module was called
    copies: list[Tensor] = field(default_factory=list[Tensor])  # copies of the values, if they are kept

    def seen_as(self, state: Tensor) -> Seen:
        """Return the events at which a state was seen; the value is True if it was the same, unchanged tensor object.

        Otherwise it was a tensor with equal values. On the meta device values cannot be compared, so only the same
        tensor counts.
        """
        key = key_of(state)
        equal = [event for event in self.events if event.key == key]
        seen = {event: event.tensor() is state and event.version == state._version for event in equal}
        return {event: is_same for event, is_same in seen.items() if is_same or not state.is_meta}


@contextmanager
def trace_calls(model: nn.Module, *, keep: bool = False) -> Generator[Trace]:
    """Record every module call of the model inside the `with` block; yield the trace, which fills meanwhile.

    With `keep`, every value is copied, so that `Event.tensor` still returns it afterwards; otherwise events hold weak
    references.
    """
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
            _record(trace, call, "input", index, copied(value), call.started)

    def after(module: nn.Module, _args: tuple[object, ...], output: object) -> None:
        call = open_calls.pop()
        while call.module is not module:  # an inner call raised, so that its hook never ran, and the model went on
            call = open_calls.pop()
        call.ended = next(clock)
        for index, value in _parts(output):
            _record(trace, call, "output", index, copied(value), call.ended)

    with ExitStack() as handles:
        for module in paths:
            handles.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.enter_context(module.register_forward_hook(after))
        yield trace


def _parts(output: object) -> Iterable[tuple[int | str | None, object]]:
    """Return pairs of position or key and value for the output of a module; [(None, output)] for a single tensor."""
    if isinstance(output, Tensor):
        return [(None, output)]
    to_tuple: Callable[[], tuple[object, ...]] | None = getattr(output, "to_tuple", None)
    if to_tuple is not None:  # a ModelOutput: its positions are those of the tuple that `return_dict=False` gives
        output = to_tuple()
    if isinstance(output, Mapping):
        return cast("Mapping[str, object]", output).items()
    return enumerate(cast("tuple[object, ...]", output)) if isinstance(output, (tuple, list)) else ()


def _record(trace: Trace, call: Call, side: Side, index: int | str | None, value: object, time: int) -> None:
    """Add the events of one argument or result of a call to the trace. Values that cannot be states are left out."""
    if not isinstance(value, Tensor) or value.ndim != 3 or not value.is_floating_point():
        return
    # a tensor without values costs nothing to keep, and has to be kept: it is recognised by identity
    held = (lambda: value) if value.is_meta else weakref.ref(value)
    trace.events.append(Event(call, side, index, time, key_of(value), held, value._version))
    for swap in () if value.is_meta else _SWAPS:  # some models order the axes differently inside
        trace.events.append(Event(call, side, index, time, key_of(value.transpose(*swap)), lambda: None, 0, swap))


_SWAPS = ((1, 2), (0, 1))


def key_of(tensor: Tensor) -> Key:
    """Return a hashable key of a tensor: shape, dtype and some of its values. Equal tensors have equal keys."""
    kind = (tuple(tensor.shape), tensor.dtype)
    if tensor.is_meta or tensor.ndim != 3:
        return kind
    steps = [max(1, size // samples) for size, samples in zip(tensor.shape, (2, 6, 6), strict=True)]
    sample = tensor[:: steps[0], :: steps[1], :: steps[2]].to("cpu", torch.float64)
    return *kind, (sample + 0.0).numpy().tobytes()  # + 0.0 turns -0.0 into 0.0, which equals it but has other bytes
