"""Measures of what a probe's score is worth: baselines that read only the text, random labels, and an online code."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
from torch.nn import functional as F

from lamina.data.windows import IGNORED
from lamina.tasks.outputs import Results
from lamina.tasks.token_classification import tagged_text
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from lamina.studies.statistics import Label
    from lamina.tasks.base import Targets
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task

    Features: TypeAlias = NDArray[np.floating] | csr_matrix  # [rows, features]

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the training rows at which the portions of an online code end, as in Voita and Titov 2020."""


def control_task(task: Task, parts: Sequence[str], seed: int) -> Task:
    """Return the task with the same examples and random labels: one label per distinct word, or per distinct text.

    Each image or audio clip has a label of its own. Labels are drawn from those of the "train" split, so that each
    class stays about as frequent as it was. Raises UnknownNameError if a split does not exist.

    Args:
        task: A task with labels.
        parts: Names of the splits that the returned task has.
        seed: Seed of the labels; together with the word or text it decides the label.

    Source:
        Hewitt and Liang 2019, arXiv:1909.03368, section 2: random labels per word type.
    """
    tags = task.kind.tags_words
    truths = list(task.split("train").labels)
    pool = [tag for row in truths for tag in row if tag != IGNORED] if tags else truths

    def random_label(key: Hashable) -> Label:
        return pool[derive_seed("control", seed, key) % len(pool)]

    splits = {}
    for name in parts:
        split = task.split(name)
        if tags:
            rows = zip(_words(split), split.labels, strict=True)
            labels = [
                tuple(t if t == IGNORED else random_label(word) for word, t in zip(*row, strict=True)) for row in rows
            ]
        else:
            labels = [
                # each image or audio clip has a key of its own, and equal texts get equal labels
                random_label(text if isinstance(text, str | tuple) else (name, row))
                for row, text in enumerate(split.texts)
            ]
        splits[name] = split.with_labels(labels)
    return replace(task, splits=splits)


def _words(split: Split) -> Iterable[list[str]]:
    for text, spans in zip(map(tagged_text, split.texts), split.words or (), strict=True):
        yield [text[start:end] for start, end in spans]


def code_portions(rows: int, seed: int) -> list[list[int]]:
    """Return the row numbers of the portions of an online code; `seed` decides which row is in which.

    An online code sends the labels of `rows` training rows portion by portion, each with the help of a probe that was
    trained on all portions before it. The portions end at the shares of the rows in `PORTIONS`; no portion is empty.
    """
    order = np.random.default_rng(derive_seed("code", seed)).permutation(rows).tolist()
    ends = sorted({math.ceil(share * rows) for share in PORTIONS})
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def only_rows(task: Task, rows: Iterable[int]) -> Split:
    """Return the "train" split with the labels of `rows` only; all others become -100, which losses ignore."""
    split, labelled, tags = task.split("train"), set(rows), task.kind.tags_words
    labels = [
        label if row in labelled else (IGNORED,) * len(label) if tags else IGNORED
        for row, label in enumerate(split.labels)
    ]
    return split.with_labels(labels)


@final
class LabelBits(Results):
    """Sums up the bits that it takes to send true labels with a probe: -log2 of each label's predicted probability.

    Labels of -100 do not count. `targets` are the labels of all rows. `bits` is the sum so far, and `count` the number
    of labels in it. In word tagging tasks that is not the number of words: each part of a word such as "C++" has a
    label, and words that share a token have one together.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets, self.bits, self.count = targets, 0.0, 0

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:  # noqa: ARG002
        """Add the labels of the rows whose numbers are in `rows`, and their bits.

        `outputs` are the probe's logits, `[batch, classes]` or `[batch, tokens, classes]`; `labels` is not used.
        """
        logits, truths = outputs.float().cpu().flatten(0, -2), self._targets.tensor(rows).flatten()
        loss = F.cross_entropy(logits, truths, ignore_index=IGNORED, reduction="sum")
        self.bits += float(loss) / math.log(2)
        self.count += int((truths != IGNORED).sum())

    def first_not_finite(self) -> int | None:
        """Return None: only a sum is stored, so the first row that is not finite is not known.

        The study's table shows a sum that is infinite or NaN, and its last conclusion counts them.
        """
        return None


def code_length(first: int, sent: Sequence[LabelBits], classes: int) -> tuple[float, float]:
    """Return the length in bits of the online code of a task's training labels, and the compression that it achieves.

    The labels of the first portion are sent with log2(classes) bits each, all others with the help of probes.

    Args:
        first: Number of labels in the first portion.
        sent: The labels of each later portion, with their bits.
        classes: Number of classes.

    Returns:
        The length in bits; and the compression: log2(classes) bits for every label, divided by that length (NaN if it
        is 0).

    Source:
        Voita and Titov 2020, arXiv:2003.12298, section 2.2, eq. 2.
    """
    label_bits = math.log2(classes)
    total = first * label_bits + sum(portion.bits for portion in sent)
    uniform = (first + sum(portion.count for portion in sent)) * label_bits
    return total, uniform / total if total else math.nan


BASELINES = ("majority", "length", "bag_of_words", "tfidf")
# Columns of strings, one string per row in each: the text; both texts of a pair; or a word and its two neighbours.
TextColumns: TypeAlias = list[list[str]]


def baseline_predictions(task: Task, split: str) -> Iterator[tuple[str, list[Label]]]:
    """Train each baseline on the "train" split of a task, and yield its name and its predictions for another split.

    - "majority": the most frequent class; for regression, the mean.
    - "length": number of characters and words of each text; for word tagging, number of characters of the word.
    - "bag_of_words": counts of words; for word tagging, the word and its two neighbours.
    - "tfidf": TF-IDF of words and pairs of words; for word tagging, TF-IDF of 1 to 4 consecutive letters of the word
      and its two neighbours.

    The last three use logistic regression, or ridge regression if labels are numbers. Tasks without text (images,
    audio) have only "majority". Raises UnknownNameError if a split does not exist.

    Args:
        task: A task with classes, tags or numbers as labels.
        split: Name of the split to predict.

    Yields:
        A baseline's name, and a list with one prediction per row, in the form of the split's labels.
    """
    train, test = task.split("train"), task.split(split)
    tags = task.kind.tags_words
    truths = [tag for row in train.labels for tag in row] if tags else list(train.labels)
    reads_text = task.kind.processor == "tokenizer"
    train_columns, test_columns = (
        _text_columns(part, tags=tags) if reads_text else [[""] * len(part)] for part in (train, test)
    )
    if tags:  # words without a label teach nothing
        labelled = [at for at, tag in enumerate(truths) if tag != IGNORED]
        truths = [truths[at] for at in labelled]
        train_columns = [[column[at] for at in labelled] for column in train_columns]
    for name in BASELINES if reads_text else BASELINES[:1]:
        predictions = _fit_and_predict(name, task.problem_type, train_columns, truths, test_columns, tags=tags)
        yield name, list(_group_by_text(predictions, test)) if tags else predictions


def _text_columns(split: Split, *, tags: bool) -> TextColumns:
    """Return the texts that the baselines read, as columns of strings with one string per row.

    With `tags` a row is a word, and there are three columns: the word itself, the word before it, and the word after it
    in the same text ("" if there is none). Otherwise a row is an example with one column, or two for pairs of texts.
    """
    if tags:
        padded = [["", *words, ""] for words in _words(split)]
        # the word itself, the word before it, the word after it
        return [[word for row in padded for word in row[shift : len(row) - 2 + shift]] for shift in (1, 0, 2)]
    return [list(side) for side in zip(*split.texts, strict=True)] if split.pairs else [list(split.texts)]


def _group_by_text(predictions: list[int], split: Split) -> Iterator[tuple[int, ...]]:
    ends = accumulate((len(row) for row in split.labels), initial=0)
    return (tuple(predictions[start:end]) for start, end in pairwise(ends))


def _fit_and_predict(
    name: str, problem: str, train: TextColumns, truths: Sequence[Label], test: TextColumns, *, tags: bool
) -> list[Any]:
    """Train the baseline `name`, one of `BASELINES`, and return one prediction per row of `test`.

    `truths` are the labels of the rows in `train`, and `problem` is the problem type. With `tags`, each row is a word.
    If all training labels are equal, each prediction is that label.
    """
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    regression = problem == "regression"
    if name == "majority":
        train_features, test_features = (np.zeros((len(columns[0]), 1)) for columns in (train, test))
        model = DummyRegressor() if regression else DummyClassifier(strategy="most_frequent")
    else:
        train_features, test_features = text_features(name, train, test, tags=tags)
        model = Ridge() if regression else LogisticRegression(max_iter=300, tol=1e-3)
        model = OneVsRestClassifier(model) if problem == "multi_label" else model
    if len(np.unique(np.asarray(truths), axis=0)) == 1:  # logistic regression needs two classes
        return [truths[0]] * len(test[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Label .* is present in all training examples")
        predictions: Any = model.fit(train_features, np.asarray(truths)).predict(test_features)
    return [tuple(row) for row in predictions.tolist()] if problem == "multi_label" else predictions.tolist()


def text_features(name: str, train: TextColumns, test: TextColumns, *, tags: bool) -> tuple[Features, Features]:
    """Return the features of a baseline, `[rows, features]`, for the rows in `train` and for those in `test`.

    `name` is a baseline's, any but "majority". The features of all columns stand side by side. Vectorizers, and the
    mean and scale that standardise "length", are fitted on the training rows only. If no training text has a word,
    there is one column of zeros. With `tags`, each row is a word: "bag_of_words" does not split it, and "tfidf" reads
    its letters.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
    from sklearn.preprocessing import StandardScaler

    if name == "length":
        train_lengths, test_lengths = _lengths(train), _lengths(test)
        scaler = StandardScaler().fit(train_lengths)
        return np.asarray(scaler.transform(train_lengths)), np.asarray(scaler.transform(test_lengths))
    vectorizers: dict[tuple[str, bool], Callable[[], CountVectorizer]] = {
        ("bag_of_words", False): lambda: CountVectorizer(token_pattern=r"(?u)\w+|[^\w\s]"),
        ("bag_of_words", True): lambda: CountVectorizer(analyzer=lambda word: [word]),  # pyright: ignore[reportArgumentType]
        ("tfidf", False): lambda: TfidfVectorizer(token_pattern=r"(?u)\w+|[^\w\s]", ngram_range=(1, 2)),
        ("tfidf", True): lambda: TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), lowercase=False),
    }
    train_parts, test_parts = [], []
    for train_column, test_column in zip(train, test, strict=True):
        if any(text.strip() for text in train_column):  # a vectorizer refuses texts without any word
            vectorizer = vectorizers[name, tags]()
            train_parts.append(vectorizer.fit_transform(train_column))
            test_parts.append(vectorizer.transform(test_column))
    if not train_parts:
        return csr_matrix((len(train[0]), 1)), csr_matrix((len(test[0]), 1))
    return csr_matrix(hstack(train_parts)), csr_matrix(hstack(test_parts))


def _lengths(columns: TextColumns) -> NDArray[np.floating]:
    return np.array(
        [[size for text in row for size in (len(text), len(text.split()))] for row in zip(*columns, strict=True)], float
    )
