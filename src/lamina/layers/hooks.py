"""Hooks on a running model: receive each layer's state as it is computed, stop the run early, find the mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from threading import get_ident
from types import MethodType, TracebackType
from typing import Any, TypeGuard, cast, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lamina.errors import ConfigError
from lamina.layers.probe_input import MAIN_INPUTS
from lamina.layers.selectors import select
from lamina.layers.stack import LayerStack, Side, TapPoint
from lamina.layers.state_forms import count_tokens

# called with a layer and its state `[batch, tokens, width]`
OnState = Callable[[int, Tensor], None]
# called with the positional and keyword arguments of the module at which a pass begins
OnStart = Callable[[tuple[object, ...], dict[str, object]], None]
# attributes of a module: which of its hooks were registered with an option
_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_open: ContextVar[frozenset[object]] = ContextVar("open", default=frozenset())  # those entered in this context


@final
class ContextHooks(ExitStack):
    """A context manager for hooks that act only on forward passes of the context (`contextvars`) that made it.

    Each thread and each asyncio task has its own context; tasks and `asyncio.to_thread` calls inherit the context that
    starts them. `closed` is True from the exit on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[RemovableHandle] = []
        self.closed = False
        _open.set(_open.get() | {self})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  it never swallows an error
        # set first: torch may still call a hook that this thread is removing, and then without its keyword arguments
        self.closed = True
        _open.set(_open.get() - {self})
        for handle in self._handles:
            handle.remove()
        super().__exit__(kind, error, traceback)

    def add(self, register: Callable[..., RemovableHandle], hook: Callable[..., object], **options: bool) -> None:
        """Register `hook` until the context manager exits.

        Args:
            register: A module's bound method that registers hooks, such as `module.register_forward_hook`.
            hook: The hook. Its result is ignored. It is not called for deep copies of the module.
            **options: Keyword arguments of `register`, such as `with_kwargs=True`.
        """
        owner = cast("MethodType", register).__self__
        self._handles.append(register(_ContextHook(owner, self, hook), **options))


@final
@dataclass(eq=False)
class _ContextHook:
    """One hook of a `ContextHooks`.

    A copy of it does nothing, and its `owner`, the module on whose calls it acts, is None: a model may be copied or
    pickled by one thread while another runs it.
    """

    owner: object = None
    hooks: ContextHooks | None = None
    hook: Callable[..., object] | None = None

    def __call__(self, *args: object) -> None:
        """Call the hook, unless a copy of its module was called, or `hooks` has exited or is of another context."""
        hooks, hook = self.hooks, self.hook
        if hooks is None or hook is None or args[0] is not self.owner:
            return
        if hooks in _open.get() and not hooks.closed:
            hook(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return _ContextHook, ()


def drop_copied_hooks(model: nn.Module) -> None:
    """Remove from `model`, a copy, the hooks of `ContextHooks` that the original had while it was copied."""
    for module in model.modules():
        by_kind = (cast("dict[int, object]", vars(module)[name]) for name in ("_forward_pre_hooks", "_forward_hooks"))
        for hooks in by_kind:
            copied = [number for number, hook in hooks.items() if isinstance(hook, _ContextHook) and hook.owner is None]
            for number in copied:
                del hooks[number]
                for name in _HOOK_OPTIONS:
                    vars(module)[name].pop(number, None)


@contextmanager
def watch(
    stack: LayerStack, layers: Sequence[int], on_state: OnState, on_start: OnStart | None = None
) -> Generator[None]:
    """Call `on_state` with each chosen layer's state as soon as the model computes it, inside the `with` block.

    Passes in other threads and tasks are not seen; see `ContextHooks`.

    Args:
        stack: The stack to watch.
        layers: Numbers of the layers; negative ones count from the top. May be empty.
        on_state: Called with a layer (from 0) and its state `[batch, tokens, width]`, not copied; layers ascend.
            An exception that it raises ends the pass and propagates out of the model's call.
        on_start: Called when a pass over the stack begins, with two arguments: the tuple of positional arguments of
            `stack.scope`, and the dict of keyword arguments. None: not called.

    Raises:
        LayerIndexError: If a layer does not exist.
        ConfigError: If a layer is named twice, or is not an int.
    """
    with ContextHooks() as hooks:
        chosen = select(list(layers), stack.layers, op="watch") if layers else ()
        watch_selected(hooks, stack, chosen, on_state, on_start)
        yield


def watch_selected(
    hooks: ContextHooks, stack: LayerStack, layers: Sequence[int], on_state: OnState, on_start: OnStart | None = None
) -> None:
    """Do what `watch` does until `hooks` exits, for `layers` that are already checked and ascending."""
    watches: dict[tuple[nn.Module, Side], _Watch] = {}
    for layer in layers:
        point = stack.points[layer]
        watched = watches.setdefault((point.module, point.side), _Watch(on_state))
        watched.wanted.setdefault(point.call, []).append((layer, point))

    def start(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        thread = get_ident()
        tokens = count_tokens(arguments(stack.scope, args, kwargs)) if stack.needs_tokens else None
        for watched in watches.values():
            watched.counts[thread], watched.tokens[thread] = 0, tokens
        if on_start is not None:
            on_start(args, kwargs)

    hooks.add(stack.scope.register_forward_pre_hook, start, with_kwargs=True, prepend=True)
    for (module, side), watched in watches.items():
        if side == "input":
            hooks.add(module.register_forward_pre_hook, watched, with_kwargs=True)
        else:
            hooks.add(module.register_forward_hook, watched)


@dataclass
class _Watch:
    """A hook on the input or output of one module; it calls `on_state` for each layer whose state can be read there.

    Attributes:
        counts: Thread id -> calls of the module since its pass over the stack began.
        tokens: Thread id -> number of tokens in the input of its pass. None: no state has to be cut to that length.
        wanted: Number of a call, from 0 -> the layers to read from it, each with its point.
    """

    on_state: OnState
    counts: dict[int, int] = field(default_factory=dict[int, int])
    tokens: dict[int, int | None] = field(default_factory=dict[int, "int | None"])
    wanted: dict[int, list[tuple[int, TapPoint]]] = field(default_factory=dict[int, list[tuple[int, TapPoint]]])

    def __call__(self, _module: nn.Module, args: tuple[object, ...], rest: object) -> None:
        """Read the states from a call of the module; act as its forward pre-hook or forward hook.

        `rest` is the last argument of the hook: the keyword arguments in a pre-hook, the output in a forward hook.
        """
        thread = get_ident()
        # -1 outside a pass. Recomputations of gradient checkpointing run after the pass, with counts nobody wants.
        count = self.counts.get(thread, -1)
        self.counts[thread] = count + (count >= 0)
        for layer, point in self.wanted.get(count, ()):
            values = args if point.side == "input" and isinstance(point.index, int) else rest
            # a ModelOutput can be indexed by position too, so the same index works if the module returns a tuple
            value = values if point.index is None else cast("Mapping[object, object]", values)[point.index]
            state = cast("Tensor", value)
            state = state if point.swap is None else state.transpose(*point.swap)
            if point.form is not None:
                state = point.form.state(state, self.tokens.get(thread))
            self.on_state(layer, state)


@final
class StopForward(BaseException):
    """Raised by a hook to end a model's forward early; `run_until_stopped` catches it.

    It is a BaseException, so that `except Exception` in the model's code does not catch it.
    """


# Arguments with earlier tokens, which each block of a model changes in place. A forward with one of them must run to
# the end: otherwise only the lowest blocks would add the new tokens, and the caller's next forward would be wrong.
CACHES = frozenset({"past_key_values", "cache_params", "state"})


def holds_cache(batch: Mapping[str, object]) -> bool:
    """Return whether a batch has one of `CACHES` that is not None."""
    return any(batch.get(name) is not None for name in CACHES)


def run_until_stopped(model: nn.Module, batch: Mapping[str, object], stop: StopForward | None) -> Any:  # noqa: ANN401
    """Call `model(**batch)`, and return its output; None if a hook raised the object `stop`.

    `stop` is None if no hook raises it, because the batch has one of `CACHES`. Any other StopForward object belongs to
    an outer call and propagates. Raises ConfigError if the batch has no input of the model, or one with no rows or no
    tokens.
    """
    _check_inputs(model, batch)
    try:
        return model(**batch)
    except StopForward as raised:
        if raised is not stop:
            raise
        raised.__traceback__ = None  # its frames hold the states of the pass and the exception itself, a cycle
        return None


_INPUTS = (*MAIN_INPUTS, "inputs_embeds", "encoder_outputs", "decoder_input_ids", "decoder_inputs_embeds")


def _check_inputs(model: nn.Module, batch: Mapping[str, object]) -> None:
    """Raise ConfigError if a batch has no input of the model, or an input has no rows or no tokens.

    A model whose `forward` does not name its main input, such as a wrapper of PEFT with `*args` and `**kwargs`, is not
    refused for lack of inputs, because its other inputs are not known.
    """
    for name in _INPUTS:
        value = batch.get(name)
        if isinstance(value, Tensor) and 0 in value.shape:
            rule = "a batch has at least one row, and each row one token"
            hint = "Leave out empty batches, and add a special token to empty texts."
            raise ConfigError(f"bank: '{name}' has the shape {list(value.shape)}; {rule}. {hint}")
    main = str(getattr(model, "main_input_name", "input_ids"))
    is_given = any(batch.get(name) is not None for name in (*_INPUTS, main))
    if not is_given and main in inspect.signature(model.forward).parameters:
        what = f"the batch has {', '.join(batch) or 'no input'}; the model reads '{main}'"
        raise ConfigError(f"bank: {what}. Call bank(**batch) with what its tokenizer or processor returns.")


DECODER_INPUTS = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds", "labels")


def tower_inputs(tower: nn.Module, batch: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of a batch that the `forward` of a tower (see `LayerStack`) accepts."""
    accepted = inspect.signature(tower.forward).parameters
    return {name: value for name, value in batch.items() if name in accepted}


def run_stacks(
    model: nn.Module, stacks: Sequence[LayerStack], batch: Mapping[str, object], stop: StopForward | None
) -> Any:  # noqa: ANN401
    """Run as much of a model as `stacks` need: their towers (see `LayerStack`), or the whole model if it has none.

    If one of the stacks is a decoder and the batch has no input for it and no labels, the decoder reads the encoder's
    token ids, shifted right behind the config's start token (see `decoder_inputs`).

    Args:
        model: The model.
        stacks: The stacks whose layers are wanted. Either all have a tower, or none. Empty: the whole model runs.
        batch: Keyword arguments of the model.
        stop: The exception by which a hook ends the run early. None, as for batches with one of `CACHES`: the run is
            not ended early.

    Returns:
        The model's output; None if a hook stopped it, or if towers ran.

    Raises:
        ConfigError: If the batch has no input for one of the towers, or for the model if it has no towers; or if an
            input has no rows or no tokens.
    """
    if not stacks or stacks[0].tower is None:
        for stack in stacks:
            if stack.name == "decoder":
                batch = {**batch, **decoder_inputs(model, batch)}
        return run_until_stopped(model, batch, stop)
    for stack in stacks:
        name = str(getattr(stack.tower, "main_input_name", "input_ids"))
        if batch.get(name) is None and batch.get("inputs_embeds") is None:
            problem = f"the batch has no '{name}', only {', '.join(batch)}; the stack '{stack.name}' reads it"
            raise ConfigError(f"bank: {problem}. Name the readers that are to run: readers=[...].")
    for stack in stacks:
        tower = stack.tower or model
        run_until_stopped(tower, tower_inputs(tower, batch), stop)
    return None


def decoder_inputs(model: nn.Module, batch: Mapping[str, object]) -> dict[str, Tensor]:
    """Return `decoder_input_ids` made from the encoder's tokens, as {name: ids}.

    At each token the decoder reads the token before it; at the first token of a row, the config's start token. If a
    token follows padding, the encoder's mask is returned too, as "decoder_attention_mask". Otherwise a decoder that
    does not look ahead needs no mask: all padding is behind the tokens.

    The result is {} if the batch has any of `DECODER_INPUTS` (`labels` is one) or no `input_ids`, or the config has no
    start token.
    """
    ids, start = batch.get("input_ids"), getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    if not isinstance(ids, Tensor) or start is None or any(batch.get(name) is not None for name in DECODER_INPUTS):
        return {}
    shifted = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
    mask = batch.get("attention_mask")
    if not is_token_mask(mask) or mask.shape != ids.shape or mask.is_meta:
        return {"decoder_input_ids": shifted}
    real = mask.to(ids.device, torch.bool)
    if not (real[:, 1:] > real[:, :-1]).any():
        return {"decoder_input_ids": shifted}
    places = torch.arange(ids.shape[1], device=ids.device).where(real, -1).cummax(1).values  # of the last token so far
    places = places[:, :-1]  # of the last token before each column but the first
    previous = ids.gather(1, places.clamp(min=0)).masked_fill(places < 0, start)
    return {"decoder_input_ids": torch.cat([shifted[:, :1], previous], dim=1), "decoder_attention_mask": mask}


@contextmanager
def record_token_ids(
    model: nn.Module, stacks: Iterable[LayerStack], batch: Mapping[str, object]
) -> Generator[dict[str, Tensor]]:
    """Record the token ids that stacks read when `run_stacks` runs the batch inside the `with` block.

    A decoder beside an encoder reads other ids than the encoder: `decoder_inputs`, or the model itself if its config
    has no start token, shifts them right. So the decoder's ids are those that it is called with.

    Args:
        model: The model.
        stacks: Its stacks.
        batch: Keyword arguments of the model.

    Yields:
        Stack name -> ids `[batch, tokens]`; a decoder's are complete after the pass. A stack is missing if the batch
        has no `input_ids` for it, or if the model made the ids itself and gives only their embeddings to the decoder.
    """
    ids: dict[str, Tensor] = {}

    def put(stack: LayerStack, value: object) -> None:
        if isinstance(value, Tensor):
            ids[stack.name] = value

    with ContextHooks() as hooks:
        for stack in stacks:
            if stack.name != "decoder":
                put(stack, batch.get("input_ids"))
                continue
            # the scope of some decoders, such as that of a BERT, gets only embeddings
            put(stack, {**batch, **decoder_inputs(model, batch)}.get("decoder_input_ids"))

            def start(args: tuple[object, ...], kwargs: dict[str, object], stack: LayerStack = stack) -> None:
                put(stack, arguments(stack.scope, args, kwargs).get("input_ids"))

            watch_selected(hooks, stack, (), lambda _layer, _state: None, start)
        yield ids


def token_mask(
    stack: LayerStack,
    batch: Mapping[str, object],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Tensor | None:
    """Return the attention mask `[batch, tokens]` of a pass over a stack; None if it has none, so all tokens are real.

    A decoder that reads the encoder's tokens (see `run_stacks`) has their mask. If `batch` is known but has no mask,
    the model made the mask in `args` or `kwargs`. It is used if it is `[batch, tokens]`; otherwise the result is None.

    Args:
        stack: The stack that is read.
        batch: Keyword arguments of the whole model; {} if they are not known. If they contain a mask, it is used.
        args: Positional arguments of `stack.scope`, used if `batch` has no mask.
        kwargs: Keyword arguments of `stack.scope`, used if `batch` has no mask.

    Raises:
        ConfigError: If `batch` has a mask in another form, such as one that is added to attention scores, or only a
            mask with another name. With `batch={}`, also if the mask in `args` or `kwargs` is in another form.
    """
    mask = batch.get("decoder_attention_mask" if stack.name == "decoder" else "attention_mask")
    if stack.name == "decoder" and "input_ids" in batch and all(batch.get(name) is None for name in DECODER_INPUTS):
        mask = batch.get("attention_mask")  # the decoder reads the same tokens, shifted right
    if mask is None:
        mask = arguments(stack.scope, args, kwargs or {}).get("attention_mask")
        if batch and not is_token_mask(mask):
            for name, value in batch.items():
                if name.removeprefix("decoder_") != "attention_mask" and name.endswith("mask") and is_token_mask(value):
                    raise ConfigError(f"mask: the batch has a '{name}'; readers use only an 'attention_mask'.")
            return None  # the model itself made that mask: the batch had none
    if mask is None or is_token_mask(mask):
        return mask
    form = type(mask).__name__
    if isinstance(mask, Tensor):
        form = f"{mask.dtype} {list(mask.shape)}" + (" with other values than 0 and 1" if mask.ndim == 2 else "")
    rule = "it must be [batch, tokens], 1 (or True) at real tokens and 0 at padding"
    raise ConfigError(f"mask: the attention mask is {form}; {rule}, so that readers can tell which tokens are real.")


def is_token_mask(mask: object) -> TypeGuard[Tensor]:
    """Return whether a value is a mask `[batch, tokens]` of zeros and ones, not one that is added to attention scores.

    Values are not checked on the meta device, nor those of an integer tensor on an accelerator.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if mask.dtype == torch.bool or mask.is_meta or not mask.numel() or not (mask.is_cpu or mask.is_floating_point()):
        return True
    low, high = torch.aminmax(mask)
    if low.item() < 0 or high.item() > 1:
        return False
    return not mask.is_floating_point() or bool((mask == mask.round()).all())


def arguments(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of a module's call by name; positional arguments that have no name are left out.

    If its `forward` is a wrapper that begins with `*args`, the names are taken from the first submodule whose `forward`
    has names for them.
    """
    for part in module.modules() if args else ():
        function = None if "forward" in vars(part) else getattr(part.forward, "__func__", None)
        names = _names(part.forward) if function is None else _names_of_method(function)
        if names is not None:
            return {**dict(zip(names, args, strict=False)), **kwargs}
    return kwargs


def _names(forward: Callable[..., object]) -> tuple[str, ...] | None:
    parameters = tuple(inspect.signature(forward).parameters.values())
    begins_with_args = bool(parameters) and parameters[0].kind is parameters[0].VAR_POSITIONAL
    return None if begins_with_args else tuple(parameter.name for parameter in parameters)


@lru_cache(maxsize=1024)  # reading a signature takes longer than running a small module
def _names_of_method(function: Callable[..., object]) -> tuple[str, ...] | None:
    return _names(MethodType(function, function))  # bound to any object, so that `self` is left out
