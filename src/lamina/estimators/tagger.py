"""A scikit-learn estimator that tags words."""

from __future__ import annotations

from typing import ClassVar, Self, cast, final

from lamina.data.windows import IGNORED
from lamina.errors import DataError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.examples import Targets, as_tags, as_words, data_errors
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.label_cells import class_name, is_missing
from lamina.tasks.metrics import marks_spans, score_tags
from lamina.tasks.split import Split
from lamina.tasks.tag_schemes import odd_tag, recognise, to_iob2
from lamina.tasks.words import join


@final
class LaminaTagger(LaminaEstimator):
    """Predict a tag for each word of sentences, with a reader on a frozen model.

    X is a list of lists of words, and y a list of lists of tags. Tags may have any type; predicted tags have the same
    type. Sentences that are longer than the model allows are read in overlapping windows.

    Args:
        model: Hub id, folder or "minilm"; or a loaded transformers model, which `fit` freezes.
        reader: None: the default reader. A fusion: its head has one encoder layer with eight attention heads. A
            `lamina.Reader`: its head gets the tags of y.
        processor: Tokenizer of the model. None: the one saved with the model.
        epochs: Number of passes over the sentences. None: 3, or more if that is needed for 200 steps.
        batch_size: Sentences per step.
        learning_rate: Peak learning rate. None: 1e-3.
        max_length: Maximum tokens of a window. None: what the model allows.
        validation_fraction: Share of the sentences that is not trained on and chooses the best epoch. None: train on
            all sentences, and use the last epoch.
        random_state: Seed of the reader's initial weights, of dropout and of the order of the sentences.
        options: Further options of `lamina.fit`.
        backend: What computes predictions on a CPU, as in `lamina.predict`: "auto", "torch", "onnx" or "int8". An
            estimator that was loaded from a folder writes its ONNX export into this folder.

    Attributes:
        classes_: The tags, sorted by their names.
        bank_: The `lamina.ReaderBank` with the reader, which is named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
    """

    kind: ClassVar = TokenClassification.kind

    def fit(self, X: object, y: object) -> Self:
        """Train a new reader, set the fitted attributes, and return the estimator.

        The model's weights do not change; a loaded model is frozen and put into eval mode. An earlier `bank_` is
        replaced.

        Args:
            X: One list of words per sentence.
            y: One list of tags per sentence, with a tag for each word; -100 marks a word without a label.

        Raises:
            DataError: If X or y has the wrong form, y has only one tag, or only some of the tags mark spans. It is also
                a ValueError.
            ConfigError: If a parameter is not valid.
            ModelNotFoundError: If the model cannot be found.
        """
        op = self._op()
        words = self._words(X, "fit")
        tags = as_tags(y, words, op)
        by_name = {name: tag for row in tags for tag in row if (name := _name(tag, op)) is not None}
        if len(by_name) < 2:
            came = f"one class of tags, {next(iter(by_name.values()))!r}" if by_name else "no tag"
            raise DataError(f"{op}: y has {came}; a tagger needs at least two.")
        labels = sorted(by_name)
        if recognise(labels) is None and (odd := odd_tag(labels)) is not None:
            raise DataError(f"{op}: y has the tag {odd!r}, and other tags mark spans; all must be alike. Correct it.")
        self.classes_ = [by_name[name] for name in labels]
        number, seed = {name: at for at, name in enumerate(labels)}, self._seed()
        values = [tuple(number.get(_name(tag, op) or "", IGNORED) for tag in row) for row in tags]
        targets = Targets("classification", tuple(labels), values)
        task = self._task(_split(words, values), targets, seed)
        bank = self._new_bank()
        bank.add(READER, self._reader(task, self.reader, seed))
        self._train(bank, task, seed)
        return self

    def _words(self, X: object, method: str) -> list[list[str]]:
        return as_words(X, self._op(method))

    def predict(self, X: object) -> list[list[object]]:
        """Return one list of tags per sentence, with a tag for each word.

        Args:
            X: One list of words per sentence.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X has no rows, or a row is not a list of strings. It is also a ValueError.
            LaminaError: If the backend does not exist or cannot be used.
        """
        self._check_fitted()
        words = self._words(X, "predict")
        guesses = cast("list[tuple[int, ...]]", self._results(_split(words, None), "predict")[READER].guesses())
        return [[self.classes_[number] for number in row] for row in guesses]

    def score(self, X: object, y: object) -> float:
        """Return the span F1 score (seqeval) if the tags mark spans (`B-x`, `I-x`, `O`), else the accuracy over words.

        Args:
            X: One list of words per sentence.
            y: One list of true tags per sentence; words with the tag -100 do not count.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X or y has the wrong form.
            LaminaError: If the backend does not exist or cannot be used.
        """
        guesses = self.predict(X)
        op = self._op("score")
        truths = [[_name(tag, op) for tag in row] for row in as_tags(y, guesses, op)]
        named = [[_name(tag, op) for tag in row] for row in guesses]
        known = [[at for at, tag in enumerate(row) if tag is not None] for row in truths]
        if (scheme := recognise(_name(tag, op) or "" for tag in self.classes_)) is not None:
            truths, named = ([[*to_iob2(row, scheme)] for row in rows] for rows in (truths, named))
        labels = sorted({str(tag) for row in (*truths, *named) for tag in row if tag is not None})
        number = {name: at for at, name in enumerate(labels)}
        said, true = (
            [[number[str(row[at])] for at in places] for row, places in zip(rows, known, strict=True)]
            for rows in (named, truths)
        )
        metric = "span_f1" if marks_spans(labels) else "accuracy"
        return score_tags([metric], said, true, labels)[metric]


def _name(tag: object, op: str) -> str | None:
    """Return the name of a tag; None for -100, which marks a word without a label.

    Raises DataError, whose message begins with `op`, if the tag is missing or is no text, whole number or bool.
    """
    if is_missing(tag, (str(tag),) if isinstance(tag, str) else ()):
        raise DataError(f"{op}: y has the tag {tag!r}; every word has a tag, or -100 if it has no label.")
    if tag == IGNORED:
        return None
    with data_errors(op):
        return class_name(tag, (str(tag),))


def _split(words: list[list[str]], tags: list[tuple[int, ...]] | None) -> Split:
    joined = [join(row) for row in words]
    return Split.of([text for text, _ in joined], tags, [spans for _, spans in joined])
