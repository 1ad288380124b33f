"""Thresholds: which score gives a rate of false alarms, and how certain the rates are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, final

from lamina.errors import ConfigError

Interval = tuple[float, float]


@final
@dataclass(frozen=True)
class Calibration:
    """How a threshold was chosen: by the highest score that each text reaches anywhere, since that is what flags it.

    The intervals are Clopper and Pearson's. That of the false positives is of the rows that the threshold was chosen
    on; on others the rate is a little higher in the mean.
    """

    threshold: float
    target: float | None  # the rate of false positives that was asked for; None if the threshold was given
    false_positive_rate: float  # share of the negatives that are flagged
    false_positive_interval: Interval
    recall: float  # share of the positives that are flagged
    recall_interval: Interval
    negatives: int
    positives: int
    confidence: float = 0.95  # of the intervals
    task: str = ""
    split: str = ""
    asked: float | None = None  # of a cascade: share of the tokens for which its second reader ran

    def __post_init__(self) -> None:
        for name in ("false_positive_interval", "recall_interval"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # lists, as they come back from a file

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {**asdict(self), **{key: list(value) for key, value in vars(self).items() if isinstance(value, tuple)}}

    @classmethod
    def of(
        cls,
        highest: Sequence[float],
        positive: Sequence[bool],
        *,
        false_positive_rate: float = 0.01,
        threshold: float | None = None,
        confidence: float = 0.95,
        **facts: Any,
    ) -> Self:
        """Choose the lowest threshold whose rate of false positives is at most the one asked for.

        Args:
            highest: The highest score of each text; -inf for one that has none.
            positive: Which texts should be flagged.
            false_positive_rate: Share of the others that may be, above 0 and below 1.
            threshold: One that was chosen before, whose rates are to be measured; None: it is chosen.
            confidence: Of the intervals.
            **facts: More fields.

        Raises:
            ConfigError: If the rate or `confidence` is no share, there are no negatives or too few of them for the
                rate, no positives or no scores.
        """
        check_confidence(confidence)
        both = list(zip(highest, positive, strict=True))
        no, yes = (sorted((score for score, is_so in both if is_so == kind), reverse=True) for kind in (False, True))
        for kind, rows, what in (("negative", no, "a rate of false positives"), ("positive", yes, "recall")):
            if not rows:
                raise ConfigError(
                    f"calibrate: no row is {kind}; {what} needs one at least. Check `positive` and the task."
                )
        target = None if threshold is not None else false_positive_rate
        if threshold is None:
            threshold = _chosen(no, highest, false_positive_rate)
        false, true = ((sum(score >= threshold for score in scores), len(scores)) for scores in (no, yes))
        return cls(
            threshold=threshold,
            target=target,
            false_positive_rate=false[0] / false[1],
            false_positive_interval=interval(*false, confidence),
            recall=true[0] / true[1],
            recall_interval=interval(*true, confidence),
            negatives=len(no),
            positives=len(yes),
            confidence=confidence,
            **facts,
        )


def check_confidence(confidence: float) -> None:
    """Raise ConfigError unless it is between 0 and 1."""
    if not 0 < confidence < 1:
        raise ConfigError(f"calibrate: confidence is {confidence}; it must be between 0 and 1, such as 0.95.")


def _chosen(no: Sequence[float], highest: Sequence[float], false_positive_rate: float) -> float:
    """The lowest threshold that flags at most this share of the negatives `no`, which are sorted, the highest first."""
    if not 0 < false_positive_rate < 1:
        raise ConfigError(f"calibrate: false_positive_rate is {false_positive_rate}; it must be between 0 and 1.")
    allowed = math.floor(len(no) * false_positive_rate + 1e-9)
    if not allowed:
        needed = math.ceil(1 / false_positive_rate - 1e-9)
        came = f"there are {len(no)} negatives for a false_positive_rate of {false_positive_rate:g}"
        raise ConfigError(f"calibrate: {came}; {needed} are needed at least. Give more, or ask for a higher rate.")
    if not any(map(math.isfinite, highest)):
        came = "no text has a token that is scored"
        raise ConfigError(f"calibrate: {came}. Check the texts, and the first threshold of a cascade.")
    if no[allowed] == math.inf:
        came = f"{sum(score == math.inf for score in no)} of {len(no)} negatives are flagged without a threshold"
        raise ConfigError(f"calibrate: {came}, as the first of a cascade is sure. Raise `sure`.")
    return _between(no[allowed], highest)


def interval(hits: int, count: int, confidence: float = 0.95) -> Interval:
    """The exact (Clopper-Pearson) confidence interval of a share."""
    from scipy.stats import binomtest

    low, high = binomtest(hits, count).proportion_ci(confidence, method="exact")
    return float(low), float(high)


def _between(score: float, scores: Sequence[float]) -> float:
    """A threshold above a score and below the next higher one, so that rounding flags neither otherwise."""
    higher = (other for other in scores if score < other < math.inf)
    above = min(higher, default=math.nextafter(score, math.inf))
    middle = above - (above - score) / 2
    return middle if score < middle else above
