"""Which rows a training step sees: tasks over the same inputs share a pass, the others take turns."""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader

from lamina.data.batches import batch_count, length_batches
from lamina.errors import LaminaError
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from lamina.tasks.base import Inputs
    from lamina.train.groups import Group

    Job = tuple[Inputs, Sequence[int], int]
    """What a batch is made of: inputs, rows, epoch."""


class Step(NamedTuple):
    """One training step: rows of one group, in one epoch of that group."""

    epoch: int
    group: int
    rows: tuple[int, ...]


@dataclass
class Plan:
    """Every step of a run, in order; the same for a group whatever else is trained beside it.

    Within an epoch the groups take turns in proportion to their numbers of steps, so that all of them end it together.
    A learner that has stopped gets no more batches, and a group all of whose learners have stopped none at all.
    """

    groups: Sequence[Group]
    epochs: Mapping[str, int]  # learner name -> how many times it goes through its rows
    size: int  # rows per step
    seed: int  # decides the order
    max_steps: int | None = None  # a learner's steps end there, whatever its epochs
    stopped: dict[str, int] = field(default_factory=dict)  # learner name -> the epoch after which it stopped early

    def __post_init__(self) -> None:
        self._steps = [batch_count(group.inputs.lengths, self.size, equal=group.equal_lengths) for group in self.groups]
        counted = zip(self.groups, self._steps, strict=True)
        self._per_epoch = {name: count for group, count in counted for name in group.names}
        if self.max_steps is not None:
            self.epochs = {name: math.ceil(self.max_steps / self._per_epoch[name]) for name in self.epochs}
        self._limit = sys.maxsize if self.max_steps is None else self.max_steps

    @property
    def tasks(self) -> dict[str, Any]:
        """Learner name -> task, group by group."""
        return {name: task for group in self.groups for name, task in group.tasks.items()}

    def last_epoch(self) -> int:
        """Number of epochs of the longest learner."""
        return max(self.epochs.values())

    def active(self, group: int, epoch: int) -> tuple[str, ...]:
        """Learners of a group that still learn in an epoch (from 0)."""
        return tuple(
            name
            for name in self.groups[group].names
            if epoch < self.epochs[name] and epoch <= self.stopped.get(name, epoch)
        )

    def steps_of(self, name: str) -> int:
        """How many steps a learner takes if it does not stop early."""
        return min(self.epochs[name] * self._per_epoch[name], self._limit)

    def epoch(self, epoch: int) -> list[Step]:
        """The steps of one epoch."""
        streams = []
        for number, group in enumerate(self.groups):
            if self.active(number, epoch):
                order = derive_seed(self.seed, "order", epoch)
                batches = length_batches(group.inputs.lengths, self.size, seed=order, equal=group.equal_lengths)
                batches = batches[: self._left(number, epoch)]
                streams.append([((at + 0.5) / len(batches), number, tuple(rows)) for at, rows in enumerate(batches)])
        return [Step(epoch, number, rows) for _, number, rows in heapq.merge(*streams)]

    def _left(self, number: int, epoch: int) -> int:
        """How many steps a group has in an epoch."""
        return min(self._steps[number], self._limit - epoch * self._steps[number])

    def __len__(self) -> int:
        return sum(
            self._left(number, epoch)
            for epoch in range(self.last_epoch())
            for number in range(len(self.groups))
            if self.active(number, epoch)
        )


def batches(jobs: Sequence[Job], num_workers: int = 0) -> Iterator[dict[str, Tensor]]:
    """The batches of some jobs, in order; made by loader workers where there are any."""
    if num_workers == 0 or len(jobs) < 2:
        for inputs, rows, epoch in jobs:
            yield inputs.batch(rows, epoch=epoch)
        return
    rng = torch.Generator().manual_seed(0)  # a loader would draw from torch's own
    data, make = cast("Any", jobs), cast("Any", _batch_or_error)
    workers = min(num_workers, len(jobs))
    for batch in DataLoader(data, batch_size=None, num_workers=workers, collate_fn=make, generator=rng):
        if isinstance(batch, LaminaError):
            raise batch
        yield batch


def _batch_or_error(job: Job) -> dict[str, Tensor] | LaminaError:
    """A batch; or what went wrong, of which a loader would raise a copy without its fields."""
    inputs, rows, epoch = job
    try:
        return inputs.batch(rows, epoch=epoch)
    except LaminaError as error:
        return error


def parts_of(rows: Sequence[int], parts: int, rank: int, world_size: int) -> list[tuple[list[int], bool]]:
    """The parts of a step that a process takes, each with whether it counts.

    Where no row is left for a process, it takes the first without counting it, since all of them must run the model.
    """
    own = [(list(rows[part::parts]), True) for part in range(rank, parts, world_size) if part < len(rows)]
    return own or [([rows[0]], False)]
