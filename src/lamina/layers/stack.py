"""What is known of a stack once its layers have been found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

Side = Literal["output", "input"]
Swap = tuple[int, int]  # axes that trade places where a module sees a state as [batch, width, tokens] or [tokens, ...]


@dataclass(frozen=True, eq=False)
class TapPoint:
    """Where one layer is seen: a value that goes into, or comes out of, one call of one module."""

    module: nn.Module
    path: str  # its dotted name in the model; "" is the model itself
    side: Side
    index: int | str | None  # position or key among the arguments or results; None if the result is the state itself
    call: int  # which of the module's calls within a pass, from 0
    swap: Swap | None = None


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A sequence of blocks, and where each of its layers is seen."""

    name: str  # "main", "encoder" or "decoder"; of a model with towers "text", "vision" and the like
    width: int  # size of every state's last axis
    blocks: tuple[nn.Module, ...]  # bottom first, one several times where blocks share weights; empty without modules
    points: tuple[TapPoint, ...]  # entry i is where layer i is seen
    # the closest module around all points that is called once per pass, with the mask if any is; it starts a pass
    scope: nn.Module
    scope_path: str
    # modules with weights of their own that take part up to the last layer, each once, as registered; the same for a
    # backbone alone and inside a model with a head
    run: tuple[nn.Module, ...]
    tower: nn.Module | None = None  # the part of the model that runs the stack by itself, where there are several

    def __repr__(self) -> str:
        return f"LayerStack('{self.name}', depth={self.depth}, width={self.width})"  # and not all of its modules

    @property
    def depth(self) -> int:
        """Count of blocks."""
        return len(self.points) - 1

    @property
    def layers(self) -> int:
        """Count of layers: the blocks and the embeddings."""
        return len(self.points)


def by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module, each module once, the model itself at ""."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Name -> submodule, each once."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", module.named_children()))


def own_state(module: nn.Module) -> dict[str, object]:
    """What a module itself is saved as, in any form, without the modules inside: packed weights have no parameters."""
    state: dict[str, object] = {}
    cast("Any", module)._save_to_state_dict(state, "", True)
    return state


def swapped(state: Tensor, swap: Swap | None) -> Tensor:
    """The state with two axes exchanged; as it is for None."""
    return state if swap is None else state.transpose(*swap)


def alike(value: Tensor, state: Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape, and differ by at most `tolerance` x the largest number of the second."""
    if value.shape != state.shape or torch.equal(value, state):
        return value.shape == state.shape
    return bool((value.float() - state.float()).abs().max() <= tolerance * state.float().abs().max())
