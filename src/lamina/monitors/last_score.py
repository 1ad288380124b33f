"""Aggregation by the score of the last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor

from lamina.monitors.base import Aggregation, State

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class LastScore(Aggregation):
    """Score of the last token: `S_t = s_t`."""

    def first(self, score: Tensor) -> State:
        """Return the first token's score."""
        return (score,)

    def next(self, state: State, score: Tensor) -> State:
        """Return the new score; the one before is dropped."""
        return (score,)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the score of the last token."""
        return state[0]
