"""Rows of tokens to padded batches."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Budget(NamedTuple):
    """What a batch may hold, and what it costs.

    A batch has `most` tokens at most, padding included, but for one row that is longer by itself; a pass costs as
    much as `overhead` tokens apart from those it reads. Rows are parted so that all passes together cost least.
    """

    most: int
    overhead: int


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
    budget: Budget | None = None,
) -> list[list[int]]:
    """Row numbers in batches of like length, so that little is padded; the last one of all may have fewer rows.

    `equal` has the rows of a batch be of one length, and the last of each length may have fewer rows; there are then
    `batch_count` batches whatever the seed.

    With a seed, for training, rows are shuffled, sorted within chunks of 50 batches, and batches shuffled. Without, for
    evaluation, the longest come first, so that memory runs out at once or never; a `budget` then says how many
    tokens a batch holds.
    """
    check_range("length_batches", "batch_size", batch_size, 1)
    lengths = [int(length) for length in lengths]
    if budget is not None:
        return _budgeted(lengths, batch_size, budget, equal=equal)
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


def _budgeted(lengths: Sequence[int], batch_size: int, budget: Budget, *, equal: bool) -> list[list[int]]:
    """Batches of like length, the longest first."""
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sizes, counts = (part[::-1] for part in np.unique(lengths, return_counts=True))
    ends = [0, *np.cumsum(counts).tolist()]  # of each length, among the sorted rows
    starts = ends[:-1] if equal else _cheapest(sizes, np.array(ends), budget.overhead)
    batches: list[list[int]] = []
    for start, end in pairwise([*starts, len(rows)]):
        count = max(1, min(batch_size, budget.most // max(1, lengths[rows[start]])))
        batches += [rows[at : min(at + count, end)] for at in range(start, end, count)]
    return batches


def _cheapest(sizes: np.ndarray, ends: np.ndarray, overhead: int) -> list[int]:
    """Where batches start among rows sorted by length, if a batch costs `overhead` and its longest row for each."""
    least, first = np.zeros(len(sizes) + 1), [0] * len(sizes)
    for last in range(len(sizes)):  # the best batches of the rows up to this length
        costs = least[: last + 1] + overhead + (ends[last + 1] - ends[: last + 1]) * sizes[: last + 1]
        first[last] = int(costs.argmin())
        least[last + 1] = costs[first[last]]
    starts, last = list[int](), len(sizes) - 1
    while last >= 0:
        starts.append(int(ends[first[last]]))
        last = first[last] - 1
    return starts[::-1]


def batch_count(lengths: Sequence[int], batch_size: int, *, equal: bool = False) -> int:
    """How many batches `length_batches` makes."""
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)
