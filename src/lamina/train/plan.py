"""Which rows a training step sees: tasks over the same inputs share a pass, the others take turns."""

from __future__ import annotations

import heapq
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader

from lamina.data.batches import batch_count, length_batches
from lamina.errors import LaminaError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence

    from torch import Tensor

    from lamina.tasks.base import Inputs, Targets, TaskLike
    from lamina.tasks.task import Task

    Encodings = MutableMapping[Hashable, Inputs]
    """Inputs that were made before, for runs that read the same examples again."""
    Job = tuple[Inputs, Sequence[int], int]
    """What a batch is made of: inputs, rows, epoch."""


@dataclass
class Group:
    """Tasks over the same inputs: encoded once, run in one pass."""

    part: str  # "train", "validation", "test" or "predict"
    tasks: Mapping[str, Any]  # learner name -> `Task`; to predict, `TaskLike`
    inputs: Inputs
    targets: dict[str, Targets | None]  # learner name -> its labels; None where the inputs make them
    states: Any = None  # the cached states of the rows, where the model is not to be run

    @property
    def names(self) -> tuple[str, ...]:
        """The learners."""
        return tuple(self.tasks)

    @property
    def equal_lengths(self) -> bool:
        """Whether the rows of a batch must be of one length; see `AudioInputs`."""
        return bool(getattr(self.inputs, "equal_lengths", False))

    def labels(self, rows: Sequence[int], of_inputs: Tensor | None, names: Iterable[str]) -> dict[str, Tensor]:
        """Learner name -> labels of some rows, which the inputs may have made (`of_inputs`)."""
        targets = {name: self.targets[name] for name in names}
        labels = {name: of_inputs if own is None else own.tensor(rows) for name, own in targets.items()}
        return {name: tensor for name, tensor in labels.items() if tensor is not None}

    def truncated(self, name: str) -> int:
        """How many examples a learner sees without their end."""
        return kind_of(self.tasks[name].kind).truncated(self.inputs)


def group_tasks(
    tasks: Mapping[str, Task], options: EncodeOptions, processor: Any, encodings: Encodings | None = None
) -> list[Group]:
    """Put the tasks with the same inputs together, and encode each set of examples once.

    `encodings` is what was encoded before, and is used again; it is filled.
    """
    encodings = {} if encodings is None else encodings
    splits = {name: task.split(options.part) for name, task in tasks.items()}
    kinds = {name: kind_of(task.kind) for name, task in tasks.items()}
    together: dict[tuple[str, str, bool, int | None], list[str]] = defaultdict(list)
    for name, split in splits.items():
        task = tasks[name]
        together[kinds[name].inputs, split.key, task.by_row, task.image_size].append(name)
    groups: list[Group] = []
    for key, names in together.items():
        first = encoder_of(tasks, names)
        own = {"by_row": tasks[first].by_row, "image_size": tasks[first].image_size}
        how = replace(options, windows=kinds[first].per_token, **own)
        how = how if kinds[first].draws else replace(how, seed=0)
        mark = (*key, how, len(splits[first]))
        if mark not in encodings:
            encodings[mark] = kinds[first].encode(splits[first], processor, how)
        inputs = encodings[mark]
        targets: dict[tuple[int, str, bool], Targets | None] = {}  # made once for readers of one task
        same = {name: (id(splits[name]), tasks[name].kind, tasks[name].label_all_tokens) for name in names}
        for name in names:
            if same[name] not in targets:
                targets[same[name]] = kinds[name].targets(tasks[name], splits[name], inputs)
        own = {name: targets[same[name]] for name in names}
        groups.append(Group(options.part, {name: tasks[name] for name in names}, inputs, own))
    return groups


def encoder_of(tasks: Mapping[str, TaskLike], names: Sequence[str]) -> str:
    """Which learner's kind encodes the examples of several: one that answers token by token needs them whole."""
    return next((name for name in names if kind_of(tasks[name].kind).per_token), names[0])


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
