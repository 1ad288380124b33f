"""Hidden tokens: how many, which, and what takes their places."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import ConfigError
from lamina.tasks.masking import Masking, mask_token

MASKING = Masking(token=4, special=frozenset({0, 1, 2, 3, 4}), vocabulary=1000)


@given(st.lists(st.integers(0, 999), max_size=80), st.integers(0, 2**62))
@settings(deadline=None)
def test_what_is_hidden_can_be_told_from_the_labels(ids: list[int], seed: int):
    read, labels = MASKING.hide(ids, seed)
    assert len(read) == len(labels) == len(ids)
    ordinary = [one for one in ids if one not in MASKING.special]
    chosen = [at for at, label in enumerate(labels) if label != -100]
    assert len(chosen) == (max(1, round(0.15 * len(ordinary))) if ordinary else 0)
    assert all(labels[at] == ids[at] and ids[at] not in MASKING.special for at in chosen)
    assert all(read[at] == ids[at] for at in range(len(ids)) if at not in chosen)
    assert (read, labels) == MASKING.hide(ids, seed)


def test_eight_in_ten_become_the_mask_one_another_token_and_one_stays():
    ids = [5 + at % 900 for at in range(2000)]
    kinds: Counter[str] = Counter()
    others: set[int] = set()
    where: Counter[int] = Counter()
    for seed in range(100):
        read, labels = MASKING.hide(ids, seed)
        for at, label in enumerate(labels):
            if label != -100:
                kind = "mask" if read[at] == 4 else "same" if read[at] == ids[at] else "other"
                kinds[kind] += 1
                where[at] += 1
                others |= {read[at]} if kind == "other" else set()
    assert kinds.total() == 100 * 300
    assert kinds["mask"] / kinds.total() == pytest.approx(0.8, abs=0.02)
    assert kinds["other"] / kinds.total() == pytest.approx(0.1, abs=0.01)
    assert kinds["same"] / kinds.total() == pytest.approx(0.1, abs=0.01)
    assert len(others) > 900  # of 1000: drawn from the whole vocabulary
    assert len(where) == 2000


def test_another_seed_hides_others():
    ids = list(range(5, 205))
    assert MASKING.hide(ids, 0)[1] != MASKING.hide(ids, 1)[1]


def test_what_a_tokenizer_says(minilm):
    masking = Masking.of(minilm)
    assert (masking.token, masking.vocabulary) == (103, 30522)
    assert masking.special == {0, 100, 101, 102, 103}
    assert mask_token(minilm, "predict") == "[MASK]"


def test_a_tokenizer_without_a_mask_token(byte_level):
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        Masking.of(byte_level)
    with pytest.raises(ConfigError, match="predict: the tokenizer has no mask token"):
        mask_token(byte_level, "predict")
