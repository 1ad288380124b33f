"""DepthLSTM: an LSTM over the layers of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn

from lamina.fusion.base import SIZE, Fusion, FusionConfig, LayerView, Stream, require_fed
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class DepthLSTM(FusionConfig):
    """A fusion by an LSTM that reads a token's states from bottom to top; its last hidden state is the features.

    Args:
        dim: Size of the LSTM's hidden state, at least 1. None: the model's width.
        layers: Selector of the layers that are read. The default leaves out the embeddings.

    Raises:
        ConfigError: If a value is not valid.

    Source:
        Li et al. 2018, "Layer Trajectory LSTM", here with a plain LSTM cell; the cell in the paper has peepholes and is
        part of a recurrent model.
    """

    _ranges: ClassVar = {"dim": SIZE}

    dim: int | None = None
    layers: Selector = "1-"


class _DepthLSTMStream(Stream):
    """One forward pass of several DepthLSTM fusions (its members): their LSTM cells are computed together."""

    def __init__(self, members: Sequence[DepthLSTMFusion]) -> None:
        cells = [member.cell for member in members]
        # One product per gate (input, forget, cell, output): all four in one would allocate a block of memory so large
        # that the allocator never reuses it.
        self._input = torch.stack([cell.weight_ih for cell in cells]).mT.chunk(4, dim=-1)
        self._recurrent = torch.stack([cell.weight_hh for cell in cells]).mT.chunk(4, dim=-1)
        self._bias = torch.stack([cell.bias_ih + cell.bias_hh for cell in cells]).unsqueeze(1).chunk(4, dim=-1)
        self._hidden: Tensor | None = None  # [members, batch * tokens, dim], like `_memory`
        self._memory: Tensor | None = None

    def step(self, index: int, view: LayerView) -> None:
        state = view.state.to(self._input[0].dtype).flatten(0, 1).expand(len(self._input[0]), -1, -1)
        gates = list(map(torch.baddbmm, self._bias, [state] * 4, self._input))
        if self._hidden is not None:
            gates = list(map(torch.baddbmm, gates, [self._hidden] * 4, self._recurrent))
        input_gate, forget_gate, cell_gate, output_gate = gates
        memory = input_gate.sigmoid() * cell_gate.tanh()
        self._memory = memory if self._memory is None else torch.addcmul(memory, forget_gate.sigmoid(), self._memory)
        self._hidden = output_gate.sigmoid() * self._memory.tanh()

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        return [hidden.unflatten(0, mask.shape) for hidden in require_fed(self._hidden).unbind(0)]


@final
class DepthLSTMFusion(Fusion, config=DepthLSTM):
    """The module of `DepthLSTM`. The stream uses the parameters of its `cell`, an `nn.LSTMCell`."""

    token_wise: ClassVar = True
    stream_of: ClassVar = _DepthLSTMStream

    def __init__(self, config: DepthLSTM, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        self.cell = nn.LSTMCell(width, self.dim)
