"""LastLayer: the hidden state of the top layer, unchanged; the usual baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lamina.fusion.base import Fusion, FusionConfig, Stream, WeightedSum


@final
@dataclass(frozen=True)
class LastLayer(FusionConfig):
    """A fusion whose features are the top layer's hidden state; it has no parameters and keeps the model's width."""

    layers: ClassVar[int] = -1


@final
class LastLayerFusion(Fusion, config=LastLayer):
    """The module of `LastLayer`. If it gets the states of several layers, it reads the last one."""

    token_wise: ClassVar = True
    weights: Tensor

    def __init__(self, config: LastLayer, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        # a buffer, so that it follows the bank to another dtype or device
        self.register_buffer("weights", torch.eye(layers)[-1], persistent=False)

    def active_layers(self) -> tuple[int, ...]:
        """Return the index of the last layer, the only one that is read."""
        return (self.layers - 1,)

    def stream(self, members: object) -> Stream:
        """Return a stream that returns the last state unchanged. `members` is unused."""
        return WeightedSum(self.weights)
