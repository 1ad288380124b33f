"""Aggregation by an exponential moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor

from lamina.errors import ConfigError
from lamina.monitors.base import Aggregation, State

if TYPE_CHECKING:
    from jaxtyping import Float


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
        from `S_0 = 0` and use a = 0.5, a half-life of 1. As in their work, a monitor flags by the largest average so
        far.
    """

    half_life: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.half_life < float("inf"):
            raise ConfigError(f"ema: half_life is {self.half_life}; it must be a positive, finite number of tokens.")

    def first(self, score: Tensor) -> State:
        """Return the first token's score. It is the average so far."""
        return (score,)

    def next(self, state: State, score: Tensor) -> State:
        """Return the average after one more token: the old average, moved towards the new score."""
        return (state[0] + (1 - 2 ** (-1 / self.half_life)) * (score - state[0]),)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """Return the average."""
        return state[0]
