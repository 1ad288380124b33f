"""Concat: one linear map of the concatenated layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import SIZE, Fusion, FusionConfig, LayerView, Stream, require_fed
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class Concat(FusionConfig):
    """A fusion that maps the concatenated states `z_i` of a token to one vector: `sum_i W_i z_i`, summed over layers.

    Args:
        dim: Size of the features, at least 1. None: the model's width, as in the paper.
        layers: Selector of the layers that are read. The default leaves out the embeddings.
        bias: Whether to add a learned vector to the sum.

    Raises:
        ConfigError: If a value is not valid.

    Source:
        ElNokrashy et al. 2024, "Depth-Wise Attention (DWAtt)", arXiv:2209.15168, eq. 2. The paper does not
        say how the map is initialised; here it is as one `nn.Linear` over all states.
    """

    _ranges: ClassVar = {"dim": SIZE}

    dim: int | None = None
    layers: Selector = "1-"
    bias: bool = False


class _ConcatStream(Stream):
    """One forward pass of several Concat fusions (its members), with one batched matrix product per layer for all."""

    def __init__(self, members: Sequence[ConcatFusion]) -> None:
        self._biases = [member.bias for member in members]
        # unbound once: the gradient of each slice `projection[i]` would be as large as the whole parameter
        self._maps = [member.projection.unbind(0) for member in members]
        self._total: Tensor | None = None  # [members, batch * tokens, dim]

    def step(self, index: int, view: LayerView) -> None:
        maps = [member[index] for member in self._maps]
        weight = (torch.stack(maps) if len(maps) > 1 else maps[0].unsqueeze(0)).mT
        state = view.state.to(weight.dtype).flatten(0, 1).expand(len(maps), -1, -1)
        if self._total is None:
            self._total = torch.bmm(state, weight)
        elif torch.is_grad_enabled():
            self._total = torch.baddbmm(self._total, state, weight)
        else:
            self._total.baddbmm_(state, weight)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        totals = require_fed(self._total).unflatten(1, mask.shape).unbind(0)
        return [total if bias is None else total + bias for total, bias in zip(totals, self._biases, strict=True)]


@final
class ConcatFusion(Fusion, config=Concat):
    """The module of `Concat`. Parameters: `projection` `[layers, dim, width]`, and `bias` `[dim]` or None."""

    token_wise: ClassVar = True
    stream_of: ClassVar = _ConcatStream

    def __init__(self, config: Concat, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        bound = 1 / math.sqrt(layers * width)
        self.projection = nn.Parameter(torch.empty(layers, self.dim, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(self.dim).uniform_(-bound, bound)) if config.bias else None

    def contributions(self, states: Sequence[Tensor]) -> Tensor:
        """Return `[layers, tokens]`: the norm of each layer's term `W_i z_i` at each token of one text.

        Each state is `[1, tokens, width]`.
        """
        maps = zip(states, self.projection, strict=True)
        return torch.stack([F.linear(state[0].to(weight.dtype), weight).float().norm(dim=-1) for state, weight in maps])
