"""The score of the last token."""

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
    """The score of the token that came last: `S_t = s_t`."""

    def first(self, score: Tensor) -> State:
        """The score."""
        return (score,)

    def next(self, state: State, score: Tensor) -> State:
        """The new score."""
        return (score,)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """What is kept."""
        return state[0]
