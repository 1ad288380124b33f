"""Aggregation by a mean in which the reader's own head weighs the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from lamina.monitors.softmax_mean import ExponentialMean

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.monitors.base import State


@final
@dataclass(frozen=True)
class AttentionMean(ExponentialMean):
    """Mean of the token scores, weighted by the reader's own head: `S_t = sum_u softmax(a)_u s_u` over u <= t.

    The head is `SequenceClassification(pooling="query")`, whose learned query computes the log weights `a`. On the
    scale "log_odds" and with two labels, the score equals the reader's log odds for the text so far.

    Source:
        Kramár et al. 2026, arXiv:2601.11516, section 3.1.2, attention probes; see `SequenceClassification`.
    """

    weighted: ClassVar[bool] = True

    def first(self, score: Tensor) -> State:
        """Return the state after one token: (log weight, score, weight 1).

        `score` has the columns score and log weight.
        """
        return score[:, 1], score[:, 0], torch.ones_like(score[:, 0])
