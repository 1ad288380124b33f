"""How many rows are drawn, which, and what they lack."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lamina.errors import ConfigError
from lamina.tasks.sampling import Amount, Classes, draw_rows
from lamina.tasks.split import Split

SEQUENCE, TOKEN = "sequence_classification", "token_classification"
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def split(labels: list[Any]) -> Split:
    return Split(tuple(map(str, range(len(labels)))), tuple(labels))


def plain(sizes: list[int]) -> Classes:
    rows = [(number,) for number, size in enumerate(sizes) for _ in range(size)]
    return Classes(tuple("abcdef"[: len(sizes)]), tuple(rows))


def test_the_classes_of_a_sequence_task_are_its_labels():
    classes = Classes.of(SEQUENCE, "classification", ("no", "yes"), split([1, 0, 1]))
    assert classes == Classes(("no", "yes"), ((1,), (0,), (1,)))


def test_the_classes_of_entities_are_their_types():
    """As the papers count: CoNLL-2003 has four, whatever the number of tags."""
    classes = Classes.of(TOKEN, "classification", TAGS, split([(0, 0), (1, 2, 0, 1), (3, 2), ()]))
    assert classes == Classes(("PER", "LOC"), ((), (0,), (0, 1), ()))
    conll = ("O", *(f"{mark}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for mark in "BI"))
    assert len(Classes.of(TOKEN, "classification", conll, split([])).names) == 4


def test_the_classes_of_other_tags_are_the_tags():
    classes = Classes.of(TOKEN, "classification", ("DT", "NN"), split([(1, 0, 1), (0,)]))
    assert classes == Classes(("DT", "NN"), ((0, 1), (0,)))


def test_several_labels_are_several_classes():
    classes = Classes.of(SEQUENCE, "multi_label", ("x", "y", "z"), split([(1, 0, 1), (0, 0, 0)]))
    assert classes == Classes(("x", "y", "z"), ((0, 2), ()))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (SEQUENCE, "regression"),
        ("masked_lm", "classification"),
        ("summarization", "generation"),
        ("translation", "generation"),
    ],
)
def test_scores_and_running_text_have_no_classes(kind: str, problem: str):
    classes = Classes.of(kind, problem, ("score",), split([0.5, 1.5]))
    assert classes == Classes((), ((), ()))
    assert len(draw_rows(classes, Amount(fraction=0.5), stratified=False, seed=0)) == 1
    with pytest.raises(ConfigError, match="draw: per_class is 8; this task has no classes"):
        draw_rows(classes, Amount(per_class=8), stratified=False, seed=0)


def test_the_classes_of_pictures_are_their_labels():
    classes = Classes.of("image_classification", "classification", ("cat", "dog"), split([1, 0, 1]))
    assert classes == Classes(("cat", "dog"), ((1,), (0,), (1,)))


def test_missing_classes():
    classes = plain([3, 2, 1])
    assert classes.missing([0, 3, 5]) == []
    assert classes.missing([0, 1]) == ["b", "c"]


@pytest.mark.parametrize(
    ("amount", "count"),
    [(Amount(per_class=8), 24), (Amount(fraction=0.25), 25), (Amount(rows=7), 7), (Amount(fraction=1), 100)],
)
@pytest.mark.parametrize("stratified", [False, True])
def test_as_many_as_were_asked(amount: Amount, count: int, stratified: bool):
    classes = plain([60, 30, 10])
    rows = draw_rows(classes, amount, stratified=stratified, seed=1)
    assert len(set(rows)) == len(rows) == count
    assert rows == sorted(rows)
    assert rows == draw_rows(classes, amount, stratified=stratified, seed=1)
    if count < 100:
        assert rows != draw_rows(classes, amount, stratified=stratified, seed=2)


def test_a_plain_draw_is_uniform_over_the_rows():
    """Not over the classes: N x C rows keep the share that each class has."""
    classes = plain([80, 20])
    drawn = Counter(
        row for seed in range(1000) for row in draw_rows(classes, Amount(per_class=5), stratified=False, seed=seed)
    )
    assert set(drawn) == set(range(100))
    assert min(drawn.values()) > 60  # 100 expected, 5 sigma is 47
    assert max(drawn.values()) < 150
    assert sum(drawn[row] for row in range(80)) == pytest.approx(8000, abs=200)


def test_a_stratified_draw_has_as_many_of_each_class():
    classes = plain([60, 30, 10])
    by_class = Counter(classes.rows[row] for row in draw_rows(classes, Amount(per_class=8), stratified=True, seed=0))
    assert by_class == {(0,): 8, (1,): 8, (2,): 8}
    by_share = Counter(classes.rows[row] for row in draw_rows(classes, Amount(fraction=0.1), stratified=True, seed=0))
    assert by_share == {(0,): 6, (1,): 3, (2,): 1}


def test_more_than_there_is():
    classes = plain([60, 30, 10])
    with pytest.raises(ConfigError, match="draw: 40 x 3 classes = 120 rows of 100 rows were asked"):
        draw_rows(classes, Amount(per_class=40), stratified=False, seed=0)
    with pytest.raises(ConfigError, match="draw: 101 rows of 100 rows were asked"):
        draw_rows(classes, Amount(rows=101), stratified=False, seed=0)
    with pytest.raises(ConfigError, match=r"draw: a fraction of 0\.001 of 100 rows is no row"):
        draw_rows(classes, Amount(fraction=0.001), stratified=False, seed=0)
    with pytest.raises(ConfigError, match="draw: 11 rows of class 'c' were asked; there are 10"):
        draw_rows(classes, Amount(per_class=11), stratified=True, seed=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "draw: nothing given; one of per_class, fraction and rows"),
        ({"per_class": 1, "rows": 2}, "draw: per_class and rows given"),
        ({"per_class": 0}, "draw: per_class is 0; it must be a whole number from 1 up"),
        ({"rows": 1.5}, "draw: rows is 1.5; it must be a whole number"),
        ({"rows": True}, "draw: rows is True"),
        ({"fraction": 0.0}, "draw: fraction is 0.0; it must be above 0 and at most 1"),
        ({"fraction": 1.01}, "draw: fraction is 1.01"),
        ({"fraction": float("nan")}, "draw: fraction is nan"),
    ],
)
def test_amounts_that_cannot_be(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Amount(**given)
