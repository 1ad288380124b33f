"""The mean score of the tokens so far, the higher the more weight."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lamina.errors import ConfigError
from lamina.monitors.base import Aggregation, State

if TYPE_CHECKING:
    from jaxtyping import Float


class ExponentialMean(Aggregation):
    """A mean with the weights `softmax(e)` of exponents that tokens come with."""

    @abstractmethod
    def first(self, score: Tensor) -> State:
        """The highest exponent, and relative to it the sums of weighted scores and of weights."""

    def next(self, state: State, score: Tensor) -> State:
        """Add a token to both sums, after rescaling them to the new highest exponent."""
        exponent, value, _ = self.first(score)
        top = torch.maximum(state[0], exponent)
        before, weight = (state[0] - top).exp(), (exponent - top).exp()
        return top, state[1] * before + weight * value, state[2] * before + weight

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """The ratio of the sums."""
        return state[1] / state[2]


@final
@dataclass(frozen=True)
class SoftmaxMean(ExponentialMean):
    """A mean that weighs tokens by a softmax of their scores: `S_t = sum_u softmax(s / temperature)_u s_u`, u <= t.

    Args:
        temperature: In units of the score; positive. Near 0 it is the highest score, large the plain mean.

    Source:
        Cunningham et al. 2026, "Constitutional Classifiers++", arXiv:2601.04603, weigh the training loss of the tokens
        so; here the scores themselves.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"softmax_mean: temperature is {self.temperature}; it must be positive and finite.")

    def first(self, score: Tensor) -> State:
        """The score is the exponent, too."""
        return score / self.temperature, score, torch.ones_like(score)
