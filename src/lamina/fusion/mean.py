"""Mean: the average of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lamina.fusion.base import Fusion, FusionConfig, Stream, WeightedSum
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class Mean(FusionConfig):
    """A fusion that averages the selected layers; it has no parameters and keeps the model's width.

    Args:
        layers: Selector of the layers that are read.
    """

    layers: Selector = "all"


@final
class MeanFusion(Fusion, config=Mean):
    """The module of `Mean`; it has no parameters."""

    token_wise: ClassVar = True
    weights: Tensor

    def __init__(self, config: Mean, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        # a buffer, so that it follows the bank to another dtype or device
        self.register_buffer("weights", torch.full((layers,), 1 / layers), persistent=False)

    def importance(self) -> Float[Tensor, " layers"]:
        """Return the weight of each layer, 1 / layers."""
        return self.weights.clone()

    def stream(self, members: object) -> Stream:
        """Return a stream that averages the states. `members` is unused."""
        return WeightedSum(self.weights)
