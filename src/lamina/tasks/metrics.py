"""How good predictions are: one number per metric, and a table per class. What has no meaning is 0, never NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lamina.errors import DataError, UnknownNameError
from lamina.tasks.tags import marks_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

LOWER = frozenset({"perplexity"})
"""Metrics of which less is better; of all others more is."""

_MOST = 700.0  # the largest exponent that stays a finite number


def better(metric: str, new: float, old: float) -> bool:
    """Whether a score beats another; NaN beats nothing, and a tie is not better."""
    return new < old if metric in LOWER else new > old


def score_classes(
    metrics: Sequence[str], predictions: Tensor, targets: Tensor, classes: int, *, binary: bool = True
) -> dict[str, float]:
    """Score predicted classes: "accuracy", "f1" and "mcc".

    Args:
        metrics: Which.
        predictions: Class ids, `[rows]`.
        targets: The same, as they should be.
        classes: How many there are.
        binary: F1 of two classes is that of the second one; else, and of more, the mean over the classes that occur.

    Raises:
        UnknownNameError: If a metric is none of these.
        DataError: If there are no rows, or not as many predictions as targets.
    """
    from torchmetrics.functional import classification as tm

    predictions, targets = predictions.long(), targets.long()
    count = max(2, classes)

    def f1() -> Tensor:
        if classes == 2 and binary:
            return tm.binary_f1_score(predictions, targets)
        return tm.multiclass_f1_score(predictions, targets, num_classes=count, average="macro")

    def mcc() -> Any:
        if len(predictions.unique()) < 2 or len(targets.unique()) < 2:
            return 0.0
        return tm.multiclass_matthews_corrcoef(predictions, targets, num_classes=count)

    def accuracy() -> Tensor:
        return tm.multiclass_accuracy(predictions, targets, num_classes=count, average="micro")

    _check_rows(predictions, targets)
    return _scores(metrics, {"accuracy": accuracy, "f1": f1, "mcc": mcc})


def score_multi_label(metrics: Sequence[str], predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """Score zeros and ones `[rows, classes]`: "accuracy" (of whole rows) and "f1" (over all labels at once).

    Raises:
        UnknownNameError: If a metric is none of these.
        DataError: If there are no rows, or not as many predictions as targets.
    """
    from torchmetrics.functional import classification as tm

    _check_rows(predictions, targets)
    predictions, targets = predictions.long(), targets.long()
    count = targets.shape[-1]
    return _scores(
        metrics,
        {
            "accuracy": lambda: tm.multilabel_exact_match(predictions, targets, num_labels=count),
            "f1": lambda: tm.multilabel_f1_score(predictions, targets, num_labels=count, average="micro"),
        },
    )


def score_numbers(metrics: Sequence[str], predictions: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    """Score predicted numbers: "pearson" and "spearman" correlation; 0 where one of both does not vary.

    Raises:
        UnknownNameError: If a metric is none of these.
        DataError: If there are no rows, or not as many predictions as targets.
    """
    from torchmetrics.functional import regression as tm

    _check_rows(predictions, targets)
    both = [torch.as_tensor(rows, dtype=torch.float64).reshape(-1) for rows in (predictions, targets)]
    varies = all(bool((row != row[0]).any()) and bool(row.isfinite().all()) for row in both)
    return _scores(
        metrics,
        {
            "pearson": lambda: tm.pearson_corrcoef(*both) if varies else 0.0,
            "spearman": lambda: tm.spearman_corrcoef(*both) if varies else 0.0,
        },
    )


def score_tags(
    metrics: Sequence[str],
    predictions: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    labels: Sequence[str],
) -> dict[str, float]:
    """Score a tag for every word: "span_f1" (micro, as seqeval counts), "accuracy" and "f1" of single words.

    Raises:
        UnknownNameError: If a metric is none of these.
        DataError: If there are no words, not as many predictions as targets, or the tags mark no spans.
    """
    _check_tags(predictions, targets)
    guesses, truths = (torch.tensor([int(tag) for row in rows for tag in row]) for rows in (predictions, targets))
    plain = [name for name in metrics if name != "span_f1"]
    scores = score_classes(plain, guesses, truths, len(labels), binary=False) if plain else {}
    if "span_f1" in metrics:
        scores["span_f1"] = _span_f1(predictions, targets, labels)
    return {name: scores[name] for name in metrics}


def class_table(predictions: Tensor, targets: Tensor, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall and F1 of every class.

    Args:
        predictions: Which classes each row has, as zeros and ones `[rows, classes]`.
        targets: The same, as they should be.
        labels: Names of the classes.

    Returns:
        Per class "label", "precision", "recall", "f1" and "count", how often it is true.
    """
    predictions, targets = predictions.bool(), targets.bool()
    both, guessed, true = (hits.sum(0).tolist() for hits in (predictions & targets, predictions, targets))
    return [{"label": label, **_ratios(both[i], guessed[i], true[i])} for i, label in enumerate(labels)]


def span_table(
    predictions: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], labels: Sequence[str]
) -> list[dict[str, Any]]:
    """The same for every type of span; spans count if type, start and end are right, as seqeval finds them."""
    from seqeval.metrics.sequence_labeling import get_entities

    guessed, true = (set(get_entities(_names(labels, rows))) for rows in (predictions, targets))
    spans = (guessed & true, guessed, true)
    return [
        {"label": kind, **_ratios(*(sum(span[0] == kind for span in group) for group in spans))}
        for kind in sorted({label[2:] for label in labels if label != "O"})
    ]


class TokenSums:
    """Perplexity and accuracy of predicted tokens, summed up batch by batch: no logits are kept."""

    def __init__(self) -> None:
        self.loss, self.right, self.count = 0.0, 0, 0

    def add(self, logits: Float[Tensor, "tokens classes"], labels: Int[Tensor, " tokens"]) -> None:
        """Take in some tokens.

        Args:
            logits: Scores of every entry of the vocabulary.
            labels: The right entry.
        """
        self.loss += float(torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum"))
        self.right += int((logits.argmax(-1) == labels).sum())
        self.count += len(labels)

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Name to score, in the order asked.

        Perplexity is the exponential of the mean loss per token, cut off at the largest number there is, which also
        stands for NaN.

        Raises:
            DataError: If there was no token.
        """
        if not self.count:
            raise DataError("metrics: no token is hidden; a score needs at least one.")
        mean = self.loss / self.count
        perplexity = math.exp(mean) if mean < _MOST else math.exp(_MOST)
        return _scores(metrics, {"perplexity": lambda: perplexity, "accuracy": lambda: self.right / self.count})


def _scores(metrics: Sequence[str], known: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    for name in metrics:
        if name not in known:
            raise UnknownNameError(op="metrics", got=name, known=known, what="metric")
    scores = {name: float(known[name]()) for name in metrics}
    return {name: score if math.isfinite(score) else 0.0 for name, score in scores.items()}


def _check_rows(predictions: Sequence[Any] | Tensor, targets: Sequence[Any] | Tensor) -> None:
    if len(predictions) != len(targets):
        raise DataError(
            f"metrics: {len(predictions)} predictions for {len(targets)} targets; every row has one of each."
        )
    if len(targets) == 0:
        raise DataError("metrics: there are no rows; a score needs at least one.")


def _check_tags(predictions: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
    _check_rows(predictions, targets)
    if not any(len(row) for row in targets):
        raise DataError("metrics: there are no words; a score needs at least one.")
    for row, (guess, truth) in enumerate(zip(predictions, targets, strict=True)):
        if len(guess) != len(truth):
            raise DataError(
                f"metrics: text {row} has {len(guess)} predictions for {len(truth)} words; every word has one.", row=row
            )


def _span_f1(predictions: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], labels: Sequence[str]) -> float:
    from seqeval.metrics import f1_score

    if not marks_spans(labels):
        raise DataError(
            f"metrics: the labels {', '.join(labels)} mark no spans; span F1 needs tags as O, B-x and I-x. "
            "Use 'accuracy' or 'f1'."
        )
    return float(f1_score(_names(labels, targets), _names(labels, predictions), zero_division=0))  # pyright: ignore


def _names(labels: Sequence[str], rows: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[labels[int(tag)] for tag in row] for row in rows]


def _ratios(both: int, guesses: int, trues: int) -> dict[str, float | int]:
    """Precision, recall and F1 from counts; 0 where nothing is divided by nothing."""
    return {
        "precision": both / guesses if guesses else 0.0,
        "recall": both / trues if trues else 0.0,
        "f1": 2 * both / (guesses + trues) if guesses + trues else 0.0,
        "count": trues,
    }
