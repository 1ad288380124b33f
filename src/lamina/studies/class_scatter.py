"""How vectors of known classes scatter: sums of one pass, and the variability nu that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


@final
class ClassScatter:
    """Sums of one layer's vectors by class; `counts` says how many rows each class has."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._place = {number: place for place, number in enumerate(sorted(counts))}
        self._counts = torch.tensor([counts[number] for number in sorted(counts)], dtype=torch.float64)
        self._shift: Tensor | None = None
        self._sums = self._squares = torch.empty(0)

    def add(self, vectors: Float[Tensor, "rows width"], classes: Tensor) -> None:
        """Take in rows of known classes `[rows]`."""
        exact = vectors.double().cpu()
        if self._shift is None:  # near the mean, so that squares and means do not cancel
            self._shift = exact.mean(0)
            width = len(self._shift)
            self._sums = torch.zeros(len(self._counts), width, dtype=torch.float64)
            self._squares = torch.zeros(width, width, dtype=torch.float64)
        places = torch.tensor([self._place[int(number)] for number in classes])
        shifted = exact - self._shift
        self._sums.index_add_(0, places, shifted)
        self._squares += (shifted / self._counts[places].unsqueeze(1)).T @ shifted

    def nu(self) -> float:
        """`tr(S_w S_b^+) / C`, from the singular vectors of the centred class means: no inverse is taken."""
        classes = len(self._counts)
        means = self._sums / self._counts.unsqueeze(1)
        within = (self._squares - means.T @ means) / classes
        _, sizes, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
        scale = float(means.norm())
        kept = sizes > max(means.shape) * torch.finfo(torch.float32).eps * max(
            scale, float(within.trace().clamp(0)) ** 0.5
        )
        if not kept.any():
            return float("inf")
        directions, sizes = directions[kept], sizes[kept]
        spread = ((directions @ within) * directions).sum(1)
        return float((spread / sizes**2).sum())
