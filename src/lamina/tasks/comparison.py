"""Whether a score means anything: what always giving one answer would score, and an interval over the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from lamina.tasks.metrics import LOWER, Tags, spans_of

REPEATS = 1000  # resamples of the bootstrap
_FEWEST = 200  # resamples of many rows
_MOST_ROWS = 20_000_000  # rows of all resamples together
_ENDS = (2.5, 97.5)  # percentiles that bound a 95 % interval

# Scores some rows (indices, which may repeat): the predictions, or with True always the same answer.
RowScore: TypeAlias = Callable[[Tensor, bool], Mapping[str, float]]


class Comparison(TypedDict):
    """A score beside that of always giving one answer.

    Attributes:
        rows: Number of rows that were scored.
        always: The answer: the most frequent class, the mean, or the labels that most rows have.
        baseline: Metric -> score of always giving this answer.
        interval: Metric -> lower and upper end of the 95 % interval of the reader's own score: a percentile bootstrap
            over rows.
        verdict: None if the reader is better than that answer by the task's metric (the 95 % interval of the difference
            on the same rows is above 0); otherwise that it is not, in words.
    """

    rows: int
    always: str
    baseline: dict[str, float]
    interval: dict[str, tuple[float, float]]
    verdict: str | None


def compare(metrics: Sequence[str], rows: int, always: str, score: RowScore) -> Comparison:
    """Compare predictions with always giving one answer.

    Args:
        metrics: The metrics, of which the first decides the verdict. `score` may return fewer of them.
        rows: Number of rows.
        always: The one answer, in words.
        score: Scores rows.

    Source:
        Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 13.
    """
    rng, values, gains = np.random.default_rng(0), dict[str, list[float]](), list[float]()
    sign = -1 if metrics[0] in LOWER else 1
    for _ in range(max(_FEWEST, min(REPEATS, _MOST_ROWS // rows))):
        drawn = torch.from_numpy(rng.integers(rows, size=rows))
        own, other = score(drawn, False), score(drawn, True)
        for metric, value in own.items():
            values.setdefault(metric, []).append(value)
        gains.append(sign * (own.get(metrics[0], 0.0) - other.get(metrics[0], 0.0)))
    better = float(np.percentile(gains, _ENDS[0])) > 0
    return {
        "rows": rows,
        "always": always,
        "baseline": dict(score(torch.arange(rows), True)),
        "interval": {metric: _interval(drawn) for metric, drawn in values.items()},
        "verdict": None if better else f"not better than always answering '{always}'",
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the percentile interval of scores of resamples."""
    low, high = np.percentile(values, _ENDS).tolist()
    return low, high


def compare_tags(metrics: Sequence[str], guesses: Tags, truths: Tags, labels: Sequence[str]) -> Comparison:
    """Compare the tags of texts with giving every word the most frequent tag; rows are texts.

    Only "span_f1" and "accuracy" are compared, which are sums over texts.

    Args:
        metrics: The metrics of the task.
        guesses: For each text the number of the predicted tag of every word.
        truths: The same for the true tags.
        labels: Names of the tags.
    """
    metrics = [name for name in metrics if name in ("span_f1", "accuracy")]
    always, constant = most_frequent_tag(truths, labels)
    own, other = (_tag_counts(rows, truths, labels, spans="span_f1" in metrics) for rows in (guesses, constant))

    def score(rows: Tensor, is_constant: bool) -> Mapping[str, float]:
        right, guessed, true, right_words, words = (other if is_constant else own)[rows].sum(0).tolist()
        scores = {"span_f1": 2 * right / max(1.0, guessed + true), "accuracy": right_words / max(1.0, words)}
        return {name: scores[name] for name in metrics}

    return compare(metrics, len(truths), always, score)


def most_frequent_tag(truths: Tags, labels: Sequence[str]) -> tuple[str, list[list[int]]]:
    """Return the name of the most frequent tag, and texts all of whose words have it."""
    tags = torch.tensor([tag for row in truths for tag in row], dtype=torch.long)
    most = int(torch.bincount(tags, minlength=len(labels)).argmax())
    return labels[most], [[most] * len(row) for row in truths]


def _tag_counts(guesses: Tags, truths: Tags, labels: Sequence[str], *, spans: bool) -> Tensor:
    """Return for each text its right, guessed and true spans, and its right and all words, `[texts, 5]`."""
    rows: list[list[int]] = []
    for guess, truth in zip(guesses, truths, strict=True):
        both = [spans_of(row, labels) if spans else set[object]() for row in (guess, truth)]
        words = sum(int(one) == int(other) for one, other in zip(guess, truth, strict=True))
        rows.append([len(both[0] & both[1]), len(both[0]), len(both[1]), words, len(truth)])
    return torch.tensor(rows, dtype=torch.float64)
