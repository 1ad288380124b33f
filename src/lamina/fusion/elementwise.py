"""Elementwise: one learned weight per layer and feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor, nn

from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, fed

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from jaxtyping import Bool, Float

    from lamina.layers.selectors import Selector


@final
@dataclass(frozen=True)
class Elementwise(FusionConfig):
    """`sum_i v_i * z_i` with one learned vector per layer; `dim` is the model's width.

    Args:
        layers: Which layers.

    Source:
        Liu et al. 2021, "Understanding and Improving Encoder Layer Fusion in Sequence-to-Sequence Learning", as
        ElNokrashy et al. 2024 (DWAtt) describe it: nothing normalises the vectors. They start at 1 / layers, so the
        sum starts as the mean.
    """

    layers: Selector = "all"

    def build(self, layers: int, width: int) -> ElementwiseFusion:
        """Make the module for `layers` states of size `width`."""
        return ElementwiseFusion(layers=layers, width=width, dim=width)


@final
class ElementwiseFusion(Fusion):
    """The module of `Elementwise`: `scales [layers, width]`."""

    def __init__(self, *, layers: int, width: int, dim: int) -> None:
        super().__init__(layers=layers, width=width, dim=dim)
        self.scales = nn.Parameter(torch.full((layers, width), 1 / layers))

    def importance(self) -> Float[Tensor, " layers"]:
        """Each layer's part of the scales' absolute values; sums to 1."""
        return shares(self.scales.detach().abs().mean(1))

    def group(self) -> Hashable:
        """Same shape, same place."""
        return (self.width, self.scales.dtype, self.scales.device)

    def stream(self, members: Sequence[Fusion]) -> Stream:
        """One operation per layer for all members together."""
        return ElementwiseStream(cast("Sequence[ElementwiseFusion]", members))


class ScaledSum(Stream):
    """One accumulator `[members, batch, tokens, width]`, whatever the number of layers."""

    _total: Tensor | None = None

    def _add(self, state: Float[Tensor, "batch tokens width"], scales: Float[Tensor, "members ..."]) -> None:
        """Add `scales * state`."""
        if self._total is None:
            self._total = state * scales
        elif torch.is_grad_enabled():
            self._total = torch.addcmul(self._total, state, scales)
        else:
            self._total.addcmul_(state, scales)

    def _sums(self) -> list[Float[Tensor, "batch tokens width"]]:
        return list(fed(self._total).unbind(0))


class ElementwiseStream(ScaledSum):
    """Runs any number of alike Elementwises."""

    def __init__(self, members: Sequence[ElementwiseFusion]) -> None:
        self._scales = torch.stack([member.scales for member in members], dim=1)[..., None, None, :].unbind(0)

    def step(self, index: int, view: LayerView) -> None:
        """Scale one state."""
        scales = self._scales[index]
        self._add(view.state.to(scales.dtype), scales)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        """The sums."""
        del mask
        return self._sums()


def shares(amounts: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
    """Amounts of at least 0, divided by their sum; equal shares where all are 0."""
    total = amounts.sum()
    equal = torch.full_like(amounts, 1 / len(amounts))
    return torch.where(total > 0, amounts / total.clamp(min=torch.finfo(amounts.dtype).tiny), equal)
