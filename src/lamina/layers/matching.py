"""Record all calls of modules in a run of a model, and match the hidden states that it returned to these calls."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn

from lamina.layers.hooks import arguments
from lamina.layers.stack import Form, Side, Swap, by_path, count_tokens, own_state
from lamina.layers.wrappers import has_adapters

Key = tuple[object, ...]


@dataclass(eq=False)
class Call:
    """One call of a module in a traced run. Calls and events share one clock, which counts 0, 1, 2, ...

    Attributes:
        path: Path of the `module`.
        number: Which of the module's calls in this run, from 0.
        started: Time at which the call began.
        ended: Time at which it returned; -1 until then.
        mask: Its argument `attention_mask`, if that is [batch, tokens].
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
        tensor: Returns the tensor, or None once it was freed.
        version: The tensor's in-place version when it was seen.
        swap: Axes of the tensor that were exchanged before `key` was computed.
        form: How the tensor was cut before `key` was computed.
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


Seen = dict[Event, bool]  # an event at which a state was seen -> whether it was the same tensor or only an equal one


@dataclass(eq=False)
class Trace:
    """A record of one forward pass of a model: all module calls and events, in the order of time.

    Attributes:
        counts: Path -> how often the module was called.
        copies: Copies of the values, if they are kept.
    """

    calls: list[Call] = field(default_factory=list[Call])
    events: list[Event] = field(default_factory=list[Event])
    counts: Counter[str] = field(default_factory=Counter[str])
    copies: list[Tensor] = field(default_factory=list[Tensor])

    def seen_as(self, state: Tensor) -> Seen:
        """Find a state in the run: return event -> True if the event's tensor is this very object, unchanged.

        False means another tensor with an equal key (see `key_of`). On the meta device, which has no values, only the
        same tensor counts.
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
            if keep:
                value = value.clone()
                trace.copies.append(value)
            trace.events.extend(_events(call, side, index, value, time, tokens))

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

    An output that is not a tensor, tuple, list, mapping or ModelOutput gives no pairs.
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
    call: Call, side: Side, index: int | str | None, value: Tensor, time: int, tokens: Iterable[int]
) -> Iterator[Event]:
    """Yield the events for one argument or result of a call: the value itself, and its other forms, cut or transposed.

    Nothing is yielded for integers. `side` is "input" or "output", `index` the position or key of the value, and `time`
    the time of the event. `tokens` are the numbers of tokens in the inputs.
    """
    if not value.is_floating_point():  # no state
        return
    # a tensor without values costs nothing to keep, and has to be kept: it is recognised by identity
    held = (lambda: value) if value.is_meta else weakref.ref(value)
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


MAX_PLACES = 6  # how many places are tried for one layer; most layers have one or two


def find_blocks(model: nn.Module, trace: Trace, seen: Sequence[Seen]) -> list[Call]:
    """Return the call of each block in a traced run: a module that receives state i - 1 and returns state i.

    In many models a norm follows the last block, so that no module returns the last state. The last block is then the
    module that stands next to the other blocks and receives the state before.

    Args:
        model: The model that was run.
        trace: The run.
        seen: For each layer the events at which its state was seen, from `Trace.seen_as`.

    Returns:
        One call per block, bottom first; [] if some layer has no such module, or these modules have different parents.
    """
    blocks: list[Call] = []
    last = len(seen) - 1
    for layer in range(1, last + 1):
        since = blocks[-1].ended if blocks else -1
        receiving = _calls(seen[layer - 1], "input", since)
        returning = _calls(seen[layer], "output", since)
        both = [call for call in receiving if call in returning]  # earliest first, outer modules before inner ones
        block = next((call for call in both if _in_list(model, call)), None)
        if block is None and layer == last and blocks:
            # if the last block returns its input, the norm after it matches too; so siblings of the blocks come first
            block = next((call for call in receiving if _parent(call.path) == _parent(blocks[-1].path)), None)
        block = block or next(iter(both), None)
        if block is None and layer == last and not blocks:
            block = _single_block(model, trace, receiving)
        if block is None:
            return []
        blocks.append(block)
    return blocks if len({_parent(block.path) for block in blocks}) == 1 else []


def rank_places(seen: Sequence[Seen], blocks: Sequence[Call]) -> list[list[Event]]:
    """Return, for each layer, up to `MAX_PLACES` events at which its state can be read, best first.

    Events with the very same tensor come before events with an equal one. The order within either group is:

    1. The output of the block itself (the input of the first block for layer 0).
    2. Outputs of other modules, the latest first, because in training the state is what comes after dropout.
    3. Inputs of other modules, the earliest first.
    4. Modules that return only after the whole stack has been computed, and modules of a head.

    Args:
        seen: For each layer the events at which its state was seen, from `Trace.seen_as`.
        blocks: The blocks' calls, from `find_blocks`.
    """
    begin = min((event.time for event in seen[0]), default=0)
    ranked: list[list[Event]] = []
    for layer, events in enumerate(seen):
        block = blocks[max(0, layer - 1)] if blocks else None
        around = [event.time for event in events if event.side == "output" and event.call.started < begin]
        end = min(around) if layer and around else math.inf
        best_first = sorted(events, key=lambda event: (not events[event], *_rank(event, layer, block, end)))
        ranked.append(best_first[:MAX_PLACES])
    return ranked


def _rank(event: Event, layer: int, block: Call | None, end: float) -> tuple[int, int]:
    """Return the sort key for `rank_places` of an event at which the state of `layer` was seen.

    `block` is the call of the layer's block (None: it has none), and `end` the time at which the whole stack has been
    computed.
    """
    if event.call is block and event.side == ("output" if layer else "input"):
        return 0, 0
    if event.time >= end:
        return 3, event.time
    return (1, -event.time) if event.side == "output" else (2, event.time)


def find_scope(trace: Trace, first: Event, last: Event, state: Tensor, *, reads_tokens: bool = False) -> Call:
    """Return the innermost call around all layers of a stack; its module must be called only once per run.

    The start of this call is the start of a pass over the stack. Calls that receive the attention mask are preferred.

    Args:
        trace: The traced run.
        first: The event at which the lowest layer's state was seen.
        last: The event at which the highest layer's state was seen.
        state: A hidden state. A mask counts if it has the batch and token axes of this state.
        reads_tokens: Whether the call must receive as many tokens as the state has.
    """
    once = (call for call in reversed(trace.calls) if trace.counts[call.path] == 1)  # reversed: inner calls first
    around = [call for call in once if call.started < first.time and call.ended >= last.time]
    around = [call for call in around if call.tokens == state.shape[1]] if reads_tokens else around
    masked = [call for call in around if call.mask is not None and call.mask.shape == state.shape[:2]]
    return (masked or around)[0]


def find_run(base: nn.Module, trace: Trace, last: Event) -> tuple[nn.Module, ...]:
    """Return the modules inside `base` that have weights or adapters and that the last layer may depend on.

    These are modules first called before the event `last`, that of the highest layer. A module that is never called is
    included if it is part of a module that is called, because other modules may use its weights (DeBERTa's relative
    positions, the projections of WavLM). The result is in the order of registration, because the order of calls can
    depend on the input (mixtures of experts).
    """
    started: dict[nn.Module, int] = {}
    for call in trace.calls:
        started.setdefault(call.module, call.started)
    return tuple(dict.fromkeys(_modules_used(base, started, last.time)))


def _modules_used(module: nn.Module, started: Mapping[nn.Module, int], end: int) -> Iterator[nn.Module]:
    """Yield `module` and the modules inside it that have weights of their own or adapters.

    Modules first called after time `end` are left out, with all modules inside them; modules that were never called are
    not. `started` is module -> time of its first call.
    """
    if started.get(module, -1) <= end:
        if own_state(module) or has_adapters(module):
            yield module
        for child in module.children():
            yield from _modules_used(child, started, end)


def _calls(seen: Seen, side: str, since: int) -> list[Call]:
    """Return the calls after time `since` that received (`side` "input") or returned ("output") a state, in order.

    `seen` has the events at which the state was seen.
    """
    calls = {event.call for event in seen if event.side == side and event.call.started > since}
    return sorted(calls, key=lambda call: call.started)


def _in_list(model: nn.Module, call: Call) -> bool:
    return isinstance(model.get_submodule(_parent(call.path)), (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _single_block(model: nn.Module, trace: Trace, receiving: Sequence[Call]) -> Call | None:
    """Find the block of a stack with one block: a module in a list, whose output another module reads.

    `receiving` are the calls that receive the state of layer 0. Returns None if there is no such module.
    """
    for call in receiving:
        returned = {event.key for event in trace.events if event.call is call and event.side == "output"}
        received = {event.key for event in trace.events if event.side == "input" and event.time > call.ended}
        if _in_list(model, call) and returned & received:
            return call
    return None
