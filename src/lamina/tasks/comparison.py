"""Tell whether a score means anything: compare it with a constant prediction, with an interval over the rows."""

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
    """The scores of a reader beside those of the best constant prediction.

    Attributes:
        rows: Number of rows that were scored.
        always: The constant prediction: the most frequent class, the mean, or the labels that most rows have.
        baseline: Metric -> score of the constant prediction.
        interval: Metric -> lower and upper end of the 95 % interval of the reader's own score: a percentile bootstrap
            over rows.
        verdict: None if the reader is better by the task's metric, that is, if the 95 % interval of the difference on
            the same rows lies above 0. Otherwise a sentence that says that it is not.
    """

    rows: int
    always: str
    baseline: dict[str, float]
    interval: dict[str, tuple[float, float]]
    verdict: str | None


def compare(metrics: Sequence[str], rows: int, always: str, score: RowScore) -> Comparison:
    """Compare predictions with the best constant prediction.

    Args:
        metrics: The metrics. The first one decides the verdict. `score` may return fewer of them.
        rows: Number of rows.
        always: The constant prediction, as text.
        score: Called with row indices and a flag. Returns metric -> score on these rows: of the predictions, or of the
            constant prediction if the flag is True.

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
    """Return the two ends of the 95 % percentile interval of bootstrap scores."""
    low, high = np.percentile(values, _ENDS).tolist()
    return low, high


def compare_tags(metrics: Sequence[str], guesses: Tags, truths: Tags, labels: Sequence[str]) -> Comparison:
    """Compare predicted tags with giving every word the most frequent tag. The bootstrap draws texts.

    Only "span_f1" and "accuracy" are compared, because they can be summed over texts.

    Args:
        metrics: The metrics of the task.
        guesses: For each text, the id of the predicted tag of every word.
        truths: For each text, the id of the true tag of every word.
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
    """Return the name of the most frequent tag, and predictions that give it to every word of every text."""
    tags = torch.tensor([tag for row in truths for tag in row], dtype=torch.long)
    most = int(torch.bincount(tags, minlength=len(labels)).argmax())
    return labels[most], [[most] * len(row) for row in truths]


def _tag_counts(guesses: Tags, truths: Tags, labels: Sequence[str], *, spans: bool) -> Tensor:
    """Return five counts per text, `[texts, 5]`: correct, predicted and true spans; correct words, and all words.

    `guesses` and `truths` are the predicted and true tag ids. Without `spans`, the counts of spans are 0.
    """
    rows: list[list[int]] = []
    for guess, truth in zip(guesses, truths, strict=True):
        both = [spans_of(row, labels) if spans else set[object]() for row in (guess, truth)]
        words = sum(int(one) == int(other) for one, other in zip(guess, truth, strict=True))
        rows.append([len(both[0] & both[1]), len(both[0]), len(both[1]), words, len(truth)])
    return torch.tensor(rows, dtype=torch.float64)
