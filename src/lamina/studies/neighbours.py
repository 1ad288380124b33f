"""The intrinsic dimension of a layer's vectors, from the distances to their nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

_SAME = 1e-6  # of the typical length of a vector: rows that are no further apart are duplicates


@final
class NeighbourSample:
    """Keeps the vectors of at most `most` rows per layer, for the intrinsic dimension, which needs neighbours."""

    def __init__(self, most: int) -> None:
        self.most, self.rows = most, 0
        self._kept: list[list[Tensor]] = []

    def add(self, features: Sequence[Float[Tensor, "rows _"]]) -> None:
        """Take in rows' vectors per layer, until there are enough."""
        count = min(len(features[0]), self.most - self.rows)
        if count > 0:
            self._kept.append([vectors[:count].float().cpu() for vectors in features])
            self.rows += count

    def dimensions(self) -> list[float]:
        """The intrinsic dimension per layer."""
        return [two_nn(torch.cat(layer)) for layer in zip(*self._kept, strict=True)]


def two_nn(vectors: Float[Tensor, "rows width"]) -> float:
    """The intrinsic dimension of a cloud of points: `(N - 1) / sum_i log(r2_i / r1_i)`.

    r1 and r2 are the distances to the nearest and the second nearest point; of points that lie on each other all but
    one are left out. NaN where fewer than three are left.

    Source:
        Facco et al. 2017, "Estimating the intrinsic dimension of datasets by a minimal neighborhood information",
        doi:10.1038/s41598-017-11873-y (TwoNN), by its maximum likelihood estimate without bias in place of a fitted
        line (Denti et al. 2022, doi:10.1038/s41598-022-20991-1).
    """
    centred = vectors.double() - vectors.double().mean(0)
    distances = torch.cdist(centred, centred).fill_diagonal_(torch.inf)
    near = distances <= _SAME * centred.norm(dim=1).mean()
    kept = ~near.tril().any(1)
    distances = distances[kept][:, kept]
    if len(distances) < 3:
        return math.nan
    nearest, second = distances.topk(2, largest=False).values.unbind(1)
    total = float((second / nearest).log().sum())
    return (len(distances) - 1) / total if total > 0 else math.inf
