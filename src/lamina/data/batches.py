"""Group rows of similar length into batches, pad the rows of a batch to one length, and prepare batches in turn."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from lamina.errors import ConfigError, LaminaError
from lamina.layers.types import tokenizer_of
from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jaxtyping import Int
    from torch import Tensor

    from lamina.layers.types import Processor

    class Batches(Protocol):
        """The encoded rows of a split, which make batches; `lamina.tasks.base.Inputs` has this form."""

        def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
            """Return a model's arguments for the rows with these indices; random inputs differ by `epoch` (from 0)."""
            ...

    Job = tuple[Batches, Sequence[int], int]
    """A batch that will be prepared: the inputs that prepare it, the indices of its rows, and the epoch (from 0)."""

_SORTED_BATCHES = 50  # in training, rows are sorted by length within chunks of this number of batches


class Budget(NamedTuple):
    """The maximum number of tokens in a batch, and the fixed cost of a pass.

    Attributes:
        max_tokens: Maximum number of tokens in a batch, padding included. A longer row is a batch by itself.
        overhead: Fixed cost of a pass of the model, as the number of tokens that would take the same time.
    """

    max_tokens: int
    overhead: int


def check_tokenizer(processor: object) -> Processor:
    """Return the processor if it is, or has, a tokenizer; otherwise raise ConfigError."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer_of(processor), PreTrainedTokenizerBase):
        got = "no processor was given" if processor is None else f"the processor is a {type(processor).__name__}"
        hint = "Give the one that AutoTokenizer.from_pretrained finds for the model."
        raise ConfigError(f"task: {got}; texts need a tokenizer. {hint}")
    return cast("Processor", processor)


def pad(rows: Sequence[Sequence[int] | np.ndarray], value: int) -> Int[Tensor, "batch tokens"]:
    """Return lists or arrays of unequal length as one tensor (int64), padded with `value` on the right."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), value, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


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
        budget: Maximum number of tokens per batch, in addition to `batch_size`, and the cost of a pass: for evaluation,
            rows are divided so that all passes together cost least. `seed` is then ignored. None: no maximum.
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
    """Return how many batches `length_batches` makes of these arguments. ConfigError if `batch_size` is below 1."""
    check_range("batch_count", "batch_size", batch_size, 1)
    counts = Counter(map(int, lengths)).values() if equal else [len(lengths)]
    return sum(math.ceil(count / batch_size) for count in counts)


def batches(jobs: Sequence[Job], num_workers: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of `jobs` in order: argument of the model -> tensor, and "labels" if the inputs have labels.

    A job has the inputs, the indices of the rows, and the epoch. `num_workers` processes prepare the batches; with 0,
    or a single job, this process does. Raises LaminaError if an example cannot be read, for example a damaged image.
    """
    if num_workers == 0 or len(jobs) < 2:
        for inputs, rows, epoch in jobs:
            yield inputs.batch(rows, epoch=epoch)
        return
    rng = torch.Generator().manual_seed(0)  # without one, the loader would draw from torch's global random state
    data, make = cast("Any", jobs), cast("Any", _batch_or_error)
    workers = min(num_workers, len(jobs))
    for batch in DataLoader(data, batch_size=None, num_workers=workers, collate_fn=make, generator=rng):
        if isinstance(batch, LaminaError):
            raise batch
        yield batch


def _batch_or_error(job: Job) -> dict[str, Tensor] | LaminaError:
    """Return the batch of a job (inputs, rows, epoch), or the LaminaError that preparing it raised.

    A worker process returns the error, because an error that it raises would lose its fields on the way.
    """
    inputs, rows, epoch = job
    try:
        return inputs.batch(rows, epoch=epoch)
    except LaminaError as error:
        return error
