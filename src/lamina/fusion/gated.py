"""Gated: a weight for each layer of each token, computed from the state itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import SIZE, FusionConfig, LayerView, WeightedSum
from lamina.fusion.input_weighted import InputWeighted
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class Gated(FusionConfig):
    """A fusion that computes `sum_i w_i z_i`; a small network computes each state's weight `w = U gelu(V z + a) + b`.

    Args:
        hidden: Size of the network's hidden layer, at least 1.
        layers: Selector of the layers that are read.

    Raises:
        ConfigError: If a value is not valid.

    Source:
        Wang et al. 2018, "Multi-layer Representation Fusion for Neural Machine Translation", as ElNokrashy et al. 2024
        (DWAtt) write it: all layers share one network and nothing normalises the weights. U is initialised to 0 and b
        to 1 / layers, so that the sum is the mean at first.
    """

    _ranges: ClassVar = {"hidden": SIZE}

    hidden: int = 128
    layers: Selector = "all"


class _GatedStream(WeightedSum):
    """One forward pass of several Gated fusions (its members), with one matrix product per layer for all networks."""

    def __init__(self, members: Sequence[GatedFusion]) -> None:
        self._members = members
        self._inner = torch.cat([member.inner.weight for member in members])
        self._inner_bias = torch.cat([member.inner.bias for member in members])
        self._outer = torch.cat([member.outer.weight for member in members])
        self._outer_bias = torch.cat([member.outer.bias for member in members])
        self._weights: list[Tensor] = []

    def step(self, index: int, view: LayerView) -> None:
        state = view.state.to(self._inner.dtype)
        hidden = F.gelu(F.linear(state, self._inner, self._inner_bias)).unflatten(-1, (len(self._members), -1))
        weights = ((hidden * self._outer).sum(-1) + self._outer_bias).movedim(2, 0)
        self._weights.append(weights.detach())
        self._add(state, weights.unsqueeze(-1))

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        """Return the sum of each member, and pass the member's weights to its `observe`. `mask` is True at tokens."""
        sums = super().finish(mask)
        for member, weights in zip(self._members, torch.stack(self._weights, dim=1), strict=True):
            member.observe(weights, mask)
        return sums


@final
class GatedFusion(InputWeighted, config=Gated):
    """The module of `Gated`. Its linear maps are `inner` (V and a) and `outer` (U and b)."""

    token_wise: ClassVar = True
    stream_of: ClassVar = _GatedStream

    def __init__(self, config: Gated, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        self.inner = nn.Linear(width, config.hidden)
        self.outer = nn.Linear(config.hidden, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.constant_(self.outer.bias, 1 / layers)
