"""What is known of a stack once its layers have been found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

Side = Literal["output", "input"]


@dataclass(frozen=True, eq=False)
class TapPoint:
    """Where one layer is seen: a value that goes into, or comes out of, one call of one module.

    Attributes:
        module: The module to hook.
        path: Its dotted name in the model; "" is the model itself.
        side: Whether the state is an argument of the call or its result.
        index: Position or key among the arguments or results; None if the result is the state itself.
        call: Which of the module's calls within a pass, from 0; a module shared by several layers is called often.
        calls: How many calls a pass makes.
        swap: Two axes that trade places, where the module sees the state as `[batch, width, tokens]` (1, 2) or
            `[tokens, batch, width]` (0, 1); None if it sees it as it is returned.
    """

    module: nn.Module
    path: str
    side: Side
    index: int | str | None
    call: int
    calls: int
    swap: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A sequence of blocks, and where each of its layers is seen.

    Attributes:
        name: "main", "encoder" or "decoder".
        width: Size of every state's last axis.
        blocks: The repeated modules, bottom first; one module several times where blocks share weights. Empty
            where the model has no module per block (XLM keeps its parts in separate lists).
        points: Entry i is where layer i is seen.
        scope: The closest module around all points that is called once per pass, and with the mask where a
            module is. A call of it starts a pass over the stack.
        scope_path: Its dotted name in the model; "" is the model itself.
        run: Modules that own parameters or saved buffers and take part up to the last layer, each once, as registered;
            the same for a backbone alone and inside a model with a head.
    """

    name: str
    width: int
    blocks: tuple[nn.Module, ...]
    points: tuple[TapPoint, ...]
    scope: nn.Module
    scope_path: str
    run: tuple[nn.Module, ...]

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


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers that are part of its state, without those of modules inside."""
    own = dict(module.named_buffers(recurse=False))
    saved = module.state_dict(keep_vars=True) if own else {}
    return {name: buffer for name, buffer in own.items() if name in saved}


def pick(point: TapPoint, output: object) -> Tensor:
    """Take a layer's state out of what its module returned."""
    # a ModelOutput takes positions as well as keys, as the tuple it may be replaced by
    state = output if point.index is None and not isinstance(output, Mapping) else cast("Any", output)[point.index]
    return swapped(cast("Tensor", state), point.swap)


def pick_argument(point: TapPoint, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    """Take a layer's state out of what its module was called with."""
    index = point.index
    return swapped(cast("Tensor", kwargs[index] if isinstance(index, str) else args[index or 0]), point.swap)


def swapped(state: Tensor, swap: tuple[int, int] | None) -> Tensor:
    """The state with two axes exchanged; as it is for None."""
    return state if swap is None else state.transpose(*swap)


def alike(value: Tensor, state: Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape, and differ by at most `tolerance` x the largest number of the second."""
    if value.shape != state.shape or torch.equal(value, state):
        return value.shape == state.shape
    return bool((value.float() - state.float()).abs().max() <= tolerance * state.float().abs().max())
