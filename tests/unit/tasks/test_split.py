from __future__ import annotations

from collections import Counter

import pytest

from lamina.errors import ConfigError, DataError
from lamina.tasks.split import Split, held_out, limited, shares, without_labels


def rows(labels: list[int]) -> Split:
    return Split(tuple(f"text {i}" for i in range(len(labels))), tuple(labels))


def test_take_keeps_the_order_asked():
    split = Split(("a", "b c", "d"), ((0,), (1, 0), (1,)), (((0, 1),), ((0, 1), (2, 3)), ((0, 1),)))
    assert split.take([2, 1]) == Split(("d", "b c"), ((1,), (1, 0)), (((0, 1),), ((0, 1), (2, 3))))
    assert len(split) == 3


def test_a_tenth_is_set_aside_class_by_class():
    train, validation = held_out(rows([0] * 700 + [1] * 250 + [2] * 50), stratify=True, seed=0)
    assert Counter(validation.labels) == {0: 70, 1: 25, 2: 5}
    assert Counter(train.labels) == {0: 630, 1: 225, 2: 45}
    assert not set(train.texts) & set(validation.texts)


def test_shares_add_up_to_a_tenth():
    _, validation = held_out(rows([0] * 33 + [1] * 33 + [2] * 34), stratify=True, seed=0)
    assert len(validation) == 10
    assert Counter(validation.labels) == {0: 3, 1: 3, 2: 4}


def test_the_seed_decides_which():
    split = rows([0, 1] * 100)
    one, again, other = (held_out(split, stratify=True, seed=seed)[1].texts for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_unstratified_needs_no_class():
    split = Split(tuple("abcdefghij"), tuple(i / 7 for i in range(10)))
    train, validation = held_out(split, stratify=False, seed=0)
    assert (len(train), len(validation)) == (9, 1)


def test_one_row_cannot_be_split():
    with pytest.raises(DataError, match="train part has 1 rows; two are needed"):
        held_out(rows([0]), stratify=True, seed=0)


def test_limit_draws_rows_in_order():
    split = rows(list(range(50)))
    drawn = limited(split, 10, seed=3)
    assert len(drawn) == 10
    assert list(drawn.labels) == sorted(set(drawn.labels))
    assert drawn == limited(split, 10, seed=3)
    assert drawn != limited(split, 10, seed=4)
    assert limited(split, 50, seed=3) is split
    assert limited(split, None, seed=3) is split


def test_limit_must_leave_a_row():
    with pytest.raises(ConfigError, match="limit is 0"):
        limited(rows([0]), 0, seed=0)


def test_of_running_text_the_last_rows_are_set_aside():
    split = rows([0] * 25)
    train, validation = held_out(split, stratify=False, seed=0, last=True)
    assert train.texts + validation.texts == split.texts
    assert len(validation) == 2
    assert len(held_out(rows([0] * 3), stratify=False, seed=0, last=True)[1]) == 1


@pytest.mark.parametrize(
    ("sizes", "total", "expected"), [([3, 3, 4], 1, [0, 0, 1]), ([50, 30, 20], 7, [4, 2, 1]), ([1, 1], 2, [1, 1])]
)
def test_shares_make_up_the_total(sizes: list[int], total: int, expected: list[int]):
    assert shares(sizes, total) == expected


def test_the_option_is_named():
    with pytest.raises(ConfigError, match="task: limit_validation is -1"):
        limited(rows([0]), -1, seed=0, option="limit_validation")


def test_texts_without_their_labels():
    split = Split((("a", "b"), ("c", " "), "d", ""), (1, 0, 1, 0))
    assert without_labels(split) == Split(("a", "b", "c", "d"), (None,) * 4)
