"""SingleLayer: the projection of AdaLayers on one layer only, as a fair baseline of AdaLayers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.fusion.ada_layers import ProjectedConfig, ProjectedFusion
from lamina.layers import select

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@final
@dataclass(frozen=True)
class SingleLayer(ProjectedConfig):
    """A fusion that projects a single layer, just as `AdaLayers` projects each of its layers: a fair baseline for it.

    In the published baseline, this projection keeps its random initial weights, as with `frozen=True`.

    Args:
        layer: The layer that is read; negative numbers count from the top.
        dim: Size of the features.
        dropout: Probability of dropout on the features and, with `positions`, once more on the result.
        positions: Whether to add fixed sinusoidal token positions, after GELU.
        output_activation: Whether to apply GELU to the projected features.
        frozen: Whether the projection stays at its random initialisation, and only the head is trained.

    Raises:
        ConfigError: If a value is not valid.
        LayerIndexError: When the reader is attached, if the model does not have the layer.
    """

    layer: int = -1
    dim: int = 64
    dropout: float = 0.1
    positions: bool = False
    output_activation: bool = True
    frozen: bool = False

    def selector(self) -> int:
        """Return the index of the layer that is read; negative numbers count from the top."""
        return self.layer


@final
class SingleLayerFusion(ProjectedFusion, config=SingleLayer):
    """The module of `SingleLayer`. Parameter: `projection` `[1, dim, width]`, without gradient if `config.frozen`.

    If it gets the states of several layers, it reads the one with index `config.layer` among these states, from 0; the
    constructor raises LayerIndexError if there is none.
    """

    def __init__(self, config: SingleLayer, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, projections=1)
        self.projection.requires_grad_(not config.frozen)
        self.index = 0 if layers == 1 else select(config.layer, layers, op="single_layer")[0]

    def active_layers(self) -> tuple[int, ...]:
        """Return a tuple with the index, among the selected layers and from 0, of the one layer that is read."""
        return (self.index,)

    @classmethod
    def weights_of(cls, members: Sequence[Any]) -> Float[Tensor, "members layers"]:
        """Return one row per fusion in `members`: 1 for the layer that it reads and 0 for the others."""
        eye = torch.eye(members[0].layers, device=members[0].projection.device, dtype=members[0].projection.dtype)
        return eye[[member.index for member in members]]
