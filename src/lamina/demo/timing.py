"""Timing that can be trusted on a noisy machine: the runs take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Name = TypeVar("Name")


def in_turn(runs: Mapping[Name, Callable[[], object]], *, repeats: int = 9) -> dict[Name, list[float]]:
    """Run everything once to warm up, then in turn.

    Args:
        runs: Name -> what is timed.
        repeats: How often each is timed.

    Returns:
        Name -> seconds of every counted run.
    """
    taken: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return taken


def ratio(taken: Mapping[Name, list[float]], name: Name, to: Name) -> float:
    """Median of the ratios of runs that followed each other."""
    return statistics.median(a / b for a, b in zip(taken[name], taken[to], strict=True))
