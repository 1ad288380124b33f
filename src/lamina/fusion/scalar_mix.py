"""ScalarMix: a learned softmax weight per layer and one scale, as in ELMo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn

from lamina.fusion.base import PROBABILITY, Fusion, FusionConfig, Stream, WeightedSum
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class ScalarMix(FusionConfig):
    """A fusion by a weighted mean, `scale * sum_i softmax(scores)_i z_i`, of states z_i; it keeps the model's width.

    Args:
        layers: Selector of the layers that are read.
        layer_dropout: Probability with which a layer is left out of a training step, unless all would be; below 1.

    Raises:
        ConfigError: If a value is not valid.

    Source:
        Peters et al. 2018, arXiv:1802.05365, eq. 1; layer dropout as in Kondratyuk and Straka 2019, arXiv:1904.02099.
    """

    _ranges: ClassVar = {"layer_dropout": PROBABILITY}

    layers: Selector = "all"
    layer_dropout: float = 0.0


@final
class ScalarMixFusion(Fusion, config=ScalarMix):
    """The module of `ScalarMix`. Parameters: `scores` `[layers]` (weights before the softmax) and `scale`, a scalar."""

    token_wise: ClassVar = True

    def __init__(self, config: ScalarMix, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        self.scores = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(()))

    def importance(self) -> Float[Tensor, " layers"]:
        """Return the weight of each layer, the softmax of `scores`, without gradient. The weights sum to 1."""
        return self.scores.detach().softmax(0)

    def stream(self, members: object) -> Stream:
        """Return a stream that sums the weighted states. `members` is unused.

        In training, each layer is dropped for the whole pass with probability `layer_dropout`; the softmax is then over
        the others. If all would be dropped, none is.
        """
        scores = self.scores
        if self.training and self.config.layer_dropout > 0:
            drop = torch.empty_like(scores).bernoulli_(self.config.layer_dropout, generator=self.generator).bool()
            if not drop.all():  # the softmax of scores that are all -inf is NaN: keep all layers then
                scores = scores.masked_fill(drop, -torch.inf)
        return WeightedSum(self.scale * scores.softmax(0))
