"""Aggregation by the highest mean over a window of consecutive tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lamina.monitors.base import Aggregation, State
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class RollingMax(Aggregation):
    """Highest mean of `window` consecutive tokens: `S_t = max_(u <= t) (s_(u-w+1) + ... + s_u) / w`.

    Before the first `window` tokens are complete, the score is the mean of the tokens so far; these means do not enter
    the maximum later.

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
        check_range("rolling_max", "window", self.window, 1, 1 << 16)

    def first(self, score: Tensor) -> State:
        """Return the state after one token.

        It consists of the latest scores `[batch, window]`, the number of tokens, and the highest mean of a full window.
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
