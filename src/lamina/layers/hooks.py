"""Hooks on a running model: hand on each layer's state when it is computed, stop the forward, find the mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, final

from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.layers.selectors import select
from lamina.layers.stack import LayerStack, Side, TapPoint, pick, pick_argument

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

OnState = Callable[[int, Tensor], None]
OnStart = Callable[[tuple[object, ...], dict[str, object]], None]


@contextmanager
def watch(
    stack: LayerStack, layers: Sequence[int], on_state: OnState, on_start: OnStart | None = None
) -> Generator[None]:
    """Call back with each chosen layer's state the moment it exists.

    Args:
        stack: Where the layers are.
        layers: Layer numbers, as `select` returns them.
        on_state: Called with the layer and its state `[batch, tokens, width]`, layers ascending within a pass. May
            raise to stop the pass; the exception leaves the model's call.
        on_start: Called with the positional and keyword arguments of `stack.scope` when a pass over the stack
            begins, also after a pass that was stopped.

    Raises:
        LayerIndexError: If a layer does not exist.
    """
    chosen = sorted(select(list(layers), stack.layers, op="watch")) if layers else []
    watches = [_Watch(stack, module, side, chosen, on_state) for module, side in _places(stack, chosen)]
    handles: list[RemovableHandle] = []

    def start(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for watched in watches:
            watched.count = 0
        if on_start is not None:
            on_start(args, kwargs)

    try:
        handles.append(stack.scope.register_forward_pre_hook(start, with_kwargs=True, prepend=True))
        handles.extend(watched.register() for watched in watches)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _places(stack: LayerStack, layers: Sequence[int]) -> list[tuple[nn.Module, Side]]:
    return list(dict.fromkeys((stack.points[layer].module, stack.points[layer].side) for layer in layers))


class _Watch:
    """One side of one module; `count` is how often it was called since the pass began."""

    def __init__(
        self, stack: LayerStack, module: nn.Module, side: Side, layers: Sequence[int], on_state: OnState
    ) -> None:
        self.module, self.side, self.on_state, self.count = module, side, on_state, 0
        self.wanted: dict[int, list[tuple[int, TapPoint]]] = {}
        for layer in layers:
            point = stack.points[layer]
            if point.module is module and point.side == side:
                self.wanted.setdefault(point.call, []).append((layer, point))

    def register(self) -> RemovableHandle:
        if self.side == "input":
            return self.module.register_forward_pre_hook(partial(_on_input, self), with_kwargs=True)
        return self.module.register_forward_hook(partial(_on_output, self))


# A call beyond those of the pass is a recomputation (gradient checkpointing) and finds nothing wanted.


def _on_input(seen: _Watch, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    wanted = seen.wanted.get(seen.count)
    seen.count += 1
    for layer, point in wanted or ():
        seen.on_state(layer, pick_argument(point, args, kwargs))


def _on_output(seen: _Watch, _module: nn.Module, _args: tuple[object, ...], output: object) -> None:
    wanted = seen.wanted.get(seen.count)
    seen.count += 1
    for layer, point in wanted or ():
        seen.on_state(layer, pick(point, output))


@final
class StopForward(BaseException):
    """Raised by a hook to end a model's forward; `run_until_stopped` catches it, and nothing in between does."""


def run_until_stopped(model: nn.Module, batch: Mapping[str, Any], stop: StopForward) -> Any:
    """Run a model until a hook raises `stop`.

    Args:
        model: The model.
        batch: What it is called with.
        stop: The exception that ends this run; those of other runs pass through.

    Returns:
        The model's output, or None if it was stopped.
    """
    try:
        return model(**batch)
    except StopForward as raised:
        if raised is not stop:
            raise
        return None


def token_mask(
    stack: LayerStack,
    batch: Mapping[str, Any],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Tensor | None:
    """Find which tokens of a pass over a stack are real.

    Args:
        stack: The stack.
        batch: What the whole model was called with; empty if that is not known.
        args: Positional arguments of the call of `stack.scope`.
        kwargs: Keyword arguments of that call.

    Returns:
        The batch's own mask `[batch, tokens]`, else the one the stack was called with; None if there is neither, so
        that every token is real.

    Raises:
        ConfigError: If the mask does not say for each token whether it is real.
    """
    mask = batch.get("decoder_attention_mask" if stack.name == "decoder" else "attention_mask")
    if mask is None:
        mask = argument(stack.scope, "attention_mask", args, kwargs or {})
        if batch and not is_token_mask(mask):
            return None  # the model made it for its attention, out of a batch without a mask
    if mask is not None and not is_token_mask(mask):
        form = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            f"mask: the attention mask is {form}; it must be [batch, tokens], 1 (or True) at real tokens and 0 at "
            "padding, so that readers can tell which tokens are real."
        )
    return mask


def is_token_mask(mask: object) -> TypeGuard[Tensor]:
    """Whether a value is a mask `[batch, tokens]` of zeros and ones, not one that is added to attention scores."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    return not mask.is_floating_point() or mask.is_meta or bool((mask >= 0).all())


def argument(module: nn.Module, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """One argument of a module's call by its name; None if it was not given."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)).get(name)
