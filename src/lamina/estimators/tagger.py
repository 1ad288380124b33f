"""A tagger of words, by scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, final

from lamina.errors import DataError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.examples import as_tags, as_words
from lamina.estimators.targets import Targets
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.metrics import marks_spans, score_tags
from lamina.tasks.split import Split
from lamina.tasks.token_classification import join

if TYPE_CHECKING:
    from lamina.bank import Reader
    from lamina.fusion.base import FusionConfig


@final
class LaminaTagger(LaminaEstimator):
    """Tag every word of sentences by a reader on a frozen model.

    X is a list of lists of words, y a list of lists of tags, of any type; tags come back as they went in. Sentences
    that are longer than the model reads are read in overlapping windows.

    Args:
        model: Hub id, folder or "minilm"; or a model of transformers, which is used as it is, and frozen.
        reader: None for the default reader; a fusion, under one encoder layer with eight heads; or a `lamina.Reader`,
            whose head gets the tags of y.
        processor: Tokenizer of a model; None: its own.
        epochs: How often the reader goes through the sentences; None: 3 times, or as often as makes 200 steps.
        batch_size: Sentences per step.
        learning_rate: The highest; None: 1e-3.
        max_length: Tokens of a window; None: what the model allows.
        validation_fraction: Share of the sentences that is set aside to choose the best epoch; None: learn from all,
            and keep the last.
        random_state: Seeds the reader's start, dropout and the order of the sentences.
        options: Further options of `lamina.fit`.

    Attributes:
        classes_: The tags, sorted by their names.
        bank_: The `lamina.ReaderBank` with the reader, named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
    """

    kind: ClassVar = TokenClassification.kind

    def __init__(  # noqa: PLR0913
        self,
        model: Any = "minilm",
        *,
        reader: FusionConfig | Reader | None = None,
        processor: Any = None,
        epochs: int | None = None,
        batch_size: int = 32,
        learning_rate: float | None = None,
        max_length: int | None = None,
        validation_fraction: float | None = None,
        random_state: Any = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.reader = reader
        self.processor = processor
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.max_length = max_length
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.options = options

    def fit(self, X: Any, y: Any) -> Self:
        """Train the reader; the model stays as it is.

        Args:
            X: Lists of words.
            y: Lists of tags, one for every word.

        Raises:
            DataError: If X or y does not fit, or there is one tag alone; it is a ValueError.
            ConfigError: If a parameter does not fit.
            ModelNotFoundError: If there is no such model.
        """
        op = self._op()
        words = self._words(X, "fit")
        tags = as_tags(y, words, op)
        by_name = {str(tag): tag for row in tags for tag in row}
        if len(by_name) < 2:
            came = f"one class of tags, {next(iter(by_name.values()))!r}" if by_name else "no tag"
            raise DataError(f"{op}: y has {came}; a tagger needs at least two.")
        labels = sorted(by_name)
        self.classes_ = [by_name[name] for name in labels]
        number, seed = {name: at for at, name in enumerate(labels)}, self._seed()
        targets = Targets("classification", tuple(labels), [tuple(number[str(tag)] for tag in row) for row in tags])
        task = self._task(_split(words, targets.values), targets, seed)
        bank = self._new_bank()
        bank.add(READER, self._reader(task, self.reader, seed))
        self._train(bank, task, seed)
        return self

    def _words(self, X: Any, method: str) -> list[list[str]]:
        return as_words(X, self._op(method))

    def predict(self, X: Any) -> list[list[Any]]:
        """A tag for every word of every sentence.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X does not fit.
        """
        self._check_fitted()
        words = self._words(X, "predict")
        guesses = cast("list[tuple[int, ...]]", self._results(_split(words, None), "predict")[READER].guesses())
        return [[self.classes_[number] for number in row] for row in guesses]

    def score(self, X: Any, y: Any) -> float:
        """Span F1 where the tags mark spans (`B-x`, `I-x`, `O`), as seqeval counts; else accuracy over the words.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X or y does not fit.
        """
        guesses = self.predict(X)
        truths = as_tags(y, guesses, self._op("score"))
        labels = sorted({str(tag) for rows in (truths, guesses, [self.classes_]) for row in rows for tag in row})
        number = {name: at for at, name in enumerate(labels)}
        said, true = ([[number[str(tag)] for tag in row] for row in rows] for rows in (guesses, truths))
        metric = "span_f1" if marks_spans(labels) else "accuracy"
        return score_tags([metric], said, true, labels)[metric]


def _split(words: list[list[str]], tags: list[tuple[int, ...]] | None) -> Split:
    joined = [join(row) for row in words]
    return Split.of([text for text, _ in joined], tags, [spans for _, spans in joined])
