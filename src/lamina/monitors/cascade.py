"""Two monitors in a row: a cheap one for every token, and one that runs only where the first is unsure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, final

import torch

from lamina.errors import ConfigError
from lamina.heads.base import HeadConfig
from lamina.monitors.calibration import Calibration
from lamina.monitors.monitor import Monitor, MonitorGroup, RunningMonitors

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from lamina.monitors.monitor import GetLogits


@final
@dataclass(frozen=True)
class Cascade:
    """A cheap monitor for every token, and a larger one for those tokens at which the first is unsure.

    A text is not flagged while the first one's score of it is below that one's threshold, and flagged where it is at
    least `sure`. At tokens in between the second reader runs, its monitor aggregates these tokens alone, and its
    threshold decides; while it has none, nothing is flagged. Both read the same pass of the model, so that what is
    saved is the second reader's own work; `Watch.asked` and `Calibration.asked` say on which share of the tokens it
    ran.

    Args:
        first: The cheap one, such as a `SingleLayer` or a fusion of few layers; its threshold should let all through
            that may have to be flagged (`lamina.monitors.calibrate` it for a high rate of false positives).
        second: The larger one; `lamina.monitors.calibrate` of the cascade chooses its threshold.
        sure: The score of the first from which on the second is not asked; None: it is always asked.
        name: What it is called; None: as the second.

    Raises:
        ConfigError: If the first has no threshold, or one that is not below `sure`.
    """

    first: Monitor
    second: Monitor
    sure: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.second.name)
        low = self.first.threshold
        if low is None:
            raise ConfigError(f"cascade '{self.name}': its first monitor has no threshold. Calibrate it first.")
        if self.sure is not None and not low < self.sure:
            came = f"sure is {self.sure}, and the first monitor's threshold {low}"
            raise ConfigError(f"cascade '{self.name}': {came}; sure must be above it.")

    @property
    def readers(self) -> tuple[str, ...]:
        """The reader that always runs, and the one that runs on demand."""
        return (self.first.reader, self.second.reader)

    @property
    def reader(self) -> str:
        """The reader with which it is saved."""
        return self.second.reader

    @property
    def threshold(self) -> float | None:
        """That of the second."""
        return self.second.threshold

    @property
    def calibration(self) -> Calibration | None:
        """How that was chosen."""
        return self.second.calibration

    def check(self, heads: Mapping[str, HeadConfig]) -> None:
        """Raise an error if one of the two does not fit its reader's head."""
        self.first.check(heads)
        self.second.check(heads)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {"first": self.first.to_dict(), "second": self.second.to_dict(), "sure": self.sure, "name": self.name}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Build from what `to_dict` gave."""
        both = {key: Monitor.from_dict(given[key]) for key in ("first", "second")}
        return cls(**{**given, **both})


AnyMonitor = Monitor | Cascade


def start_monitors(
    monitors: Mapping[str, AnyMonitor], heads: Mapping[str, HeadConfig]
) -> list[tuple[tuple[str, ...], RunningMonitors]]:
    """Begin new texts: names, and those monitors at work."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for name, monitor in monitors.items():
        groups[monitor.group(heads) if isinstance(monitor, Monitor) else name].append(name)
    working: list[tuple[tuple[str, ...], RunningMonitors]] = []
    for names in groups.values():
        first, alike = monitors[names[0]], [own for name in names if isinstance(own := monitors[name], Monitor)]
        running = _RunningCascade(first, heads) if isinstance(first, Cascade) else MonitorGroup(alike, heads)
        working.append((tuple(names), running))
    return working


class _RunningCascade(RunningMonitors):
    """A cascade at work. Its score is the second's: -inf where that is not asked, inf where not needed."""

    def __init__(self, cascade: Cascade, heads: Mapping[str, HeadConfig]) -> None:
        self._cascade = cascade
        self._first, self._second = (MonitorGroup([one], heads) for one in (cascade.first, cascade.second))

    def add(self, ask: GetLogits, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "monitors batch tokens"]:
        score, sure = self._first.add(ask, mask)[0], self._cascade.sure
        certain = mask & (score >= (torch.inf if sure is None else sure))
        unsure = mask & ~certain & (score >= (self._cascade.first.threshold or 0.0))
        rows = unsure.any(1)

        def ask_some(name: str, _rows: Bool[Tensor, " batch"]) -> Tensor:
            logits = ask(name, rows)
            whole = logits.new_zeros(len(rows), *logits.shape[1:])
            whole[rows] = logits
            return whole

        value = torch.full_like(score, -torch.inf)
        if bool(rows.any()):
            value = torch.where(unsure, self._second.add(ask_some, unsure)[0], value)
        return value.masked_fill(certain, torch.inf).unsqueeze(0)
