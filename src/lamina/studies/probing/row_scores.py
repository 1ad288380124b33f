"""Metrics computed from sums over rows, so that a bootstrap can recompute them quickly for any resample of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from lamina.errors import check_known
from lamina.studies.statistics import Array, Metric
from lamina.tasks.class_results import positive_id

if TYPE_CHECKING:
    from lamina.tasks.base import KindedTask

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
    """Return a metric's counts for each row, and the function that computes the metric from sums of these counts.

    A row is one example, or one text in word tagging tasks. "spearman" uses the ranks among all rows. Raises the errors
    of `row_metric`.

    Args:
        task: The task; its kind and problem type decide which metrics exist.
        metric: Name of the metric.
        predictions: One prediction per row, in the form of `truths`.
        truths: The true label of each row.

    Returns:
        The counts `[rows, counts]`, and a function from sums `[..., counts]` to scores `[...]`.
    """
    chosen = row_metric(task, metric)
    return chosen.count(predictions, truths, task.labels), chosen.score


def row_metric(task: KindedTask, metric: str) -> _RowMetric:
    """Return how a metric of a task is computed from sums over rows.

    Raises UnknownNameError if the metric does not exist for this task, or cannot be computed so. Raises ConfigError if
    it is about one of two classes and the task does not say which one is positive.
    """
    if task.kind.tags_words:
        known = _WORD_METRICS
    elif task.problem_type == "regression":
        known = _NUMBER_METRICS
    elif task.problem_type == "multi_label":
        known = _MULTI_LABEL_METRICS
    else:
        positive = positive_id(task, [metric])
        f1 = _macro_f1 if positive is None else partial(_f1_of_class, positive)
        known = {**_CLASS_METRICS, "f1": _RowMetric(_confusion, f1)}
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


def _confusion(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return flat confusion matrices `[rows, classes * classes]`: 1 at `true class * classes + predicted class`."""
    counts = np.zeros((len(truths), len(labels) ** 2), np.float32)
    counts[np.arange(len(truths)), np.asarray(truths, int) * len(labels) + np.asarray(predictions, int)] = 1
    return counts


def _confusion_of_words(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return flattened confusion matrices `[texts, tags * tags]`: word counts at `true tag * tags + predicted tag`."""
    size = len(labels)
    pairs = zip(predictions, truths, strict=True)
    cells = (np.asarray(truth, int) * size + np.asarray(prediction, int) for prediction, truth in pairs)
    return np.stack([np.bincount(cell, minlength=size**2).astype(np.float32) for cell in cells])


def _spans(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return `[texts, 3]`: how many spans of a text are right, are predicted, and are true, decoded from BIO tags."""
    from seqeval.metrics.sequence_labeling import get_entities

    def spans(tags: Label) -> set[tuple[str, int, int]]:
        return set(get_entities([labels[tag] for tag in np.atleast_1d(tags).astype(int)]))

    both = [(spans(prediction), spans(truth)) for prediction, truth in zip(predictions, truths, strict=True)]
    return np.array([[len(predicted & true), len(predicted), len(true)] for predicted, true in both], float)


def _label_sets(predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]) -> Array:
    """Return `[rows, 3]`: how many labels of a row are right, are predicted, and are true. For multi-label tasks."""
    predicted, true = np.asarray(predictions, bool), np.asarray(truths, bool)
    return np.stack([(predicted & true).sum(1), predicted.sum(1), true.sum(1)], axis=1).astype(float)


def _moments(predictions: Sequence[Label], truths: Sequence[Label], _labels: Sequence[str]) -> Array:
    """Return six values per row, `[rows, 6]`: x, y, x², y², xy and 1. Here x is the prediction and y the truth.

    The sums of these values over some rows give Pearson's correlation over the same rows. x and y are centred by their
    means over all rows.
    """
    x, y = (np.asarray(values, float) - np.mean(np.asarray(values, float)) for values in (predictions, truths))
    return np.stack([x, y, x * x, y * y, x * y, np.ones_like(x)], axis=1)


def _rank_moments(predictions: Sequence[Label], truths: Sequence[Label], labels: Sequence[str]) -> Array:
    """Return what `_moments` returns, for the ranks of predictions and truths; sums give Spearman's correlation."""
    from scipy.stats import rankdata

    return _moments(rankdata(predictions).tolist(), rankdata(truths).tolist(), labels)


def _ratio(top: Array, bottom: Array) -> Array:
    """Return `top / bottom` elementwise, and 0 where `bottom` is 0 (at most 1e-12, to allow for rounding)."""
    return np.divide(top, bottom, out=np.zeros_like(top, float), where=bottom > 1e-12)


def _share(totals: Array) -> Array:
    """Return the accuracy `[...]` from sums `[..., 2]`: the number of right items (rows or words), and of all items."""
    return _ratio(totals[..., 0], totals[..., 1])


def _f1(totals: Array) -> Array:
    """Return the F1 score `[...]` from sums `[..., 3]`: the numbers of right, predicted and true spans or labels."""
    return _ratio(2 * totals[..., 0], totals[..., 1] + totals[..., 2])


def _matrix(totals: Array) -> Array:
    size = round(totals.shape[-1] ** 0.5)
    return totals.reshape(*totals.shape[:-1], size, size)


def _per_class_f1(totals: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the F1 score of each class, and whether the class is predicted or true at all; both `[..., classes]`.

    `totals` are summed, flattened confusion matrices `[..., classes * classes]`.
    """
    table = _matrix(totals)
    predicted_and_true = table.sum(-1) + table.sum(-2)
    return _ratio(2 * np.diagonal(table, axis1=-2, axis2=-1), predicted_and_true), predicted_and_true > 0


def _macro_f1(totals: Array) -> Array:
    """Return the mean F1 score `[...]` over the classes that occur, from summed, flattened confusion matrices."""
    scores, present = _per_class_f1(totals)
    return _ratio(scores.sum(-1), present.sum(-1).astype(float))


def _f1_of_class(number: int, totals: Array) -> Array:
    """Return the F1 score `[...]` of the class with this number, from summed, flattened confusion matrices."""
    return _per_class_f1(totals)[0][..., number]


def _mcc(totals: Array) -> Array:
    """Return Matthews' correlation coefficient `[...]` from summed, flattened confusion matrices.

    It is 0 if all predictions, or all true labels, are of one class.
    """
    table = _matrix(totals.astype(float))
    true, predicted, total = table.sum(-1), table.sum(-2), table.sum((-1, -2))
    right = np.trace(table, axis1=-2, axis2=-1)
    top = right * total - (true * predicted).sum(-1)
    return _ratio(top, np.sqrt((total**2 - (predicted**2).sum(-1)) * (total**2 - (true**2).sum(-1))))


def _correlation(totals: Array) -> Array:
    """Return Pearson's correlation `[...]` from sums of x, y, x², y², xy and 1 over rows, `[..., 6]`.

    It is 0 if all x, or all y, are equal.
    """
    x, y, xx, yy, xy, n = np.moveaxis(totals, -1, 0)
    varies = np.sqrt(np.clip(xx - x * x / n, 0, None) * np.clip(yy - y * y / n, 0, None))
    return _ratio(xy - x * y / n, varies)


_WORD_METRICS = {
    "accuracy": _RowMetric(_correct_words, _share),
    "f1": _RowMetric(_confusion_of_words, _macro_f1),
    "span_f1": _RowMetric(_spans, _f1),
}
_NUMBER_METRICS = {
    "pearson": _RowMetric(_moments, _correlation),
    "spearman": _RowMetric(_rank_moments, _correlation),
}
_MULTI_LABEL_METRICS = {"accuracy": _RowMetric(_correct, _share), "f1": _RowMetric(_label_sets, _f1)}
_CLASS_METRICS = {
    "accuracy": _RowMetric(_correct, _share),
    "f1": _RowMetric(_confusion, _macro_f1),
    "mcc": _RowMetric(_confusion, _mcc),
    "macro_f1": _RowMetric(_confusion, _macro_f1),
}
