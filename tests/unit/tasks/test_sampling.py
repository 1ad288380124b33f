"""How many rows are drawn, which, and what they lack."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from lamina.errors import ConfigError
from lamina.tasks.stratify import SampleSize, subsample_rows

Classes = tuple[tuple[str, ...], list[tuple[int, ...]]]


def plain(sizes: list[int]) -> Classes:
    return tuple("abcdef"[: len(sizes)]), [(number,) for number, size in enumerate(sizes) for _ in range(size)]


def subsample(classes: Classes, size: SampleSize, *, stratified: bool = False, seed: int = 0) -> list[int]:
    return subsample_rows(*classes, size, stratified=stratified, seed=seed)


def test_without_classes_there_is_nothing_to_multiply():
    assert len(subsample(((), [(), ()]), SampleSize(fraction=0.5))) == 1
    with pytest.raises(ConfigError, match="subsample: per_class is 8; this task has no classes"):
        subsample(((), [(), ()]), SampleSize(per_class=8))


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 10), (1, 20)])
def test_a_fraction_of_each_class_does_not_count_rows_without_a_class(fraction: float, count: int):
    names, classes = plain([12, 8])
    rows = subsample((names, [*classes, *[()] * 20]), SampleSize(fraction=fraction), stratified=True)
    assert len(rows) == count
    assert sum(row < 12 for row in rows) == 0.6 * count
    with pytest.raises(ConfigError, match=r"subsample: 21 rows of 20 rows were asked for; it must be 1 to 20 rows"):
        subsample((names, [*classes, *[()] * 20]), SampleSize(rows=21), stratified=True)


@pytest.mark.parametrize(
    ("amount", "count"),
    [
        (SampleSize(per_class=8), 24),
        (SampleSize(fraction=0.25), 25),
        (SampleSize(rows=7), 7),
        (SampleSize(fraction=1), 100),
        (SampleSize(per_class=cast("Any", np.int64(8))), 24),
        (SampleSize(fraction=cast("Any", np.float32(0.25))), 25),
    ],
)
@pytest.mark.parametrize("stratified", [False, True])
def test_as_many_as_were_asked(amount: SampleSize, count: int, stratified: bool):
    classes = plain([60, 30, 10])
    rows = subsample(classes, amount, stratified=stratified, seed=1)
    assert len(set(rows)) == len(rows) == count
    assert rows == sorted(rows)
    assert rows == subsample(classes, amount, stratified=stratified, seed=1)
    if count < 100:
        assert rows != subsample(classes, amount, stratified=stratified, seed=2)


def test_a_plain_draw_is_uniform_over_the_rows():
    """Not over the classes: N x C rows keep the share that each class has."""
    classes = plain([80, 20])
    drawn = Counter(
        row for seed in range(1000) for row in subsample(classes, SampleSize(per_class=5), stratified=False, seed=seed)
    )
    assert set(drawn) == set(range(100))
    assert min(drawn.values()) > 60  # 100 expected, 5 sigma is 47
    assert max(drawn.values()) < 150
    assert sum(drawn[row] for row in range(80)) == pytest.approx(8000, abs=200)


def test_a_stratified_draw_has_as_many_of_each_class():
    classes = plain([60, 30, 10])
    by_class = Counter(classes[1][row] for row in subsample(classes, SampleSize(per_class=8), stratified=True, seed=0))
    assert by_class == {(0,): 8, (1,): 8, (2,): 8}
    by_share = Counter(classes[1][row] for row in subsample(classes, SampleSize(fraction=0.1), stratified=True, seed=0))
    assert by_share == {(0,): 6, (1,): 3, (2,): 1}


def test_a_stratified_draw_leaves_out_rows_of_several_classes():
    classes: Classes = (("a", "b"), [(0, 1), (1, 0), (0,), (), (1,)])
    for seed in range(5):
        assert subsample(classes, SampleSize(per_class=1), stratified=True, seed=seed) == [2, 4]


def test_more_than_there_is():
    classes = plain([60, 30, 10])
    with pytest.raises(ConfigError, match="subsample: 40 x 3 classes = 120 rows of 100 rows were asked for"):
        subsample(classes, SampleSize(per_class=40))
    with pytest.raises(ConfigError, match="subsample: 101 rows of 100 rows were asked for"):
        subsample(
            classes,
            SampleSize(rows=101),
        )
    with pytest.raises(ConfigError, match=r"subsample: a fraction of 0\.001 of 100 rows is less than one row"):
        subsample(
            classes,
            SampleSize(fraction=0.001),
        )
    with pytest.raises(ConfigError, match="subsample: 11 rows of class 'c' were asked for; there are 10"):
        subsample(classes, SampleSize(per_class=11), stratified=True, seed=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "subsample: nothing given; exactly one of per_class, fraction and rows"),
        ({"per_class": 1, "rows": 2}, "subsample: per_class and rows given"),
        ({"per_class": 0}, "subsample: per_class is 0; it must be a whole number of at least 1"),
        ({"rows": 1.5}, "subsample: rows is 1.5; it must be a whole number"),
        ({"rows": True}, r"subsample: rows is True; it must be a whole number of at least 1\.$"),
        ({"per_class": "8"}, "subsample: per_class is '8'; it must be a whole number of at least 1"),
        ({"fraction": True}, "subsample: fraction is True; it must be above 0 and at most 1"),
        ({"fraction": 0.0}, "subsample: fraction is 0.0; it must be above 0 and at most 1"),
        ({"fraction": 1.01}, "subsample: fraction is 1.01"),
        ({"fraction": float("nan")}, "subsample: fraction is nan"),
    ],
)
def test_amounts_that_cannot_be(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SampleSize(**given)
