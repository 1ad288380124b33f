"""Aggregation by the sum of each label's highest score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lamina.monitors.base import Aggregation, State

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class MultiMax(Aggregation):
    """Sum over the flagged labels of each label's highest score so far: `S_t = sum_h max_(u <= t) s_(u, h)`.

    A single high-scoring token counts fully, however long the text is. Labels may have their maxima at different
    tokens.

    Source:
        Kramár et al. 2026, arXiv:2601.11516, section 3.2.1: `f(S) = sum_h max_j v_h . MLP(x_j)`. Their heads h are
        learned together; here h are the flagged labels of the reader.
    """

    per_label: ClassVar[bool] = True

    def first(self, score: Tensor) -> State:
        """Return the scores `[batch, labels]` of the first token."""
        return (score,)

    def next(self, state: State, score: Tensor) -> State:
        """Return the higher one of the state and the new token's score, label by label."""
        return (torch.maximum(state[0], score),)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the sum over the labels of their highest scores."""
        return state[0].sum(1)
