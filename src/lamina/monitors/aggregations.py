"""Aggregations: running scores of a text by the last token's score, and by means and maxima of the scores so far.

In the formulas, `s_t` is the score of token t, counted from 1, and `S_t` the running score at this token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lamina.errors import ConfigError
from lamina.monitors.base import Aggregation, State
from lamina.utils import check_fields, check_range

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class LastScore(Aggregation):
    """Score of the last token: `S_t = s_t`."""

    def next(self, state: State, score: Tensor) -> State:
        """Return the new token's score alone; `state`, the score of the token before, is not used."""
        return (score,)


@final
@dataclass(frozen=True)
class MeanScore(Aggregation):
    """Mean of the scores so far: `S_t = (s_1 + ... + s_t) / t`.

    For a sequence classifier with `pooling="mean"` and two labels, on the scale "log_odds", the score equals the
    reader's log odds for the text so far.
    """

    def first(self, score: Tensor) -> State:
        """Return the state after the first token: (sum of the scores, number of tokens)."""
        return score, torch.ones_like(score)

    def next(self, state: State, score: Tensor) -> State:
        """Return the state after one more token: its score is added to the sum, and it is counted."""
        return state[0] + score, state[1] + 1

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the sum divided by the number of tokens."""
        return state[0] / state[1]


@final
@dataclass(frozen=True)
class EMA(Aggregation):
    """Exponential moving average: `S_t = (1 - a) S_(t-1) + a s_t` with `a = 1 - 2^(-1 / half_life)`, and `S_1 = s_1`.

    Args:
        half_life: Number of tokens after which the weight of a score has halved; positive and finite.

    Raises:
        ConfigError: If `half_life` is not positive and finite.

    Source:
        Kramár et al. 2026, "Building Production-Ready Probes For Gemini", arXiv:2601.11516, section 3.1.2. They start
        from `S_0 = 0` and use a = 0.5, a half-life of 1.
    """

    half_life: float = 5.0

    def __post_init__(self) -> None:
        check_fields("ema", self)
        if not 0 < self.half_life < math.inf:
            raise ConfigError(f"ema: half_life is {self.half_life}; it must be a positive, finite number of tokens.")

    def next(self, state: State, score: Tensor) -> State:
        """Return the average after one more token: the old average in `state`, moved towards the new score."""
        return (state[0] + (1 - 2 ** (-1 / self.half_life)) * (score - state[0]),)


@final
@dataclass(frozen=True)
class RollingMax(Aggregation):
    """Highest mean of `window` consecutive tokens: `S_t = max_(u <= t) (s_(u-w+1) + ... + s_u) / w`.

    w is `window`. In the first w - 1 tokens, the score is the mean of the tokens so far. These means do not enter the
    maximum later.

    Args:
        window: Number of tokens in a window, 1 to 65,536; 1 gives the highest score of any token.

    Raises:
        ConfigError: If `window` is out of range.

    Source:
        McKenzie et al. 2025, arXiv:2506.10805. Kramár et al. 2026, arXiv:2601.11516, section 3.2.2, also weigh the
        tokens of a window by learned attention; here all tokens of a window have the same weight.
    """

    window: int = 10

    def __post_init__(self) -> None:
        check_fields("rolling_max", self)
        check_range("rolling_max", "window", self.window, 1, 1 << 16)

    def first(self, score: Tensor) -> State:
        """Return the state after one token.

        It consists of the latest scores `[batch, window]`, the number of tokens, and the highest mean of a full window,
        -infinity as long as no window is full.
        """
        last = torch.nn.functional.pad(score.unsqueeze(1), (self.window - 1, 0))
        return last, torch.ones_like(score), score if self.window == 1 else torch.full_like(score, -torch.inf)

    def next(self, state: State, score: Tensor) -> State:
        """Return the state after one more token: its score enters the window, and the oldest one leaves."""
        last, count, best = torch.cat([state[0][:, 1:], score.unsqueeze(1)], dim=1), state[1] + 1, state[2]
        return last, count, torch.where(count >= self.window, torch.maximum(best, last.mean(1)), best)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the highest mean of a full window; before there is one, the mean of the tokens so far."""
        last, count, best = state
        return torch.where(count >= self.window, best, last.sum(1) / count)


@final
@dataclass(frozen=True)
class MultiMax(Aggregation):
    """Sum over the flagged labels of each label's highest score so far: `S_t = sum_h max_(u <= t) s_(u, h)`.

    A single high-scoring token counts fully, however long the text is. Labels may have their maxima at different
    tokens, and the sum of several probabilities may exceed 1.

    Source:
        Kramár et al. 2026, arXiv:2601.11516, section 3.2.1: `f(S) = sum_h max_j v_h . MLP(x_j)`. Their heads h are
        learned together; here h are the flagged labels of the reader.
    """

    per_label: ClassVar[bool] = True

    def next(self, state: State, score: Tensor) -> State:
        """Return the highest score of each label so far, `[batch, labels]`: the larger one of state and new score."""
        return (torch.maximum(state[0], score),)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the sum, over the labels, of each label's highest score."""
        return state[0].sum(1)


class ExponentialMean(Aggregation):
    """Base class of weighted means: subclasses give each token an exponent, and the weights are the softmax of these.

    The state is (highest exponent so far, weighted sum of the scores, sum of the weights). Both sums are relative to
    the highest exponent, so that no exponential overflows.
    """

    @abstractmethod
    def first(self, score: Tensor) -> State:
        """Return the state after one token: (its exponent, its score, 1). `next` calls this for every token."""

    def next(self, state: State, score: Tensor) -> State:
        """Return the state with the new token's score; both sums are rescaled to the new highest exponent."""
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
    """Mean of the token scores, weighted by their own softmax: `S_t = sum_(u <= t) softmax(s / temperature)_u s_u`.

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
        check_fields("softmax_mean", self)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"softmax_mean: temperature is {self.temperature}; it must be positive and finite.")

    def first(self, score: Tensor) -> State:
        """Return the state after one token: (exponent, score, 1). The exponent is the score over the temperature."""
        return score / self.temperature, score, torch.ones_like(score)


@final
@dataclass(frozen=True)
class AttentionMean(ExponentialMean):
    """Mean of the token scores with weights from the reader's own head: `S_t = sum_(u <= t) softmax(a)_u s_u`.

    The head is `SequenceClassification(pooling="query")`. Its learned query gives each token a log weight `a`. On the
    scale "log_odds" and with two labels, the score equals the reader's log odds for the text so far.

    Source:
        Kramár et al. 2026, arXiv:2601.11516, section 3.1.2, attention probes; see `SequenceClassification`.
    """

    weighted: ClassVar[bool] = True

    def first(self, score: Tensor) -> State:
        """Return the state after one token: (log weight, score, 1). `score` has two columns: score and log weight."""
        return score[:, 1], score[:, 0], torch.ones_like(score[:, 0])
