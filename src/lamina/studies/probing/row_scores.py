"""What each row adds to a metric, so that a metric of any rows, drawn as often as one likes, is one of their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata

from lamina.errors import check_known
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from lamina.tasks.base import TaskLike

Array = np.ndarray[Any, np.dtype[Any]]
Metric = Callable[[Array], Array]


def row_counts(task: TaskLike, metric: str, guesses: Sequence[Any], truths: Sequence[Any]) -> tuple[Array, Metric]:
    """Counts `[rows, counts]` of guesses as `Results.guesses` gives them, and what makes the metric of their sums.

    A row is an example: of tasks that tag words, a text. Of "spearman" the ranks are those among all rows.

    Raises:
        UnknownNameError: If the metric is none that sums of rows give.
    """
    if kind_of(task.kind).tags_words:
        known = {"accuracy": _right_words, "f1": _confused_words, "span_f1": _spans}
    elif task.problem_type == "regression":
        known = {"pearson": _moments, "spearman": _rank_moments}
    elif task.problem_type == "multi_label":
        known = {"accuracy": _right, "f1": _set_labels}
    else:
        known = {"accuracy": _right, "f1": _confused, "mcc": _confused, "macro_f1": _confused}
    check_known("statistics", [metric], known, "metric")
    counts = known[metric](guesses, truths, task.labels)
    of_second = metric == "f1" and len(task.labels) == 2 and known[metric] is _confused
    how: dict[Any, Metric] = {_right: _share, _right_words: _share, _spans: _f1, _set_labels: _f1}
    how |= {_moments: _correlation, _rank_moments: _correlation, _confused_words: _macro_f1}
    how[_confused] = _mcc if metric == "mcc" else _second_f1 if of_second else _macro_f1
    return counts, how[known[metric]]


def _right(guesses: Sequence[Any], truths: Sequence[Any], _labels: Sequence[str]) -> Array:
    pairs = zip(guesses, truths, strict=True)
    return np.array([[np.array_equal(guess, truth), 1] for guess, truth in pairs], float)


def _right_words(guesses: Sequence[Any], truths: Sequence[Any], _labels: Sequence[str]) -> Array:
    pairs = zip(guesses, truths, strict=True)
    return np.array([[sum(map(int.__eq__, guess, truth)), len(truth)] for guess, truth in pairs], float)


def _confused(guesses: Sequence[Any], truths: Sequence[Any], labels: Sequence[str]) -> Array:
    counts = np.zeros((len(truths), len(labels) ** 2), np.float32)
    counts[np.arange(len(truths)), np.asarray(truths, int) * len(labels) + np.asarray(guesses, int)] = 1
    return counts


def _confused_words(guesses: Sequence[Any], truths: Sequence[Any], labels: Sequence[str]) -> Array:
    size = len(labels)
    pairs = zip(guesses, truths, strict=True)
    cells = (np.asarray(truth, int) * size + np.asarray(guess, int) for guess, truth in pairs)
    return np.stack([np.bincount(cell, minlength=size**2).astype(np.float32) for cell in cells])


def _spans(guesses: Sequence[Any], truths: Sequence[Any], labels: Sequence[str]) -> Array:
    """Right, guessed and true spans of each text."""
    from seqeval.metrics.sequence_labeling import get_entities

    def spans(tags: Sequence[int]) -> set[Any]:
        return set(get_entities([labels[tag] for tag in tags]))

    both = [(spans(guess), spans(truth)) for guess, truth in zip(guesses, truths, strict=True)]
    return np.array([[len(guess & truth), len(guess), len(truth)] for guess, truth in both], float)


def _set_labels(guesses: Sequence[Any], truths: Sequence[Any], _labels: Sequence[str]) -> Array:
    guess, truth = np.asarray(guesses, bool), np.asarray(truths, bool)
    return np.stack([(guess & truth).sum(1), guess.sum(1), truth.sum(1)], axis=1).astype(float)


def _moments(guesses: Sequence[Any], truths: Sequence[Any], _labels: Sequence[str]) -> Array:
    x, y = (np.asarray(values, float) - np.mean(values) for values in (guesses, truths))
    return np.stack([x, y, x * x, y * y, x * y, np.ones_like(x)], axis=1)


def _rank_moments(guesses: Sequence[Any], truths: Sequence[Any], labels: Sequence[str]) -> Array:
    return _moments(rankdata(guesses).tolist(), rankdata(truths).tolist(), labels)


def _ratio(top: Array, bottom: Array) -> Array:
    """0 where nothing is divided by nothing."""
    return np.divide(top, bottom, out=np.zeros_like(top, float), where=bottom > 1e-12)


def _share(totals: Array) -> Array:
    return _ratio(totals[..., 0], totals[..., 1])


def _f1(totals: Array) -> Array:
    return _ratio(2 * totals[..., 0], totals[..., 1] + totals[..., 2])


def _square(totals: Array) -> Array:
    size = round(totals.shape[-1] ** 0.5)
    return totals.reshape(*totals.shape[:-1], size, size)


def _per_class_f1(totals: Array) -> tuple[Array, Array]:
    table = _square(totals)
    said = table.sum(-1) + table.sum(-2)
    return _ratio(2 * np.diagonal(table, axis1=-2, axis2=-1), said), said > 0


def _macro_f1(totals: Array) -> Array:
    scores, present = _per_class_f1(totals)
    return _ratio(scores.sum(-1), present.sum(-1).astype(float))


def _second_f1(totals: Array) -> Array:
    return _per_class_f1(totals)[0][..., 1]


def _mcc(totals: Array) -> Array:
    table = _square(totals.astype(float))
    true, said, total = table.sum(-1), table.sum(-2), table.sum((-1, -2))
    right = np.trace(table, axis1=-2, axis2=-1)
    top = right * total - (true * said).sum(-1)
    return _ratio(top, np.sqrt((total**2 - (said**2).sum(-1)) * (total**2 - (true**2).sum(-1))))


def _correlation(totals: Array) -> Array:
    x, y, xx, yy, xy, n = np.moveaxis(totals, -1, 0)
    varies = np.sqrt(np.clip(xx - x * x / n, 0, None) * np.clip(yy - y * y / n, 0, None))
    return _ratio(xy - x * y / n, varies)
