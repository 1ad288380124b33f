"""The steps of a fine-tuning run: which rows each sees, in which batches, and how much each batch counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.data import Sampler

from lamina.data.batches import length_batches
from lamina.data.windows import IGNORED
from lamina.utils import derive_seed, rank, world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lamina.train.rows import Rows

SHARE = "share"  # key of a batch: the share of the step's labels that it holds


class Steps(Sampler[list[int]]):
    """The rows of every step, of like length, shuffled anew in every epoch.

    A step is the same whether one process takes it in one batch, or several in some batches each.

    Args:
        rows: What is learnt from.
        size: Rows per step; one step of an epoch may have fewer.
        batches: In how many batches each process takes its rows.
        seed: Decides the order, together with the epoch.
        epoch: Tells the number of the epoch that begins, from 0.
    """

    def __init__(self, rows: Rows, size: int, *, batches: int, seed: int, epoch: Callable[[], int]) -> None:
        self._rows, self._size, self._batches, self._seed = rows, size, batches, seed
        self._lengths = rows.lengths
        self._next, self._epoch = epoch, 0

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        self._epoch = self._next()
        yield from length_batches(self._lengths, self._size, seed=derive_seed(self._seed, "order", self._epoch))

    def collate(self, numbers: Sequence[int]) -> dict[str, Any]:
        """This process's batches of a step, as "parts".

        Where no row is left for a process, it takes the first with the share 0, since all of them must run the model.
        """
        number, size = rank(), world_size()
        parts = size * self._batches
        own = [list(numbers[part::parts]) for part in range(number, parts, size) if part < len(numbers)]
        made = [self._rows.batch(some, epoch=self._epoch) for some in own or [numbers[:1]]]
        counts = [_labels(batch) if own else 0 for batch in made]
        return {"parts": [{**batch, SHARE: count} for batch, count in zip(made, counts, strict=True)]}


def share_out(parts: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Turn the counts of labels into shares of the step's, in all processes; a step without labels has none to give.

    Args:
        parts: Batches of this process, as `Steps.collate` makes them; changed in place.
        device: Where the processes exchange numbers.
    """
    total = torch.tensor(float(sum(part[SHARE] for part in parts)), device=device)
    if world_size() > 1:
        distributed.all_reduce(total)
    whole = max(float(total), 1.0)
    for part in parts:
        part[SHARE] /= whole


def _labels(batch: dict[str, Tensor]) -> int:
    """Over how many labels a model takes the mean of its loss."""
    labels = batch["labels"]
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORED).sum())
