"""AdaLayers: learned importance of each layer over small normalised projections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.fusion.projected import ProjectedConfig, ProjectedFusion
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class AdaLayers(ProjectedConfig):
    """Weigh every layer's projected features by a learned softmax.

    `F = gelu(sum_i p_i dropout(LayerNorm(W_i gelu(z_i))))` with `p = softmax(alpha * scores)`.

    Args:
        dim: Size of the features, k in the paper.
        alpha: Multiplies the scores, so larger lets the importances move faster; positive.
        cutoff: An importance at or below this is set to 0 and the rest is renormalised; below 1 / layers.
        entropy: Weight (lambda) of the mean of -p log p over layers, added to the loss.
        layers: Which layers; the default leaves the embeddings out.
        dropout: Probability, on each layer's features.
        positions: Add fixed sinusoidal token positions to the sum.
        output_activation: GELU on the sum, as in the reference code; the thesis prints none.

    Source:
        Dremov 2024, "Using Internal Representations of Frozen Transformer Models", section 5.1.
    """

    dim: int = 64
    alpha: float = 64.0
    cutoff: float = 0.0
    entropy: float = 0.0
    layers: Selector = "1-"
    dropout: float = 0.1
    positions: bool = False
    output_activation: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("ada_layers")
        check_range("ada_layers", "cutoff", self.cutoff, 0, 1, open_high=True)
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"ada_layers: alpha is {self.alpha}; it must be positive.")
        check_range("ada_layers", "entropy", self.entropy, 0)


@final
class AdaLayersFusion(ProjectedFusion, config=AdaLayers):
    """The module of `AdaLayers`: `projection [layers, dim, width]`, `scores [layers]`."""

    def __init__(self, config: AdaLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, projections=layers)
        if config.cutoff >= 1 / layers:
            came = f"cutoff is {config.cutoff} for {layers} layers"
            raise ConfigError(f"ada_layers: {came}; it would remove every layer. Use a cutoff below {1 / layers:.4g}.")
        self.scores = nn.Parameter(torch.ones(layers))

    def weights(self) -> Float[Tensor, " layers"]:
        """Softmax of the scores, after the cutoff."""
        weights = (self.config.alpha * self.scores).softmax(0)
        if self.config.cutoff == 0:
            return weights
        weights = weights * (weights > self.config.cutoff)
        return weights / weights.sum()

    def importance(self) -> Float[Tensor, " layers"]:
        """Share of each layer; sums to 1."""
        return self.weights().detach()

    def regularization(self, head: nn.Module | None = None) -> Tensor | None:
        """`entropy * mean_i(-p_i log p_i)`, after the cutoff."""
        if self.config.entropy == 0:
            return None
        weights = self.weights()
        positive = weights[weights > 0]  # 0 log 0 is 0, but its derivative is not a number
        return self.config.entropy * torch.special.entr(positive).sum() / self.layers
