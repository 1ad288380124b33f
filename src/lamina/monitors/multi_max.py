"""The sum of every label's highest score."""

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
    """Each flagged label's highest score so far, summed: `S_t = sum_h max_(u <= t) s_(u, h)`.

    A single suspicious token counts in full however long the text is, and different labels may peak at different ones.

    Source:
        Kramár et al. 2026, arXiv:2601.11516, section 3.2.1: `f(S) = sum_h max_j v_h . MLP(x_j)`. There the heads h are
        learned together; here they are the labels of the reader that the monitor flags.
    """

    per_label: ClassVar[bool] = True

    def first(self, score: Tensor) -> State:
        """The scores of the labels."""
        return (score,)

    def next(self, state: State, score: Tensor) -> State:
        """The higher ones."""
        return (torch.maximum(state[0], score),)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Their sum."""
        return state[0].sum(1)
