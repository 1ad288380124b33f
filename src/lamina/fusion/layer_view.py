"""One layer's state as fusions see it, with the work that several of them share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class LayerView:
    """One layer's hidden state, its mask (True at real tokens), and the work that several fusions share, done once."""

    def __init__(
        self,
        state: Float[Tensor, "batch tokens width"],
        mask: Bool[Tensor, "batch tokens"],
        segments: Int[Tensor, "batch tokens"] | None = None,
    ) -> None:
        self.state, self.mask = state, mask
        self.segments = mask.int() if segments is None else segments  # 1: of the first text, 2: of the second, 0: none

    @cached_property
    def gelu(self) -> Float[Tensor, "batch tokens width"]:
        """The exact GELU of the state."""
        return F.gelu(self.state)

    @cached_property
    def normed(self) -> Float[Tensor, "batch tokens width"]:
        """The state layer-normed, without affine part."""
        return F.layer_norm(self.state, self.state.shape[-1:])

    @cached_property
    def matches(self) -> Float[Tensor, "batch 8"]:
        """How two texts match, in numbers around 0; see `PairedLayers`."""
        first, second = (self.segments == 1) & self.mask, (self.segments == 2) & self.mask
        directions = F.normalize(self.normed.float(), dim=-1)
        cosines = directions @ directions.mT
        means = [(directions * side.unsqueeze(-1)).sum(1) for side in (first, second)]
        sizes = [side.sum(1) for side in (first, second)]
        one, two = (_best_matches(cosines, side, other) for side, other in ((first, second), (second, first)))
        apart = (sizes[0] - sizes[1]) / (sizes[0] + sizes[1]).clamp(min=1)
        return 4 * (torch.stack([*one, *two, F.cosine_similarity(*means, dim=-1), apart], dim=1) - 0.5)


def _best_matches(
    cosines: Float[Tensor, "batch tokens tokens"],
    side: Bool[Tensor, "batch tokens"],
    other: Bool[Tensor, "batch tokens"],
) -> list[Float[Tensor, " batch"]]:
    """Mean, least and standard deviation of the highest cosine of each token of a side with the other side's."""
    best = cosines.masked_fill(~other.unsqueeze(1), -1).amax(2)
    count = side.sum(1).clamp(min=1)
    mean = (best * side).sum(1) / count
    least = best.masked_fill(~side, 1).amin(1)
    variance = ((best - mean.unsqueeze(1)).square() * side).sum(1) / count
    return [mean, least, (variance + 1e-6).sqrt()]
