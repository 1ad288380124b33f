"""Baselines that read only the text: a layer adds something if its probe scores higher than they do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from lamina.studies.probing.row_scores import Label
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task

    Features: TypeAlias = NDArray[np.floating] | csr_matrix  # [rows, features]

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
    for name in BASELINES if reads_text else BASELINES[:1]:
        predictions = _fit_and_predict(name, task.problem_type, train_columns, truths, test_columns, tags=tags)
        yield name, list(_group_by_text(predictions, test)) if tags else predictions


def _text_columns(split: Split, *, tags: bool) -> TextColumns:
    """Return the texts that the baselines read, as columns of strings with one string per row.

    With `tags` a row is a word, and there are three columns: the word itself, the word before it, and the word after it
    in the same text ("" if there is none). Otherwise a row is an example with one column, or two for pairs of texts.
    """
    if tags:
        padded = [
            ["", *(text[start:end] for start, end in spans), ""]
            for text, spans in zip(split.texts, split.words or (), strict=True)
        ]
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

    `name` is that of the baseline, any but "majority". The features of all columns stand side by side. Vectorizers are
    fitted on the training rows only; if no training text has a word, there is one column of zeros. With `tags`, each
    row is a word: "bag_of_words" does not split it, and "tfidf" reads its letters.
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
        ("bag_of_words", True): lambda: CountVectorizer(analyzer=_whole_word),  # pyright: ignore[reportArgumentType]
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


def _whole_word(word: str) -> list[str]:
    return [word]


def _lengths(columns: TextColumns) -> NDArray[np.floating]:
    return np.array(
        [[size for text in row for size in (len(text), len(text.split()))] for row in zip(*columns, strict=True)], float
    )
