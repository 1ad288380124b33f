"""LastLayer: the hidden state of one layer as it is; what most people do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from lamina.fusion.base import Fusion, FusionConfig, Stream, WeightedSum


@final
@dataclass(frozen=True)
class LastLayer(FusionConfig):
    """The top layer's hidden state, unchanged; no parameters, so `dim` is the model's width."""

    layers: ClassVar[int] = -1


@final
class LastLayerFusion(Fusion, config=LastLayer):
    """The module of `LastLayer`; of several states it reads the last."""

    token_wise: ClassVar = True

    def active_layers(self) -> tuple[int, ...]:
        """The last state."""
        return (self.layers - 1,)

    def stream(self, members: object) -> Stream:
        """Pass the state through."""
        return WeightedSum(torch.eye(self.layers)[-1])
