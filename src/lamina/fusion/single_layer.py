"""SingleLayer: the projection of AdaLayers on one layer, trained; the fair baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from lamina.fusion.ada_layers import ProjectedConfig, ProjectedFusion
from lamina.layers import select

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@final
@dataclass(frozen=True)
class SingleLayer(ProjectedConfig):
    """Project one layer as AdaLayers does, without importances.

    The published baseline left this projection at its random start; here it is trained.

    Args:
        layer: Which layer; negative counts from the top. The other settings are those of `AdaLayers`.
    """

    layer: int = -1
    dim: int = 64
    dropout: float = 0.1
    positions: bool = False
    output_activation: bool = True

    def __post_init__(self) -> None:
        self.check("single_layer")

    def selector(self) -> int:
        """The one layer."""
        return self.layer


@final
class SingleLayerFusion(ProjectedFusion, config=SingleLayer):
    """The module of `SingleLayer`: `projection [1, dim, width]`; of several states it reads number `layer`."""

    def __init__(self, config: SingleLayer, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, projections=1)
        self.index = 0 if layers == 1 else select(config.layer, layers, op="single_layer")[0]

    def active_layers(self) -> tuple[int, ...]:
        """The layer that is read."""
        return (self.index,)

    def weights(self) -> Float[Tensor, " layers"]:
        """1 for the layer that is read, 0 for the others."""
        return torch.eye(self.layers, device=self.projection.device, dtype=self.projection.dtype)[self.index]
