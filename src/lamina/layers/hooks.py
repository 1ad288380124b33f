"""Hooks on a running model: hand on each layer's state when it is computed, stop the forward, find the mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any, TypeGuard, cast, final

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.layers.selectors import select
from lamina.layers.stack import LayerStack, Side, TapPoint, swapped

OnState = Callable[[int, Tensor], None]
OnStart = Callable[[tuple[object, ...], dict[str, object]], None]
_open: ContextVar[tuple[object, ...]] = ContextVar("open", default=())


@final
class ContextHooks(ExitStack):
    """Hooks that act in passes of the context that opened them (`contextvars`), and so not in those of other threads.

    A context is that of one thread or asyncio task, and goes on in the tasks and `asyncio.to_thread` calls it starts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._closed = False
        _open.set((*_open.get(), self))

    def __exit__(self, *error: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._closed = True  # first: torch calls a hook that another thread is removing, but without its options
        _open.set(tuple(hooks for hooks in _open.get() if hooks is not self))
        super().__exit__(*error)

    def add(self, register: Callable[..., Any], hook: Callable[..., object], **options: bool) -> None:
        """Register a hook by a module's method, until the context manager ends; copies of the module are not heard."""
        owner = cast("Any", register).__self__

        def act(*args: object) -> None:
            if args[0] is owner and self in _open.get() and not self._closed:
                hook(*args)

        self.enter_context(register(act, **options))


@contextmanager
def watch(
    stack: LayerStack, layers: Sequence[int], on_state: OnState, on_start: OnStart | None = None
) -> Generator[None]:
    """Call back with each chosen layer's state the moment it exists.

    LayerIndexError if there is no such layer, ConfigError if one is named twice.

    `on_state` gets the layer and its state `[batch, tokens, width]`, layers ascending within a pass; what it raises
    stops the pass and leaves the model's call. `on_start` gets the positional and keyword arguments of `stack.scope`
    when a pass over the stack begins, also after one that was stopped.
    """
    watches: dict[tuple[nn.Module, Side], _Watch] = {}
    for layer in select(list(layers), stack.layers, op="watch") if layers else ():
        point = stack.points[layer]
        watched = watches.setdefault((point.module, point.side), _Watch(on_state))
        watched.wanted.setdefault(point.call, []).append((layer, point))

    def start(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for watched in watches.values():
            watched.counts[get_ident()] = 0
        if on_start is not None:
            on_start(args, kwargs)

    with ContextHooks() as hooks:
        hooks.add(stack.scope.register_forward_pre_hook, start, with_kwargs=True, prepend=True)
        for (module, side), watched in watches.items():
            if side == "input":
                hooks.add(module.register_forward_pre_hook, watched, with_kwargs=True)
            else:
                hooks.add(module.register_forward_hook, watched)
        yield


class _Watch:
    """One side of one module; `counts` holds, by thread, how often it was called since the pass there began."""

    def __init__(self, on_state: OnState) -> None:
        self.on_state = on_state
        self.counts: dict[int, int] = {}
        self.wanted: dict[int, list[tuple[int, TapPoint]]] = {}

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], rest: Any) -> None:
        """`rest` is what a hook gets last: the keyword arguments before a call, what it returned after it."""
        thread = get_ident()
        count = self.counts.get(thread, -1)  # a recomputation (gradient checkpointing) comes later: it is not wanted
        self.counts[thread] = count + (count >= 0)
        for layer, point in self.wanted.get(count, ()):
            self.on_state(layer, _pick(point, args, rest))


def _pick(point: TapPoint, args: tuple[Any, ...], rest: Any) -> Tensor:
    values: Any = args if point.side == "input" and isinstance(point.index, int) else rest
    # a ModelOutput takes positions as well as keys, as the tuple that may come in its place
    return swapped(values if point.index is None else values[point.index], point.swap)


@final
class StopForward(BaseException):
    """Raised by a hook to end a model's forward; `run_until_stopped` catches it, and nothing in between does."""


def run_until_stopped(model: nn.Module, batch: Mapping[str, Any], stop: StopForward) -> Any:
    """The model's output, or None if a hook raised `stop`; the exceptions of other runs pass through."""
    try:
        return model(**batch)
    except StopForward as raised:
        if raised is not stop:
            raise
        stop.__traceback__ = None  # its frames hold the states of the pass, and itself: none of it would be let go
        return None


DECODER_INPUTS = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds", "labels")


def token_mask(
    stack: LayerStack,
    batch: Mapping[str, Any],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Tensor | None:
    """Find which tokens of a pass over a stack are real: None if all are; ConfigError if the mask does not say so.

    It is the mask `[batch, tokens]` in `batch`, what the whole model was called with (empty if that is not known), else
    the one among `args` and `kwargs`, what the stack's scope was called with.
    """
    mask = batch.get("decoder_attention_mask" if stack.name == "decoder" else "attention_mask")
    if stack.name == "decoder" and "input_ids" in batch and all(batch.get(name) is None for name in DECODER_INPUTS):
        mask = batch.get("attention_mask")  # the model shifts its input right, and as many of its tokens are real
    if mask is None:
        mask = arguments(stack.scope, args, kwargs or {}).get("attention_mask")
        if batch and not is_token_mask(mask):
            for name, value in batch.items():
                if name.removeprefix("decoder_") != "attention_mask" and name.endswith("mask") and is_token_mask(value):
                    raise ConfigError(f"mask: the batch has a '{name}', no 'attention_mask'; readers know only that.")
            return None  # the model made it for its attention, out of a batch without a mask
    if mask is not None and not is_token_mask(mask):
        form = type(mask).__name__
        if isinstance(mask, Tensor):
            form = f"{mask.dtype} {list(mask.shape)}" + (" with other values than 0 and 1" if mask.ndim == 2 else "")
        raise ConfigError(
            f"mask: the attention mask is {form}; it must be [batch, tokens], 1 (or True) at real tokens and 0 at "
            "padding, so that readers can tell which tokens are real."
        )
    return mask


def is_token_mask(mask: object) -> TypeGuard[Tensor]:
    """Whether a value is a mask `[batch, tokens]` of zeros and ones, not one that is added to attention scores.

    Integers on an accelerator are taken to be such: to look at them would wait for it.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if mask.dtype == torch.bool or mask.is_meta or not mask.numel() or not (mask.is_cpu or mask.is_floating_point()):
        return True
    low, high = torch.aminmax(mask)
    return bool(low >= 0) and bool(high <= 1) and (not mask.is_floating_point() or bool((mask == mask.round()).all()))


def arguments(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """The arguments of a module's call by name; a wrapper's `*args` have the names of the module inside it."""
    for part in module.modules() if args else ():
        parameters = inspect.signature(part.forward).parameters
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in list(parameters.values())[:1]):
            return {**dict(zip(parameters, args, strict=False)), **kwargs}
    return kwargs
