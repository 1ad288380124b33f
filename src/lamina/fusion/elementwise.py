"""Elementwise: a learned weight for each layer and each entry of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import nn

from lamina.fusion.base import Fusion, FusionConfig, WeightedSum, normalized
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@final
@dataclass(frozen=True)
class Elementwise(FusionConfig):
    """A fusion that computes `sum_i v_i * z_i`, with a learned vector `v_i` per layer. It keeps the model's width.

    Args:
        layers: Selector of the layers that are read.

    Source:
        Liu et al. 2021, "Understanding and Improving Encoder Layer Fusion in Sequence-to-Sequence Learning", as
        ElNokrashy et al. 2024 (DWAtt) describe it: nothing normalises the vectors. They are initialised to 1 / layers,
        so that the sum is the mean at first.
    """

    layers: Selector = "all"


class _ElementwiseStream(WeightedSum):
    """One forward pass of several Elementwise fusions (its members), with one operation per layer for all."""

    def __init__(self, members: Sequence[ElementwiseFusion]) -> None:
        super().__init__(torch.stack([member.scales for member in members], dim=1)[..., None, None, :])


@final
class ElementwiseFusion(Fusion, config=Elementwise):
    """The module of `Elementwise`. Parameter: `scales` `[layers, width]`."""

    token_wise: ClassVar = True
    stream_of: ClassVar = _ElementwiseStream

    def __init__(self, config: Elementwise, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        self.scales = nn.Parameter(torch.full((layers, width), 1 / layers))

    def importance(self) -> Float[Tensor, " layers"]:
        """Return each layer's share of the absolute values of `scales`. The shares sum to 1."""
        return normalized(self.scales.detach().abs().mean(1))
