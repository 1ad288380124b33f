"""The mean that a head takes, which has learnt how much each token weighs."""

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
    """A mean with the weights of the reader's own head: `S_t = sum_u softmax(a)_u s_u`, u <= t.

    The head is `SequenceClassification(pooling="query")`, whose learnt query gives `a`. On the scale "log_odds" the
    score is what the reader says of the text so far, where it has two labels.

    Source:
        Kramár et al. 2026, arXiv:2601.11516, section 3.1.2, attention probes; see `SequenceClassification`.
    """

    weighted: ClassVar[bool] = True

    def first(self, score: Tensor) -> State:
        """The exponent is the second column."""
        return score[:, 1], score[:, 0], torch.ones_like(score[:, 0])
