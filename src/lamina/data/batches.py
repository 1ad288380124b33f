"""Group rows of tokens into batches of similar length, and pad them."""

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
    """The size limit of a batch in tokens, and the fixed cost of a pass.

    Attributes:
        most: Maximum tokens of a batch, padding included. A single row that is longer is a batch of its own.
        overhead: Fixed cost of a pass of the model, as the number of tokens that would take the same time.
    """

    most: int
    overhead: int


def tokenizer_of(processor: Processor) -> Any:
    """Return the tokenizer of a processor, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def pad(rows: Sequence[Any], value: int) -> Int[Tensor, "batch tokens"]:
    """Return lists or arrays of unequal length as one tensor, filled with `value` on the right."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), value, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def padding_of(processor: Processor) -> dict[str, int]:
    """Return the padding value of each key of a batch.

    Without a padding token (GPT-2) it is the end token, or 0. Batches are always padded on the right, even if the
    tokenizer pads on the left for generation, so that every token has the same position, and so the same states, as it
    would have alone.
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
    """Group rows into batches of similar length, so that little is padded, and return the row numbers of each batch.

    Args:
        lengths: Tokens of each row.
        batch_size: Maximum rows of a batch; the last batch may have fewer.
        seed: Seed for training: rows are shuffled, sorted by length within chunks of 50 batches, and the batches are
            shuffled. None, for evaluation: the longest rows come first, so that memory runs out at once or never.
        equal: Whether all rows of a batch must have the same length; there are then always `batch_count` batches.
        budget: Limit in tokens for evaluation, in addition to `batch_size`. None: no limit.
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
    """Return batches within a budget, the longest rows first; their total cost is as low as possible."""
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
    """Return where groups of batches start among rows sorted by length, so that the total cost is lowest.

    Args:
        sizes: The different lengths, longest first.
        ends: How many of the sorted rows have at least the first, second ... of these lengths; begins with 0.
        overhead: Cost of a batch beside its rows; each row costs as much as the longest row of its batch.
    """
    least, first = np.zeros(len(sizes) + 1), [0] * len(sizes)
    for last in range(len(sizes)):  # dynamic programming: the cheapest batches of all rows up to this length
        costs = least[: last + 1] + overhead + (ends[last + 1] - ends[: last + 1]) * sizes[: last + 1]
        first[last] = int(costs.argmin())
        least[last + 1] = costs[first[last]]
    starts, last = list[int](), len(sizes) - 1
    while last >= 0:
        starts.append(int(ends[first[last]]))
        last = first[last] - 1
    return starts[::-1]


def batch_count(lengths: Sequence[int], batch_size: int, *, equal: bool = False) -> int:
    """Return how many batches `length_batches` makes of these rows."""
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)
