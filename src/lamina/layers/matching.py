"""Match the states a model returned to the modules they came out of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from lamina.layers.adapters import has_adapters
from lamina.layers.call_trace import Call, Event, Seen, Trace
from lamina.layers.stack import own_state

MOST = 6  # how many places are tried for one layer; one or two are the rule


def find_blocks(model: nn.Module, trace: Trace, seen: Sequence[Seen]) -> list[Call]:
    """Find the call of each block, bottom first: state i - 1 goes in, state i comes out. Empty without such modules.

    A last block whose output is normalised before it is returned is known by its place beside the others.
    """
    blocks: list[Call] = []
    last = len(seen) - 1
    for layer in range(1, last + 1):
        since = blocks[-1].ended if blocks else -1
        takes = _calls(seen[layer - 1], "input", since)
        gives = _calls(seen[layer], "output", since)
        both = [call for call in takes if call in gives]  # the earliest, of those the outermost, in a list if any is
        block = next((call for call in both if _in_list(model, call)), next(iter(both), None))
        if block is None and layer == last:
            beside = (call for call in takes if blocks and _parent(call.path) == _parent(blocks[-1].path))
            block = next(beside, None) if blocks else _single(model, trace, takes)
        if block is None:
            return []
        blocks.append(block)
    return blocks if len({_parent(block.path) for block in blocks}) == 1 else []


def places(seen: Sequence[Seen], blocks: Sequence[Call]) -> list[list[Event]]:
    """For each layer, the events at which it can be read, best first.

    Where a state was seen as the same tensor, equal ones count only after those. The block comes first. Without one,
    the last module to pass the state on, since dropout is invisible here but not in training; then the first that
    takes it in; last the modules around the whole stack, which return only after it, and what a head does with it.
    """
    begin = min((event.time for event in seen[0]), default=0)
    ranked: list[list[Event]] = []
    for layer, events in enumerate(seen):
        block = blocks[max(0, layer - 1)] if blocks else None
        around = [event.time for event in events if event.side == "output" and event.call.started < begin]
        end = min(around) if layer and around else math.inf
        ranked.append(sorted(events, key=lambda event: (not events[event], *_rank(event, layer, block, end)))[:MOST])
    return ranked


def _rank(event: Event, layer: int, block: Call | None, end: float) -> tuple[int, int]:
    if event.call is block and event.side == ("output" if layer else "input"):
        return 0, 0
    if event.time >= end:
        return 3, event.time
    return (1, -event.time) if event.side == "output" else (2, event.time)


def find_scope(trace: Trace, first: Event, last: Event, state: Tensor) -> Call:
    """Find the closest call around all layers that happens once per pass; one with the mask, if any has it."""
    once = (call for call in reversed(trace.calls) if trace.counts[call.path] == 1)  # calls begin in order
    around = [call for call in once if call.started < first.time and call.ended >= last.time]
    masked = [call for call in around if call.mask is not None and call.mask.shape == state.shape[:2]]
    return (masked or around)[0]


def find_run(base: nn.Module, trace: Trace, last: Event) -> tuple[nn.Module, ...]:
    """List the modules with weights of their own, or with adapters, that take part up to the last layer.

    Modules that are never called count too where they lie inside one that is: their weights are used from outside
    (DeBERTa's relative positions, the projections of WavLM). The order is that of registration, because the order of
    calls can depend on the input (experts).
    """
    started: dict[nn.Module, int] = {}
    for call in trace.calls:
        started.setdefault(call.module, call.started)
    return tuple(dict.fromkeys(_taking_part(base, started, last.time)))


def _taking_part(module: nn.Module, started: Mapping[nn.Module, int], end: int) -> Iterator[nn.Module]:
    if started.get(module, -1) <= end:
        if own_state(module) or has_adapters(module):
            yield module
        for child in module.children():
            yield from _taking_part(child, started, end)


def _calls(seen: Seen, side: str, since: int) -> list[Call]:
    calls = {event.call for event in seen if event.side == side and event.call.started > since}
    return sorted(calls, key=lambda call: call.started)


def _in_list(model: nn.Module, call: Call) -> bool:
    return isinstance(model.get_submodule(_parent(call.path)), (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _single(model: nn.Module, trace: Trace, takes: Sequence[Call]) -> Call | None:
    """The single block of a stack with one: in a list of modules, and another module takes what it gives."""
    for call in takes:
        given = {event.key for event in trace.events if event.call is call and event.side == "output"}
        taken = {event.key for event in trace.events if event.side == "input" and event.time > call.ended}
        if _in_list(model, call) and given & taken:
            return call
    return None
