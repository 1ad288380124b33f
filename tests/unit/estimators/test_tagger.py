from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV

import lamina
from lamina import errors
from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.estimators.predictors import LaminaTagger

WORDS = [["anna", "went", "to", "paris"], ["ben", "saw", "rome", "and", "oslo"], ["the", "film"], []] * 2
TAGS = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "O", "B-LOC", "O", "B-LOC"], ["O", "O"], []] * 2
LINEAR = lamina.Reader(lamina.fusion.Mean(), lamina.TokenClassification(("x",), encoder_layers=0, dropout=0.0))
FAST: dict[str, Any] = {"learning_rate": 0.1, "epochs": 20, "batch_size": 4, "options": {"cache": "off"}}
FAST |= {"reader": LINEAR}


def test_every_word_gets_a_tag_as_it_went_in(base: str):
    fitted = LaminaTagger(base, **FAST).fit(WORDS, TAGS)
    assert fitted.predict(WORDS) == TAGS
    assert fitted.score(WORDS, TAGS) == 1.0
    number = {"B-PER": 1, "O": 0, "B-LOC": 2}
    numbers = [np.array([number[tag] for tag in row]) for row in TAGS]
    said = LaminaTagger(base, **FAST).fit(WORDS, numbers).predict(WORDS)
    assert said == [list(row) for row in numbers]
    assert {type(tag) for row in said for tag in row} == {int}


def test_a_word_without_a_label_is_not_the_tag_that_is_empty(base: str):
    said = {}
    for name in ("", "o"):
        tags = [["B-PER" if at == 0 else -100 if at == 1 else name for at in range(len(row))] for row in WORDS]
        tags = [[{"B-PER": "x"}.get(tag, tag) for tag in row] for row in tags]
        said[name] = LaminaTagger(base, **FAST).fit(WORDS, tags).predict(WORDS)
    assert said["o"] == [[tag or "o" for tag in row] for row in said[""]]


def test_tags_that_begin_with_i_stay_so(base: str):
    tags = [[tag.replace("B-", "I-") for tag in row] for row in TAGS]
    fitted = LaminaTagger(base, **FAST).fit(WORDS, tags)
    assert fitted.classes_ == ["I-LOC", "I-PER", "O"]
    assert fitted.predict(WORDS) == tags


def test_the_score_is_span_f1_where_tags_mark_spans_and_accuracy_else(base: str):
    fitted = LaminaTagger(base, **FAST).fit(WORDS, TAGS)
    one_wrong = [["B-PER", "O", "O", "B-ORG"], *TAGS[1:]]  # a tag that was never seen
    assert fitted.score(WORDS, one_wrong) == pytest.approx(9 / 10)
    plain = [[tag.removeprefix("B-") for tag in row] for row in TAGS]
    fitted = LaminaTagger(base, **FAST).fit(WORDS, plain)
    assert fitted.score(WORDS[:1], [["PER", "O", "O", "O"]]) == pytest.approx(3 / 4)


def test_the_span_score_names_the_package_that_it_lacks(base: str, monkeypatch: pytest.MonkeyPatch):
    fitted = LaminaTagger(base, **FAST | {"epochs": 1}).fit(WORDS, TAGS)
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    outside = [["O"] * len(words) for words in WORDS]
    monkeypatch.setattr(fitted, "predict", lambda _: outside)
    assert fitted.score(WORDS, outside) == 1  # the accuracy, as no tag marks a span
    monkeypatch.setattr(fitted, "predict", Mock(side_effect=AssertionError("the model runs")))
    with pytest.raises(MissingExtraError, match=r"LaminaTagger.score.*seqeval"):
        fitted.score(WORDS, TAGS)


def test_a_fit_that_is_refused_before_training_leaves_the_one_before(base: str):
    fitted = LaminaTagger(base, **FAST).fit(WORDS, TAGS)
    with pytest.raises(DataError, match="test_size"):
        fitted.set_params(validation_fraction=2.0).fit(WORDS[:1], [["a", "b", "a", "b"]])
    assert fitted.predict(WORDS) == TAGS


@pytest.mark.long
def test_in_a_search(base: str):
    search = GridSearchCV(LaminaTagger(base, **FAST), {"epochs": [1, 20]}, cv=2)
    assert search.fit(WORDS, TAGS).best_params_ == {"epochs": 20}


def test_a_fusion_has_the_usual_head(base: str):
    head = LaminaTagger(base, reader=lamina.fusion.LastLayer(), epochs=1).fit(WORDS, TAGS).bank_["reader"].config.head
    assert (head.encoder_layers, head.labels) == (1, ("B-LOC", "B-PER", "O"))
    with pytest.raises(ConfigError, match="attention_heads is 8 for features of size 20"):
        LaminaTagger(base, reader=lamina.Concat(dim=20)).fit(WORDS, TAGS)


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        (["anna went"], [["O", "O"]], "row 0 of X is 'anna went' of type str; every row is a list of words"),
        ("anna", [["O"]], "X is one str"),
        ([], [], r"X has 0 sample\(s\)"),
        ([["anna", 3]], [["O", "O"]], "row 0 of X holds 3 of type int; every word is a text"),
        ([["anna"], ["went", "to"]], [["O"], ["O"]], "row 1 has 2 words and 1 tags"),
        ([["anna"], ["went", "to"]], [["O"], "O O"], "row 1 of y is a text; it must be a list with a tag"),
        ([["anna"]], [["O"], ["O"]], "inconsistent numbers of samples"),
        ([["anna"]], None, "requires y to be passed"),
        ([["anna", "went"]], [["O", "O"]], "y has one class of tags, 'O'"),
        ([[]], [[]], "y has no tag"),
    ],
)
def test_what_does_not_fit(base: str, words: object, tags: object, message: str):
    with pytest.raises(DataError, match=f"LaminaTagger.fit: .*{message}"):
        LaminaTagger(base).fit(words, tags)


def test_before_fit(base: str):
    with pytest.raises(NotFittedError):
        LaminaTagger(base).predict(WORDS)


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        (["B-PER", None], "y has the tag None; every word has a tag, or -100"),
        (["B-PER", float("nan")], "y has the tag nan"),
        (["B-PER", b"O"], "of type bytes"),
        (["B-PER", "0"], "y has the tag '0', and other tags mark spans"),
    ],
)
def test_tags_that_are_no_names(tags: list[object], problem: str):
    with pytest.raises(DataError, match=problem):
        LaminaTagger(epochs=1).fit([["Ana", "left"], ["Lima", "is"]], [tags, ["B-LOC", "O"]])
