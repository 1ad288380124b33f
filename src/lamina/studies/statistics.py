"""What numbers allow to conclude: intervals over seeds, paired bootstrap over rows, Holm's correction, a sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from lamina.errors import ConfigError
from lamina.train.results import summarise
from lamina.utils import check_range, pluralize

Array = np.ndarray[Any, np.dtype[Any]]
Metric = Callable[[Array], Array]
_AT_ONCE = 1 << 22  # weights of rows that are drawn at a time


@final
@dataclass(frozen=True)
class Difference:
    """By how much one method is ahead of another on the same rows.

    Attributes:
        first: Name of the one.
        second: Name of the other.
        value: Score of the first less that of the second, of the mean over seeds.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p: Two-sided, that both are the same.
        rows: On so many rows.
        seeds: Of so many seeds; of one there is no interval over seeds, and nothing is concluded.
        holm: `p` after Holm's correction for all comparisons made; None: there was no other.
        confidence: Of the interval.
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
        """Whether one may be said to be ahead: more than one seed, 0 outside the interval, and a small enough p."""
        p = self.p if self.holm is None else self.holm
        return self.seeds > 1 and self.low * self.high > 0 and p <= 1 - self.confidence

    def __str__(self) -> str:
        """What may be concluded, as a sentence."""
        n = f"n = {pluralize(self.rows, 'row')}"
        if self.seeds < 2:
            side = f"{_number(abs(self.value))} {'above' if self.value >= 0 else 'below'}"
            return f"{self.first} is {side} {self.second} ({n}); with one seed no interval is claimed."
        one, two, ends = self.first, self.second, (self.low, self.high)
        if self.value < 0 and self.conclusive:
            one, two, ends = two, one, (-self.high, -self.low)
        name, p = ("p", self.p) if self.holm is None else ("Holm p", self.holm)
        interval = f"{100 * self.confidence:g} % {_number(ends[0])} to {_number(ends[1])}"
        facts = f"({interval}, {n}, {self.seeds} seeds, {name} {_p_value(p)})"
        if self.conclusive:
            return f"{one} is ahead of {two} by {_number(abs(self.value))} {facts}."
        among = " among so many comparisons" if self.low * self.high > 0 and self.holm is not None else ""
        return f"{one} and {two} cannot be told apart{among}: the difference is {_number(self.value)} {facts}."


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
    """Compare two methods on the same rows, which are drawn again with replacement, as are the seeds if several ran.

    The interval is that of the percentiles. p is twice the share of draws on the other side of 0 (or at it), both
    counted one higher, so that it is never 0.

    Args:
        first: What the first method scores, `[rows]` or `[seeds, rows]`; or counts of rows `[seeds, rows, counts]`
            that `metric` makes a score of.
        second: The same of the second method, on the same rows with the same seeds.
        metric: Sums of the rows' counts `[..., counts]` -> scores `[...]`; None: the mean of the rows.
        names: What to call the two.
        repeats: How many draws.
        confidence: Of the interval.
        seed: Decides the draws.

    Raises:
        ConfigError: If both are not of one shape, there is no row, or an option is out of its range.

    Source:
        Efron and Tibshirani 1993, chapter 13. Seeds and rows are drawn as in Sellam et al. 2022, arXiv:2106.16163,
        section 3, "paired seeds".
    """
    op = "paired_bootstrap"
    check_range(op, "repeats", repeats, 100)
    check_range(op, "confidence", confidence, 0.5, 1, open_high=True)
    one, two = np.asarray(first, float), np.asarray(second, float)
    if one.shape != two.shape or not one.size:
        raise ConfigError(f"{op}: the scores have the shapes {one.shape} and {two.shape}; both need the same rows.")
    counts = np.stack([_as_counts(one, metric), _as_counts(two, metric)])  # [2, seeds, rows, counts]
    score: Metric = metric or (lambda totals: totals[..., 0] / totals[..., 1])
    _, seeds, rows, _ = counts.shape
    rng = np.random.default_rng(seed)
    draws: list[Array] = []
    for size in _sizes(repeats, max(1, _AT_ONCE // rows)):
        weights = rng.multinomial(rows, np.full(rows, 1 / rows), size=size).astype(float)
        totals = np.einsum("dr,msrc->mdsc", weights, counts, optimize=True)
        ahead = score(totals[0]) - score(totals[1])  # [draws, seeds]
        of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=size)
        draws.append((ahead * of_seeds).sum(1) / seeds)
    drawn = np.concatenate(draws)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    p = min(1.0, 2 * (1 + min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))) / (1 + repeats))
    whole = counts.sum(2)
    value = float((score(whole[0]) - score(whole[1])).mean())
    return Difference(*names, value, float(low), float(high), p, rows, seeds, confidence=confidence)


def _as_counts(scores: Array, metric: Metric | None) -> Array:
    """`[seeds, rows, counts]`; of plain scores the counts are the score and 1."""
    if metric is not None:
        return scores if scores.ndim == 3 else scores[None]
    scores = scores if scores.ndim == 2 else scores[None]
    return np.stack([scores, np.ones_like(scores)], axis=-1)


def _sizes(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def holm(values: Sequence[float]) -> list[float]:
    """The p values of several comparisons, corrected so that the chance of any false conclusion is what they say.

    Source:
        Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure".
    """
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[number]))
        adjusted[number] = highest
    return adjusted


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Comparisons of one family, each with its Holm p; a single one needs none."""
    if len(differences) < 2:
        return list(differences)
    values = holm([difference.p for difference in differences])
    return [replace(difference, holm=p) for difference, p in zip(differences, values, strict=True)]


_EXACT_BELOW = 9  # pairs


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Spearman's, as "score", with "p" and "n"; NaN for fewer than three pairs, or where one side never differs.

    Of fewer than nine pairs p is exact: the share of all orders that are as far from 0, in either direction.
    """
    from scipy.stats import spearmanr

    if len(first) < 3 or min(len(set(first)), len(set(second))) < 2:
        return {"n": len(first), "p": float("nan"), "score": float("nan")}
    found: Any = spearmanr(first, second)
    p = _exact_p(first, second) if len(first) < _EXACT_BELOW else float(found.pvalue)
    return {"n": len(first), "p": p, "score": float(found.statistic)}


def _exact_p(first: Sequence[float], second: Sequence[float]) -> float:
    from scipy.stats import rankdata

    if not all(map(math.isfinite, [*first, *second])):
        return math.nan
    one, two = (rankdata(values) - (len(values) + 1) / 2 for values in (first, second))
    every = np.abs(np.array(list(itertools.permutations(two))) @ one)
    return float((every >= abs(float(two @ one)) - 1e-9).mean())


def mean_and_interval(values: Sequence[float]) -> str:
    """Scores of several seeds as "0.853 ± 0.012" (95 % t interval), of one as "0.853 (one seed)"."""
    summary = summarise(values)
    if summary.interval is None:
        return f"{_number(summary.mean)} (one seed)"
    return f"{_number(summary.mean)} ± {_number(summary.interval)}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.01 else f"= {p:.2f}"
