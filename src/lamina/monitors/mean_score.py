"""The mean score of the tokens so far."""

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
    """The mean of the tokens so far: `S_t = (s_1 + ... + s_t) / t`.

    Of a reader of whole texts that pools by "mean", on the scale "log_odds", it is what the reader says of the text so
    far, where it has two labels.
    """

    def first(self, score: Tensor) -> State:
        """Sum and count."""
        return score, torch.ones_like(score)

    def next(self, state: State, score: Tensor) -> State:
        """Add to both."""
        return state[0] + score, state[1] + 1

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Their ratio."""
        return state[0] / state[1]
