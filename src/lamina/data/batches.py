"""Rows of tokens to padded batches."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import groupby
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
_ALIKE = 0.75  # of the longest row's length


class Budget(NamedTuple):
    """Tokens of a batch, padding included: `most` at most, but for one row that is longer by itself.

    A batch that holds `enough` takes no row that is shorter than three quarters of its longest: a pass of its own then
    costs less than the padding.
    """

    most: int
    enough: int


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
    batches: list[list[int]] = []
    longest = 0  # of the last batch
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        held = len(batches[-1]) * longest if batches else 0
        short = lengths[row] < (longest if equal else _ALIKE * longest if held >= budget.enough else 0)
        if not batches or len(batches[-1]) == batch_size or held + longest > budget.most or short:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


def batch_count(lengths: Sequence[int], batch_size: int, *, equal: bool = False) -> int:
    """How many batches `length_batches` makes."""
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)
