"""Group rows of similar length into batches."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

_SORTED_BATCHES = 50  # in training, rows are sorted by length within chunks of this number of batches


class Budget(NamedTuple):
    """The maximum number of tokens in a batch, and the fixed cost of a pass.

    Attributes:
        max_tokens: Maximum number of tokens in a batch, padding included. A longer row is a batch by itself.
        overhead: Fixed cost of a pass of the model, as the number of tokens that would take the same time.
    """

    max_tokens: int
    overhead: int


def length_batches(
    lengths: Sequence[int],
    batch_size: int,
    *,
    seed: int | None = None,
    equal: bool = False,
    budget: Budget | None = None,
) -> list[list[int]]:
    """Group rows into batches of similar length, and return each batch's row indices.

    Raises ConfigError if `batch_size` is below 1.

    Args:
        lengths: Number of tokens of each row.
        batch_size: Maximum number of rows in a batch.
        seed: Seed of the order for training: rows are shuffled, then sorted by length within chunks of 50 batches (with
            `equal`, all at once), and finally the batches are shuffled. None, for evaluation: the longest rows come
            first, so that the first batch shows whether memory suffices.
        equal: Whether all rows of a batch must have the same length.
        budget: For evaluation: maximum number of tokens in a batch, and the cost of a pass. Rows are divided so that
            all passes together cost about least, the longest rows first, and `seed` is ignored. None: no maximum.
    """
    check_range("length_batches", "batch_size", batch_size, 1)
    lengths = np.asarray(lengths, dtype=np.int64).tolist()
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
        ordered = sorted(rows[start : start + chunk], key=lengths.__getitem__, reverse=True)
        parts = [list(group) for _, group in groupby(ordered, key=lengths.__getitem__)] if equal else [ordered]
        for part in parts:
            for at in range(0, len(part), batch_size):
                batches.append(part[at : at + batch_size])
    if rng is not None:
        rng.shuffle(batches)
    return batches


def _budgeted(lengths: Sequence[int], batch_size: int, budget: Budget, *, equal: bool) -> list[list[int]]:
    """Return the row indices of batches that fit `budget`, the longest rows first; arguments as in `length_batches`.

    Rows are divided into the groups of `_cheapest` (with `equal`, of one length), and each group into batches.
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

    The cost of a group is `overhead` plus the number of its rows times the length of its longest row. `sizes` are the
    distinct lengths in descending order. `ends[i]` is the number of rows longer than `sizes[i]`; one more entry is the
    number of all rows.
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
    """Return how many batches `length_batches` makes without a budget. ConfigError if `batch_size` is below 1."""
    check_range("batch_count", "batch_size", batch_size, 1)
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)
