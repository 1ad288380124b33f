"""Cascades: a cheap monitor for every token, and a larger one only where the cheap one is unsure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, final

import torch

from lamina.errors import ConfigError
from lamina.heads.base import HeadConfig
from lamina.monitors.calibration import Calibration
from lamina.monitors.monitor import GetLogits, Monitor, MonitorGroup, RunningMonitors
from lamina.utils import JSON, JSONObject, check_fields

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@final
@dataclass(frozen=True)
class Cascade:
    """Two monitors: a cheap one for every token, and a larger one only for tokens where the cheap one is unsure.

    At each token, the score of the first monitor decides:

    - below the first monitor's threshold, the text is not flagged;
    - from `sure` on, the text is flagged;
    - in between, the second monitor's reader is run. The second monitor aggregates only the tokens in between, and
      flags the text if its own threshold is reached. Without that threshold the cascade flags nothing.

    Both readers read the same pass of the model. `Watch.asked` and `Calibration.asked` are the fraction of the tokens
    that were in between.

    Args:
        first: The cheap monitor, for example with a `SingleLayer` fusion. Calibrate it for a high false positive rate:
            a text below its threshold is never flagged.
        second: The larger monitor. `lamina.monitors.calibrate` on the cascade chooses its threshold.
        sure: Score of the first monitor that flags the text without the second. None: no score does.
        name: Name of the cascade. None or "": the second monitor's name.

    Raises:
        ConfigError: If the first monitor has no threshold, or its threshold is not below `sure`; or an option has a
            wrong type.
    """

    first: Monitor
    second: Monitor
    sure: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_fields("cascade", self)
        object.__setattr__(self, "name", self.name or self.second.name)
        low = self.first.threshold
        if low is None:
            raise ConfigError(f"cascade '{self.name}': its first monitor has no threshold. Calibrate it first.")
        if self.sure is not None and not low < self.sure:
            problem = f"sure is {self.sure}, and the first monitor's threshold {low}"
            raise ConfigError(f"cascade '{self.name}': {problem}; sure must be above it.")

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of the two readers, that of the first monitor first."""
        return (self.first.reader, self.second.reader)

    @property
    def reader(self) -> str:
        """Name of the reader that the cascade is saved with: the second one."""
        return self.second.reader

    @property
    def threshold(self) -> float | None:
        """Threshold of the second monitor, which decides the flags; None if it has none."""
        return self.second.threshold

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the second monitor's threshold; None if it was not calibrated."""
        return self.second.calibration

    def check(self, heads: Mapping[str, HeadConfig]) -> None:
        """Raise ConfigError or UnknownNameError unless both monitors fit their readers' heads; see `Monitor.check`."""
        self.first.check(heads)
        self.second.check(heads)

    def to_dict(self) -> dict[str, JSON]:
        """Return the fields as JSON-ready values, for `from_dict`."""
        return {"first": self.first.to_dict(), "second": self.second.to_dict(), "sure": self.sure, "name": self.name}

    @classmethod
    def from_dict(cls, fields: JSONObject) -> Self:
        """Build a cascade from the fields that `to_dict` returned.

        Raises ConfigError or UnknownNameError if a value is not valid; see `Cascade` and `Monitor.from_dict`.
        """
        both = {key: Monitor.from_dict(fields[key]) for key in ("first", "second")}
        return cls(**{**fields, **both})


AnyMonitor = Monitor | Cascade


def start_monitors(
    monitors: Mapping[str, AnyMonitor], heads: Mapping[str, HeadConfig]
) -> list[tuple[tuple[str, ...], RunningMonitors]]:
    """Start monitors on a new batch of texts; monitors that can be computed together become one object.

    Args:
        monitors: Name -> monitor.
        heads: Reader name -> config of its head.

    Returns:
        Pairs: names of monitors, and the object that computes their running scores. Monitors with equal `Monitor.group`
        share one object; each cascade has its own.
    """
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for name, monitor in monitors.items():
        groups[monitor.group(heads) if isinstance(monitor, Monitor) else name].append(name)
    started: list[tuple[tuple[str, ...], RunningMonitors]] = []
    for names in groups.values():
        first, alike = monitors[names[0]], [one for name in names if isinstance(one := monitors[name], Monitor)]
        running = _RunningCascade(first, heads) if isinstance(first, Cascade) else MonitorGroup(alike, heads)
        started.append((tuple(names), running))
    return started


class _RunningCascade(RunningMonitors):
    """A cascade in progress over a batch of texts."""

    def __init__(self, cascade: Cascade, heads: Mapping[str, HeadConfig]) -> None:
        self._cascade = cascade
        self._first, self._second = (MonitorGroup([monitor], heads) for monitor in (cascade.first, cascade.second))

    def add(self, get_logits: GetLogits, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "monitors batch tokens"]:
        """Score the tokens with both monitors, as `RunningMonitors.add` does, and return the cascade's score at each.

        The score is inf where the first monitor reaches `sure`, -inf where it is below its threshold and at padding,
        NaN where its score is NaN, and else the second monitor's running score. The second reader is run only for texts
        with a token of this last sort.
        """
        score, sure = self._first.add(get_logits, mask)[0], self._cascade.sure
        certain = mask & (score >= (torch.inf if sure is None else sure))
        unsure = mask & ~certain & (score >= (self._cascade.first.threshold or 0.0))
        rows = unsure.any(1)

        def get_unsure_logits(name: str, _rows: Bool[Tensor, " batch"]) -> Tensor:
            """Return logits of the reader `name` for all texts: 0 for texts without an unsure token."""
            logits = get_logits(name, rows)
            whole = logits.new_zeros(len(rows), *logits.shape[1:])
            whole[rows] = logits
            return whole

        value = torch.full_like(score, -torch.inf)
        if bool(rows.any()):
            value = torch.where(unsure, self._second.add(get_unsure_logits, unsure)[0], value)
        value = value.masked_fill(mask & score.isnan(), torch.nan)  # which no threshold compares as it should
        return value.masked_fill(certain, torch.inf).unsqueeze(0)
