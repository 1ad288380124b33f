"""The base class of aggregations, which turn the scores of a text's tokens into a running score of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lamina.registry import Registry

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    {
        "last_score": "lamina.monitors.aggregations:LastScore",
        "mean_score": "lamina.monitors.aggregations:MeanScore",
        "ema": "lamina.monitors.aggregations:EMA",
        "rolling_max": "lamina.monitors.aggregations:RollingMax",
        "multi_max": "lamina.monitors.aggregations:MultiMax",
        "softmax_mean": "lamina.monitors.aggregations:SoftmaxMean",
        "attention_mean": "lamina.monitors.aggregations:AttentionMean",
    },
)
State = tuple[Tensor, ...]  # what an aggregation remembers of the tokens so far; every tensor is [batch, ...]


class Aggregation(ABC):
    """A rule that turns the scores of a text's tokens into one running score.

    Subclasses are frozen dataclasses that implement `next`; `first` and `value` have defaults. The running score at a
    token depends only on this token and earlier ones. Padding is skipped. The object itself holds no state: `first` and
    `next` return a tuple of tensors `[batch, ...]` that summarises the tokens of each text so far. The caller passes it
    to the next call.

    The scores of a token are `[batch]`. If the class sets `per_label`, they are `[batch, labels]`, with a column per
    flagged label; if it sets `weighted`, they are `[batch, 2]`, the score and its log weight.
    """

    per_label: ClassVar[bool] = False
    weighted: ClassVar[bool] = False

    def first(self, score: Tensor) -> State:
        """Return the state of each text after its first token; `score` has the token's scores, as the class says.

        By default, the state is these scores.
        """
        return (score,)

    @abstractmethod
    def next(self, state: State, score: Tensor) -> State:
        """Return the state after one more token; `state` is the state before it, and `score` as in `first`."""

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the running score of each text, `[batch]`, from the state after its latest token.

        By default, it is the first tensor of the state.
        """
        return state[0]

    def running(
        self, scores: Float[Tensor, "batch tokens columns"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens"]:
        """Return the running score of each text at each of its tokens.

        Args:
            scores: Scores of the tokens. One column; or one per flagged label (`per_label`); or the score and its log
                weight (`weighted`).
            mask: True at tokens, False at padding.

        Returns:
            Running scores in float64. Padding repeats the score of the token before it; before the first token it is
            NaN. Without tokens, the result is `[batch, 0]`.
        """
        return RunningScore(self).add(scores, mask)


@final
class RunningScore:
    """An aggregation in progress over a batch of texts. How tokens are divided into chunks makes no difference."""

    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._state: State | None = None  # None before the first token
        # [batch], True in texts that have had a real token; None once all have, which saves the comparisons
        self._begun: Tensor | None = None

    def add(
        self, scores: Float[Tensor, "batch tokens columns"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens"]:
        """Add the next tokens of each text, and return its running score at each; see `Aggregation.running`."""
        has_columns = self._aggregation.per_label or self._aggregation.weighted
        scores = scores.double() if has_columns else scores.double().squeeze(-1)
        values = [self._add_token(score, real) for score, real in zip(scores.unbind(1), mask.unbind(1), strict=True)]
        return torch.stack(values, dim=1) if values else scores.new_empty(mask.shape)

    def _add_token(self, score: Tensor, real: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Add a token of each text where `real` is True; return all running scores, NaN before a text's first token."""
        aggregation = self._aggregation
        if self._state is None:
            fresh, self._begun = aggregation.first(score), torch.zeros_like(real)
            self._state = fresh
        elif self._begun is None:
            fresh = aggregation.next(self._state, score)
        else:  # some texts begin with this token, others are under way
            fresh = _where(self._begun, aggregation.next(self._state, score), aggregation.first(score))
        all_real = bool(real.all())
        self._state = fresh if all_real else _where(real, fresh, self._state)
        if self._begun is not None:
            self._begun = None if all_real else self._begun | real
        value = aggregation.value(self._state)
        return value if self._begun is None else value.masked_fill(~self._begun, torch.nan)


def _where(condition: Bool[Tensor, " batch"], then: State, other: State) -> State:
    pairs = zip(then, other, strict=True)
    return tuple(torch.where(condition.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs)
