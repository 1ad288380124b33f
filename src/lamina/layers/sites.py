"""Find where a block's attention and feed-forward network add to its state, by running the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Literal, NamedTuple, cast

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
_LENGTHS = 7, 11  # lengths of the two inputs


class _Added(NamedTuple):
    """An addition inside a block: the event of the added value, and the state to which it is added."""

    event: Event
    to: Tensor


def at_site(model: nn.Module, stack: LayerStack, site: Site) -> LayerStack:
    """Return a copy of a stack in which layer i is read at another place in block i, `stack.blocks[i - 1]`.

    With `site="attention"` or "ffn", layer i is the value that block i's attention or feed-forward network adds to the
    state (`attn_out` and `mlp_out` in TransformerLens), including a norm or dropout before the sum. Layer 0 does not
    change. With "output" the stack itself is returned.

    The first call for a stack runs the model on tiny inputs and leaves it unchanged. A module's output in a block is an
    added value if state + output equals, bit for bit, a value that a later module receives or returns. The attention's
    value is the first added value in which a token depends on the states of other tokens (a decoder's attention over
    the encoder does not count). The feed-forward network's value is the last added value in which no token depends on
    other tokens.

    Raises:
        UnsupportedModelError: If a value is not added as a module returned it, for example because it is scaled before;
            if the stack has no module per block, or its states have another form (see `Form`); if its blocks have no
            attention, or nothing but attention; if the model has no weights, or does not run on a tiny input.
    """
    if site == "output":
        return stack
    model = stack.tower or model
    known = _known.setdefault(model, {})
    if known.get(stack.name, (None, None))[0] != stack.blocks:
        with preserve_model(model):
            known[stack.name] = stack.blocks, _find_points(model, stack)
    points = known[stack.name][1][site]
    return replace(stack, points=(stack.points[0], *points))


_Points = dict[str, tuple[TapPoint, ...]]  # site -> tap point of each block
# model -> name of a stack -> (its blocks, which must stay the same, and its points)
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[object, _Points]]] = weakref.WeakKeyDictionary()


def _find_points(model: nn.Module, stack: LayerStack) -> _Points:
    """Run the model, and return site ("attention", "ffn") -> tap point of each block; for errors see `at_site`."""
    if not stack.blocks:
        raise _unsupported(model, "it has no module per block")
    if stack.is_converted:
        raise _unsupported(model, "its blocks pass on states that are not [batch, tokens, width]")
    if main_device(model).type == "meta":
        raise _unsupported(model, "it has no weights, and what is added is found by its values")
    traces = [_run(model, length) for length in _LENGTHS]
    first, second = ([[*_additions(trace, call)] for call in _block_calls(trace, stack)] for trace in traces)
    if [*map(len, first)] != [*map(len, second)] or len({*map(len, first)}) != 1 or len(first[0]) < 2:
        raise _unsupported(model, "what its blocks add to the states is not the output of modules in them")
    mixes = [_mixes_tokens(model, traces[0], _block_calls(traces[0], stack)[0], added) for added in first[0]]
    if True not in mixes or False not in mixes:
        raise _unsupported(model, "its blocks have no attention, or nothing beside it")
    chosen = {"attention": mixes.index(True), "ffn": len(mixes) - 1 - mixes[::-1].index(False)}
    return {site: tuple(added[number].event.point() for added in first) for site, number in chosen.items()}


def _unsupported(model: nn.Module, reason: str) -> UnsupportedModelError:
    hint = "Use site='output'."
    return UnsupportedModelError(op="tap", model_type=family_of(model), reason=reason, hint=hint)


def _run(model: nn.Module, length: int) -> Trace:
    """Run a model on a tiny input of `length` tokens, with torch seeded; return the trace, with copies of all values.

    Raises UnsupportedModelError if neither the model nor its backbone accepts the input.
    """
    inputs = probe_input(model, length, seed=length).inputs
    for target in dict.fromkeys((model, backbone(model))):
        try:
            with trace_calls(model, keep=True) as trace:
                torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
                target(**inputs)
        except Exception:  # a head may refuse the input, where the backbone does not
            continue
        return trace
    raise _unsupported(model, "it does not run on a small input")


def _block_calls(trace: Trace, stack: LayerStack) -> list[Call]:
    return [call for call in trace.calls if call.module in set(stack.blocks)][: stack.depth]


def _additions(trace: Trace, block: Call) -> Iterator[_Added]:
    """Yield the additions in a traced block, in order; `block` is the call of the block in `trace`.

    An addition is a module's output that, added to a state in the block, gives a value seen later in the block. If
    there is none, the two outputs that `_added_together` finds are yielded.
    """
    inside = [event for event in trace.events if block.started <= event.time <= block.ended and event.swap is None]
    start = next(event for event in inside if event.call is block and event.side == "input")
    shape = _value(start).shape
    inside = [event for event in inside if _value(event).shape == shape]
    outputs = {event.key: event for event in inside if event.side == "output" and event.call is not block}
    by_key: dict[Key, list[Event]] = {}
    for event in inside:
        by_key.setdefault(event.key, []).append(event)
    states, totals = {start.key: _value(start)}, set[Key]()
    for event in sorted(outputs.values(), key=lambda event: event.time):
        for state in reversed(list(states.values())):
            total = state + _value(event)
            key = key_of(total)
            later = [seen for seen in by_key.get(key, ()) if seen.time >= event.time]
            if later and key not in totals and torch.equal(_value(later[0]), total):
                states |= {**_computed_from(inside, key), key: total}
                totals.add(key)
                yield _Added(event, state)
                break
    if not totals:
        yield from _added_together(list(outputs.values()), start, inside[-1])


def _computed_from(inside: Sequence[Event], key: Key) -> dict[Key, Tensor]:
    """Return key of the output -> output, for each module in a block that received the value whose key is `key`.

    `inside` are the events of the block. In a post-norm block, the norm after an addition computes the state for the
    next addition.
    """
    receivers = [event.call for event in inside if event.side == "input" and event.key == key]
    return {event.key: _value(event) for event in inside if event.side == "output" and event.call in receivers}


def _added_together(outputs: Sequence[Event], start: Event, end: Event) -> Iterator[_Added]:
    """Yield two module outputs that, added to the state at `start`, give the value at `end`; nothing if none do.

    Blocks add in this way if their attention and feed-forward network read the same state.
    """
    state, result = _value(start), _value(end)
    for first, second in permutations(sorted(outputs, key=lambda event: event.time), 2):
        a, b = _value(first), _value(second)
        if torch.equal((a + b) + state, result) or torch.equal((state + a) + b, result):
            yield from (_Added(event, state) for event in sorted((first, second), key=lambda event: event.time))
            return


def _value(event: Event) -> Tensor:
    """Return the tensor of an event in a trace that was recorded with `keep=True`."""
    return cast("Tensor", event.tensor())


def _mixes_tokens(model: nn.Module, trace: Trace, block: Call, added: _Added) -> bool:
    """Return whether an addition in a block lets tokens depend on other tokens' states.

    `trace` is the run on the shorter input, `block` the call of the block in it, and `added` the addition. The model is
    run again (`_run`); the first token's state is changed before a module in the block reads it. The values that are
    added to the other tokens in both runs are compared.
    """
    key = key_of(added.to)
    reader = next(
        event
        for event in trace.events
        if event.side == "input" and event.key == key and event.call is not block and event.time >= block.started
    )
    count, index = 0, cast("int | str", reader.index)  # an argument always has a position or a name

    def change(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        nonlocal count
        count += 1
        if count - 1 != reader.call.number:
            return None
        values = {**dict(enumerate(args)), **kwargs}  # positional arguments have numbers as keys
        state = cast("Tensor", values[index]).clone()
        state[0, 0] += torch.linspace(-1, 1, state.shape[-1]).to(state)
        values[index] = state
        return tuple(values[number] for number in range(len(args))), {name: values[name] for name in kwargs}

    with reader.call.module.register_forward_pre_hook(change, with_kwargs=True):
        again = _run(model, _LENGTHS[0])
    same = (event for event in again.events if _place(event) == _place(added.event))
    return not torch.equal(_value(next(same))[0, 1:], _value(added.event)[0, 1:])


def _place(event: Event) -> tuple[object, ...]:
    """Return a key of an event; the same event in another run of the model has the same key."""
    return event.call.path, event.call.number, event.side, event.index, event.swap
