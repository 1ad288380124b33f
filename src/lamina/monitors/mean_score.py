"""Aggregation by the plain mean of all tokens so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lamina.monitors.base import Aggregation, State

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class MeanScore(Aggregation):
    """Mean of the scores so far: `S_t = (s_1 + ... + s_t) / t`.

    For a sequence classifier with `pooling="mean"` and two labels, on the scale "log_odds", the score equals the
    reader's log odds for the text so far.
    """

    def first(self, score: Tensor) -> State:
        """Return (sum, count) after the first token."""
        return score, torch.ones_like(score)

    def next(self, state: State, score: Tensor) -> State:
        """Return (sum, count) with the new score added."""
        return state[0] + score, state[1] + 1

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the mean: the sum of the scores divided by their count."""
        return state[0] / state[1]
