"""Means over repeated runs, with how far they can be trusted."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Summary:
    """Values of repeated runs in short.

    Attributes:
        count: How many values.
        mean: Their mean.
        spread: Sample standard deviation; 0 for a single value.
        interval: Half the width of the t interval around the mean; None for a single value, which tells nothing.
    """

    count: int
    mean: float
    spread: float
    interval: float | None


def summarise(values: Sequence[float], *, confidence: float = 0.95) -> Summary:
    """Sum up the values of independent runs.

    Args:
        values: One per run.
        confidence: Share of such intervals that hold the true mean, where the values are normally distributed.

    Raises:
        ConfigError: If there is no value, or `confidence` is not between 0 and 1.

    Source:
        Student 1908, "The probable error of a mean".
    """
    if not values:
        raise ConfigError("summarise: there is no value; at least one is needed. Give the values of the runs.")
    if not 0 < confidence < 1:
        raise ConfigError(f"summarise: confidence is {confidence}; it must be between 0 and 1. Use 0.95.")
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Summary(1, mean, 0.0, None)
    spread = statistics.stdev(values)
    return Summary(count, mean, spread, _quantile((1 + confidence) / 2, count - 1) * spread / math.sqrt(count))


def _quantile(share: float, freedom: int) -> float:
    """The value below which `share` of Student's t distribution lies."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))
