"""Record the inputs and outputs of every module while a model is called."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn

from lamina.layers.hooks import arguments
from lamina.layers.stack import Side, Swap, TapPoint, by_path
from lamina.layers.state_forms import Form, count_tokens

Key = tuple[object, ...]


@dataclass(eq=False)
class Call:
    """One call of a module in a traced run. Calls and events share one clock, which counts 0, 1, 2, ...

    Attributes:
        path: Path of the `module`.
        number: Which of the module's calls in this run, from 0.
        started: Time at which the call began.
        ended: Time at which it returned; -1 until then.
        mask: Its argument `attention_mask`, if that is [batch, tokens]; else None.
        tokens: Number of tokens that it receives; None if it reads no tokens.
    """

    module: nn.Module
    path: str
    number: int
    started: int
    ended: int = -1
    mask: Tensor | None = None
    tokens: int | None = None


@dataclass(eq=False)
class Event:
    """A floating-point tensor that was an argument or a result of a module's call in a traced run.

    Attributes:
        call: The call; `side` is "input" for an argument, "output" for a result.
        index: Position or key among the arguments or results; None if it is the result itself.
        time: When it was seen, on the clock of the calls.
        key: What equal values have in common; see `key_of`.
        tensor: Returns the tensor, or None once it was freed, or if `swap` or `form` is set.
        version: The tensor's in-place version when it was seen.
        swap: Axes of the tensor that were exchanged before `key` was computed; None: none.
        form: How the tensor was cut before `key` was computed; None: not.
    """

    call: Call
    side: Side
    index: int | str | None
    time: int
    key: Key
    tensor: Callable[[], Tensor | None]
    version: int
    swap: Swap | None = None
    form: Form | None = None

    def point(self, form: Form | None = None) -> TapPoint:
        """Return where to read the same argument or result in later runs of the model.

        `form` is the form in which the model returns the state there, used if the event itself has none.
        """
        call = self.call
        return TapPoint(call.module, call.path, self.side, self.index, call.number, self.swap, self.form or form)


Seen = dict[Event, bool]  # an event at which a state was seen -> whether it was the same tensor or only an equal one


@dataclass(eq=False)
class Trace:
    """A record of one forward pass of a model: all module calls and events, in the order of time.

    Attributes:
        counts: Path -> how often the module was called.
    """

    calls: list[Call] = field(default_factory=list[Call])
    events: list[Event] = field(default_factory=list[Event])
    counts: Counter[str] = field(default_factory=Counter[str])

    def seen_as(self, state: Tensor) -> Seen:
        """Return the events whose tensor has the same key as `state` (see `key_of`): event -> whether it is `state`.

        A tensor that was changed in place since the event is not `state`. On the meta device, which has no values, only
        events of `state` itself are returned.
        """
        key = key_of(state)
        equal = [event for event in self.events if event.key == key]
        seen = {event: event.tensor() is state and event.version == state._version for event in equal}
        return {event: is_same for event, is_same in seen.items() if is_same or not state.is_meta}


@contextmanager
def trace_calls(
    model: nn.Module, *, keep: bool = False, axes: Container[int] = (3,), tokens: Iterable[int] = ()
) -> Generator[Trace]:
    """Record every module call of the model inside the `with` block; yield the trace, which fills during the block.

    Args:
        model: The model.
        keep: Copy every value, so that `Event.tensor` still returns it afterwards. False: events hold weak references.
        axes: The numbers of axes that a recorded tensor may have.
        tokens: Numbers of tokens in the inputs. A tensor with more tokens may have been padded inside the model, so it
            is also recorded without the additional tokens.
    """
    trace, open_calls = Trace(), list[Call]()

    def record(call: Call, side: Side, index: int | str | None, value: object, time: int) -> None:
        if isinstance(value, Tensor) and value.ndim in axes:
            trace.events.extend(_events(call, side, index, value.clone() if keep else value, time, tokens, keep))

    clock = itertools.count()
    paths = {module: path for path, module in by_path(model).items()}

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        path = paths[module]
        named = arguments(module, args, kwargs)
        call = Call(module, path, trace.counts[path], next(clock), mask=_mask(named), tokens=count_tokens(named))
        trace.counts[path] += 1
        trace.calls.append(call)
        open_calls.append(call)
        for index, value in (*enumerate(args), *kwargs.items()):
            record(call, "input", index, value, call.started)

    def after(module: nn.Module, _args: tuple[object, ...], output: object) -> None:
        call = open_calls.pop()
        while call.module is not module:  # an inner call raised, so that its hook never ran, and the model went on
            call = open_calls.pop()
        call.ended = next(clock)
        for index, value in _parts(output):
            record(call, "output", index, value, call.ended)

    with ExitStack() as handles:
        for module in paths:
            handles.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.enter_context(module.register_forward_hook(after))
        yield trace


def _mask(named: Mapping[str, object]) -> Tensor | None:
    mask = named.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _parts(output: object) -> Iterable[tuple[int | str | None, object]]:
    """Return pairs (position or key, value) for the output of a module; [(None, output)] for a single tensor.

    A ModelOutput gives the positions of its tuple, a mapping its keys. An output that is neither of these, nor a
    tensor, tuple or list, gives no pairs.
    """
    if isinstance(output, Tensor):
        return [(None, output)]
    to_tuple: Callable[[], tuple[object, ...]] | None = getattr(output, "to_tuple", None)
    if to_tuple is not None:  # a ModelOutput: its positions are those of the tuple that `return_dict=False` gives
        output = to_tuple()
    if isinstance(output, Mapping):
        return cast("Mapping[str, object]", output).items()
    return enumerate(cast("tuple[object, ...]", output)) if isinstance(output, (tuple, list)) else ()


def _events(
    call: Call, side: Side, index: int | str | None, value: Tensor, time: int, tokens: Iterable[int], keep: bool
) -> Iterator[Event]:
    """Yield the events for one argument or result of a call: the value itself, and its cut and transposed forms.

    Only values with 3 axes have such forms, and not on the meta device. Only floating-point tensors yield events.
    `tokens` are the numbers of tokens in the inputs, and `keep` says whether the first event holds the value itself;
    the other arguments are those of `Event`.
    """
    if not value.is_floating_point():  # no state
        return
    # a tensor without values costs nothing to keep, and has to be kept: it is recognised by identity
    held = (lambda: value) if keep or value.is_meta else weakref.ref(value)
    yield Event(call, side, index, time, key_of(value), held, value._version)
    if value.is_meta or value.ndim != 3:
        return
    for swap in _SWAPS:  # some models order the axes differently inside
        yield Event(call, side, index, time, key_of(value.transpose(*swap)), lambda: None, 0, swap)
    for count, form in product(tokens, _CUTS):
        if 0 < count < value.shape[1]:
            yield Event(call, side, index, time, key_of(form.state(value, count)), lambda: None, 0, form=form)


_CUTS = (Form("first"), Form("last"))
_SWAPS = ((1, 2), (0, 1))


def key_of(tensor: Tensor) -> Key:
    """Return a hashable key of a tensor: shape, dtype and a sample of its values. Equal tensors have equal keys."""
    kind = (tuple(tensor.shape), tensor.dtype)
    if tensor.is_meta:
        return kind
    steps = [max(1, size // samples) for size, samples in zip(tensor.shape, (2, 6, 6, 6), strict=False)]
    sample = tensor[tuple(slice(None, None, step) for step in steps)].to("cpu", torch.float64)
    return *kind, (sample + 0.0).numpy().tobytes()  # + 0.0 turns -0.0 into 0.0, which equals it but has other bytes
