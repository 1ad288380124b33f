"""Mean: the plain average of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from lamina.fusion.base import Fusion, FusionConfig, Stream, WeightedSum
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@final
@dataclass(frozen=True)
class Mean(FusionConfig):
    """Average the selected layers; no parameters, so `dim` is the model's width."""

    layers: Selector = "all"


@final
class MeanFusion(Fusion, config=Mean):
    """The module of `Mean`."""

    token_wise: ClassVar = True

    def importance(self) -> Float[Tensor, " layers"]:
        """The same share for each layer; sums to 1."""
        return torch.full((self.layers,), 1 / self.layers)

    def stream(self, members: object) -> Stream:
        """One running sum."""
        return WeightedSum(self.importance())
