"""How good predictions are: one number per metric, and a table per class."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lamina.errors import DataError, UnknownNameError
from lamina.tasks.kinds import GENERATION, MASKED, METRICS, TOKEN
from lamina.tasks.tags import marks_spans
from lamina.tasks.text_metrics import score_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    Rows = Sequence[Any] | Tensor


class Asked(Protocol):
    """What a metric has to know of a task."""

    @property
    def kind(self) -> str:
        """The kind of task."""
        ...

    @property
    def problem(self) -> str:
        """What is predicted."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """Class names in the order of their ids."""
        ...


def compute(
    task: Asked | tuple[str, str, Sequence[str]], metrics: Sequence[str], predictions: Rows, targets: Rows
) -> dict[str, float]:
    """Score predictions.

    Args:
        task: A task, or its (kind, problem, labels).
        metrics: Names; which fit which task is `lamina.tasks.kinds.METRICS`.
        predictions: Per row a class id, a number (regression) or zeros and ones (multi-label); token tasks: per text
            a class id for every word; where texts are written, texts.
        targets: The truth, in the same form.

    Returns:
        Name to score, in the order asked. Accuracy of a multi-label row counts only if all its labels are right; its
        F1 is over all labels at once. F1 is that of the second class if there are two, else the mean over the classes
        that occur. Those of texts are told in `score_texts`. What has no meaning (one class only, a constant) is 0,
        never NaN.

    Raises:
        UnknownNameError: If a metric is none there is for this task.
        DataError: If there are no rows, or not as many predictions as targets.
    """
    kind, problem, labels = _asked(task)
    known = METRICS[kind, problem]
    for name in metrics:
        if name not in known:
            raise UnknownNameError(op="metrics", got=name, known=known, what="metric")
    _check_rows(kind, predictions, targets)
    if kind in GENERATION:
        return score_texts(metrics, [str(text) for text in predictions], [str(text) for text in targets])
    scores = {name: _FUNCTIONS[name](kind, problem, labels, predictions, targets) for name in metrics}
    return {name: score if math.isfinite(score) else 0.0 for name, score in scores.items()}


def per_class(
    task: Asked | tuple[str, str, Sequence[str]], predictions: Rows, targets: Rows
) -> list[dict[str, str | float | int]]:
    """Precision, recall and F1 of every class.

    Args:
        task: A task, or its (kind, problem, labels).
        predictions: As in `compute`.
        targets: As in `compute`.

    Returns:
        Per class `label`, `precision`, `recall`, `f1` and `count`, how often it is true. Tasks whose tags mark spans
        have one row per span type. Regression and written texts have no classes: an empty list.

    Raises:
        DataError: If there are no rows, or not as many predictions as targets.
    """
    kind, problem, labels = _asked(task)
    _check_rows(kind, predictions, targets)
    if problem in ("regression", "generation"):
        return []
    if kind == TOKEN and marks_spans(labels):
        return _span_rows(labels, predictions, targets)
    guessed, true = _hot(kind, problem, labels, predictions), _hot(kind, problem, labels, targets)
    both, guesses, trues = (guessed & true).sum(0), guessed.sum(0), true.sum(0)
    return [{"label": label, **_ratios(int(both[i]), int(guesses[i]), int(trues[i]))} for i, label in enumerate(labels)]


def _asked(task: Asked | tuple[str, str, Sequence[str]]) -> tuple[str, str, Sequence[str]]:
    kind, problem, labels = task if isinstance(task, tuple) else (task.kind, task.problem, task.labels)
    known = [", ".join(pair) for pair in METRICS if pair[0] != MASKED]  # that is summed up, see TokenSums
    if f"{kind}, {problem}" not in known:
        raise UnknownNameError(op="metrics", got=f"{kind}, {problem}", known=known, what="kind of task")
    return kind, problem, labels


def _check_rows(kind: str, predictions: Rows, targets: Rows) -> None:
    if len(predictions) != len(targets):
        raise DataError(
            f"metrics: {len(predictions)} predictions for {len(targets)} targets; every row has one of each. "
            "Predict all rows."
        )
    if len(targets) == 0 or (kind == TOKEN and all(len(row) == 0 for row in targets)):
        raise DataError("metrics: there are no rows; a score needs at least one. Give rows to score.")
    if kind != TOKEN:
        return
    for row, (guess, truth) in enumerate(zip(predictions, targets, strict=True)):
        if len(guess) != len(truth):
            raise DataError(
                f"metrics: text {row} has {len(guess)} predictions for {len(truth)} words; every word has one. "
                "Predict all words.",
                row=row,
            )


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

        Perplexity is the exponential of the mean loss per token; it is cut off at the largest number there is, which is
        also what stands for NaN.

        Raises:
            DataError: If there was no token.
        """
        if not self.count:
            raise DataError("metrics: no token is hidden; a score needs at least one. Give longer texts.")
        mean = self.loss / self.count
        known = {
            "perplexity": math.exp(mean) if mean < _MOST else math.exp(_MOST),
            "accuracy": self.right / self.count,
        }
        return {name: known[name] for name in metrics}


_MOST = 700.0  # the largest exponent that stays a finite number


def _flat(kind: str, rows: Rows) -> Tensor:
    """Class ids, of all words of all texts in a token task."""
    if kind == TOKEN:
        rows = [int(one) for row in rows for one in row]
    return torch.as_tensor(rows).long()


def _hot(kind: str, problem: str, labels: Sequence[str], rows: Rows) -> Tensor:
    """Which class each row has, as a boolean per row and class."""
    if problem == "multi_label":
        return torch.as_tensor(rows).bool()
    return torch.nn.functional.one_hot(_flat(kind, rows), len(labels)).bool()


def _accuracy(kind: str, problem: str, labels: Sequence[str], predictions: Rows, targets: Rows) -> float:
    from torchmetrics.functional.classification import multiclass_accuracy, multilabel_exact_match

    if problem == "multi_label":
        guessed, true = (_hot(kind, problem, labels, rows).long() for rows in (predictions, targets))
        return float(multilabel_exact_match(guessed, true, num_labels=len(labels)))
    guessed, true = _flat(kind, predictions), _flat(kind, targets)
    return float(multiclass_accuracy(guessed, true, num_classes=max(2, len(labels)), average="micro"))


def _f1(kind: str, problem: str, labels: Sequence[str], predictions: Rows, targets: Rows) -> float:
    from torchmetrics.functional.classification import binary_f1_score, multiclass_f1_score, multilabel_f1_score

    if problem == "multi_label":
        guessed, true = (_hot(kind, problem, labels, rows).long() for rows in (predictions, targets))
        return float(multilabel_f1_score(guessed, true, num_labels=len(labels), average="micro"))
    guessed, true = _flat(kind, predictions), _flat(kind, targets)
    if len(labels) == 2 and kind != TOKEN:
        return float(binary_f1_score(guessed, true))
    return float(multiclass_f1_score(guessed, true, num_classes=max(2, len(labels)), average="macro"))


def _mcc(kind: str, _problem: str, labels: Sequence[str], predictions: Rows, targets: Rows) -> float:
    from torchmetrics.functional.classification import multiclass_matthews_corrcoef

    guessed, true = _flat(kind, predictions), _flat(kind, targets)
    if len(guessed.unique()) < 2 or len(true.unique()) < 2:
        return 0.0
    return float(multiclass_matthews_corrcoef(guessed, true, num_classes=len(labels)))


def _numbers(predictions: Rows, targets: Rows) -> tuple[Tensor, Tensor] | None:
    """Both as float64; None if one of them does not vary, so that no correlation exists."""
    guessed, true = (torch.as_tensor(rows, dtype=torch.float64).reshape(-1) for rows in (predictions, targets))
    varies = all(bool((row != row[0]).any()) and bool(row.isfinite().all()) for row in (guessed, true))
    return (guessed, true) if varies else None


def _pearson(_kind: str, _problem: str, _labels: Sequence[str], predictions: Rows, targets: Rows) -> float:
    from torchmetrics.functional.regression import pearson_corrcoef

    both = _numbers(predictions, targets)
    return 0.0 if both is None else float(pearson_corrcoef(*both))


def _spearman(_kind: str, _problem: str, _labels: Sequence[str], predictions: Rows, targets: Rows) -> float:
    from torchmetrics.functional.regression import spearman_corrcoef

    both = _numbers(predictions, targets)
    return 0.0 if both is None else float(spearman_corrcoef(*both))


def _span_f1(_kind: str, _problem: str, labels: Sequence[str], predictions: Rows, targets: Rows) -> float:
    from seqeval.metrics import f1_score

    if not marks_spans(labels):
        raise DataError(
            f"metrics: the labels {', '.join(labels)} mark no spans; span F1 needs tags as O, B-x and I-x. "
            "Use 'accuracy' or 'f1'."
        )
    return float(f1_score(_names(labels, targets), _names(labels, predictions), zero_division=0))  # pyright: ignore


def _names(labels: Sequence[str], rows: Rows) -> list[list[str]]:
    return [[labels[int(one)] for one in row] for row in rows]


def _span_rows(labels: Sequence[str], predictions: Rows, targets: Rows) -> list[dict[str, str | float | int]]:
    """Counts of spans with the same type, start and end, as seqeval finds them."""
    from seqeval.metrics.sequence_labeling import get_entities

    guessed, true = (set(get_entities(_names(labels, rows))) for rows in (predictions, targets))
    return [
        {
            "label": kind,
            **_ratios(*(sum(span[0] == kind for span in spans) for spans in (guessed & true, guessed, true))),
        }
        for kind in sorted({label[2:] for label in labels if label != "O"})
    ]


def _ratios(both: int, guesses: int, trues: int) -> dict[str, float | int]:
    """Precision, recall and F1 from counts; 0 where nothing is divided by nothing."""
    return {
        "precision": both / guesses if guesses else 0.0,
        "recall": both / trues if trues else 0.0,
        "f1": 2 * both / (guesses + trues) if guesses + trues else 0.0,
        "count": trues,
    }


_FUNCTIONS: dict[str, Callable[[str, str, Sequence[str], Rows, Rows], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "mcc": _mcc,
    "pearson": _pearson,
    "spearman": _spearman,
    "span_f1": _span_f1,
}
"""The metrics of classes, tags and numbers; `lamina.tasks.kinds.METRICS` says which fit which task."""
