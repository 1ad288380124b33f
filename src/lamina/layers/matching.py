"""Match the hidden states that a model returned to the module calls of a traced run (`call_trace.Trace`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from lamina.layers.adapters import has_adapters
from lamina.layers.call_trace import Call, Event, Seen, Trace
from lamina.layers.stack import own_state

MAX_PLACES = 6  # how many places are tried for one layer; most layers have one or two


def find_blocks(model: nn.Module, trace: Trace, seen: Sequence[Seen]) -> list[Call]:
    """Return the call of each block in a traced run: a module that receives state i - 1 and returns state i.

    In many models a norm follows the last block, so that no module returns the last state. The last block is then the
    module that stands next to the other blocks and receives the state before; for a single block see `_single_block`.

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
    """Return an event's sort key for `rank_places`, smallest first; the state of `layer` was seen at the event.

    `block` is the call of the layer's block, or of the first block for layer 0. None: no blocks were found. `end` is
    the time at which the whole stack has been computed; infinite for layer 0, or if it is not known.
    """
    if event.call is block and event.side == ("output" if layer else "input"):
        return 0, 0
    if event.time >= end:
        return 3, event.time
    return (1, -event.time) if event.side == "output" else (2, event.time)


def find_scope(trace: Trace, first: Event, last: Event, state: Tensor, *, reads_tokens: bool = False) -> Call:
    """Return the innermost call around all layers of a stack, among the modules that are called only once per run.

    The start of this call is the start of a pass over the stack. Calls that receive the attention mask are preferred.
    Raises IndexError if `reads_tokens` leaves no call.

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

    These are modules first called before `last`, the highest layer's event in `trace`. A module that is never called is
    included if it is part of a module that is called, which may use its weights. The result is in the order of
    registration, because the order of calls can depend on the input (mixtures of experts).
    """
    started: dict[nn.Module, int] = {}
    for call in trace.calls:
        started.setdefault(call.module, call.started)
    return tuple(dict.fromkeys(_modules_used(base, started, last.time)))


def _modules_used(module: nn.Module, started: Mapping[nn.Module, int], end: int) -> Iterator[nn.Module]:
    """Yield `module` and the modules inside it that have weights of their own or adapters.

    A module first called after time `end` is left out, with all modules inside it. A module that was never called is
    included. `started` is module -> time of its first call.
    """
    if started.get(module, -1) <= end:
        if own_state(module) or has_adapters(module):
            yield module
        for child in module.children():
            yield from _modules_used(child, started, end)


def _calls(seen: Seen, side: str, since: int) -> list[Call]:
    """Return, in order, the calls begun after time `since` that received a state (`side` "input") or returned it.

    `seen` has the events at which the state was seen.
    """
    calls = {event.call for event in seen if event.side == side and event.call.started > since}
    return sorted(calls, key=lambda call: call.started)


def _in_list(model: nn.Module, call: Call) -> bool:
    return isinstance(model.get_submodule(_parent(call.path)), (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _single_block(model: nn.Module, trace: Trace, receiving: Sequence[Call]) -> Call | None:
    """Return the call of a stack's only block in `trace`, a traced run of `model`; None if there is none.

    It is the first call in `receiving`, the calls that receive the state of layer 0 in their order, whose module is in
    a list of modules, and whose output is the input of a later call.
    """
    for call in receiving:
        returned = {event.key for event in trace.events if event.call is call and event.side == "output"}
        received = {event.key for event in trace.events if event.side == "input" and event.time > call.ended}
        if _in_list(model, call) and returned & received:
            return call
    return None
