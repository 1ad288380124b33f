"""How the states of each layer lie: angles along the blocks, entropy and curvature, streamed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.errors import ConfigError

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


FEWEST = 4  # rows that the unbiased estimator needs


@final
class MinibatchCKA:
    """Sums of the unbiased HSIC between all pairs of layers, minibatch by minibatch.

    `CKA(i, j) = H(i, j) / sqrt(H(i, i) H(j, j))`, where H sums over minibatches the unbiased estimate
    `HSIC_1 = <K, L> / (n (n - 3))` of the U-centred matrices of inner products K and L of n rows.

    Source:
        Nguyen, Raghu and Kornblith 2021, arXiv:2010.15327, eq. 2 and 3; the estimator is that of Song et al. 2012,
        "Feature Selection via Dependence Maximization", written with the U-centred matrices of Szekely and Rizzo 2014,
        which give the same number by one inner product.
    """

    def __init__(self) -> None:
        self.rows = self.minibatches = 0
        self._total: Tensor | None = None

    def add(self, features: Sequence[Float[Tensor, "rows _"]]) -> None:
        """Take in one minibatch: per layer its rows' vectors `[rows, width]`, of any width but of the same rows.

        Raises:
            ConfigError: If there are fewer than 4 rows.
        """
        rows = len(features[0])
        if rows < FEWEST:
            raise ConfigError(
                f"similarity: a minibatch has {rows} rows; the unbiased estimate needs at least {FEWEST}."
            )
        kernels = torch.stack([u_centred_kernel(vectors) for vectors in features]).flatten(1)
        total = (kernels @ kernels.T).cpu() / (rows * (rows - 3))
        self._total = total if self._total is None else self._total + total
        self.rows, self.minibatches = self.rows + rows, self.minibatches + 1

    def cka(self) -> Float[Tensor, "layers layers"]:
        """Debiased CKA of each pair, 1 on the diagonal; NaN beside a layer whose states do not differ between rows.

        It is about 0 for independent states, and may be a little below; ConfigError if no minibatch came.
        """
        if self._total is None:
            raise ConfigError("similarity: no minibatch came; at least one is needed.")
        own = self._total.diagonal()
        scale = torch.where(own > 0, own, torch.nan).sqrt()
        return self._total / torch.outer(scale, scale)


def u_centred_kernel(vectors: Float[Tensor, "rows width"]) -> Float[Tensor, "rows rows"]:
    """The inner products of rows, U-centred: off the diagonal `k_ij - r_i - r_j + m`, 0 on it; in float64.

    `r_i` is the sum of row i over n - 2, `m` the sum of all over (n - 1)(n - 2), both without the diagonal.
    """
    rows = len(vectors)
    exact = vectors.to(torch.float32 if vectors.device.type == "mps" else torch.float64)
    exact = exact - exact.mean(0)  # changes nothing but the rounding
    kernel = (exact @ exact.T).fill_diagonal_(0)
    by_row = kernel.sum(1) / (rows - 2)
    kernel = kernel - by_row[:, None] - by_row + by_row.sum() / (rows - 1)
    return kernel.fill_diagonal_(0)


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
