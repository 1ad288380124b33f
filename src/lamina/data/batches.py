"""Rows of tokens to padded batches."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    Processor = PreTrainedTokenizerBase | ProcessorMixin

_SORTED_BATCHES = 50


def tokenizer_of(processor: Processor) -> Any:
    """The tokenizer that a processor holds, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def pad(rows: Sequence[Any], value: int) -> Int[Tensor, "batch tokens"]:
    """Lists or arrays of unequal length as one tensor, filled with `value` on the right."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), value, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def padding_of(processor: Processor) -> dict[str, int]:
    """What each key of a batch is padded with; without a padding token (GPT-2) the end token, or 0.

    Batches are padded on the right, whatever side the tokenizer pads for generation, so that every token keeps the
    position it has in a batch of its own, and with it its states.
    """
    tokenizer = tokenizer_of(processor)
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return {
        "input_ids": next(token for token in tokens if token is not None),
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
    }


def length_batches(
    lengths: Sequence[int],
    batch_size: int,
    *,
    seed: int | None = None,
    equal: bool = False,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Row numbers in batches of like length, so that little is padded; the last one of all may have fewer rows.

    `equal` has the rows of a batch be of one length, and the last of each length may have fewer rows; there are then
    `batch_count` batches whatever the seed.

    With a seed, for training, rows are shuffled, sorted within chunks of 50 batches, and batches shuffled. Without, for
    evaluation, the longest come first, so that memory runs out at once or never; the rows of a batch then hold
    `max_tokens` at most, padding included, but for one row that is longer by itself.
    """
    check_range("length_batches", "batch_size", batch_size, 1)
    lengths = [int(length) for length in lengths]
    if max_tokens is not None:
        return _budgeted(lengths, batch_size, max_tokens)
    rows, chunk = list(range(len(lengths))), len(lengths) or 1
    rng = None if seed is None else random.Random(seed)
    if rng is not None:
        rng.shuffle(rows)
        chunk = chunk if equal else batch_size * _SORTED_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(rows), chunk):
        ordered = sorted(rows[start : start + chunk], key=lambda row: -lengths[row])
        alike = [list(group) for _, group in groupby(ordered, key=lengths.__getitem__)] if equal else [ordered]
        batches += [part[i : i + batch_size] for part in alike for i in range(0, len(part), batch_size)]
    if rng is not None:
        rng.shuffle(batches)
    return batches


def _budgeted(lengths: Sequence[int], batch_size: int, max_tokens: int) -> list[list[int]]:
    """Batches of like length, the longest first, of a number of tokens at most."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        last = batches[-1] if batches else []
        if not last or len(last) == batch_size or (len(last) + 1) * lengths[last[0]] > max_tokens:
            batches.append(last := [])
        last.append(row)
    return batches


def batch_count(lengths: Sequence[int], batch_size: int, *, equal: bool = False) -> int:
    """How many batches `length_batches` makes."""
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)
