"""Interfaces of the collections that gather a model's outputs, and the records that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired, Protocol, TypeAlias, TypedDict, TypeVar, runtime_checkable

from torch import Tensor

from lamina.utils import JSON

# What a model or reader returns for a batch: logits `[batch, ...]`, or one generated text per row.
Outputs: TypeAlias = Tensor | Sequence[str]

# A label of an example, as in `Split.labels`: a class id, a number, 0 and 1 per class, or a class id per word.
Label: TypeAlias = int | float | tuple[int, ...]

OutputsT = TypeVar("OutputsT", contravariant=True)  # the outputs that a `Results` collects
AnswerT = TypeVar("AnswerT")  # the predictions that it returns, one per example


class WrongAnswer(TypedDict):
    """A record of an example with a wrong prediction.

    Attributes:
        row: Index of the example in its split.
        text: The example: a text, a pair as a list of two texts, or the name of a file. None until it is looked up.
        true: The correct answer: a class name, a number, or a list of class names or of spans.
        predicted: The predicted answer, likewise.
        confidence: Probability of the predicted answer, or of the most certain wrong label or span; absent for
            regressions.
        error: Predicted minus correct number; only for regressions.
    """

    row: int
    text: JSON
    true: JSON
    predicted: JSON
    confidence: NotRequired[float]
    error: NotRequired[float]


class ClassRow(TypedDict):
    """The scores of one class, or an average over classes, as `metrics.class_table` returns them.

    Attributes:
        label: Name of the class, or "micro avg", "macro avg" or "weighted avg".
        precision: Fraction of the predictions of this class that are correct.
        recall: Fraction of the examples of this class that were predicted as this class.
        f1: Harmonic mean of precision and recall.
        count: Number of examples (or words, spans) of this class; in an average, of all classes.
        guessed: Number of predictions of this class; in an average, of all classes.
    """

    label: str
    precision: float
    recall: float
    f1: float
    count: int
    guessed: int


@runtime_checkable
class Results(Protocol[OutputsT, AnswerT]):
    """Collects a model's outputs batch by batch. Once all are added, it returns scores, tables and predictions.

    A subclass must define `add`, which by default does nothing. It defines other methods if its kind of task needs
    them; by default they return None or an empty result.
    """

    def add(self, rows: Sequence[int], outputs: OutputsT, labels: Tensor | None = None) -> None:
        """Add `outputs`, those for the rows with the indices `rows`.

        `labels` are the labels that the batch brought, for kinds that make labels with the inputs; else None.
        """

    def first_not_finite(self) -> int | None:
        """Return the index of the first example (or row) whose outputs are NaN or infinite; None if all are finite."""
        return None

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Return metric -> score, in the order of `metrics`; {} by default. UnknownNameError for an unknown metric."""
        return {}

    def baseline(self, metrics: Sequence[str]) -> tuple[str, dict[str, float]] | None:
        """Return the constant prediction that is best by the first metric, and metric -> best score of any of them.

        They are computed from the labels alone. Kinds without such a prediction return None.
        """
        return None

    def compare(self, metrics: Sequence[str]) -> Mapping[str, object]:
        """Return how the scores by `metrics` compare with those of a constant prediction: a `class_results.Comparison`.

        {} for kinds whose scores are not compared with a constant prediction.
        """
        return {}

    def per_class(self) -> list[ClassRow]:
        """Return a table of scores per class, in the form of `metrics.class_table`; [] without classes."""
        return []

    def errors(self, count: int) -> list[WrongAnswer]:
        """Return at most `count` wrong predictions, the most confident first; [] by default."""
        return []

    def set_learnt(self, info: Mapping[str, JSON]) -> None:
        """Use a reader's saved `info`, the facts that `Kind.learnt` returned in training; by default ignore them."""

    def predictions(self) -> list[AnswerT]:
        """Return the JSON-ready prediction for each example; [] by default."""
        return []

    def raw_predictions(self) -> Sequence[object]:
        """Return predictions with logits in place of probabilities; kinds without logits return `predictions`."""
        return self.predictions()

    def guesses(self) -> list[Label]:
        """Return the predicted label of each example, in the same form as `Split.labels`; [] by default."""
        return []
