"""Examples in Arrow, and drawing rows from them."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError
from lamina.tasks.split import Split, held_out, limited
from lamina.tasks.stratify import shares


def rows(labels: list[int]) -> Split:
    return Split.of(tuple(f"text {i}" for i in range(len(labels))), tuple(labels))


def test_take_keeps_the_order_asked():
    split = Split.of(("a", "b c", "d"), ((0,), (1, 0), (1,)), (((0, 1),), ((0, 1), (2, 3)), ((0, 1),)))
    assert split.select_rows([2, 1]) == Split.of(("d", "b c"), ((1,), (1, 0)), (((0, 1),), ((0, 1), (2, 3))))
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
    split = Split.of(tuple("abcdefghij"), tuple(i / 7 for i in range(10)))
    train, validation = held_out(split, stratify=False, seed=0)
    assert (len(train), len(validation)) == (9, 1)


def test_one_row_cannot_be_split():
    with pytest.raises(DataError, match="train split has 1 rows; two are needed"):
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
    assert (*train.texts, *validation.texts) == split.texts
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
    pairs = Split.of((("a", "b"), ("c", " ")), (1, 0))
    assert pairs.without_labels() == Split.of(("a", "b", "c"))
    assert Split.of(("d", " ", ""), (1, 0, 1)).without_labels() == Split.of(("d",), (None,))


# What examples hold


@pytest.mark.parametrize(
    ("texts", "labels", "words"),
    [
        (["a", "b"], [1, 0], None),
        (["a", "b"], [True, False], None),
        (["a", "b"], [1.0, 0.5], None),
        (["a", "b"], ["x", "y \ud83d"], None),
        (["a", "b"], [(1, 0), (0, 1)], None),
        (["a b", ""], [(3, 1), ()], [((0, 1), (2, 3)), ()]),
        (["", "a b"], [(), (3, 1)], [(), ((0, 1), (2, 3))]),
        ([("a", "b"), ("", "c")], [1, 0], None),
        (["a", "b"], None, None),
        (["half \ud83d", "\x00\u200b\U0001f600"], [1, 0], None),
        ([], [], None),
        ([], None, []),
    ],
)
def test_columns_come_back(texts: list[Any], labels: list[Any] | None, words: list[Any] | None):
    split = Split.of(iter(texts), labels, words)
    assert split.texts == [text.replace("\ud83d", "\ufffd") if isinstance(text, str) else text for text in texts]
    expected = [None] * len(texts) if labels is None else labels
    assert split.labels == [
        label.replace("\ud83d", "\ufffd") if isinstance(label, str) else label for label in expected
    ]
    assert split.words == words
    assert split.pairs is bool(texts and isinstance(texts[0], tuple))
    assert split.labelled is bool(labels)
    assert len(split) == len(texts)
    for same in (copy.deepcopy(split), pickle.loads(pickle.dumps(split)), split.select_rows(range(len(split)))):
        assert same == split
        assert same.key == split.key


def test_many_rows_keep_their_order():
    """They are taken in chunks."""
    split = Split.of((f"text {row}" for row in range(2500)), (row % 7 for row in range(2500)))
    assert split.texts[-1] == "text 2499"
    assert split.texts[998:1002] == ("text 998", "text 999", "text 1000", "text 1001")
    assert list(split.labels) == [row % 7 for row in range(2500)]
    assert split.select_rows([2400, 3]).select_rows([1]).texts == ("text 3",)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        Split.of(["a", "b"], [1])


def test_the_key_tells_texts_apart():
    keys = [Split.of(texts).key for texts in (["a", "b"], ["b", "a"], ["ab", ""], ["a\x00b"], [("a", "b")])]
    assert len(set(keys)) == 5
    assert Split.of(["a", "b"], [1, 0]).key == keys[0]


def test_what_is_no_split_is_not_equal():
    assert Split.of(["a"]) != ["a"]
    assert Split.of(["a"]).texts != "a"
    assert repr(Split.of("abcd").texts) == "Column(['a', 'b', 'c', ...], 4 rows)"


def test_other_labels_for_the_same_examples():
    split = Split.of(("a", "b c", "d"), ((0,), (1, 0), (1,)), (((0, 1),), ((0, 1), (2, 3)), ((0, 1),)))
    changed = split.with_labels([(-100,), (1, 1), (0,)])
    assert changed.labels == ((-100,), (1, 1), (0,))
    assert (changed.texts, changed.words, changed.key) == (split.texts, split.words, split.key)
    assert changed.select_rows([2, 1]).labels == ((0,), (1, 1))
    assert changed.with_labels([0, 1, 2]).select_rows([1]).labels == (1,)
    assert split.labels == ((0,), (1, 0), (1,))
    assert changed.labelled
