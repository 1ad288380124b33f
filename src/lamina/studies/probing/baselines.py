"""What the text alone gives away, without any model: a probe that does not beat these has found nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.tasks import kind_of

if TYPE_CHECKING:
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task

BASELINES = ("majority", "length", "bag_of_words", "tfidf")
Sides = list[list[str]]  # columns of texts: the text, both of a pair, or a word and its neighbours


def baseline_guesses(task: Task, split: str) -> Iterator[tuple[str, list[Any]]]:
    """Name and guesses, in the form of the split's labels, of each baseline, trained on all of the train part.

    - "majority": the class that is most frequent; of numbers the mean.
    - "length": characters and words of each text; of tags, characters of the word.
    - "bag_of_words": counts of words; of tags, the word and both its neighbours.
    - "tfidf": TF-IDF of words and pairs of words; of tags, of the same words' 1 to 4 letters in a row.

    The last three by logistic regression, of numbers by ridge regression. Images have "majority" alone.
    """
    train, test = task.split("train"), task.split(split)
    tags = kind_of(task.kind).tags_words
    truths = [tag for row in train.labels for tag in row] if tags else list(train.labels)
    reads_text = kind_of(task.kind).processor == "tokenizer"
    sides = [_sides(part, tags=tags) if reads_text else [[""] * len(part)] for part in (train, test)]
    for name in BASELINES if reads_text else BASELINES[:1]:
        guesses = _fitted(name, task.problem_type, sides[0], truths, sides[1], tags=tags)
        yield name, list(_per_text(guesses, test)) if tags else guesses


def _sides(split: Split, *, tags: bool) -> Sides:
    if tags:
        words = [
            ["", *(text[start:end] for start, end in spans), ""]
            for text, spans in zip(split.texts, split.words or (), strict=True)
        ]
        return [[word for row in words for word in row[at : len(row) - 2 + at]] for at in (1, 0, 2)]
    return [list(side) for side in zip(*split.texts, strict=True)] if split.pairs else [list(split.texts)]


def _per_text(guesses: list[Any], split: Split) -> Iterator[tuple[Any, ...]]:
    ends = accumulate((len(row) for row in split.labels), initial=0)
    return (tuple(guesses[start:end]) for start, end in pairwise(ends))


def _fitted(name: str, problem: str, train: Sides, truths: Sequence[Any], test: Sides, *, tags: bool) -> list[Any]:
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    numbers = problem == "regression"
    if name == "majority":
        seen, asked = (np.zeros((len(sides[0]), 1)) for sides in (train, test))
        model: Any = DummyRegressor() if numbers else DummyClassifier(strategy="most_frequent")
    else:
        seen, asked = _features(name, train, test, tags=tags)
        model = Ridge() if numbers else LogisticRegression(max_iter=300, tol=1e-3)
        model = OneVsRestClassifier(model) if problem == "multi_label" else model
    if len(np.unique(np.asarray(truths), axis=0)) == 1:  # of one class alone
        return [truths[0]] * len(test[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Label .* is present in all training examples")
        said = model.fit(seen, np.asarray(truths)).predict(asked)
    return [tuple(row) for row in said.tolist()] if problem == "multi_label" else said.tolist()


def _features(name: str, train: Sides, test: Sides, *, tags: bool) -> tuple[Any, Any]:
    """Features of both parts, side by side."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
    from sklearn.preprocessing import StandardScaler

    if name == "length":
        seen, asked = _lengths(train), _lengths(test)
        scaler = StandardScaler().fit(seen)
        return scaler.transform(seen), scaler.transform(asked)
    whole: Any = _whole  # the stubs know of names only
    makes: dict[tuple[str, bool], Callable[[], Any]] = {
        ("bag_of_words", False): lambda: CountVectorizer(token_pattern=r"(?u)\w+|[^\w\s]"),
        ("bag_of_words", True): lambda: CountVectorizer(analyzer=whole),
        ("tfidf", False): lambda: TfidfVectorizer(token_pattern=r"(?u)\w+|[^\w\s]", ngram_range=(1, 2)),
        ("tfidf", True): lambda: TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), lowercase=False),
    }
    parts = []
    for side, other in zip(train, test, strict=True):
        if any(text.strip() for text in side):
            vectorizer = makes[name, tags]()
            parts.append((vectorizer.fit_transform(side), vectorizer.transform(other)))
    if not parts:
        return csr_matrix((len(train[0]), 1)), csr_matrix((len(test[0]), 1))
    return tuple(hstack(side).tocsr() for side in zip(*parts, strict=True))  # pyright: ignore[reportReturnType]


def _whole(word: str) -> list[str]:
    return [word]


def _lengths(sides: Sides) -> Any:
    return np.array(
        [[size for text in row for size in (len(text), len(text.split()))] for row in zip(*sides, strict=True)]
    )
