"""Where a block's attention and its feed-forward network add to the states, found by looking."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from lamina.errors import UnsupportedModelError
from lamina.layers.adapters import backbone
from lamina.layers.call_trace import Call, Event, Key, Trace, key_of, trace_calls
from lamina.layers.devices import main_device
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.roles import family_of
from lamina.layers.stack import LayerStack, TapPoint

Site = Literal["output", "attention", "ffn"]
_LENGTHS = 7, 11  # of the two inputs


class _Added(NamedTuple):
    """What a part of a block adds, and the state that it is added to."""

    event: Event
    to: Tensor


def at_site(model: nn.Module, stack: LayerStack, site: Site) -> LayerStack:
    """The stack, seen at another place of its blocks: layer i is what block i adds there; layer 0 stays as it is.

    A block adds to its state what its attention returns, and then what its feed-forward network does (TransformerLens
    calls these `attn_out` and `mlp_out`); a norm or dropout that comes before the sum is part of it. The model is run
    on two tiny inputs, and every output of a module inside a block is tried: added to the state before it, it must
    give, bit for bit, a value that a later module is given or gives. Of what is added so, attention is the first whose
    tokens depend on the states of other tokens (a decoder's other attention, over the encoder, does not), and the
    network is the last whose tokens do not.

    Raises:
        UnsupportedModelError: If no modules' outputs are what a block adds, as where they are scaled in between.
    """
    if site == "output":
        return stack
    model = stack.tower or model
    found = _known.setdefault(model, {})
    if found.get(stack.name, (None, None))[0] != stack.blocks:
        with preserve_model(model):
            found[stack.name] = stack.blocks, _find(model, stack)
    points = found[stack.name][1][site]
    return replace(stack, points=(stack.points[0], *points))


_Points = dict[str, tuple[TapPoint, ...]]
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[object, _Points]]] = weakref.WeakKeyDictionary()


def _find(model: nn.Module, stack: LayerStack) -> _Points:
    if not stack.blocks:
        raise _refused(model, "it has no module per block")
    if main_device(model).type == "meta":
        raise _refused(model, "it has no weights, and what is added is told by its values")
    first, second = (_added_by_block(model, stack, length) for length in _LENGTHS)
    if [*map(len, first)] != [*map(len, second)] or len({*map(len, first)}) != 1 or len(first[0]) < 2:
        raise _refused(model, "what its blocks add to the states is returned by no modules of theirs")
    mixes = [_mixes(model, stack, added) for added in range(len(first[0]))]
    if True not in mixes or False not in mixes:
        raise _refused(model, "its blocks have no attention, or nothing beside it")
    chosen = {"attention": mixes.index(True), "ffn": len(mixes) - 1 - mixes[::-1].index(False)}
    return {site: tuple(_point(added[number].event) for added in first) for site, number in chosen.items()}


def _refused(model: nn.Module, reason: str) -> UnsupportedModelError:
    hint = "Use site='output'."
    return UnsupportedModelError(op="tap", model_type=family_of(model), reason=reason, hint=hint)


def _point(event: Event) -> TapPoint:
    return TapPoint(event.call.module, event.call.path, event.side, event.index, event.call.number)


def _run(model: nn.Module, length: int) -> Trace:
    inputs = probe_input(model, length, seed=length).inputs
    for target in dict.fromkeys((model, backbone(model))):
        try:
            with trace_calls(model, keep=True) as trace:
                torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
                target(**inputs)
        except Exception:  # a head may refuse the input, where the backbone does not
            continue
        return trace
    raise _refused(model, "it does not run on a small input")


def _added_by_block(model: nn.Module, stack: LayerStack, length: int) -> list[list[_Added]]:
    trace = _run(model, length)
    return [list(_added(trace, call)) for call in _block_calls(trace, stack)]


def _block_calls(trace: Trace, stack: LayerStack) -> list[Call]:
    return [call for call in trace.calls if call.module in set(stack.blocks)][: stack.depth]


def _added(trace: Trace, block: Call) -> Iterator[_Added]:
    """What a block adds, in order."""
    inside = [event for event in trace.events if block.started <= event.time <= block.ended and event.swap is None]
    start = next(event for event in inside if event.call is block and event.side == "input")
    shape = _value(start).shape
    inside = [event for event in inside if _value(event).shape == shape]
    outputs = {event.key: event for event in inside if event.side == "output" and event.call is not block}
    given: dict[Key, list[Event]] = {}
    for event in inside:
        given.setdefault(event.key, []).append(event)
    states, totals = {start.key: _value(start)}, set[Key]()
    for event in sorted(outputs.values(), key=lambda event: event.time):
        for state in reversed(list(states.values())):
            total = state + _value(event)
            key = key_of(total)
            later = [seen for seen in given.get(key, ()) if seen.time >= event.time]
            if later and key not in totals and torch.equal(_value(later[0]), total):
                states |= {**_taking(inside, key), key: total}
                totals.add(key)
                yield _Added(event, state)
                break
    if not totals:
        yield from _side_by_side(list(outputs.values()), start, inside[-1])


def _taking(inside: Sequence[Event], key: Key) -> dict[Key, Tensor]:
    """What modules make of a value alone: a norm after the addition gives the state that is added to next."""
    takers = [event.call for event in inside if event.side == "input" and event.key == key]
    return {event.key: _value(event) for event in inside if event.side == "output" and event.call in takers}


def _side_by_side(outputs: Sequence[Event], start: Event, end: Event) -> Iterator[_Added]:
    """Two that are added in one go, where attention and network read the same state."""
    state, result = _value(start), _value(end)
    for one, other in permutations(sorted(outputs, key=lambda event: event.time), 2):
        a, b = _value(one), _value(other)
        if torch.equal((a + b) + state, result) or torch.equal((state + a) + b, result):
            yield from (_Added(event, state) for event in sorted((one, other), key=lambda event: event.time))
            return


def _value(event: Event) -> Tensor:
    return cast("Tensor", event.tensor())


def _mixes(model: nn.Module, stack: LayerStack, number: int) -> bool:
    """Whether what the first block adds at one place depends, for a token, on the states of other tokens.

    The state of the first token is changed for the module that reads it; the others are looked at.
    """
    trace = _run(model, _LENGTHS[0])
    block = _block_calls(trace, stack)[0]
    added = list(_added(trace, block))[number]
    key = key_of(added.to)
    reader = next(
        event
        for event in trace.events
        if event.side == "input" and event.key == key and event.call is not block and event.time >= block.started
    )
    count, index = 0, reader.index

    def change(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        count += 1
        if count - 1 != reader.call.number:
            return None
        values: Any = list(args) if isinstance(index, int) else kwargs
        changed = cast("Tensor", values[index]).clone()
        changed[0, 0] += torch.linspace(-1, 1, changed.shape[-1]).to(changed)
        values[index] = changed
        return (tuple(values), kwargs) if values is not kwargs else (args, kwargs)

    with reader.call.module.register_forward_pre_hook(change, with_kwargs=True):
        again = _run(model, _LENGTHS[0])
    same = (event for event in again.events if _place(event) == _place(added.event))
    return not torch.equal(_value(next(same))[0, 1:], _value(added.event)[0, 1:])


def _place(event: Event) -> tuple[object, ...]:
    return event.call.path, event.call.number, event.side, event.index, event.swap
