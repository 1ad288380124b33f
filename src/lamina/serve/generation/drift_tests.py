"""Tests whether replies drift away from the texts on which a served bank's monitors were calibrated.

There is one test for each saved monitor that has a sketch (a summary) of its calibration texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

from lamina.monitors import Monitor

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.monitors import DriftWatcher


@final
class DriftTests:
    """The drift tests of each bank that is served. A bank that replaces another begins with new tests."""

    def __init__(self) -> None:
        self._lock = Lock()  # several texts begin at the same time
        # texts of the old bank may begin and end while a new one is already served
        self._watchers: WeakKeyDictionary[ReaderBank, dict[str, DriftWatcher]] = WeakKeyDictionary()

    def of(self, bank: ReaderBank) -> Mapping[str, DriftWatcher]:
        """Return monitor name -> drift test, for the bank's monitors that have a sketch of their calibration texts."""
        with self._lock:
            if bank not in self._watchers:
                monitors = {name: one for name, one in bank.monitors.items() if isinstance(one, Monitor)}
                own = {name: one.watch_drift() for name, one in monitors.items() if one.sketch is not None}
                self._watchers[bank] = own
            return self._watchers[bank]

    def evidence(self, bank: ReaderBank) -> dict[str, float]:
        """Return monitor name -> evidence of drift, for the monitors of a bank that have a drift test; see `of`.

        1 or more is an alarm; see `DriftWatcher.evidence`.
        """
        return {name: watcher.evidence for name, watcher in self.of(bank).items()}
