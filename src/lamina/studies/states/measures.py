"""Measures of hidden states, accumulated batch by batch: block distance, entropy, curvature, CKA and dimension."""

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

Scores = dict[str, list[float]]  # measure -> one number per layer


class LayerMeasure(ABC):
    """Base class of measures with one number per layer: the mean over tokens or texts, accumulated batch by batch.

    A subclass sets `names`, its measures, and writes `values`. `layers` is the number of layers that are read.
    """

    names: ClassVar[tuple[str, ...]]

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(len(self.names), layers, dtype=torch.float64)
        self._counts = torch.zeros(layers, dtype=torch.float64)

    def on_state(
        self, index: int, state: Float[Tensor, "batch tokens width"], real: Bool[Tensor, "batch tokens"]
    ) -> None:
        """Add a layer's values on one batch to the sums.

        Args:
            index: Index of the layer among those that are read, from 0; ascending within a batch.
            state: The layer's state.
            real: True at tokens, False at padding.
        """
        values = self.values(index, state.float(), real)
        self._sums[:, index] += values.double().sum(1).cpu()
        self._counts[index] += values.shape[1]

    @abstractmethod
    def values(
        self, index: int, state: Float[Tensor, "batch tokens width"], real: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "names count"]:
        """Return a layer's values in a batch, `[measures, tokens or texts]`, over which the means are taken.

        Parameters as in `on_state`, with `state` in float32.
        """

    def scores(self) -> Scores:
        """Return measure -> its mean for each layer; NaN for layers without any value."""
        return dict(zip(self.names, (self._sums / self._counts).tolist(), strict=True))


@final
class BlockDistance(LayerMeasure):
    """Measures how far a token's state moves between two layers that are read one after the other.

    The lowest layer that is read has no value. "angular_distance" is arccos(cosine) / pi, from 0 to 1;
    "block_influence" is 1 - cosine, from 0 to 2.

    Source:
        Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv:2403.17887, eq. 7, and Men et
        al. 2024, "ShortGPT", arXiv:2403.03853, eq. 1. Here both are means over all tokens without padding; Gromov et
        al. use the last token of each text.
    """

    names = ("angular_distance", "block_influence")
    _previous: Tensor | None = None

    def values(self, index: int, state: Tensor, real: Tensor) -> Tensor:
        """Return how far each token moved since the layer that was read before: angular distance and block influence.

        The result is `[2, tokens]`. Padding (`real` is False), and tokens with an all-zero state, are left out. The
        lowest layer gives `[2, 0]`, because no layer was read before it. Call this once per layer, in ascending order
        of `index`.
        """
        unit = F.normalize(state[real], dim=-1)
        previous, self._previous = self._previous, unit
        if index == 0 or previous is None:
            return unit.new_zeros(2, 0)
        has_direction = unit.any(-1) & previous.any(-1)
        unit, previous = unit[has_direction], previous[has_direction]
        difference = (unit - previous).norm(dim=-1)
        # 2 atan2(|a - b|, |a + b|) is the angle between unit vectors, exact for small ones too, unlike arccos
        angle = 2 * torch.atan2(difference, (unit + previous).norm(dim=-1))
        return torch.stack([angle / math.pi, difference**2 / 2])


@final
class Entropy(LayerMeasure):
    """Measures how evenly a text's tokens spread over directions: matrix entropy of order 2, averaged over texts.

    It is `-log sum_k (lambda_k / sum lambda)^2`, in nats, over the eigenvalues of the matrix of inner products between
    the tokens' states: 0 if all states point in one direction, and at most log(tokens).

    Source:
        Skean et al. 2025, "Layer by Layer", arXiv:2502.02013, eq. 1 (prompt entropy), with alpha = 2, for which the sum
        needs no eigenvalues; they report alpha near 1.
    """

    names = ("entropy",)

    def values(self, index: int, state: Tensor, real: Tensor) -> Tensor:
        """Return the entropy of each text over its tokens without padding (`real` is False). `index` is unused.

        The result is `[1, texts]`, without a column for texts whose states are all zero.
        """
        del index
        states = state * real.unsqueeze(-1)
        lengths = states.flatten(1).norm(dim=1)
        states = states[lengths != 0] / lengths[lengths != 0, None, None]  # NaN is not left out
        # the sum of squared eigenvalues is the squared norm of the matrix; both Gram matrices have the same eigenvalues
        smaller = states if states.shape[1] <= states.shape[2] else states.mT
        return -(smaller @ smaller.mT).square().sum((1, 2)).log().unsqueeze(0)


@final
class Curvature(LayerMeasure):
    """Measures how much the path from token to token bends: the mean angle between consecutive steps, in radians.

    The mean is taken over each text, and then over texts.

    Texts without three consecutive tokens whose states differ are left out.

    Source:
        Hosseini and Fedorenko 2023, arXiv:2311.04930, eq. 1 and 2, who report degrees.
    """

    names = ("curvature",)

    def values(self, index: int, state: Tensor, real: Tensor) -> Tensor:
        """Return the mean angle of each text in radians, `[1, texts]`, without a column for texts without an angle.

        Padding, where `real` is False, does not count. `index` is unused.
        """
        del index
        steps = F.normalize(state.diff(dim=1), dim=-1)
        first, second = steps[:, :-1], steps[:, 1:]
        angles = 2 * torch.atan2((second - first).norm(dim=-1), (second + first).norm(dim=-1))
        counted = real[:, 2:] & real[:, 1:-1] & real[:, :-2] & first.any(-1) & second.any(-1)
        angles, count = angles.masked_fill(~counted, 0).sum(1), counted.sum(1)
        return (angles[count > 0] / count[count > 0]).unsqueeze(0)


MEASURES: dict[str, type[LayerMeasure]] = {
    name: measure for measure in (BlockDistance, Entropy, Curvature) for name in measure.names
}


FEWEST = 4  # rows that the unbiased estimator needs
_ROUNDING = 1e-24  # states whose differences are a millionth of their length are equal: HSIC has the fourth power


@final
class MinibatchCKA:
    """Debiased linear CKA between all pairs of layers, accumulated minibatch by minibatch.

    `CKA(i, j) = H(i, j) / sqrt(H(i, i) H(j, j))`, where H sums over minibatches the unbiased estimate
    `HSIC_1 = <K, L> / (n (n - 3))` of the U-centred matrices of inner products K and L of n rows.

    Attributes:
        rows: Number of rows that were added.
        minibatches: Number of minibatches that were added.

    Source:
        Nguyen, Raghu and Kornblith 2021, arXiv:2010.15327, eq. 2 and 3; the estimator is that of Song et al. 2012,
        "Feature Selection via Dependence Maximization", written with the U-centred matrices of Szekely and Rizzo 2014.
    """

    def __init__(self) -> None:
        self.rows = self.minibatches = 0
        self._total: Tensor | None = None
        self._lengths: Tensor | float = 0.0  # [layers], fourth power of a vector's length, summed over minibatches

    def add(self, features: Sequence[Float[Tensor, "rows _"]]) -> None:
        """Add one minibatch; raise ConfigError if it has fewer than 4 rows.

        `features` has, for each layer, one vector per row, `[rows, width]`; widths may differ between layers.
        """
        rows = len(features[0])
        if rows < FEWEST:
            raise ConfigError(
                f"similarity: a minibatch has {rows} rows; the unbiased estimate needs at least {FEWEST}."
            )
        kernels = torch.stack([u_centred_kernel(vectors) for vectors in features]).flatten(1)
        total = (kernels @ kernels.T).cpu() / (rows * (rows - 3))
        self._total = total if self._total is None else self._total + total
        squared = torch.stack([vectors.float().square().sum(1).mean() for vectors in features])
        self._lengths = self._lengths + squared.cpu().double().square()
        self.rows, self.minibatches = self.rows + rows, self.minibatches + 1

    def cka(self) -> Float[Tensor, "layers layers"]:
        """Return the CKA of all pairs of layers, `[layers, layers]`: 1 on the diagonal, near 0 if independent.

        A value may be slightly below 0, because the estimate is debiased. Pairs with a layer whose states are the same
        in all rows are NaN. Raises ConfigError if no minibatch was added, or if every layer has the same states in all
        rows.
        """
        if self._total is None:
            raise ConfigError("similarity: no minibatch was added; at least one is needed.")
        own = self._total.diagonal()
        varies = own > _ROUNDING * self._lengths
        if not bool(varies.any()):
            problem = "all rows have the same states in every layer, so that CKA is not defined"
            raise ConfigError(f"similarity: {problem}. Give texts that differ.")
        scale = torch.where(varies, own, torch.nan).sqrt()
        return self._total / torch.outer(scale, scale)


def u_centred_kernel(vectors: Float[Tensor, "rows width"]) -> Float[Tensor, "rows rows"]:
    """Return the U-centred matrix of the inner products of `vectors`, in float64.

    It is 0 on the diagonal, and `k_ij - r_i - r_j + m` elsewhere. `r_i` is the sum of row i divided by n - 2, and `m`
    the sum of all entries divided by (n - 1)(n - 2); both leave out the diagonal. On devices without float64 (MPS) the
    result is in float32.
    """
    rows = len(vectors)
    exact = vectors.to(torch.float32 if vectors.device.type == "mps" else torch.float64)
    exact = exact - exact.mean(0)  # changes nothing but the rounding
    kernel = (exact @ exact.T).fill_diagonal_(0)
    by_row = kernel.sum(1) / (rows - 2)
    kernel = kernel - by_row[:, None] - by_row + by_row.sum() / (rows - 1)
    return kernel.fill_diagonal_(0)


_SAME = 1e-6  # rows closer together than this share of a vector's typical length are duplicates


@final
class NeighbourSample:
    """Stores each layer's vectors for the first rows, to estimate the intrinsic dimension from nearest neighbours.

    At most `most` rows are stored; `rows` is how many there are so far.
    """

    def __init__(self, most: int) -> None:
        self.most, self.rows = most, 0
        self._parts: list[list[Tensor]] = []

    def add(self, features: Sequence[Float[Tensor, "rows _"]]) -> None:
        """Store the vectors `[rows, width]` of each layer in float32 on the CPU, up to `most` rows over all calls."""
        count = min(len(features[0]), self.most - self.rows)
        if count > 0:
            self._parts.append([vectors[:count].float().cpu() for vectors in features])
            self.rows += count

    def dimensions(self) -> list[float]:
        """Return the intrinsic dimension of each layer's stored vectors, by `two_nn`; [] if none are stored."""
        return [two_nn(torch.cat(layer)) for layer in zip(*self._parts, strict=True)]


def two_nn(vectors: Float[Tensor, "rows width"]) -> float:
    """Return the intrinsic dimension of a set of vectors, taken as points: `(N - 1) / sum_i log(r2_i / r1_i)`.

    r1 and r2 are a point's distances to its nearest and second nearest point. Only one of several equal points is used.

    Returns:
        The dimension: NaN if there are fewer than three different points, infinity if r1 equals r2 for all points.

    Source:
        Facco et al. 2017, "Estimating the intrinsic dimension of datasets by a minimal neighborhood information",
        doi:10.1038/s41598-017-11873-y (TwoNN), by its unbiased maximum likelihood estimate instead of a fitted line
        (Denti et al. 2022, doi:10.1038/s41598-022-20991-1).
    """
    centred = vectors.double() - vectors.double().mean(0)
    distances = torch.cdist(centred, centred).fill_diagonal_(torch.inf)
    near = distances <= _SAME * centred.norm(dim=1).mean()
    is_first = ~near.tril().any(1)  # no earlier point is a duplicate
    distances = distances[is_first][:, is_first]
    if len(distances) < 3:
        return math.nan
    nearest, second = distances.topk(2, largest=False).values.unbind(1)
    total = float((second / nearest).log().sum())
    return (len(distances) - 1) / total if total > 0 else math.inf
