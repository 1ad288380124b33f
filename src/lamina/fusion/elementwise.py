"""Elementwise: one learned weight per layer and feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import nn

from lamina.fusion.base import Fusion, FusionConfig, WeightedSum, shares
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@final
@dataclass(frozen=True)
class Elementwise(FusionConfig):
    """`sum_i v_i * z_i` with one learned vector per layer; `dim` is the model's width.

    Source:
        Liu et al. 2021, "Understanding and Improving Encoder Layer Fusion in Sequence-to-Sequence Learning", as
        ElNokrashy et al. 2024 (DWAtt) describe it: nothing normalises the vectors. They start at 1 / layers, so the
        sum starts as the mean.
    """

    layers: Selector = "all"


class _ElementwiseStream(WeightedSum):
    """One operation per layer for all members together."""

    def __init__(self, members: Sequence[ElementwiseFusion]) -> None:
        super().__init__(torch.stack([member.scales for member in members], dim=1)[..., None, None, :])


@final
class ElementwiseFusion(Fusion, config=Elementwise):
    """The module of `Elementwise`: `scales [layers, width]`."""

    token_wise: ClassVar = True
    stream_of: ClassVar = _ElementwiseStream

    def __init__(self, config: Elementwise, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        self.scales = nn.Parameter(torch.full((layers, width), 1 / layers))

    def importance(self) -> Float[Tensor, " layers"]:
        """Each layer's part of the scales' absolute values; sums to 1."""
        return shares(self.scales.detach().abs().mean(1))
