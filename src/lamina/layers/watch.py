"""Hand each layer's state on at the moment it is computed, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

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
        for each in watches:
            each.count = 0
        if on_start is not None:
            on_start(args, kwargs)

    try:
        handles.append(stack.scope.register_forward_pre_hook(start, with_kwargs=True, prepend=True))
        handles.extend(each.register() for each in watches)
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
