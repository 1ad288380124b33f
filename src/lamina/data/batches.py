"""Group rows of similar length into batches, and pad the rows of a batch to one length."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from lamina.layers.types import Processor

# A tokenizer of transformers. Its type is not used, because its stubs are narrower than what it accepts and returns.
Tokenizer: TypeAlias = Any

_SORTED_BATCHES = 50  # number of batches for training among whose rows lengths are sorted


class Budget(NamedTuple):
    """The maximum number of tokens in a batch, and the fixed cost of a pass.

    Attributes:
        max_tokens: Maximum number of tokens in a batch, padding included. A single row that is longer is a batch by
            itself.
        overhead: Fixed cost of a pass of the model, as the number of tokens that would take the same time.
    """

    max_tokens: int
    overhead: int


def tokenizer_of(processor: Processor) -> Tokenizer:
    """Return the tokenizer that a processor contains; a processor that contains none is returned itself."""
    return getattr(processor, "tokenizer", processor)


def pad(rows: Sequence[Sequence[int] | np.ndarray], value: int) -> Int[Tensor, "batch tokens"]:
    """Return lists or arrays of unequal length as one tensor (int64), padded with `value` on the right."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), value, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def padding_of(processor: Processor) -> dict[str, int]:
    """Return {"input_ids": padding value, "token_type_ids": padding value} for a processor's tokenizer.

    Input ids are padded with the padding token, or with the end token if the tokenizer has no padding token (GPT-2), or
    else with 0. Lamina pads on the right, even if the tokenizer pads on the left for generation. So every token has the
    position, and therefore the hidden states, that it has in a batch by itself.
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
    """Group rows into batches of similar length, so that little is padded, and return the row indices of each batch.

    Args:
        lengths: Number of tokens of each row.
        batch_size: Maximum number of rows in a batch.
        seed: Seed of the order for training: rows are shuffled, then sorted by length within chunks of 50 batches, and
            finally the batches are shuffled. None is for evaluation: the batches with the longest rows come first, so
            that a lack of memory shows in the first batch.
        equal: Whether all rows of a batch must have the same length.
        budget: Maximum number of tokens per batch, beside `batch_size`; for evaluation only, `seed` is then ignored.
            None: no maximum.

    Raises:
        ConfigError: If `batch_size` is below 1.
    """
    check_range("length_batches", "batch_size", batch_size, 1)
    lengths = [int(length) for length in lengths]
    if budget is not None:
        return _budgeted(lengths, batch_size, budget, equal=equal)
    rows, chunk = list(range(len(lengths))), len(lengths) or 1
    rng = None if seed is None else random.Random(seed)
    if rng is not None:
        rng.shuffle(rows)
        # rows of equal length are found only if all rows are sorted
        chunk = chunk if equal else batch_size * _SORTED_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(rows), chunk):
        ordered = sorted(rows[start : start + chunk], key=lambda row: -lengths[row])
        parts = [list(group) for _, group in groupby(ordered, key=lengths.__getitem__)] if equal else [ordered]
        batches += [part[i : i + batch_size] for part in parts for i in range(0, len(part), batch_size)]
    if rng is not None:
        rng.shuffle(batches)
    return batches


def _budgeted(lengths: Sequence[int], batch_size: int, budget: Budget, *, equal: bool) -> list[list[int]]:
    """Return the row indices of batches for evaluation that fit a budget and have the lowest total cost.

    The batches are in descending order of length. The parameters are those of `length_batches`.
    """
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sizes, counts = (part[::-1] for part in np.unique(lengths, return_counts=True))
    ends = [0, *np.cumsum(counts).tolist()]  # rows ends[i] to ends[i + 1] (exclusive) have the length sizes[i]
    starts = ends[:-1] if equal else _cheapest(sizes, np.array(ends), budget.overhead)
    batches: list[list[int]] = []
    for start, end in pairwise([*starts, len(rows)]):
        count = max(1, min(batch_size, budget.max_tokens // max(1, lengths[rows[start]])))
        batches += [rows[at : min(at + count, end)] for at in range(start, end, count)]
    return batches


def _cheapest(sizes: np.ndarray, ends: np.ndarray, overhead: int) -> list[int]:
    """Divide rows, sorted by length, into groups of lowest total cost; return the index of each group's first row.

    The cost of a group is `overhead`, plus for each row the length of the group's longest row. `sizes` are the
    different lengths in descending order, and `ends[i]` is the number of rows that are longer than `sizes[i]` (last
    entry: all rows).
    """
    # dynamic programming over lengths: least[i] is the lowest cost of all rows longer than sizes[i], and first[last]
    # is the longest length in the group that ends with the rows of length sizes[last]
    least, first = np.zeros(len(sizes) + 1), [0] * len(sizes)
    for last in range(len(sizes)):
        costs = least[: last + 1] + overhead + (ends[last + 1] - ends[: last + 1]) * sizes[: last + 1]
        first[last] = int(costs.argmin())
        least[last + 1] = costs[first[last]]
    starts, last = list[int](), len(sizes) - 1
    while last >= 0:
        starts.append(int(ends[first[last]]))
        last = first[last] - 1
    return starts[::-1]


def batch_count(lengths: Sequence[int], batch_size: int, *, equal: bool = False) -> int:
    """Return how many batches `length_batches` makes without a budget; the parameters are the same."""
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)
