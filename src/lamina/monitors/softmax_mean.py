"""Aggregation by a mean in which higher scores weigh more."""

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
    """Base class of means with softmax weights: each token has an exponent, and softmax turns exponents into weights.

    The state is (highest exponent so far, weighted sum of the scores, sum of the weights). Both sums are relative to
    the highest exponent, so that no exponential overflows.
    """

    @abstractmethod
    def first(self, score: Tensor) -> State:
        """Return (exponent, score, weight 1) of a token."""

    def next(self, state: State, score: Tensor) -> State:
        """Return the state with one more token; both sums are rescaled to the new highest exponent."""
        exponent, value, _ = self.first(score)
        top = torch.maximum(state[0], exponent)
        before, weight = (state[0] - top).exp(), (exponent - top).exp()
        return top, state[1] * before + weight * value, state[2] * before + weight

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the weighted mean: the sum of the scores divided by the sum of the weights."""
        return state[1] / state[2]


@final
@dataclass(frozen=True)
class SoftmaxMean(ExponentialMean):
    """Mean with a softmax of the scores as weights: `S_t = sum_u softmax(s / temperature)_u s_u` over u <= t.

    Args:
        temperature: Positive and finite, in units of the score. Near 0 the mean is the highest score; for a large value
            it is the plain mean.

    Raises:
        ConfigError: If `temperature` is not positive and finite.

    Source:
        Cunningham et al. 2026, "Constitutional Classifiers++", arXiv:2601.04603. They weigh the training loss of the
        tokens in this way; here the scores themselves are weighed.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"softmax_mean: temperature is {self.temperature}; it must be positive and finite.")

    def first(self, score: Tensor) -> State:
        """Return (exponent, score, weight 1) of a token; the exponent is the score divided by the temperature."""
        return score / self.temperature, score, torch.ones_like(score)
