"""Time functions alternately, so that ratios are reliable on a noisy machine."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Name = TypeVar("Name")


def in_turn(
    runs: Mapping[Name, Callable[[], object]],
    *,
    repeats: int = 9,
    processor: dict[Name, list[float]] | None = None,
) -> dict[Name, list[float]]:
    """Call all functions once to warm up; then time them in turns, `repeats` times each.

    Args:
        runs: Name -> function without arguments.
        repeats: Number of timed calls of each function.
        processor: Filled with name -> processor seconds of each timed call. None: they are not measured.

    Returns:
        Name -> seconds of each timed call, in order.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            used, taken = time.process_time() - used, time.perf_counter() - start
            if turn:  # turn 0 is the warm-up
                seconds[name].append(taken)
                if processor is not None:
                    processor.setdefault(name, []).append(used)
    return seconds


def ratio(seconds: Mapping[Name, list[float]], name: Name, to: Name) -> float:
    """Return how many times as long `name` takes as `to`: the median over turns. `seconds` comes from `in_turn`."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))
