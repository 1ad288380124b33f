"""DepthLSTM: an LSTM that climbs the layers of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor, nn

from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, fed
from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from jaxtyping import Bool, Float

    from lamina.layers.selectors import Selector


@final
@dataclass(frozen=True)
class DepthLSTM(FusionConfig):
    """The last hidden state of an LSTM that reads a token's states from the lowest layer to the highest.

    It takes one state at a time, so it streams; that is no slower than handing `nn.LSTM` all of them.

    Args:
        dim: Size of its hidden state; None: the model's width.
        layers: Which layers; the default leaves the embeddings out.

    Raises:
        ConfigError: If a value cannot be.

    Source:
        Li et al. 2018, "Layer Trajectory LSTM", with a plain LSTM cell: theirs has peepholes and sits inside a
        recurrent model.
    """

    dim: int | None = None
    layers: Selector = "1-"

    def __post_init__(self) -> None:
        if self.dim is not None:
            check_range("depth_lstm", "dim", self.dim, 1, math.inf)

    def build(self, layers: int, width: int) -> DepthLSTMFusion:
        """Make the module for `layers` states of size `width`."""
        return DepthLSTMFusion(layers=layers, width=width, dim=self.dim or width)


@final
class DepthLSTMFusion(Fusion):
    """The module of `DepthLSTM`: `cell`, an `nn.LSTMCell` (its parameters, one start and one order of gates)."""

    def __init__(self, *, layers: int, width: int, dim: int) -> None:
        super().__init__(layers=layers, width=width, dim=dim)
        self.cell = nn.LSTMCell(width, dim)

    def group(self) -> Hashable:
        """Same shape, same place."""
        return (self.cell.weight_ih.shape, self.cell.weight_ih.dtype, self.cell.weight_ih.device)

    def stream(self, members: Sequence[Fusion]) -> Stream:
        """One step of all members' cells per layer."""
        return DepthLSTMStream([cast("DepthLSTMFusion", member).cell for member in members])


class DepthLSTMStream(Stream):
    """Runs any number of alike cells as one; keeps a hidden and a cell state, `[members, batch * tokens, dim]`."""

    def __init__(self, cells: Sequence[nn.LSTMCell]) -> None:
        # gate by gate (enter, keep, new, leave): all four at once is one large piece of memory that is never reused
        self._input = torch.stack([cell.weight_ih for cell in cells]).mT.chunk(4, dim=-1)
        self._recurrent = torch.stack([cell.weight_hh for cell in cells]).mT.chunk(4, dim=-1)
        self._bias = torch.stack([cell.bias_ih + cell.bias_hh for cell in cells]).unsqueeze(1).chunk(4, dim=-1)
        self._hidden: Tensor | None = None
        self._memory: Tensor | None = None

    def step(self, index: int, view: LayerView) -> None:
        """Take one step up."""
        del index
        members, dtype = len(self._input[0]), self._input[0].dtype
        state = view.state.to(dtype).flatten(0, 1).expand(members, -1, -1)
        gates = [torch.baddbmm(bias, state, weight) for bias, weight in zip(self._bias, self._input, strict=True)]
        if self._hidden is not None:
            gates = [
                torch.baddbmm(gate, self._hidden, weight) for gate, weight in zip(gates, self._recurrent, strict=True)
            ]
        enter, keep, new, leave = gates
        memory = enter.sigmoid() * new.tanh()
        self._memory = memory if self._memory is None else torch.addcmul(memory, keep.sigmoid(), self._memory)
        self._hidden = leave.sigmoid() * self._memory.tanh()

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        """The hidden states."""
        return [hidden.unflatten(0, mask.shape) for hidden in fed(self._hidden).unbind(0)]
