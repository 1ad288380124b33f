from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from lamina.data.batches import Budget, batch_count, length_batches
from lamina.data.encode import encode, pad
from lamina.errors import ConfigError
from lamina.layers.types import padding_of, tokenizer_of

TEXTS = ["the cat sat on the mat", "moon"]


def batch(tokenizer, rows: list[int]):
    return encode(TEXTS, tokenizer, max_length=64).batch(rows, padding_of(tokenizer))


def test_pads_to_the_longest_on_the_right(minilm, monkeypatch: pytest.MonkeyPatch):
    expected = {key: list(row) for key, row in minilm(TEXTS[0], padding=False).items()}
    for side in ("right", "left"):
        monkeypatch.setattr(minilm, "padding_side", side)
        found = batch(minilm, [1, 0])
        assert {key: row[1].tolist() for key, row in found.items()} == expected
        assert found["input_ids"][0].tolist() == [101, 4231, 102, *[minilm.pad_token_id] * 5]
        assert found["attention_mask"].sum(1).tolist() == [3, 8]
        assert all(str(tensor.dtype) == "torch.int64" for tensor in found.values())
    assert batch(minilm, [1])["input_ids"].shape == (1, 3)


def test_without_padding_token(byte_level, monkeypatch: pytest.MonkeyPatch):
    assert batch(byte_level, [0, 1])["input_ids"][1, -1] == byte_level.eos_token_id
    assert byte_level.pad_token is None
    monkeypatch.setattr(byte_level, "_special_tokens_map", dict.fromkeys(byte_level._special_tokens_map))
    assert batch(byte_level, [0, 1])["input_ids"][1, -1] == 0
    assert batch(byte_level, [0, 1])["attention_mask"][1, -1] == 0


def test_a_processor_may_hold_the_tokenizer(minilm):
    class Processor:
        tokenizer = minilm

    assert tokenizer_of(Processor()) is minilm is tokenizer_of(minilm)  # pyright: ignore[reportArgumentType]


def test_pad():
    assert pad([[1], [2, 3]], 9).tolist() == [[1, 9], [2, 3]]


def test_evaluation_takes_the_longest_first():
    assert length_batches([3, 9, 1, 9, 5], 2) == [[1, 3], [4, 0], [2]]


def test_training_shuffles_by_seed():
    rng = random.Random(1)
    lengths = [rng.randint(1, 100) for _ in range(1000)]
    one, again, other = (length_batches(lengths, 8, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(row for batch in one for row in batch) == list(range(1000))
    assert [sum(len(batch) == 8 for batch in one), len(one)] == [125, 125]
    firsts = [lengths[batch[0]] for batch in one]
    assert firsts != sorted(firsts, reverse=True)


def test_little_is_padded():
    rng = random.Random(0)
    lengths = [rng.randint(5, 200) for _ in range(3000)]
    padded = sum(max(lengths[row] for row in batch) * len(batch) for batch in length_batches(lengths, 16, seed=0))
    assert padded < 1.05 * sum(lengths)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("function", [length_batches, batch_count])
def test_batch_size_is_positive(function: Any, size: int):
    with pytest.raises(ConfigError, match=f"{function.__name__}: batch_size is {size}; it must be at least 1"):
        function([1], size)


@pytest.mark.parametrize(
    ("budget", "equal", "batches"),
    [
        (Budget(100, 100), False, [[8, 8, 6, 4, 4, 4]]),
        (Budget(24, 24), False, [[8, 8, 6], [4, 4, 4]]),
        (Budget(7, 7), False, [[8], [8], [6], [4], [4], [4]]),  # a longer row has a batch of its own
        (Budget(100, 15), False, [[8, 8, 6, 4, 4, 4]]),  # 48 + 15
        (Budget(100, 11), False, [[8, 8, 6], [4, 4, 4]]),  # 24 + 12 and 11 twice is less
        (Budget(100, 1), False, [[8, 8], [6], [4, 4, 4]]),
        (Budget(100, 100), True, [[8, 8], [6], [4, 4, 4]]),
    ],
)
def test_a_budget_of_tokens(budget: Budget, equal: bool, batches: list[list[int]]):
    lengths = [4, 8, 4, 6, 8, 4]
    made = length_batches(lengths, 10, equal=equal, budget=budget)
    assert [[lengths[row] for row in rows] for rows in made] == batches
    assert sorted(row for rows in made for row in rows) == list(range(6))


def test_passes_are_parted_so_that_they_cost_least():
    rng = random.Random(0)
    for _ in range(100):
        lengths = sorted((rng.randint(1, 30) for _ in range(rng.randint(0, 8))), reverse=True)
        overhead = rng.randint(0, 20)

        def cost(batches: Iterable[Sequence[int]], overhead: int = overhead) -> int:
            return sum(overhead + len(batch) * max(batch) for batch in batches if batch)

        made = length_batches(lengths, 10, budget=Budget(1000, overhead))
        cuts = itertools.chain.from_iterable(itertools.combinations(range(1, len(lengths)), n) for n in range(8))
        parted = ([lengths[a:b] for a, b in itertools.pairwise([0, *cut, len(lengths)])] for cut in cuts)
        assert cost([[lengths[row] for row in batch] for batch in made]) == min(map(cost, parted), default=0)
