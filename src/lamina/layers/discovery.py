"""Find the stacks of a model: run it on tiny inputs (probes), and match the returned hidden states to its modules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from threading import get_ident
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError, check_known, first_line
from lamina.layers.adapters import adapted_layers, backbone
from lamina.layers.call_trace import Event, Trace, trace_calls
from lamina.layers.devices import MetaValues, main_device
from lamina.layers.hooks import watch
from lamina.layers.matching import find_blocks, find_run, find_scope, rank_places
from lamina.layers.preserve import preserve_model, uncompiled
from lamina.layers.probe_input import NoInputError, Probe, prefer_full, probe_input
from lamina.layers.recorded import RecordedModel
from lamina.layers.roles import family_of
from lamina.layers.selectors import Selector, is_all, select
from lamina.layers.sites import Site, at_site
from lamina.layers.stack import LayerStack, alike, by_path, towers_of
from lamina.layers.state_forms import Form, first_tensor, forms_of, state_of
from lamina.layers.wrappers import checked_model, is_bitsandbytes, unwrapped

_FIRST, _SECOND = 7, 11  # lengths of the two probe inputs: odd and different, so that no other axis has that size
_CLOSE = 1e-2  # relative tolerance: some kernels of accelerators sum in another order each time
_HIDDEN = {"main": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}
_ELSEWHERE = "Use a model whose layers all have one shape [batch, tokens, width], or one part of this model."
_WEIGHTS = "Load its weights first."
_PART = "Give one part of it, such as its text or vision model."

States = dict[str, tuple[Tensor, ...]]  # name of a stack -> its hidden states


def stacks(model: nn.Module) -> dict[str, LayerStack]:
    """Find the stacks of a model, and for each layer the module call that produces its hidden state.

    The first call runs the model on tiny inputs and leaves it unchanged. The result is cached until the model's modules
    or number of layers change. On the meta device (no weights) states are matched by identity only, not by value.

    Args:
        model: A transformers model, with or without a head. Wrappers (torch.compile, DataParallel) are ignored.

    Returns:
        Name -> stack: {"main": stack} for a model with one stack, {"encoder": stack, "decoder": stack} for an
        encoder-decoder. A model with a tower for each kind of input (CLIP) has one stack per tower that can be read:
        {"text": stack, "vision": stack}.

    Raises:
        UnsupportedModelError: If a layer cannot be matched to a module with certainty; if `model` has no config, or
            runs on no tiny input that can be made; if its weights are packed by bitsandbytes; if its adapters (PEFT)
            learn a prompt, or are merged and disabled.
        ConfigError: If `model` is not a model (a path or a bank, for example), or was compiled by torch.jit.
    """
    model = checked_model(model, "stacks")
    if model not in _known or _known[model][0] != _signature(model):
        discovered = _discover(model).values()
        paths = {module: path for path, module in by_path(model).items()}
        _known[model] = (_signature(model), [_map_modules(stack, paths.__getitem__) for stack in discovered])
    modules = by_path(model)
    return {stack.name: _map_modules(stack, modules.__getitem__) for stack in _known[model][1]}


def default_stack(model: nn.Module, name: str | None = None, *, op: str = "stacks") -> LayerStack:
    """Return one stack of a model.

    Args:
        model: A transformers model; see `stacks`.
        name: Name of the stack. None: the only one, or the encoder.
        op: The operation that error messages begin with.

    Raises:
        UnknownNameError: If the model has no stack of that name.
        ConfigError: If `model` is not a model, or `name` is None and the model has towers.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    return pick_stack(stacks(checked_model(model, op)), name, op=op)


def pick_stack(by_name: Mapping[str, LayerStack], name: str | None, *, op: str) -> LayerStack:
    """Return one of the stacks in `by_name`. `name` and `op` are those of `default_stack`.

    Raises UnknownNameError for an unknown name, and ConfigError if `name` is None and all stacks belong to towers.
    """
    if name is None and all(stack.tower is not None for stack in by_name.values()):
        problem = f"the model has a stack for each of {', '.join(by_name)}, and none is named"
        raise ConfigError(f"{op}: {problem}. Give stack='{next(iter(by_name))}' or another of these.")
    if name is None:
        name = "main" if "main" in by_name else "encoder"
    check_known(op, [name], by_name, "stack")
    return by_name[name]


@contextmanager
def tap(
    model: nn.Module, layers: Selector = "all", stack: str | None = None, site: Site = "output"
) -> Generator[dict[int, Tensor]]:
    """Collect hidden states while the model is called inside the `with` block.

    Args:
        model: The model. Its outputs stay the same, bit for bit. Compiled models, this one and all others in the
            process, run uncompiled inside the `with` block, and give the outputs of the uncompiled model.
        layers: Layer selector: which layers to collect. "all" leaves layer 0 out if `site` is not "output".
        stack: Name of the stack. None: the only one, or the encoder.
        site: Where in block i to read layer i. "output": the hidden state after the block. "attention" or "ffn": what
            that part of the block adds to the state. The embeddings (layer 0) have neither. See `layers.sites.at_site`.

    Yields:
        A dict from layer to state `[batch, tokens, width]`, not copied. It fills while the model is called in this
        thread or task, and is emptied when the next pass over the stack begins, so after `generate` it holds the last
        pass. States carry gradients if the pass does. Looking up a layer that was not collected raises a ConfigError
        that says why.

    Raises:
        UnsupportedModelError: If the model's layers cannot be found, or not at that site.
        UnknownNameError: If the stack or the site does not exist.
        LayerIndexError: If a layer does not exist.
        ConfigError: If `model` is not a model; if `layers` is no valid selector, or names layer 0 and `site` is not
            "output"; if the model has towers and `stack` is None.
    """
    model = checked_model(model, "tap")
    check_known("tap", [site], get_args(Site), "site")
    source = default_stack(model, stack, op="tap")
    chosen = select("1-" if site != "output" and is_all(layers) else layers, source.layers, op="tap")
    if site != "output" and 0 in chosen:
        raise ConfigError(f"tap: layer 0 is the embeddings; they have no {site}. Use layers from 1.")
    source = at_site(model, source, site)
    states = _TappedStates(source.name, chosen)
    latest: list[int] = []  # id of the thread whose pass began last: tasks of one context may run the model in parallel

    def start(_args: object, _kwargs: object) -> None:
        latest[:] = [get_ident()]
        states.clear()

    def on_state(layer: int, state: Tensor) -> None:
        if latest == [get_ident()]:
            states[layer] = state

    with uncompiled(), watch(source, chosen, on_state, start):
        yield states


class _TappedStates(dict[int, Tensor]):
    """The dict layer -> hidden state that `tap` yields; looking up a missing layer raises a ConfigError."""

    def __init__(self, stack: str, layers: Sequence[int]) -> None:
        super().__init__()
        self._stack, self._layers = stack, layers

    def __missing__(self, layer: int) -> Tensor:
        if layer not in self._layers:
            known = ", ".join(map(str, self._layers))
            raise ConfigError(f"tap: layer {layer!r} is not tapped; the tapped layers are {known}.")
        problem = f"layer {layer} was not seen; no pass of the stack '{self._stack}' has reached it"
        raise ConfigError(f"tap: {problem}. Run the model within the `with` block, in its thread or task.")


def same_stacks(model: nn.Module, copy: nn.Module) -> None:
    """Let `stacks(copy)` use what was found for `model`, with the copy's own modules, instead of searching again.

    `copy` must have the same modules at the same paths. Raises the errors of `stacks(model)`.
    """
    model, copy = unwrapped(model), unwrapped(copy)
    stacks(model)
    _known[copy] = (_signature(copy), _known[model][1])


def _signature(model: nn.Module) -> tuple[object, ...]:
    """Return a value that changes whenever a model's stacks may change: modules, presence of weights, layer counts."""
    config: object = model.config
    modules = tuple(map(weakref.ref, model.modules()))
    return modules, main_device(model).type == "meta", *(getattr(config, name, None) for name in _SETTINGS)


_SETTINGS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "tie_last_hidden_states")
# the signature of a model, and its stacks with paths in place of modules: modules would keep the model alive
_Known = tuple[tuple[object, ...], list[LayerStack]]
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def _map_modules(stack: LayerStack, move: Callable[[Any], Any]) -> LayerStack:
    """Return the stack with every module replaced by `move(module)`; used to turn modules into paths and back."""
    return replace(
        stack,
        blocks=tuple(map(move, stack.blocks)),
        points=tuple(replace(point, module=move(point.module)) for point in stack.points),
        scope=move(stack.scope),
        run=tuple(map(move, stack.run)),
        tower=None if stack.tower is None else move(stack.tower),
    )


def _discover(model: nn.Module) -> dict[str, LayerStack]:
    """Find the stacks of a model, or else those of its towers; return name -> stack. A `RecordedModel` knows its stack.

    Raises UnsupportedModelError if neither can be found.
    """
    if isinstance(model, RecordedModel):
        return {model.facts.stack: model.own_stack()}
    try:
        with preserve_model(model):
            return _find_stacks(model)
    except _UnreadableError as error:
        if _declare_outputs(model):
            return _discover(model)
        if by_tower := _tower_stacks(model):
            return by_tower
        family = family_of(model)
        raise UnsupportedModelError(
            op="stacks", model_type=family, reason=error.reason, hint=error.hint, what=error.what
        ) from error


_declared: set[type[nn.Module]] = set()  # classes that `_declare_outputs` has seen in this process


def _declare_outputs(model: nn.Module) -> bool:
    """Let transformers note which outputs the classes of a model can return; False if all classes were seen before.

    transformers notes it when a model is built, once per class. A process that has only unpickled models would get no
    hidden states from them.
    """
    from transformers import PreTrainedModel

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    unseen = {type(part): copy.deepcopy(part.config) for part in parts if type(part) not in _declared}
    for kind, config in unseen.items():
        PreTrainedModel.__init__(kind.__new__(kind), config)  # pyright: ignore[reportUnknownMemberType]
    _declared.update(unseen)
    return bool(unseen)


def _tower_stacks(model: nn.Module) -> dict[str, LayerStack]:
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
    """Raised when layers cannot be found. `stacks` turns it into an UnsupportedModelError with the same attributes."""

    def __init__(self, reason: str, hint: str = _ELSEWHERE, what: str | None = None) -> None:
        self.reason, self.hint, self.what = reason, hint, what
        super().__init__(reason)


def _find_stacks(model: nn.Module) -> dict[str, LayerStack]:
    """Find the stacks of a model; return name -> stack.

    Run the model on one input, check the result on another, and compare it with a pass without `output_hidden_states`.
    On the meta device, only the first run is made.

    Raises:
        _UnreadableError: If any of these steps fails, or the model is of a kind that is refused (see `stacks`).
    """
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise _UnreadableError("it is not a transformers model: it has no config", "Load it with AutoModel.")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "it learns a prompt, which is not part of the layers"
        raise _UnreadableError(reason, "Use another adapter (LoRA).", "the model's adapter (PEFT)")
    if any(layer.disable_adapters and getattr(layer, "merged", False) for layer in adapted_layers(model)):
        reason = "its adapters are merged and disabled"
        raise _UnreadableError(reason, "Call unmerge_adapter() of the PEFT model first.", "this state of the model")
    if is_bitsandbytes(model):
        effect = "whose kernels give a token different values in different batches, and no test of Lamina runs them"
        raise _UnreadableError(f"its weights are packed by bitsandbytes, {effect}", "Load it in bfloat16.")
    try:
        pairs = _input_pairs(model)
    except NoInputError as error:
        raise _UnreadableError(str(error), _PART) from error
    has_weights = main_device(model).type != "meta"
    with nullcontext() if has_weights else MetaValues():
        trace, target, states, (first, second) = _first_run(model, pairs)
    found = {name: _find_places(model, name, entries, trace, first) for name, entries in states.items()}
    if has_weights:
        chosen, again = _verify(target, second, found)
    else:  # states without values can only be matched by identity
        chosen, again = {name: [events[0] for events in places.by_layer] for name, places in found.items()}, None
    by_name = {name: _build(model, name, places, chosen[name], trace) for name, places in found.items()}
    if again is not None:
        _check_plain_pass(target, second, by_name, again)
    return by_name


def _input_pairs(model: nn.Module) -> list[tuple[Probe, Probe]]:
    """Return one or two pairs of inputs; the second pair is for models that reject the first.

    The texts, or the audio, of a pair have different lengths.

    Raises NoInputError if no input can be made.
    """
    plain, full = (
        (probe_input(model, _FIRST, 1, full=full), probe_input(model, _SECOND, 2, full=full)) for full in (False, True)
    )
    if main_device(model).type == "meta":
        return [plain, (plain[0].without_mask(), plain[1])]
    return [plain, full] if full[0].is_full else [plain]


class _Places(NamedTuple):
    """The places in the model where the states of one stack's layers may be read, as found in the first traced run.

    Attributes:
        state: The state of layer 0 in that run, as `[batch, tokens, width]`.
        blocks: The blocks, bottom first. Empty if no module is a block.
        by_layer: For each layer the events at which its state was seen, best first.
        forms: For each layer the form in which the model returns its state (None: as it is); see `forms_of`.
    """

    state: Tensor
    blocks: tuple[nn.Module, ...]
    by_layer: list[list[Event]]
    forms: list[Form | None]


def _first_run(
    model: nn.Module, pairs: Sequence[tuple[Probe, Probe]]
) -> tuple[Trace, nn.Module, States, tuple[Probe, Probe]]:
    """Run the model on the first input in `pairs` that it accepts. If it accepts none, run its backbone.

    The first input of each pair is for this run, the second for `_verify`. If the model accepts only a full input, this
    is recorded for it and its backbone (`prefer_full`).

    Returns:
        The trace of the run, the module that was called (model or backbone), the hidden states that it returned, and
        the pair whose first input was accepted.

    Raises:
        _UnreadableError: The first failure, if neither the model nor the backbone accepts an input.
    """
    failures: list[_UnreadableError] = []
    targets = dict.fromkeys((model, backbone(model)))
    for target, pair in product(targets, pairs):
        try:
            texts = [value for name, value in pair[0].inputs.items() if name.endswith("input_ids")]
            with trace_calls(model, axes=(2, 3, 4), tokens={ids.shape[1] for ids in texts}) as trace:
                states = _run_for_states(target, pair[0])
            for module in targets if pair[0].is_full else ():
                prefer_full(module)
            return trace, target, states, pair
        except _UnreadableError as error:
            failures.append(error)
    if getattr(getattr(model, "config", None), "return_dict", True) is False:
        # some models read the outputs of their parts by name, and the parts follow the config alone
        raise _UnreadableError(failures[0].reason, "Set model.config.return_dict = True.") from failures[0]
    raise failures[0]


def _run(target: nn.Module, probe: Probe, **options: bool) -> object:
    """Seed torch, and return the output of `target` for a probe input; `options` are further keyword arguments.

    An exception in the module becomes an _UnreadableError.
    """
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    try:
        return target(**probe.inputs, **options)
    except Exception as error:
        parts = [f"model.{name}" for name, child in target.named_children() if hasattr(child, "config")]
        hint = f"Give one part of it: {', '.join(parts)}." if parts else "Check its config."
        hint = _WEIGHTS if main_device(target).type == "meta" else hint
        reason = f"it does not run on a small input ({type(error).__name__}: {first_line(error)})"
        raise _UnreadableError(reason, hint) from error


def _run_for_states(target: nn.Module, probe: Probe) -> States:
    """Run `target` on the probe's inputs; return stack name -> the hidden states in its output, one per layer.

    The names are "main" alone, or "encoder" and "decoder". Raises _UnreadableError if `target` fails on these inputs,
    or its output has no hidden states.
    """
    output = _run(target, probe, output_hidden_states=True, return_dict=True)
    states = {name: getattr(output, key, None) for name, key in _HIDDEN.items()}
    single = {name: tuple(map(first_tensor, value)) for name, value in states.items() if value is not None}
    by_stack = cast("States", single)
    if "main" in by_stack:
        return {"main": by_stack["main"]}
    if set(by_stack) != {"encoder", "decoder"}:
        raise _UnreadableError("it returns no hidden_states of its own", _PART)
    return by_stack


def _find_places(model: nn.Module, name: str, states: tuple[Tensor, ...], trace: Trace, probe: Probe) -> _Places:
    """Return the places where each state of stack `name` was seen in a traced run on the input `probe`.

    `states` are the states that the model returned in this run, which `trace` has recorded.

    Raises:
        _UnreadableError: If a state was not seen, or `_check_shapes` refuses the states.
    """
    tokens = _tokens_of(name, probe)
    downsampling: object = getattr(model.config, "downsampling_rate", 0)  # of CANINE
    forms = forms_of(states, probe, tokens, downsampling=downsampling if isinstance(downsampling, int) else 0)
    _check_shapes(name, _formed(states, forms, tokens), probe.rows)
    seen = [trace.seen_as(state) for state in states]
    for layer, events in enumerate(seen):
        if not events:
            hint = _WEIGHTS if states[layer].is_meta else _ELSEWHERE
            raise _unmatched(name, layer, "no module gets or returns it as the model returns it", hint)
    calls = find_blocks(model, trace, seen)
    state = state_of(states[0], forms[0], tokens)
    return _Places(state, tuple(call.module for call in calls), rank_places(seen, calls), forms)


def _tokens_of(name: str, probe: Probe) -> int | None:
    ids = probe.inputs.get("decoder_input_ids" if name == "decoder" else "input_ids")
    return None if ids is None else ids.shape[1]


def _formed(states: Sequence[Tensor], forms: Sequence[Form | None], tokens: int | None) -> tuple[Tensor, ...]:
    return tuple(state_of(state, form, tokens) for state, form in zip(states, forms, strict=True))


def _check_shapes(name: str, states: tuple[object, ...], rows: int) -> None:
    """Raise _UnreadableError unless stack `name` has at least two states, all of one shape `[rows, tokens, width]`.

    A state that is not a tensor, or has NaN, is an error too.
    """
    if len(states) < 2:
        raise _UnreadableError(f"its {name} stack returns {len(states)} hidden states; there must be 2 at least")
    shape: tuple[int, ...] | None = None
    for layer, state in enumerate(states):
        if not isinstance(state, Tensor):
            raise _unmatched(name, layer, f"it is a {type(state).__name__}, not one tensor")
        shape = shape or tuple(state.shape)
        if state.ndim == 4:
            why = f"it is a map of shape {tuple(state.shape)}, as in convolutional networks, not a sequence of tokens"
            raise _unmatched(name, layer, why)
        if state.ndim != 3 or state.shape[0] != rows:
            raise _unmatched(name, layer, f"its shape is {tuple(state.shape)}, which is not [batch, tokens, width]")
        if tuple(state.shape) != shape:
            raise _unmatched(name, layer, f"its shape is {tuple(state.shape)}, but the shape of layer 0 is {shape}")
        if not state.is_meta and bool(state.isnan().any()):
            raise _unmatched(name, layer, "it holds NaN on a small input", "Check the weights, or use a wider dtype.")


def _unmatched(name: str, layer: int, why: str, hint: str = _ELSEWHERE) -> _UnreadableError:
    return _UnreadableError(f"layer {layer} of its {name} stack cannot be matched to a module: {why}", hint)


def _verify(target: nn.Module, probe: Probe, found: Mapping[str, _Places]) -> tuple[dict[str, list[Event]], States]:
    """Run another input, and choose for each layer the best place that shows exactly the returned state in both runs.

    `target` is the module to call, `probe` the input, and `found` has the places of each stack from the first run.

    Returns:
        Stack name -> for each layer the chosen event of the first run; and the hidden states that this run returned.

    Raises:
        _UnreadableError: If `target` fails; if a layer has no such place, or all of them come before the place chosen
            for the layer below; if a state has another shape or NaN; or if a stack returns a different number of
            states.
    """
    candidates = [
        (event, event.form or form, _tokens_of(name, probe))
        for name, places in found.items()
        for events, form in zip(places.by_layer, places.forms, strict=True)
        for event in events
    ]
    seen: dict[Event, tuple[Tensor, Tensor]] = {}

    def on_state(number: int, value: Tensor) -> None:
        # Both must equal the state. A tensor that the model changes in place later is not a place to read the state.
        event, form, tokens = candidates[number]
        state = state_of(value, form, tokens)
        seen[event] = state, state.clone()

    # converted here, not by the hooks: each stack has its own number of tokens, and `target` may hold several stacks
    points = tuple(replace(event.point(), form=None) for event, _, _ in candidates)
    with watch(LayerStack("candidates", 0, (), points, target, "", ()), range(len(points)), on_state):
        returned = _run_for_states(target, probe)
    chosen: dict[str, list[Event]] = {}
    states: States = {}
    for name, places in found.items():
        if len(returned[name]) != len(places.by_layer):
            raise _UnreadableError(f"its {name} stack returns a different number of hidden states for another input")
        states[name] = _formed(returned[name], places.forms, _tokens_of(name, probe))
        _check_shapes(name, states[name], probe.rows)
        chosen[name] = []
        for layer, (ranked, state) in enumerate(zip(places.by_layer, states[name], strict=True)):
            since = chosen[name][-1].time if chosen[name] else -1
            later = (event for event in ranked if event.time >= since and event in seen)
            event = next((event for event in later if all(torch.equal(value, state) for value in seen[event])), None)
            if event is None:
                raise _unmatched(name, layer, "where one input showed it, another input shows a different value")
            chosen[name].append(event)
    return chosen, states


def _build(model: nn.Module, name: str, places: _Places, events: list[Event], trace: Trace) -> LayerStack:
    """Return stack `name`, with layer i read at `events[i]`; `places` and `trace` come from the run that found them."""
    points = tuple(event.point(form) for event, form in zip(events, places.forms, strict=True))
    needs_tokens = any(point.form is not None and point.form.needs_tokens for point in points)
    scope = find_scope(trace, events[0], events[-1], places.state, reads_tokens=needs_tokens)
    base = backbone(model)
    run = find_run(base if scope.module in set(base.modules()) else model, trace, events[-1])
    return LayerStack(name, places.state.shape[-1], places.blocks, points, scope.module, scope.path, run)


def _check_plain_pass(target: nn.Module, probe: Probe, by_name: Mapping[str, LayerStack], states: States) -> None:
    """Run `target` without `output_hidden_states`, as users do; compare the states at the stacks' hooks with `states`.

    `probe` is the input, `by_name` has the stacks, and `states` are those that the model returned for this input.

    Raises:
        _UnreadableError: If `target` fails, a layer's hook is not called, or gets another value than that in `states`.
    """
    seen: dict[str, dict[int, Tensor]] = {name: {} for name in by_name}
    with ExitStack() as exits:
        for name, stack in by_name.items():
            exits.enter_context(watch(stack, range(stack.layers), seen[name].__setitem__))
        _run(target, probe)
    for name, stack in by_name.items():
        if list(seen[name]) != list(range(stack.layers)):
            raise _UnreadableError(f"a plain pass shows layers {list(seen[name])} of its {name} stack")
        for layer, value in seen[name].items():
            if not alike(value, states[name][layer], _CLOSE):
                raise _unmatched(name, layer, "a plain pass shows a different value there")
