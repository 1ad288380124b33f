"""The tests of drift of a served bank: one for each saved monitor that has a sketch of its calibration."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, final

from lamina.monitors import Monitor

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.monitors import DriftWatcher


@final
class DriftTests:
    """The tests of drift of the bank that is served; a bank that replaces it begins with new tests."""

    def __init__(self) -> None:
        self._lock = Lock()  # several texts begin at the same time
        self._bank: ReaderBank | None = None
        self._watchers: dict[str, DriftWatcher] = {}

    def of(self, bank: ReaderBank) -> Mapping[str, DriftWatcher]:
        """Return monitor name -> its test, for the monitors of a bank that have a sketch."""
        with self._lock:
            if bank is not self._bank:
                self._bank = bank
                monitors = {name: one for name, one in bank.monitors.items() if isinstance(one, Monitor)}
                self._watchers = {name: one.watch_drift() for name, one in monitors.items() if one.sketch is not None}
            return self._watchers

    def evidence(self) -> dict[str, float]:
        """Return monitor name -> evidence of drift, which is 1 or more at an alarm; see `DriftWatcher.evidence`."""
        return {name: watcher.evidence for name, watcher in self._watchers.items()}
