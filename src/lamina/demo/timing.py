"""Time functions alternately, so that ratios are reliable on a noisy machine."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Name = TypeVar("Name")


def in_turn(runs: Mapping[Name, Callable[[], object]], *, repeats: int = 9) -> dict[Name, list[float]]:
    """Call all functions once to warm up; then time them in turns, `repeats` times each.

    Args:
        runs: Name -> function without arguments.
        repeats: Number of timed calls of each function.

    Returns:
        Name -> seconds of each timed call, in order.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # turn 0 is the warm-up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[Name, list[float]], name: Name, to: Name) -> float:
    """Return the median of the ratios of `name` to `to` within each turn."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))
