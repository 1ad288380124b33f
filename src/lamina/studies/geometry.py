"""How the states of each layer lie: angles along the blocks, entropy and curvature, streamed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Scores = dict[str, list[float]]  # measure -> a number per layer


class LayerMeasure(ABC):
    """Numbers of each layer, summed up pass by pass; `layers` counts those that are read."""

    names: ClassVar[tuple[str, ...]]

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(len(self.names), layers, dtype=torch.float64)
        self._counts = torch.zeros(layers, dtype=torch.float64)

    def on_state(
        self, index: int, state: Float[Tensor, "batch tokens width"], real: Bool[Tensor, "batch tokens"]
    ) -> None:
        """Take in a state; `index` counts the layers that are read from 0, ascending within a pass."""
        values = self.values(index, state.float(), real)
        self._sums[:, index] += values.double().sum(1).cpu()
        self._counts[index] += values.shape[1]

    @abstractmethod
    def values(
        self, index: int, state: Float[Tensor, "batch tokens width"], real: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "names count"]:
        """The numbers of one batch that the mean is taken over."""

    def scores(self) -> Scores:
        """Per layer the mean of each measure; NaN where nothing could be measured."""
        return dict(zip(self.names, (self._sums / self._counts).tolist(), strict=True))


@final
class BlockDistance(LayerMeasure):
    """How far a token's state moves from one layer that is read to the next; the lowest has none.

    "angular_distance" is arccos(cosine) / pi, from 0 to 1; "block_influence" is 1 - cosine, from 0 to 2.

    Source:
        Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv:2403.17887, eq. 7, and Men et
        al. 2024, "ShortGPT", arXiv:2403.03853, eq. 1. Both are means over all real tokens here; Gromov et al. take the
        last token of each text.
    """

    names = ("angular_distance", "block_influence")
    _before: Tensor | None = None

    def values(self, index: int, state: Tensor, real: Tensor) -> Tensor:
        """Of every real token."""
        unit = F.normalize(state[real], dim=-1)
        before, self._before = self._before, unit
        if index == 0 or before is None:
            return unit.new_zeros(2, 0)
        difference = (unit - before).norm(dim=-1)
        # 2 atan2(|a - b|, |a + b|) is the angle between unit vectors, exact for small ones too, unlike arccos
        angle = 2 * torch.atan2(difference, (unit + before).norm(dim=-1))
        return torch.stack([angle / math.pi, difference**2 / 2])


@final
class Entropy(LayerMeasure):
    """How evenly a text's tokens spread over directions: the matrix entropy of order 2, in nats.

    `-log sum_k (lambda_k / sum lambda)^2` over the eigenvalues of the tokens' inner products, so 0 where all states
    point one way, and at most log(tokens). Mean over texts.

    Source:
        Skean et al. 2025, "Layer by Layer", arXiv:2502.02013, eq. 1 (prompt entropy), with alpha = 2, where the sum
        needs no eigenvalues; they report alpha near 1.
    """

    names = ("entropy",)

    def values(self, index: int, state: Tensor, real: Tensor) -> Tensor:
        """Of every text."""
        del index
        states = state * real.unsqueeze(-1)
        states = states / states.flatten(1).norm(dim=1).clamp(min=torch.finfo(states.dtype).tiny)[:, None, None]
        few = states if states.shape[1] <= states.shape[2] else states.mT
        return -(few @ few.mT).square().sum((1, 2)).log().unsqueeze(0)


@final
class Curvature(LayerMeasure):
    """How much a text's path through the states bends: the mean angle between steps that follow each other, in radians.

    A step leads from a real token's state to the next one's; texts of fewer than three have no angle. Mean over texts.

    Source:
        Hosseini and Fedorenko 2023, arXiv:2311.04930, eq. 1 and 2, who give degrees.
    """

    names = ("curvature",)

    def values(self, index: int, state: Tensor, real: Tensor) -> Tensor:
        """Of every text that has an angle."""
        del index
        steps = F.normalize(state.diff(dim=1), dim=-1)
        first, second = steps[:, :-1], steps[:, 1:]
        angles = 2 * torch.atan2((second - first).norm(dim=-1), (second + first).norm(dim=-1))
        counted = real[:, 2:] & real[:, 1:-1] & real[:, :-2]
        angles, count = angles.masked_fill(~counted, 0).sum(1), counted.sum(1)
        return (angles[count > 0] / count[count > 0]).unsqueeze(0)


MEASURES: dict[str, type[LayerMeasure]] = {
    name: kind for kind in (BlockDistance, Entropy, Curvature) for name in kind.names
}
