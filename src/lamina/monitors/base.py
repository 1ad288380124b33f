"""What every aggregation is: from the scores of tokens to the score of the text so far, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lamina.registry import Registry

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

AGGREGATIONS = Registry(
    "aggregation",
    {
        "last_score": "lamina.monitors.last_score:LastScore",
        "mean_score": "lamina.monitors.mean_score:MeanScore",
        "ema": "lamina.monitors.ema:EMA",
        "rolling_max": "lamina.monitors.rolling_max:RollingMax",
        "multi_max": "lamina.monitors.multi_max:MultiMax",
        "softmax_mean": "lamina.monitors.softmax_mean:SoftmaxMean",
        "attention_mean": "lamina.monitors.attention_mean:AttentionMean",
    },
)
State = tuple[Tensor, ...]  # what is kept of the tokens so far; every tensor is [batch, ...]


class Aggregation(ABC):
    """Makes one score of a text out of its tokens' scores. Subclasses are frozen dataclasses.

    The score after a token depends on that token and those before it. Tokens that are not real count nowhere.
    """

    per_label: ClassVar[bool] = False  # True: takes the scores of the labels apart, `[batch, labels]` at a time
    weighted: ClassVar[bool] = False  # True: takes the score and the log weight of the head, `[batch, 2]` at a time

    @abstractmethod
    def first(self, score: Tensor) -> State:
        """What is kept of a text's first token; `score` is `[batch]`, of more columns if `per_label` or `weighted`."""

    @abstractmethod
    def next(self, state: State, score: Tensor) -> State:
        """What is kept once another token has come."""

    @abstractmethod
    def value(self, state: State) -> Float[Tensor, " batch"]:
        """The score of the text so far."""

    def running(
        self, scores: Float[Tensor, "batch tokens labels"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens"]:
        """The score of each text up to and including each token.

        Args:
            scores: Score of each token; of one label, or several where `per_label`, or with its log weight.
            mask: True where a token is real.

        Returns:
            In float64. At a token that is not real the score is that of the tokens before it; NaN before the first.
        """
        return RunningScore(self).add(scores, mask)


@final
class RunningScore:
    """An aggregation under way: takes tokens in pieces of any length, and gives what it would give of all at once."""

    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._state: State | None = None
        self._begun: Tensor | None = None  # [batch], True where a real token has come; None: everywhere

    def add(
        self, scores: Float[Tensor, "batch tokens labels"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens"]:
        """Take some more tokens; see `Aggregation.running`."""
        several = self._aggregation.per_label or self._aggregation.weighted
        scores = scores.double() if several else scores.double().squeeze(-1)
        values = [self._one(score, real) for score, real in zip(scores.unbind(1), mask.unbind(1), strict=True)]
        return torch.stack(values, dim=1) if values else scores.new_empty(mask.shape)

    def _one(self, score: Tensor, real: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        how = self._aggregation
        if self._state is None:
            fresh, self._begun = how.first(score), torch.zeros_like(real)
            self._state = fresh
        elif self._begun is None:
            fresh = how.next(self._state, score)
        else:
            fresh = _where(self._begun, how.next(self._state, score), how.first(score))
        every = bool(real.all())
        self._state = fresh if every else _where(real, fresh, self._state)
        if self._begun is not None:
            self._begun = None if every else self._begun | real
        value = how.value(self._state)
        return value if self._begun is None else value.masked_fill(~self._begun, torch.nan)


def _where(condition: Bool[Tensor, " batch"], then: State, other: State) -> State:
    """Row by row one state or the other."""
    pairs = zip(then, other, strict=True)
    return tuple(torch.where(condition.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs)
