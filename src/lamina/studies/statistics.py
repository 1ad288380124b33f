"""Statistics of studies: intervals over seeds, the paired bootstrap over rows, Holm's correction, and sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from lamina.errors import ConfigError
from lamina.train.results import summarise
from lamina.utils import check_range, pluralize

Array: TypeAlias = NDArray[np.floating]
Metric: TypeAlias = Callable[[Array], Array]  # sums of counts `[..., counts]` -> scores `[...]`
_AT_ONCE = 1 << 22  # bootstrap weights held in memory at a time


@final
@dataclass(frozen=True)
class Difference:
    """The difference between the scores of two methods on the same rows. `paired_bootstrap` returns it.

    `str()` of it is a sentence that says what may be concluded.

    Attributes:
        first: Name of the first method.
        second: Name of the second method.
        value: Score of the first method minus the score of the second, both averaged over seeds.
        low: Lower end of the confidence interval of `value`.
        high: Upper end of the confidence interval of `value`.
        p: Two-sided p value of the hypothesis that both methods score the same.
        rows: Number of rows that both methods were scored on.
        seeds: Number of seeds. With one seed there is no interval over seeds, and nothing is concluded.
        holm: `p` after Holm's correction for all comparisons that were made together; None: this was the only one.
        confidence: Coverage of the interval, such as 0.95.
    """

    first: str
    second: str
    value: float
    low: float
    high: float
    p: float
    rows: int
    seeds: int
    holm: float | None = None
    confidence: float = 0.95

    @property
    def conclusive(self) -> bool:
        """Whether one method may be called better.

        That takes more than one seed, an interval without 0, and a p value (after Holm's correction, if there is one)
        of at most 1 - `confidence`.
        """
        p = self.p if self.holm is None else self.holm
        return self.seeds > 1 and self.low * self.high > 0 and p <= 1 - self.confidence

    def __str__(self) -> str:
        """Return a sentence: which method is better, or that they cannot be told apart, or that one seed is too few."""
        n = f"n = {pluralize(self.rows, 'row')}"
        if self.seeds < 2:
            side = f"{_number(abs(self.value))} {'above' if self.value >= 0 else 'below'}"
            return f"{self.first} is {side} {self.second} ({n}); with one seed no interval is claimed."
        better, worse, ends = self.first, self.second, (self.low, self.high)
        if self.value < 0 and self.conclusive:
            better, worse, ends = worse, better, (-self.high, -self.low)
        name, p = ("p", self.p) if self.holm is None else ("Holm p", self.holm)
        interval = f"{100 * self.confidence:g} % {_number(ends[0])} to {_number(ends[1])}"
        facts = f"({interval}, {n}, {self.seeds} seeds, {name} {_p_value(p)})"
        if self.conclusive:
            return f"{better} is ahead of {worse} by {_number(abs(self.value))} {facts}."
        among = " among so many comparisons" if self.low * self.high > 0 and self.holm is not None else ""
        return f"{better} and {worse} cannot be told apart{among}: the difference is {_number(self.value)} {facts}."


def paired_bootstrap(
    first: Array,
    second: Array,
    *,
    metric: Metric | None = None,
    names: tuple[str, str] = ("A", "B"),
    repeats: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Compare two methods by a paired bootstrap: resample the rows, and the seeds if there are several.

    The interval consists of percentiles of the resampled differences. The p value is twice the share of resamples whose
    difference is 0 or has the opposite sign. Numerator and denominator of the share are raised by one, so that p is
    never 0. Raises ConfigError if the two shapes differ, there are no rows, or an option is out of its range.

    Args:
        first: Scores of the first method, `[rows]` or `[seeds, rows]`; or, with `metric`, counts per row `[seeds, rows,
            counts]`.
        second: The same for the second method, on the same rows and with the same seeds.
        metric: Function from sums of counts `[..., counts]` to scores `[...]`. None: the score is the mean over rows.
        names: Names of the two methods, for the sentence.
        repeats: Number of resamples, at least 100.
        confidence: Coverage of the interval, from 0.5 to below 1.
        seed: Seed of the resampling.

    Returns:
        The difference of the scores with its interval and p value.

    Source:
        Efron and Tibshirani 1993, chapter 13. Seeds and rows are resampled as in Sellam et al. 2022, arXiv:2106.16163,
        section 3, "paired seeds".
    """
    op = "paired_bootstrap"
    check_range(op, "repeats", repeats, 100)
    check_range(op, "confidence", confidence, 0.5, 1, open_high=True)
    left, right = np.asarray(first, float), np.asarray(second, float)
    if left.shape != right.shape or not left.size:
        raise ConfigError(f"{op}: the scores have the shapes {left.shape} and {right.shape}; both need the same rows.")
    counts = np.stack([_as_counts(left, metric), _as_counts(right, metric)])  # [2, seeds, rows, counts]
    score: Metric = metric or (lambda totals: totals[..., 0] / totals[..., 1])
    _, seeds, rows, _ = counts.shape
    rng = np.random.default_rng(seed)
    differences: list[Array] = []
    for size in _sizes(repeats, max(1, _AT_ONCE // rows)):
        weights = rng.multinomial(rows, np.full(rows, 1 / rows), size=size).astype(float)
        totals = np.einsum("dr,msrc->mdsc", weights, counts, optimize=True)
        ahead = score(totals[0]) - score(totals[1])  # [resamples, seeds]
        seed_weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=size)
        differences.append((ahead * seed_weights).sum(1) / seeds)
    resampled = np.concatenate(differences)
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    p = min(1.0, 2 * (1 + min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))) / (1 + repeats))
    totals = counts.sum(2)
    value = float((score(totals[0]) - score(totals[1])).mean())
    return Difference(*names, value, float(low), float(high), p, rows, seeds, confidence=confidence)


def _as_counts(scores: Array, metric: Metric | None) -> Array:
    """Return scores as `[seeds, rows, counts]`, the form that the bootstrap sums over rows.

    Without a metric, `scores` are `[rows]` or `[seeds, rows]`, and a row's counts are its score and 1. With a metric
    they are counts already, `[rows, counts]` or `[seeds, rows, counts]`.
    """
    if metric is not None:
        return scores if scores.ndim == 3 else scores[None]
    scores = scores if scores.ndim == 2 else scores[None]
    return np.stack([scores, np.ones_like(scores)], axis=-1)


def _sizes(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def holm(values: Sequence[float]) -> list[float]:
    """Return p values after Holm's correction for all of them, in the order of `values`.

    If conclusions are drawn only from corrected values up to 0.05, the chance that any of them is false is at most 5 %.

    Source:
        Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure".
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[number]))
        adjusted[number] = highest
    return adjusted


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences with `holm` set, Holm's correction for all of them; a single one is returned unchanged."""
    if len(differences) < 2:
        return list(differences)
    values = holm([difference.p for difference in differences])
    return [replace(difference, holm=p) for difference, p in zip(differences, values, strict=True)]


_EXACT_BELOW = 9  # pairs; all orders of more would be too many to try


class RankCorrelation(NamedTuple):
    """Spearman's rank correlation: the number of pairs `n`, the two-sided `p` value, and the correlation as `score`."""

    n: int
    p: float
    score: float


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> RankCorrelation:
    """Return Spearman's rank correlation of two sequences of equal length, with its p value.

    Correlation and p value are NaN for fewer than three pairs, or if all values of one sequence are equal. For fewer
    than nine pairs the p value is exact: the share of all orders of `second` whose correlation is at least as far from
    0.
    """
    from scipy.stats import spearmanr

    if len(first) < 3 or min(len(set(first)), len(set(second))) < 2:
        return RankCorrelation(len(first), math.nan, math.nan)
    correlation, p = (float(value) for value in spearmanr(first, second))  # pyright: ignore[reportArgumentType]
    return RankCorrelation(len(first), _exact_p(first, second) if len(first) < _EXACT_BELOW else p, correlation)


def _exact_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the exact two-sided p value of Spearman's correlation of two short sequences.

    The p value is the share of all orders of `second` whose correlation with `first` is at least as far from 0 as that
    of `second` itself. It is NaN if a value is not finite.
    """
    from scipy.stats import rankdata

    if not all(map(math.isfinite, [*first, *second])):
        return math.nan
    left, right = (rankdata(values) - (len(values) + 1) / 2 for values in (first, second))
    products = np.abs(np.array(list(itertools.permutations(right))) @ left)
    return float((products >= abs(float(right @ left)) - 1e-9).mean())


def mean_and_interval(values: Sequence[float]) -> str:
    """Return the mean of one value per seed as text: "0.853 ± 0.012" (95 % t interval), or "0.853 (one seed)".

    Raises ConfigError if there are no values.
    """
    summary = summarise(values)
    if summary.interval is None:
        return f"{_number(summary.mean)} (one seed)"
    return f"{_number(summary.mean)} ± {_number(summary.interval)}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.01 else f"= {p:.2f}"
