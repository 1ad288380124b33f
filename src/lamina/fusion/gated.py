"""Gated: each state of each token sets its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, WeightedSum
from lamina.fusion.elementwise import shares
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class Gated(FusionConfig):
    """`sum_i w_i z_i` with `w_i = U gelu(V z_i + a) + b`, one number per token and layer; `dim` is the model's width.

    Args:
        hidden: Size of the gate's hidden layer.
        layers: Which layers.

    Raises:
        ConfigError: If `hidden` is below 1.

    Source:
        Wang et al. 2018, "Multi-layer Representation Fusion for Neural Machine Translation", as ElNokrashy et al. 2024
        (DWAtt) write it: `w_i = f(z_i)`, so one gate serves all the layers and nothing normalises its weights. U starts
        at 0 and b at 1 / layers, so the sum starts as the mean.
    """

    hidden: int = 128
    layers: Selector = "all"

    def __post_init__(self) -> None:
        check_range("gated", "hidden", self.hidden, 1)

    def build(self, layers: int, width: int) -> GatedFusion:
        """Make the module for `layers` states of size `width`."""
        return GatedFusion(layers=layers, width=width, hidden=self.hidden)


class InputWeighted(Fusion):
    """A fusion that weighs its layers anew for each token, and keeps count of what each layer got."""

    amounts: Tensor  # [layers]; not saved: it describes what was read, not what was learned

    def __init__(self, *, layers: int, width: int, dim: int) -> None:
        super().__init__(layers=layers, width=width, dim=dim)
        self.register_buffer("amounts", torch.zeros(layers), persistent=False)

    def observe(self, weights: Float[Tensor, "layers batch tokens"], mask: Bool[Tensor, "batch tokens"]) -> None:
        """Count the size of the weights of real tokens."""
        seen = weights.detach().float().abs().masked_fill(~mask, 0).sum((1, 2))
        self.amounts = self.amounts.to(seen) + seen

    def train(self, mode: bool = True) -> Self:
        """As in torch; a change of mode starts a new count."""
        if mode != self.training:
            self.amounts = torch.zeros_like(self.amounts)
        return super().train(mode)

    def importance(self) -> Float[Tensor, " layers"]:
        """Each layer's part of the absolute weights; sums to 1.

        Over the real tokens read since the module was last switched between training and evaluation (so after a
        validation, over all of it); equal shares before any.
        """
        return shares(self.amounts)


@final
class GatedFusion(InputWeighted):
    """The module of `Gated`: the linear maps `inner` (V, a) and `outer` (U, b)."""

    stacks: ClassVar[bool] = True

    def __init__(self, *, layers: int, width: int, hidden: int) -> None:
        super().__init__(layers=layers, width=width, dim=width)
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.constant_(self.outer.bias, 1 / layers)

    def stream(self, members: Sequence[Any]) -> Stream:
        """One matrix product per layer for all members together: their hidden layers are stacked into one."""
        return _GatedStream(members)


class _GatedStream(WeightedSum):
    def __init__(self, members: Sequence[GatedFusion]) -> None:
        self._members = members
        self._inner = torch.cat([member.inner.weight for member in members])
        self._inner_bias = torch.cat([member.inner.bias for member in members])
        self._outer = torch.cat([member.outer.weight for member in members])
        self._outer_bias = torch.cat([member.outer.bias for member in members])
        self._weights: list[Tensor] = []

    def step(self, index: int, view: LayerView) -> None:
        del index
        state = view.state.to(self._inner.dtype)
        hidden = F.gelu(F.linear(state, self._inner, self._inner_bias)).unflatten(-1, (len(self._members), -1))
        weights = ((hidden * self._outer).sum(-1) + self._outer_bias).movedim(2, 0)
        self._weights.append(weights.detach())
        self._add(state, weights.unsqueeze(-1))

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        sums = super().finish(mask)
        for member, weights in zip(self._members, torch.stack(self._weights, dim=1), strict=True):
            member.observe(weights, mask)
        return sums
