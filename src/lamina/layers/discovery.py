"""The stacks of a model: found by running it on tiny inputs and matching the states it returns, once per model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from threading import get_ident
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError, check_known, first_line
from lamina.layers.adapters import adapted_layers, backbone
from lamina.layers.call_trace import Event, Trace, trace_calls
from lamina.layers.devices import MetaValues, main_device
from lamina.layers.hooks import watch
from lamina.layers.matching import find_blocks, find_run, find_scope, places
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import NoInputError, Probe, probe_input
from lamina.layers.roles import family_of
from lamina.layers.selectors import Selector, select
from lamina.layers.sites import Site, at_site
from lamina.layers.stack import LayerStack, TapPoint, alike, by_path
from lamina.layers.towers import towers_of
from lamina.layers.wrappers import is_bitsandbytes, uncompiled, unwrapped

_FIRST, _SECOND = 7, 11  # lengths of the two probe inputs: odd and different
_CLOSE = 1e-2  # some kernels of accelerators add in another order each time
_HIDDEN = {"main": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}
_ELSEWHERE = "Use a model whose layers all have one shape [batch, tokens, width], or one part of this model."
_PART = "Give one part of it, such as its text or vision model."

States = dict[str, tuple[Any, ...]]  # tensors, once their shapes are checked


def stacks(model: nn.Module) -> dict[str, LayerStack]:
    """Find a model's stacks and where each of their layers is seen.

    The first call runs the model on tiny inputs and leaves it as it was; the result is kept until the model's modules
    change. On the meta device (a config without weights) states are told by identity alone.

    Args:
        model: A transformers model, with or without a head. Of a compiled or DataParallel model it is the one inside.

    Returns:
        {"main": stack}, or {"encoder": stack, "decoder": stack}; of a model with a tower for each kind of input (CLIP)
        a stack of each that can be read, {"text": stack, "vision": stack}.

    Raises:
        UnsupportedModelError: If a layer cannot be found, or cannot be read for certain.
        ConfigError: If it is no model.
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = "a transformers model is needed, such as the first of what lamina.load returns"
        raise ConfigError(f"stacks: got a {type(model).__name__}; {what}.")
    if model not in _known or _known[model][0] != _state(model):
        discovered = _discover(model).values()
        paths = {module: path for path, module in by_path(model).items()}
        _known[model] = (_state(model), [_moved(stack, paths.__getitem__) for stack in discovered])
    modules = by_path(model)
    return {stack.name: _moved(stack, modules.__getitem__) for stack in _known[model][1]}


def default_stack(model: nn.Module, name: str | None = None, *, op: str = "stacks") -> LayerStack:
    """Get a stack by name; None is the only one, or the encoder.

    Raises:
        UnknownNameError: If there is none of that name.
        ConfigError: If none is named, and the model has towers.
        UnsupportedModelError: If the model's layers cannot be read.
    """
    return pick_stack(stacks(model), name, op=op)


def pick_stack(by_name: Mapping[str, LayerStack], name: str | None, *, op: str) -> LayerStack:
    """Get one of a model's stacks; see `default_stack`."""
    if name is None and all(stack.tower is not None for stack in by_name.values()):
        came = f"the model has a stack for each of {', '.join(by_name)}, and none is named"
        raise ConfigError(f"{op}: {came}. Give stack='{next(iter(by_name))}' or another of these.")
    name = name or ("main" if "main" in by_name else "encoder")
    check_known(op, [name], by_name, "stack")
    return by_name[name]


@contextmanager
def tap(
    model: nn.Module, layers: Selector = "all", stack: str | None = None, site: Site = "output"
) -> Generator[dict[int, Tensor]]:
    """Collect states as the model runs.

    Args:
        model: The model; what it returns stays the same, bit for bit. Compiled ones run uncompiled meanwhile.
        layers: Which layers, as a selector.
        stack: Name of the stack; None is the only one, or the encoder.
        site: "output", the layers' states; "attention" or "ffn", what that part of block i adds to its state, before
            the sum (layers 1 and up: the embeddings have neither). It is found by looking; see `layers.sites.at_site`.

    Yields:
        Layer -> its state `[batch, tokens, width]`, filled as the model runs and emptied when a new pass over the
        stack begins, so after `generate` it holds the last pass. States carry gradients if the pass does. To ask for a
        layer that was not seen is a ConfigError that says why.

    Raises:
        UnsupportedModelError: If the model's layers cannot be read, or not at that site.
        UnknownNameError: If it has no such stack, or there is no such site.
        LayerIndexError: If it has no such layer.
        ConfigError: If `layers` is no selector, or names layer 0 for a site inside the blocks; or the model has towers
            and no stack is named.
    """
    model = unwrapped(model)
    check_known("tap", [site], get_args(Site), "site")
    source = default_stack(model, stack, op="tap")
    chosen = select("1-" if layers == "all" and site != "output" else layers, source.layers, op="tap")
    if site != "output" and 0 in chosen:
        raise ConfigError(f"tap: layer 0 is the embeddings; they have no {site}. Use layers from 1.")
    source = at_site(model, source, site)
    states = _Tapped(source.name, chosen)
    latest: list[int] = []  # the thread of the latest pass, for tasks of this context that run the model at once

    def start(_args: object, _kwargs: object) -> None:
        latest[:] = [get_ident()]
        states.clear()

    def on_state(layer: int, state: Tensor) -> None:
        if latest == [get_ident()]:
            states[layer] = state

    with uncompiled(), watch(source, chosen, on_state, start):
        yield states


class _Tapped(dict[int, Tensor]):
    """What `tap` yields; says why a layer is not there."""

    def __init__(self, stack: str, layers: Sequence[int]) -> None:
        super().__init__()
        self._stack, self._layers = stack, layers

    def __missing__(self, layer: int) -> Tensor:
        if layer not in self._layers:
            known = ", ".join(map(str, self._layers))
            raise ConfigError(f"tap: layer {layer!r} is not tapped; those that are: {known}.")
        ran = f"no pass of the stack '{self._stack}' came to it in this thread or task while it was tapped"
        raise ConfigError(f"tap: layer {layer} was not seen; {ran}.")


def same_stacks(model: nn.Module, copy: nn.Module) -> None:
    """Take what was found for a model to hold for a copy with the same modules at the same paths."""
    stacks(model)
    _known[copy] = (_state(copy), _known[model][1])


def _state(model: nn.Module) -> tuple[object, ...]:
    """What must stay for the stacks to hold: the modules, whether there are weights, what the config says of layers."""
    config: Any = model.config
    modules = tuple(map(weakref.ref, model.modules()))
    return modules, main_device(model).type == "meta", *(getattr(config, name, None) for name in _SETTINGS)


_SETTINGS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "tie_last_hidden_states")
_Known = tuple[tuple[object, ...], list[LayerStack]]  # paths in place of modules, so as not to hold on to the model
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def _moved(stack: LayerStack, move: Callable[[Any], Any]) -> LayerStack:
    """The stack with something in place of each of its modules."""
    return replace(
        stack,
        blocks=tuple(map(move, stack.blocks)),
        points=tuple(replace(point, module=move(point.module)) for point in stack.points),
        scope=move(stack.scope),
        run=tuple(map(move, stack.run)),
        tower=None if stack.tower is None else move(stack.tower),
    )


def _discover(model: nn.Module) -> dict[str, LayerStack]:
    try:
        with preserve_model(model):
            return _find(model)
    except _UnreadableError as error:
        if by_tower := _of_towers(model):
            return by_tower
        family = family_of(model)
        raise UnsupportedModelError(op="stacks", model_type=family, reason=error.reason, hint=error.hint) from error


def _of_towers(model: nn.Module) -> dict[str, LayerStack]:
    """The stacks of the towers that can be read, each named after its tower."""
    by_name: dict[str, LayerStack] = {}
    paths = {module: path for path, module in by_path(model).items()}
    for name, tower in towers_of(model).items():
        try:
            (stack,) = stacks(tower).values()
        except (UnsupportedModelError, ValueError):  # it cannot be read, or has two stacks
            continue
        points = tuple(replace(point, path=paths[point.module]) for point in stack.points)
        by_name[name] = replace(stack, name=name, points=points, scope_path=paths[stack.scope], tower=tower)
    return by_name


class _UnreadableError(Exception):
    def __init__(self, reason: str, hint: str = _ELSEWHERE) -> None:
        self.reason, self.hint = reason, hint
        super().__init__(reason)


def _find(model: nn.Module) -> dict[str, LayerStack]:
    """See where each state is, check it on another input, rehearse a plain pass."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise _UnreadableError("it is no transformers model: it has no config", "Load it with AutoModel.")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise _UnreadableError("its adapter learns a prompt, which is no part of its layers", "Use another, as LoRA.")
    if any(layer.disable_adapters and getattr(layer, "merged", False) for layer in adapted_layers(model)):
        raise _UnreadableError(
            "its adapters are merged and disabled", "Call unmerge_adapter() of the PEFT model first."
        )
    if is_bitsandbytes(model):
        what = "its weights are packed by bitsandbytes; its kernels compute a token differently alone than among others"
        raise _UnreadableError(f"{what}, and no test of Lamina runs them", "Load it in bfloat16.")
    try:
        first, second = probe_input(model, _FIRST, seed=1), probe_input(model, _SECOND, seed=2)
    except NoInputError as error:
        raise _UnreadableError(str(error), _PART) from error
    has_weights = main_device(model).type != "meta"
    with nullcontext() if has_weights else MetaValues():
        trace, target, states = _first_run(model, [first] if has_weights else [first, first.without_mask()])
    sights = {name: _sight(model, name, entries, trace, first.rows) for name, entries in states.items()}
    if has_weights:
        chosen, again = _verify(target, second, sights)
    else:  # states are told by identity alone
        chosen, again = {name: [events[0] for events in sight.places] for name, sight in sights.items()}, None
    by_name = {name: _build(model, name, sight, chosen[name], trace) for name, sight in sights.items()}
    if again is not None:
        _rehearse(target, second, by_name, again)
    return by_name


class _Sight(NamedTuple):
    """One stack on the first run: a state of it, its blocks, and for each layer the events where it can be read."""

    state: Tensor
    blocks: tuple[nn.Module, ...]
    places: list[list[Event]]


def _first_run(model: nn.Module, probes: Sequence[Probe]) -> tuple[Trace, nn.Module, States]:
    """Run the model; if its head refuses the input, the backbone alone."""
    failures: list[_UnreadableError] = []
    targets = dict.fromkeys((model, backbone(model)))
    for target, probe in product(targets, probes):
        try:
            with trace_calls(model) as trace:
                return trace, target, _run_for_states(target, probe)
        except _UnreadableError as error:
            failures.append(error)
    raise failures[0]


def _run(target: nn.Module, probe: Probe, **options: bool) -> object:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    try:
        return target(**probe.inputs, **options)
    except Exception as error:
        reason = f"it does not run on a small input ({type(error).__name__}: {first_line(error)})"
        raise _UnreadableError(reason, _way_out(target)) from error


def _way_out(target: nn.Module) -> str:
    if main_device(target).type == "meta":
        return "Load its weights first."
    parts = [f"model.{name}" for name, child in target.named_children() if hasattr(child, "config")]
    return f"Give one part of it: {', '.join(parts)}." if parts else "Check its config."


def _run_for_states(target: nn.Module, probe: Probe) -> States:
    output = _run(target, probe, output_hidden_states=True, return_dict=True)
    states = {name: getattr(output, key, None) for name, key in _HIDDEN.items()}
    by_stack: States = {name: tuple(values) for name, values in states.items() if values is not None}
    if "main" in by_stack:
        return {"main": by_stack["main"]}
    if set(by_stack) != {"encoder", "decoder"}:
        raise _UnreadableError("it returns no hidden_states of its own", _PART)
    return by_stack


def _sight(model: nn.Module, name: str, states: tuple[Any, ...], trace: Trace, rows: int) -> _Sight:
    _check_shapes(name, states, rows)
    seen = [trace.seen_as(state) for state in states]
    for layer, events in enumerate(seen):
        if not events:
            hint = "Load its weights first." if states[layer].is_meta else _ELSEWHERE
            raise _lost(name, layer, "no module takes or gives it as it is returned; it is changed in between", hint)
    calls = find_blocks(model, trace, seen)
    return _Sight(states[0], tuple(call.module for call in calls), places(seen, calls))


def _check_shapes(name: str, states: tuple[object, ...], rows: int) -> None:
    if len(states) < 2:
        raise _UnreadableError(f"its {name} stack returns {len(states)} hidden states; there must be 2 at least")
    shape: tuple[int, ...] | None = None
    for layer, state in enumerate(states):
        if not isinstance(state, Tensor):
            raise _lost(name, layer, f"it is a {type(state).__name__}, not one tensor")
        shape = shape or tuple(state.shape)
        if state.ndim != 3 or state.shape[0] != rows:
            raise _lost(name, layer, f"its shape is {tuple(state.shape)}, which is not [batch, tokens, width]")
        if tuple(state.shape) != shape:
            raise _lost(name, layer, f"its shape is {tuple(state.shape)}, and that of layer 0 is {shape}")
        if not state.is_meta and bool(state.isnan().any()):
            raise _lost(name, layer, "it holds NaN on a small input", "Check the weights, or use a wider dtype.")


def _lost(name: str, layer: int, why: str, hint: str = _ELSEWHERE) -> _UnreadableError:
    return _UnreadableError(f"layer {layer} of its {name} stack cannot be matched to a module: {why}", hint)


def _verify(target: nn.Module, probe: Probe, sights: Mapping[str, _Sight]) -> tuple[dict[str, list[Event]], States]:
    """Run on another input and keep, for each layer, the best place where exactly the returned state is seen."""
    events = [event for sight in sights.values() for events in sight.places for event in events]
    heard: dict[Event, tuple[Tensor, Tensor]] = {}

    def on_state(number: int, value: Tensor) -> None:
        heard[events[number]] = value, value.clone()  # what is changed in place later is no state

    candidates = LayerStack("candidates", 0, (), tuple(map(_point, events)), target, "", ())
    with watch(candidates, range(len(events)), on_state):
        states = _run_for_states(target, probe)
    chosen: dict[str, list[Event]] = {}
    for name, sight in sights.items():
        _check_shapes(name, states[name], probe.rows)
        if len(states[name]) != len(sight.places):
            raise _UnreadableError(f"its {name} stack returns another count of hidden states on another input")
        chosen[name] = []
        for layer, (ranked, state) in enumerate(zip(sight.places, states[name], strict=True)):
            since = chosen[name][-1].time if chosen[name] else -1
            later = (event for event in ranked if event.time >= since and event in heard)
            event = next((event for event in later if all(torch.equal(value, state) for value in heard[event])), None)
            if event is None:
                raise _lost(name, layer, "where it seemed to be, another input shows another value")
            chosen[name].append(event)
    return chosen, states


def _point(event: Event) -> TapPoint:
    return TapPoint(event.call.module, event.call.path, event.side, event.index, event.call.number, event.swap)


def _build(model: nn.Module, name: str, sight: _Sight, events: list[Event], trace: Trace) -> LayerStack:
    scope = find_scope(trace, events[0], events[-1], sight.state)
    base = backbone(model)
    run = find_run(base if scope.module in set(base.modules()) else model, trace, events[-1])
    points = tuple(map(_point, events))
    return LayerStack(name, sight.state.shape[-1], sight.blocks, points, scope.module, scope.path, run)


def _rehearse(target: nn.Module, probe: Probe, by_name: Mapping[str, LayerStack], states: States) -> None:
    """Run as users do, without asking for hidden states, and compare."""
    heard: dict[str, dict[int, Tensor]] = {name: {} for name in by_name}
    with ExitStack() as exits:
        for name, stack in by_name.items():
            exits.enter_context(watch(stack, range(stack.layers), heard[name].__setitem__))
        _run(target, probe)
    for name, stack in by_name.items():
        if list(heard[name]) != list(range(stack.layers)):
            raise _UnreadableError(f"a plain pass shows layers {list(heard[name])} of its {name} stack")
        for layer, value in heard[name].items():
            if not alike(value, states[name][layer], _CLOSE):
                raise _lost(name, layer, "a plain pass shows another value there")
