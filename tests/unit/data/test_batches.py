from __future__ import annotations

import random

import pytest
import torch

from lamina.data.batches import collate, length_batches, pad
from lamina.errors import ConfigError

ROWS = [
    {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 1], "labels": [-100, 2, 1]},
    {"input_ids": [8], "attention_mask": [1], "token_type_ids": [0], "labels": [3]},
]


def test_pads_to_the_longest(minilm):
    batch = collate(ROWS, minilm)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, minilm.pad_token_id, minilm.pad_token_id]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 1], [3, -100, -100]]
    assert all(tensor.dtype == torch.long for tensor in batch.values())


def test_pads_on_the_right_whatever_the_tokenizer_does(metaspace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metaspace, "padding_side", "left")
    batch = collate(ROWS, metaspace)
    assert batch["input_ids"].tolist()[1] == [8] + [metaspace.pad_token_id] * 2
    assert batch["attention_mask"].tolist()[1] == [1, 0, 0]
    assert batch["labels"].tolist()[1] == [3, -100, -100]


def test_without_padding_token(byte_level, monkeypatch: pytest.MonkeyPatch):
    batch = collate(ROWS, byte_level)
    assert batch["input_ids"].tolist()[1] == [8, byte_level.eos_token_id, byte_level.eos_token_id]
    assert byte_level.pad_token is None
    monkeypatch.setattr(byte_level, "_special_tokens_map", dict.fromkeys(byte_level._special_tokens_map))
    assert collate(ROWS, byte_level)["input_ids"].tolist()[1] == [8, 0, 0]


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


def test_batch_size_is_positive():
    with pytest.raises(ConfigError, match="batch_size is 0"):
        length_batches([1], 0)
