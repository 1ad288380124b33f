"""Statistics of studies: intervals over seeds, the paired bootstrap over rows, Holm's correction, and sentences.

Metrics are computed from sums over rows, so that a bootstrap can recompute them quickly for any resample of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray

from lamina.errors import ConfigError, check_known
from lamina.tasks.class_results import positive_id
from lamina.tasks.metrics import labelled_words, spans_of
from lamina.train.results import INTERVAL_SEEDS, summarise
from lamina.utils import check_range, pluralize

if TYPE_CHECKING:
    from lamina.tasks.base import KindedTask
    from lamina.tasks.metrics import Tags

Array: TypeAlias = NDArray[np.floating]
Metric: TypeAlias = Callable[[Array], Array]  # sums of counts `[..., counts]` -> scores `[...]`
_AT_ONCE = 1 << 22  # bootstrap weights held in memory at a time
# With five rows or fewer even a method that is ahead on all of them has a sign-test p of 2 / 2**5 = 0.0625 or more. The
# bootstrap would draw the same few differences again and again, and give an interval that is much too narrow.
LEAST_DIFFERING = 6


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
        differing: Number of rows on which the methods differ. Fewer than six decide nothing.
        seeds: Number of seeds. With fewer than three nothing is concluded, because the seeds that are resampled are too
            few to show how much seeds differ.
        holm: `p` after Holm's correction for all comparisons that were made together, or multiplied by the number of
            methods if the scores chose the best of them; None: this was the only one.
        confidence: Coverage of the interval, such as 0.95.
    """

    first: str
    second: str
    value: float
    low: float
    high: float
    p: float
    rows: int
    differing: int
    seeds: int
    holm: float | None = None
    confidence: float = 0.95

    @property
    def corrected_p(self) -> float:
        """The p value after Holm's correction; `p` itself if this was the only comparison."""
        return self.p if self.holm is None else self.holm

    @property
    def few_differ(self) -> bool:
        """Whether the methods differ on fewer than six rows: too few for the interval and the p value to hold."""
        return self.differing < LEAST_DIFFERING

    @property
    def conclusive(self) -> bool:
        """Whether one method may be called better.

        That takes three seeds or more, six or more rows on which the methods differ, an interval without 0, and a p
        value (after Holm's correction, if there is one) of at most 1 - `confidence`.
        """
        is_apart = self.low * self.high > 0 and self.corrected_p <= 1 - self.confidence
        return self.seeds >= INTERVAL_SEEDS and not self.few_differ and is_apart

    def __str__(self) -> str:
        """Return a sentence: which method is better, or that this cannot be said, and why."""
        n = f"n = {pluralize(self.rows, 'row')}"
        if self.seeds < INTERVAL_SEEDS:
            side = f"{_number(abs(self.value))} {'above' if self.value >= 0 else 'below'}"
            return f"{self.first} is {side} {self.second} ({n}); {few_seeds(self.seeds)} no interval is claimed."
        if self.few_differ:
            what = f"the difference is {_number(self.value)} ({n}, {self.seeds} seeds)"
            return f"{self.first} and {self.second} cannot be told apart: {few_differ(self.differing, 'row')}; {what}."
        better, worse, ends = self.first, self.second, (self.low, self.high)
        if self.value < 0 and self.conclusive:
            better, worse, ends = worse, better, (-self.high, -self.low)
        name = "p" if self.holm is None else "Holm p"
        interval = f"{100 * self.confidence:g} % {_number(ends[0])} to {_number(ends[1])}"
        facts = f"({interval}, {n}, {self.seeds} seeds, {name} {_p_value(self.corrected_p)})"
        if self.conclusive:
            return f"{better} is ahead of {worse} by {_number(abs(self.value))} {facts}."
        among = " among so many comparisons" if self.low * self.high > 0 and self.holm is not None else ""
        return f"{better} and {worse} cannot be told apart{among}: the difference is {_number(self.value)} {facts}."


def few_seeds(count: int) -> str:
    """Return "with one seed" or "with 2 seeds", to begin a clause that says that they are too few."""
    return f"with {'one seed' if count == 1 else pluralize(count, 'seed')}"


def few_differ(count: int, unit: str) -> str:
    """Return the clause that says that only `count` rows, or whatever `unit` names, differ between two methods."""
    if not count:
        return f"no {unit} differs"
    return f"only {pluralize(count, unit)} {'differs' if count == 1 else 'differ'}, which decides nothing"


def paired_bootstrap(  # noqa: PLR0913 the options of a public entry point
    first: Array,
    second: Array,
    *,
    metric: Metric | None = None,
    differing: int | None = None,
    names: tuple[str, str] = ("A", "B"),
    repeats: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Compare two methods by a paired bootstrap: resample the rows, and the seeds if there are several.

    The interval consists of percentiles of the resampled differences. The p value is twice the share of resamples whose
    difference is 0 or has the opposite sign. Numerator and denominator of the share are raised by one, so that p is
    never 0. If the methods differ on fewer than six rows, both are too optimistic and the result is not conclusive,
    because the exact sign test could not reach 0.05 either. Raises ConfigError if the two shapes differ or are not
    allowed, there are no rows, the score of all rows or of a resample is NaN or infinite, or an option is out of range.

    Args:
        first: Scores of the first method, `[rows]` or `[seeds, rows]`; or, with `metric`, counts per row, `[rows,
            counts]` or `[seeds, rows, counts]`.
        second: The same for the second method, on the same rows and with the same seeds.
        metric: Function from sums of counts `[..., counts]` to scores `[...]`. None: the score is the mean over rows.
        differing: Number of rows with different predictions, for a metric whose counts of a row depend on other rows
            too, such as macro F1 or a correlation. No more rows than that count as different. None: rows whose scores
            or counts differ with any seed.
        names: Names of the two methods, for the sentence.
        repeats: Number of resamples, at least 100.
        confidence: Coverage of the interval, from 0.5 to below 1.
        seed: Seed of the resampling.

    Returns:
        The score of the first method minus that of the second, with interval and p value.

    Source:
        Efron and Tibshirani 1993, chapter 13. Seeds and rows are resampled as in Sellam et al. 2022, arXiv:2106.16163,
        section 3, "paired seeds".
    """
    op = "paired_bootstrap"
    check_range(op, "repeats", repeats, 100)
    check_range(op, "confidence", confidence, 0.5, 1, open_high=True)
    check_range(op, "seed", seed, 0)
    left, right = np.asarray(first, float), np.asarray(second, float)
    if left.shape != right.shape or not left.size or left.ndim not in ((1, 2) if metric is None else (2, 3)):
        axes = "[rows] or [seeds, rows]" if metric is None else "[rows, counts] or [seeds, rows, counts]"
        came = f"the scores have the shapes {left.shape} and {right.shape}"
        raise ConfigError(f"{op}: {came}; both need the same rows, as {axes}.")
    counts = np.stack([_as_counts(left, metric), _as_counts(right, metric)])  # [2, seeds, rows, counts]
    score: Metric = metric or (lambda totals: totals[..., 0] / totals[..., 1])
    _, seeds, rows, _ = counts.shape
    rng = np.random.default_rng(seed)
    differences: list[Array] = []
    most = max(1, _AT_ONCE // rows)
    for start in range(0, repeats, most):
        size = min(most, repeats - start)
        weights = rng.multinomial(rows, np.full(rows, 1 / rows), size=size).astype(float)
        totals = np.einsum("dr,msrc->mdsc", weights, counts, optimize=True)
        ahead = score(totals[0]) - score(totals[1])  # [resamples, seeds]
        seed_weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=size)
        differences.append((ahead * seed_weights).sum(1) / seeds)
    resampled, totals = np.concatenate(differences), counts.sum(2)
    value = float((score(totals[0]) - score(totals[1])).mean())
    if not (math.isfinite(value) and np.isfinite(resampled).all()):
        problem = f"the score of {names[0]} or {names[1]} is NaN or infinite"
        hint = "Leave out rows without a finite score, or use a metric that has no NaN."
        if math.isfinite(value):
            problem = f"{(~np.isfinite(resampled)).sum()} of {repeats} resamples have no finite score"
            hint = "Use a metric that is defined for every resample. F1, for instance, is 0 without positives."
        raise ConfigError(f"{op}: {problem}. {hint}")
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    p = min(1.0, 2 * (1 + min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))) / (1 + repeats))
    unequal = int((counts[0] != counts[1]).any(axis=(0, 2)).sum())
    unequal = unequal if differing is None else min(unequal, differing)
    return Difference(*names, value, float(low), float(high), p, rows, unequal, seeds, confidence=confidence)


def _as_counts(scores: Array, metric: Metric | None) -> Array:
    """Return scores as `[seeds, rows, counts]`, the form that the bootstrap sums over rows.

    Without a metric, `scores` are `[rows]` or `[seeds, rows]`, and a row's counts are its score and 1. With a metric
    they are counts already, `[rows, counts]` or `[seeds, rows, counts]`.
    """
    if metric is not None:
        return scores if scores.ndim == 3 else scores[None]
    scores = scores if scores.ndim == 2 else scores[None]
    return np.stack([scores, np.ones_like(scores)], axis=-1)


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


def of_best(difference: Difference, among: int) -> Difference:
    """Return the difference with `holm` set, if the compared scores chose its first method from several.

    The p value of the best of `among` methods is multiplied by their number (Bonferroni), as is the smallest of as many
    p values by `corrected`.
    """
    return replace(difference, holm=min(1.0, among * difference.p)) if among > 1 else difference


def repeats_for(comparisons: int) -> int:
    """Return a number of resamples with which the lowest p value can stay at most 0.02 after correction.

    The correction is for so many `comparisons`. The number is 5,000 or more.
    """
    return max(5000, 100 * comparisons)


_EXACT_BELOW = 9  # pairs of a group; all orders of more would be too many to try
_MOST_ORDERS = 5_000_000  # in all groups


class RankCorrelation(NamedTuple):
    """Spearman's rank correlation: the number of pairs `n`, the two-sided `p` value, and the correlation as `score`."""

    n: int
    p: float
    score: float

    def sentence(self, claim: str, positive: str, negative: str, counted: str) -> str:
        """Return a sentence about a claim, with the facts in brackets. It begins in lower case, to follow "name: ".

        If there is no correlation (NaN) or p is above 0.05, it says that the claim cannot be said or concluded.

        Args:
            claim: The claim, as the end of "whether" or "that".
            positive: The claim that a positive correlation supports; the sentence begins with it.
            negative: The claim that a negative correlation supports; the sentence begins with it.
            counted: The things that are correlated, with their number, such as "7 layers".
        """
        if math.isnan(self.score):
            return f"whether {claim} cannot be said (n = {counted})."
        facts = f"rank correlation {self.score:.2f}, p = {self.p:.2g}, n = {counted}"
        if self.p > 0.05:
            return f"that {claim} cannot be concluded ({facts})."
        return f"{positive if self.score > 0 else negative} ({facts})."


def rank_correlation(
    first: Sequence[float], second: Sequence[float], groups: Sequence[Hashable] | None = None
) -> RankCorrelation:
    """Return Spearman's rank correlation of two sequences of equal length, with its p value.

    With `groups`, a value is ranked among those of its group alone, so that a difference between groups is no
    correlation. The centred ranks of all groups are then correlated.

    Correlation and p value are NaN for fewer than three pairs (in groups of two or more), or if a value is NaN or all
    values of one sequence have the same rank. Infinite values have ranks as others. The p value is the share of all
    orders of `second`, within each group, whose correlation is at least as far from 0: exact for up to five million
    orders and groups of fewer than nine, else from 10,000 random orders. Without `groups`, that of scipy's `spearmanr`
    for nine pairs or more.
    """
    from scipy.stats import rankdata, spearmanr

    members: dict[Hashable, list[int]] = {}
    for at, group in enumerate([0] * len(first) if groups is None else groups):
        members.setdefault(group, []).append(at)
    places = [at for at in members.values() if len(at) > 1]
    n = sum(map(len, places))
    if n < 3 or any(map(math.isnan, [*first, *second])):
        return RankCorrelation(n, math.nan, math.nan)
    left, right = (
        [rankdata([values[at] for at in group]) - (len(group) + 1) / 2 for group in places]
        for values in (first, second)
    )
    size = math.sqrt(sum(float(own @ own) for own in left) * sum(float(own @ own) for own in right))
    if not size:
        return RankCorrelation(n, math.nan, math.nan)
    product = sum(float(one @ other) for one, other in zip(left, right, strict=True))
    if groups is None and n >= _EXACT_BELOW:
        p = float(spearmanr(first, second).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        p = _p_of_orders(left, right, product)
    return RankCorrelation(n, p, product / size)


def _p_of_orders(left: Sequence[Array], right: Sequence[Array], product: float) -> float:
    """Return the share of orders of `right`, within each group, whose product with `left` is as far from 0 as another.

    `left` and `right` have the centred ranks of each group, and `product` is the other product. `rank_correlation` says
    how many orders are tried.
    """
    orders = math.prod(math.factorial(len(own)) for own in right)
    if orders <= _MOST_ORDERS and max(map(len, right)) < _EXACT_BELOW:
        sums = np.zeros(1)
        for one, other in zip(left, right, strict=True):
            sums = (sums[:, None] + np.array(list(itertools.permutations(other))) @ one).ravel()
        return float((np.abs(sums) >= abs(product) - 1e-9).mean())
    rng, tried = np.random.default_rng(0), 10_000
    sums = np.zeros(tried)
    for one, other in zip(left, right, strict=True):
        sums += rng.permuted(np.tile(other, (tried, 1)), axis=1) @ one
    return float((1 + (np.abs(sums) >= abs(product) - 1e-9).sum()) / (1 + tried))


def mean_and_interval(values: Sequence[float]) -> str:
    """Return the mean of one value per seed as text: "0.853 ± 0.012", with a 95 % t interval.

    With fewer than three seeds, it is "0.853 (one seed)" or "0.853 (2 seeds, no interval)". Raises ConfigError if there
    are no values, or one of several is not finite.
    """
    summary = summarise(values)
    if summary.shown_interval is None:
        seeds = "one seed" if len(values) == 1 else f"{len(values)} seeds, no interval"
        return f"{_number(summary.mean)} ({seeds})"
    return f"{_number(summary.mean)} ± {_number(summary.shown_interval)}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.01 else f"= {p:.2f}"


# A class number, a number, a tuple of 0 and 1 per label (multi-label), or a tuple with one class per word (tags).
Label: TypeAlias = int | float | tuple[int, ...]
_Counter: TypeAlias = Callable[[Sequence[Label], Sequence[Label], Sequence[str]], Array]


@final
@dataclass(frozen=True)
class _RowMetric:
    """A metric in two steps: counts per row, and a function of the sums of these counts over any set of rows.

    Attributes:
        count: Returns `[rows, counts]` from predictions, true labels and class names.
        score: Returns the metric `[...]` from sums of such counts, `[..., counts]`.
    """

    count: _Counter
    score: Metric


def row_counts(
    task: KindedTask, metric: str, predictions: Sequence[Label], truths: Sequence[Label]
) -> tuple[Array, Metric]:
    """Return a metric's counts `[rows, counts]`, and the function from sums of them `[..., counts]` to scores `[...]`.

    A row is one example, or one text in word tagging tasks, where words without a label do not count. "spearman" uses
    the ranks among all rows. Macro F1 is the mean over the classes that are predicted or true in any row. In sums over
    some rows, a class that these rows lack counts with its F1 over all rows. Raises UnknownNameError or ConfigError as
    `row_metric` does.

    Args:
        task: The task; its kind and problem type decide which metrics exist.
        metric: Name of the metric.
        predictions: One prediction per row, in the form of `truths`.
        truths: The true label of each row.
    """
    chosen = row_metric(task, metric)
    if task.kind.tags_words:
        predictions, truths = labelled_words(cast("Tags", predictions), cast("Tags", truths))
    return chosen.count(predictions, truths, task.labels), chosen.score


def row_metric(task: KindedTask, metric: str) -> _RowMetric:
    """Return how a metric of a task is computed from sums over rows.

    Raises UnknownNameError if the metric does not exist for this task, or cannot be computed so. Raises ConfigError if
    the metric is about one of two classes, and the task does not say which one is positive.
    """
    if task.kind.tags_words:
        known = _WORD_METRICS
    elif task.problem_type == "regression":
        known = _NUMBER_METRICS
    elif task.problem_type == "multi_label":
        known = _MULTI_LABEL_METRICS
    else:
        positive = positive_id(task, [metric])
        f1 = _MACRO_F1 if positive is None else _RowMetric(partial(_counts_of_class, positive), _f1)
        known = {**_CLASS_METRICS, "f1": f1}
    check_known("statistics", [metric], known, "metric")
    return known[metric]


def _correct(predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]) -> Array:
    """Return `[rows, 2]`: 1 if the prediction equals the true label, else 0; and 1, which counts the row."""
    pairs = zip(predictions, truths, strict=True)
    return np.array([[np.array_equal(prediction, truth), 1] for prediction, truth in pairs], float)


def _correct_words(predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]) -> Array:
    """Return `[texts, 2]`: for each text, the number of words with the right tag, and the number of words."""
    pairs = zip(map(np.atleast_1d, predictions), map(np.atleast_1d, truths), strict=True)
    return np.array([[(prediction == truth).sum(), len(truth)] for prediction, truth in pairs], float)


def _tally(numbers: NDArray[np.intp], classes: NDArray[np.intp], rows: int, size: int) -> Array:
    """Return how often rows have each class, `[rows, size]`. Item i is of row `numbers[i]` and class `classes[i]`."""
    return np.bincount(numbers * size + classes, minlength=rows * size).reshape(rows, size).astype(np.float32)


def _class_counts(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return `[rows, 3, classes]`: for each class 1 if it is right, if it is predicted, and if it is true; else 0."""
    numbers = np.arange(len(truths))
    return _tallies(numbers, np.asarray(predictions, int), np.asarray(truths, int), len(truths), len(labels))


def _class_counts_of_words(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return `[texts, 3, tags]`: for each tag, how many words of a text rightly have it, are predicted it, have it."""
    rows = [np.atleast_1d(truth) for truth in truths]
    numbers = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    predicted, true = (
        np.concatenate([np.empty(0, int), *map(np.atleast_1d, side)]).astype(int) for side in (predictions, rows)
    )
    return _tallies(numbers, predicted, true, len(rows), len(labels))


def _tallies(
    numbers: NDArray[np.intp], predicted: NDArray[np.intp], true: NDArray[np.intp], rows: int, size: int
) -> Array:
    """Return counts of the right, predicted and true classes of each row, `[rows, 3, size]`.

    A confusion matrix per row would hold them too, but with `size` squared counts, which is too much memory for tasks
    with many classes.
    """
    right = predicted == true
    sides = ((numbers[right], true[right]), (numbers, predicted), (numbers, true))
    return np.stack([_tally(*side, rows, size) for side in sides], axis=1)


def _counts_of_class(
    number: int, predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]
) -> Array:
    """Return `[rows, 3]`: 1 if the class `number` is right in a row, if it is predicted, and if it is true; else 0."""
    predicted, true = (np.asarray(side, int) == number for side in (predictions, truths))
    return np.stack([predicted & true, predicted, true], axis=1).astype(float)


def _with_sizes(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return `[rows, 1 + 2 * classes]`: whether the row is right, and 1 for its predicted and its true class."""
    right, predicted, true = np.moveaxis(_class_counts(predictions, truths, labels), 1, 0)
    return np.hstack([right.sum(1, keepdims=True), predicted, true])


def _with_classes(
    count: _Counter, predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]
) -> Array:
    """Return `[rows, 4 * classes]`: right classes, predicted plus true classes, F1 per class, and a mask of classes.

    The first two are those of the row, by `count`. F1 and mask are those of all rows, repeated in each row. The mask is
    1 for the classes that are predicted or true in any row; macro F1 of a resample is the mean over them. A class that
    the resample lacks counts with its F1 here.
    """
    right, predicted, true = np.moveaxis(count(predictions, truths, labels), 1, 0)
    sizes = predicted + true
    total = sizes.sum(0)
    whole = np.concatenate([_ratio(2 * right.sum(0), total), (total > 0).astype(float)])
    return np.hstack([right, sizes, np.broadcast_to(whole, (len(right), len(whole)))])


def _spans(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return `[texts, 3]`: how many spans of a text are right, predicted and true; `spans_of` finds them."""
    pairs = zip(cast("Tags", predictions), cast("Tags", truths), strict=True)
    both = [[spans_of(tags, labels) for tags in pair] for pair in pairs]
    return np.array([[len(predicted & true), len(predicted), len(true)] for predicted, true in both], float)


def _label_sets(predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]) -> Array:
    """Return `[rows, 3]`: how many labels of a row are right, are predicted, and are true. For multi-label tasks."""
    predicted, true = np.asarray(predictions, bool), np.asarray(truths, bool)
    return np.stack([(predicted & true).sum(1), predicted.sum(1), true.sum(1)], axis=1).astype(float)


def _moments(predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]) -> Array:
    """Return six values per row, `[rows, 6]`: x, y, x², y², xy and 1. Here x is the prediction and y the truth.

    The sums of these values over some rows give Pearson's correlation over the same rows. x and y are centred by their
    means over all rows, and then divided by their largest absolute value, so that no square is too small or too large.
    """
    x, y = (np.asarray(values, float) - np.mean(np.asarray(values, float)) for values in (predictions, truths))
    x, y = (values / (np.abs(values).max(initial=0) or 1) for values in (x, y))
    return np.stack([x, y, x * x, y * y, x * y, np.ones_like(x)], axis=1)


def _rank_moments(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return what `_moments` returns, for the ranks of predictions and truths; sums give Spearman's correlation."""
    from scipy.stats import rankdata

    return _moments(rankdata(predictions).tolist(), rankdata(truths).tolist(), labels)


def _ratio(top: Array, bottom: Array) -> Array:
    """Return `top / bottom` elementwise, and 0 where `bottom` is 0 (at most 1e-12, to allow for rounding)."""
    return np.divide(top, bottom, out=np.zeros_like(top, float), where=bottom > 1e-12)


def _share(totals: Array) -> Array:
    """Return the accuracy `[...]` from sums `[..., 2]`: the number of right items (rows or words), and of all items.

    It is 0 if there are no items.
    """
    return _ratio(totals[..., 0], totals[..., 1])


def _f1(totals: Array) -> Array:
    """Return the F1 score `[...]` from sums `[..., 3]`: the numbers of right, predicted and true spans or labels.

    It is 0 if none is predicted or true.
    """
    return _ratio(2 * totals[..., 0], totals[..., 1] + totals[..., 2])


def _macro_f1(totals: Array) -> Array:
    """Return the mean F1 score `[...]` over the classes in the mask, from sums of what `_with_classes` returns."""
    right, sizes, whole_f1, occurs = np.split(totals, 4, axis=-1)
    f1 = np.where(sizes > 0, _ratio(2 * right, sizes), _ratio(whole_f1, occurs))
    return _ratio(f1.sum(-1), (occurs > 0).sum(-1).astype(float))


def _mcc(totals: Array) -> Array:
    """Return Matthews' correlation coefficient `[...]`; 0 if all predictions, or all true labels, are of one class.

    `totals` are sums of what `_with_sizes` returns, `[..., 1 + 2 * classes]`.
    """
    right, sizes = totals[..., 0].astype(float), totals[..., 1:].astype(float)
    predicted, true = np.split(sizes, 2, axis=-1)
    total = true.sum(-1)
    top = right * total - (true * predicted).sum(-1)
    return _ratio(top, np.sqrt((total**2 - (predicted**2).sum(-1)) * (total**2 - (true**2).sum(-1))))


def _correlation(totals: Array) -> Array:
    """Return Pearson's correlation `[...]` from sums of x, y, x², y², xy and 1 over rows, `[..., 6]`.

    It is 0 if all x, or all y, are equal or nearly so.
    """
    x, y, xx, yy, xy, n = np.moveaxis(totals, -1, 0)
    of_x, of_y = xx - x * x / n, yy - y * y / n
    varies = (of_x > 1e-13 * xx) & (of_y > 1e-13 * yy)  # beyond rounding
    spread = np.sqrt(np.where(varies, of_x, 1) * np.where(varies, of_y, 1))
    return np.where(varies, (xy - x * y / n) / spread, 0.0)


_WORD_METRICS = {
    "accuracy": _RowMetric(_correct_words, _share),
    "f1": _RowMetric(partial(_with_classes, _class_counts_of_words), _macro_f1),
    "span_f1": _RowMetric(_spans, _f1),
}
_NUMBER_METRICS = {
    "pearson": _RowMetric(_moments, _correlation),
    "spearman": _RowMetric(_rank_moments, _correlation),
}
_MULTI_LABEL_METRICS = {"accuracy": _RowMetric(_correct, _share), "f1": _RowMetric(_label_sets, _f1)}
_MACRO_F1 = _RowMetric(partial(_with_classes, _class_counts), _macro_f1)
_CLASS_METRICS = {"accuracy": _RowMetric(_correct, _share), "mcc": _RowMetric(_with_sizes, _mcc), "macro_f1": _MACRO_F1}
