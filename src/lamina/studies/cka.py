"""Debiased linear CKA of any number of layers, from minibatches: only a matrix of layers x layers is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Float

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
