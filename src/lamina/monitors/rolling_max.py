"""The highest mean of some tokens in a row."""

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
    """The highest mean of `window` tokens in a row: `S_t = max_(u <= t) (s_(u-w+1) + ... + s_u) / w`.

    Before there are as many tokens it is the mean of those that came, which does not count later.

    Args:
        window: Tokens of a mean; 1 gives the highest score of any token.

    Source:
        McKenzie et al. 2025, arXiv:2506.10805. Kramár et al. 2026, arXiv:2601.11516, section 3.2.2, also weigh the
        tokens of a window by learned attention; here they weigh alike.
    """

    window: int = 10

    def __post_init__(self) -> None:
        check_range("rolling_max", "window", self.window, 1, 1 << 16)

    def first(self, score: Tensor) -> State:
        """The last scores, how many have come, and the highest mean of a whole window."""
        last = torch.nn.functional.pad(score.unsqueeze(1), (self.window - 1, 0))
        return last, torch.ones_like(score), score if self.window == 1 else torch.full_like(score, -torch.inf)

    def next(self, state: State, score: Tensor) -> State:
        """Move the window on."""
        last, count, best = torch.cat([state[0][:, 1:], score.unsqueeze(1)], dim=1), state[1] + 1, state[2]
        return last, count, torch.where(count >= self.window, torch.maximum(best, last.mean(1)), best)

    def value(self, state: State) -> Float[Tensor, " batch"]:
        """The highest mean."""
        last, count, best = state
        return torch.where(count >= self.window, best, last.sum(1) / count)
