"""The estimators that predict: LaminaClassifier, LaminaRegressor and LaminaTagger, by scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, final

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_class_weight

from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.examples import (
    Targets,
    as_classes,
    as_tags,
    as_words,
    class_targets,
    data_errors,
    number_targets,
    plain_column,
)
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.label_cells import class_name, is_missing
from lamina.tasks.metrics import marks_spans, require_metrics, score_tags
from lamina.tasks.split import Split
from lamina.tasks.tag_schemes import odd_tag, recognise, to_iob2
from lamina.tasks.words import join

if TYPE_CHECKING:
    from sklearn.utils import ClassifierTags, Tags
    from torch import nn

    from lamina.bank import Reader
    from lamina.fusion.base import FusionConfig


@final
@dataclass(eq=False, repr=False, kw_only=True)
class LaminaClassifier(ClassifierMixin, LaminaEstimator):
    """Classify texts, or pairs of texts, with a reader on a frozen model.

    X is a list, array or column of texts; or pairs of texts, as tuples or as two columns. y has one class per text (a
    text, whole number or bool). For several labels per text, it is an array or a data frame of zeros and ones, shape
    (texts, labels); the reader's labels have the names of a data frame's columns.
    Clones share the model; the two models last used by name are cached.

    Args:
        model: Hub id, folder or "minilm"; or a loaded transformers model, which `fit` freezes.
        reader: None: the default reader. A fusion, such as `lamina.ScalarMix()`: its head is a linear map of the mean
            over the tokens. A `lamina.Reader`: its head gets the labels of y, and the weights of `class_weight` if
            it is given. Its `seed` is not used (see `random_state`), and `weights` are refused.
        processor: Tokenizer of the model. None: the one saved with the model.
        epochs: Number of passes over the texts. None: 3, or more if that is needed for 200 steps.
        batch_size: Texts per step.
        learning_rate: Peak learning rate. None: 1e-3.
        class_weight: None: all classes have the same weight in the loss. "balanced", or class -> weight: as elsewhere
            in scikit-learn. Not for several labels per text.
        positive: The class that "f1" in `result_` is about, if there are two classes. None: "1", "yes" or "true" if the
            other class is "0", "no" or "false"; for other names of classes, "f1" is not reported.
        max_length: Maximum tokens per text; longer texts are cut. None: what the model allows.
        validation_fraction: Share of the texts that is not trained on and chooses the best epoch. None: train on all
            texts, and use the last epoch.
        random_state: Seed of initial weights, dropout, order of the texts and validation split; or a NumPy generator
            that draws one. None: NumPy's global generator.
        options: Further options of `lamina.fit`, such as `{"weight_decay": 0.01, "cache": "on"}`.
        backend: What computes predictions on a CPU, as in `lamina.predict`: "auto", "torch", "onnx" or "int8". It is
            not checked by `fit`. An estimator that was loaded from a folder writes its ONNX export into this folder.

    Attributes:
        classes_: The classes, sorted. With several labels per text: the numbers of the labels, from 0.
        bank_: The `lamina.ReaderBank` with the reader, which is named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
        n_features_in_: Number of columns of X; not set if X is one-dimensional.
        pairs_: Whether X of `fit` had pairs of texts; other methods need an X of the same form.
        feature_names_in_: Names of the columns; only set if X is a data frame.
    """

    kind: ClassVar = SequenceClassification.kind

    reader: FusionConfig | Reader | None = None
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None
    positive: object = None

    def fit(self, X: object, y: object) -> Self:
        """Train a new reader, set the fitted attributes, and return the estimator.

        If `model` is a loaded model, its weights do not change; it stays frozen and in eval mode. An earlier `bank_` is
        replaced, and is gone if training fails.

        Args:
            X: Texts, or pairs of texts.
            y: One class per text, or an array of zeros and ones with shape (texts, labels).

        Raises:
            DataError: If X or y has the wrong form, y has only one class, or scikit-learn refuses `class_weight`,
                `validation_fraction` or `random_state`. It is also a ValueError.
            ConfigError: If another parameter is not valid.
            UnknownNameError: If an option does not exist, or y lacks `positive`.
            LaminaError: If the model cannot be found (ModelNotFoundError) or read, the reader does not fit it, or a
                loss is NaN or infinite.
        """
        op = self._op()
        texts, columns = self._new_texts(X)
        targets, seed = class_targets(y, texts, op), self._seed()
        task = self._task(Split.of(texts, targets.values), targets, seed)
        bank = self._new_bank(columns)
        self.classes_ = cast("np.ndarray", targets.classes)
        bank.add(READER, self._reader(task, self.reader, seed, class_weights=self._weights(targets)))
        self._train(bank, task, seed, targets)
        return self

    def _weights(self, targets: Targets) -> tuple[float, ...] | None:
        """Return the loss weight of each class, in the order of `classes_`; None if `class_weight` is None.

        `targets` are the training labels, whose frequencies "balanced" uses.

        Raises ConfigError if texts have several labels, and DataError if scikit-learn refuses `class_weight`.
        """
        if self.class_weight is None:
            return None
        if targets.problem_type != "classification":
            raise ConfigError(f"{self._op()}: class_weight is set, but y has several labels per text; it is for one.")
        given = dict(self.class_weight) if isinstance(self.class_weight, Mapping) else self.class_weight
        classes = self.classes_[cast("list[int]", targets.values)]
        with data_errors(self._op()):
            weights = compute_class_weight(given, classes=self.classes_, y=classes)
        return tuple(float(weight) for weight in weights)

    def _logits(self, X: object, method: str) -> torch.Tensor:
        return self._logits_of(X, method)[READER]

    @property
    def _several(self) -> bool:
        return self.bank_[READER].config.head.problem_type == "multi_label"

    def predict(self, X: object) -> np.ndarray:
        """Return the most probable class per text, `[texts]`.

        With several labels per text: `[texts, labels]`, 1 where the probability exceeds 0.5, else 0.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X has the wrong form.
            LaminaError: If the backend cannot be used, or an output is NaN or infinite.
        """
        logits = self._logits(X, "predict")
        return (logits > 0).long().numpy() if self._several else self.classes_[logits.argmax(-1).numpy()]

    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """Return the accuracy; with several labels per text, the share of texts whose labels are all right.

        `sample_weight` has a weight per text (None: equal ones). Errors as in `predict`, and DataError if a label in
        `y` is missing, or `y` does not fit X.
        """
        self._check_fitted()
        with data_errors(op := self._op("score")):
            column = plain_column(y, op)
            truths = column if self._several else as_classes(column, self.classes_)
            return float(super().score(X, truths, sample_weight))  # pyright: ignore

    def predict_proba(self, X: object) -> np.ndarray:
        """Return probabilities `[texts, classes]`, with the classes in the order of `classes_`.

        With several labels per text, each label has its own probability, and rows need not sum to 1. Errors: those of
        `predict`.
        """
        logits = self._logits(X, "predict_proba").double()
        return (logits.sigmoid() if self._several else logits.softmax(-1)).numpy()

    def predict_log_proba(self, X: object) -> np.ndarray:
        """Return the logarithms of `predict_proba`, `[texts, classes]`. Errors: those of `predict`."""
        logits = self._logits(X, "predict_log_proba").double()
        return (torch.nn.functional.logsigmoid(logits) if self._several else logits.log_softmax(-1)).numpy()

    def decision_function(self, X: object) -> np.ndarray:
        """Return logits `[texts, classes]`; with two classes, the second's minus the first's, `[texts]`.

        With several labels per text always `[texts, labels]`. Errors: those of `predict`.
        """
        logits = self._logits(X, "decision_function").double()
        return (logits[:, 1] - logits[:, 0] if not self._several and logits.shape[1] == 2 else logits).numpy()

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        cast("ClassifierTags", tags.classifier_tags).multi_label = True
        return tags


@final
@dataclass(eq=False, repr=False, kw_only=True)
class LaminaRegressor(RegressorMixin, LaminaEstimator):
    """Predict a number for each text, or pair of texts, with a reader on a frozen model.

    X has the same forms as for `LaminaClassifier`; y is one number per text. The reader is trained on numbers that are
    scaled to mean 0 and standard deviation 1. After training, mean and standard deviation are folded into its last
    linear map, so that the saved bank predicts unscaled numbers.

    Args:
        model: Hub id, folder or "minilm"; or a loaded transformers model, which `fit` freezes.
        reader: None, a fusion or a `lamina.Reader`, as in `LaminaClassifier`.
        processor: Tokenizer of the model. None: the one saved with the model.
        epochs: Number of passes over the texts. None: 3, or more if that is needed for 200 steps.
        batch_size: Texts per step.
        learning_rate: Peak learning rate. None: 1e-3.
        max_length: Maximum tokens per text. None: what the model allows.
        validation_fraction: Share of the texts that is not trained on and chooses the best epoch, by Pearson's
            correlation. None: train on all texts, and use the last epoch.
        random_state: As in `LaminaClassifier`.
        options: Further options of `lamina.fit`.
        backend: As in `LaminaClassifier`.

    Attributes:
        bank_: The `lamina.ReaderBank` with the reader, which is named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
        n_features_in_: Number of columns of X; not set if X is one-dimensional.
        pairs_: Whether X of `fit` had pairs of texts; other methods need an X of the same form.
        feature_names_in_: Names of the columns; only set if X is a data frame.
    """

    kind: ClassVar = SequenceClassification.kind

    reader: FusionConfig | Reader | None = None

    def fit(self, X: object, y: object) -> Self:
        """Train a new reader, set the fitted attributes, and return the estimator.

        If `model` is a loaded model, its weights do not change; it stays frozen and in eval mode. An earlier `bank_` is
        replaced, and is gone if training fails.

        Args:
            X: Texts, or pairs of texts.
            y: One number per text.

        Raises:
            DataError: If X or y has the wrong form, or scikit-learn refuses `validation_fraction` or `random_state`. It
                is also a ValueError.
            ConfigError: If another parameter is not valid, or the reader's head does not end with a linear map.
            UnknownNameError: If an option does not exist.
            LaminaError: If the model cannot be found (ModelNotFoundError) or read, the reader does not fit it, or a
                loss is NaN or infinite.
        """
        op = self._op()
        texts, columns = self._new_texts(X)
        targets, seed = number_targets(y, texts, op), self._seed()
        task = self._task(Split.of(texts, targets.values), targets, seed)
        bank = self._new_bank(columns)
        reader = bank.add(READER, self._reader(task, self.reader, seed))
        if not reader.config.head.linear:  # pyright: ignore
            raise ConfigError(f"{op}: the reader's head has linear=False; a regressor needs the linear map at its end.")
        self._train(bank, task, seed, targets)
        with torch.no_grad():
            output = cast("nn.Linear", reader.head.output)
            output.weight.mul_(targets.scale)
            output.bias.mul_(targets.scale).add_(targets.mean)
        return self

    def predict(self, X: object) -> np.ndarray:
        """Return one number per text, `[texts]`.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X has the wrong form.
            LaminaError: If the backend cannot be used, or an output is NaN or infinite.
        """
        return self._logits_of(X, "predict")[READER][:, 0].double().numpy()

    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """Return R², as scikit-learn computes it, with a weight per text in `sample_weight` (None: equal ones).

        Errors as in `predict`, and DataError if `y` does not fit X.
        """
        self._check_fitted()
        with data_errors(self._op("score")):
            return float(super().score(X, y, sample_weight))  # pyright: ignore


@final
@dataclass(eq=False, repr=False, kw_only=True)
class LaminaTagger(LaminaEstimator):
    """Predict a tag for each word of sentences, with a reader on a frozen model.

    X is a list of lists of words, and y a list of lists of tags. A tag is a text, whole number or bool; predicted tags
    have the same type. Sentences that are longer than the model allows are read in overlapping windows.

    Args:
        model: Hub id, folder or "minilm"; or a loaded transformers model, which `fit` freezes.
        reader: None: the default reader. A fusion: its head has one encoder layer with eight attention heads. A
            `lamina.Reader`: its head gets the tags of y; its `seed` is not used, and `weights` are refused.
        processor: Tokenizer of the model. None: the one saved with the model.
        epochs: Number of passes over the sentences. None: 3, or more if that is needed for 200 steps.
        batch_size: Sentences per step.
        learning_rate: Peak learning rate. None: 1e-3.
        max_length: Maximum tokens of a window. None: what the model allows.
        validation_fraction: Share of the sentences that is not trained on and chooses the best epoch. None: train on
            all sentences, and use the last epoch.
        random_state: As in `LaminaClassifier`.
        options: Further options of `lamina.fit`.
        backend: As in `LaminaClassifier`.

    Attributes:
        classes_: The tags, sorted by their names.
        bank_: The `lamina.ReaderBank` with the reader, which is named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
    """

    kind: ClassVar = TokenClassification.kind

    reader: FusionConfig | Reader | None = None

    def fit(self, X: object, y: object) -> Self:
        """Train a new reader, set the fitted attributes, and return the estimator.

        If `model` is a loaded model, its weights do not change; it stays frozen and in eval mode. An earlier `bank_` is
        replaced, and is gone if training fails.

        Args:
            X: One list of words per sentence.
            y: One list of tags per sentence, with a tag for each word; -100 marks a word without a label.

        Raises:
            DataError: If X or y has the wrong form, y has only one tag, only some of the tags mark spans, or
                scikit-learn refuses `validation_fraction` or `random_state`. It is also a ValueError.
            ConfigError: If another parameter is not valid.
            UnknownNameError: If an option does not exist.
            LaminaError: If the model cannot be found (ModelNotFoundError) or read, the reader does not fit it, or a
                loss is NaN or infinite.
        """
        op = self._op()
        words = as_words(X, op)
        tags = as_tags(y, words, op)
        by_name = {name: tag for row in tags for tag in row if (name := _name(tag, op)) is not None}
        if len(by_name) < 2:
            came = f"one class of tags, {next(iter(by_name.values()))!r}" if by_name else "no tag"
            raise DataError(f"{op}: y has {came}; a tagger needs at least two.")
        labels = sorted(by_name)
        if recognise(labels) is None and (odd := odd_tag(labels)) is not None:
            raise DataError(f"{op}: y has the tag {odd!r}, and other tags mark spans; all must be alike. Correct it.")
        number, seed = {name: at for at, name in enumerate(labels)}, self._seed()
        names = [[_name(tag, op) for tag in row] for row in tags]
        values = [tuple(IGNORED if name is None else number[name] for name in row) for row in names]
        targets = Targets("classification", tuple(labels), values)
        task = self._task(_split(words, values), targets, seed)
        bank = self._new_bank({})
        self.classes_ = [by_name[name] for name in labels]
        bank.add(READER, self._reader(task, self.reader, seed))
        self._train(bank, task, seed, targets)
        return self

    def predict(self, X: object) -> list[list[object]]:
        """Return one list of tags per sentence, with a tag for each word.

        Args:
            X: One list of words per sentence.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X has no rows, or a row is not a list of strings. It is also a ValueError.
            LaminaError: If the backend cannot be used, or an output is NaN or infinite.
        """
        self._check_fitted()
        words = as_words(X, self._op("predict"))
        guesses = cast("list[tuple[int, ...]]", self._results(_split(words, None), "predict")[READER].guesses())
        return [[self.classes_[number] for number in row] for row in guesses]

    def score(self, X: object, y: object) -> float:
        """Return the span F1 score (seqeval) if the tags mark spans (as `B-x`, `I-x`, `O`), else accuracy over words.

        Args:
            X: One list of words per sentence.
            y: One list of true tags per sentence; words with the tag -100 do not count.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X or y has the wrong form, or all tags are -100.
            LaminaError: If the backend cannot be used, or an output is NaN or infinite.
            MissingExtraError: If the tags mark spans, and seqeval is not installed.
        """
        self._check_fitted()
        op = self._op("score")
        truths = [[_name(tag, op) for tag in row] for row in as_tags(y, as_words(X, op), op)]
        known = [[at for at, tag in enumerate(row) if tag is not None] for row in truths]
        classes = [_name(tag, op) or "" for tag in self.classes_]
        if (scheme := recognise(classes)) is not None:
            truths = [[*to_iob2(row, scheme)] for row in truths]
        can_mark = scheme is not None or marks_spans(classes)
        if can_mark and marks_spans(tag for row in truths for tag in row if tag is not None):
            require_metrics(op, ["span_f1"])  # before the passes of the model
        named = [[_name(tag, op) for tag in row] for row in self.predict(X)]
        if scheme is not None:
            named = [[*to_iob2(row, scheme)] for row in named]
        labels = sorted({str(tag) for row in (*truths, *named) for tag in row if tag is not None})
        number = {name: at for at, name in enumerate(labels)}
        said, true = (
            [[number[str(row[at])] for at in places] for row, places in zip(rows, known, strict=True)]
            for rows in (named, truths)
        )
        metric = "span_f1" if marks_spans(labels) else "accuracy"
        require_metrics(op, [metric])
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
