"""Which rows a training step sees: tasks over the same inputs share a pass, the others take turns."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader

from lamina.data.batches import length_batches
from lamina.errors import LaminaError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence

    from torch import Tensor

    from lamina.tasks.base import Inputs, Kind, Targets
    from lamina.tasks.task import Task

    Encodings = MutableMapping[Hashable, Inputs]
    """Inputs that were made before, for runs that read the same examples again."""


@dataclass
class Group:
    """Tasks over the same inputs: encoded once, run in one pass.

    Attributes:
        part: Which part of the tasks they are: "train", "validation" or "test".
        tasks: Learner name -> task.
        kind: What encoded them.
        inputs: Their rows.
        targets: Learner name -> its labels; None where the inputs make them.
        states: The cached states of the rows, where the model is not to be run; else None.
    """

    part: str
    tasks: Mapping[str, Any]  # of `Task`; to predict, of `TaskLike`
    kind: Kind
    inputs: Inputs
    targets: dict[str, Targets | None]
    states: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The learners."""
        return tuple(self.tasks)

    def labels(self, rows: Sequence[int], made: Tensor | None, names: Iterable[str]) -> dict[str, Tensor]:
        """Learner name -> labels of some rows.

        Args:
            rows: Which.
            made: Those that the inputs made.
            names: Which learners.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            targets = self.targets[name]
            labels = made if targets is None else targets.tensor(rows)
            if labels is not None:
                found[name] = labels
        return found

    def truncated(self, name: str) -> int:
        """How many examples a learner sees without their end."""
        return kind_of(self.tasks[name].kind).truncated(self.inputs)


def group_tasks(
    tasks: Mapping[str, Task], options: EncodeOptions, processor: Any, encodings: Encodings | None = None
) -> list[Group]:
    """Put the tasks with the same inputs together, and encode each set of examples once.

    Args:
        tasks: Learner name -> task.
        options: Which part, and how it is read.
        processor: Tokenizer or image processor.
        encodings: What was encoded before, and is used again; filled.
    """
    encodings = {} if encodings is None else encodings
    splits = {name: task.split(options.part) for name, task in tasks.items()}
    together: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, split in splits.items():
        together[kind_of(tasks[name].kind).inputs, split.key].append(name)
    groups: list[Group] = []
    for key, names in together.items():
        kinds = {name: kind_of(tasks[name].kind) for name in names}
        first = next((name for name in names if kinds[name].per_token), names[0])
        how = replace(options, windows=kinds[first].per_token)
        mark = (*key, how, len(splits[first]))
        if mark not in encodings:
            encodings[mark] = kinds[first].encode(splits[first], processor, how)
        inputs = encodings[mark]
        targets: dict[str, Targets | None] = {}
        made: dict[tuple[int, str], Targets | None] = {}
        for name in names:
            same = (id(splits[name]), tasks[name].kind)
            if same not in made:
                made[same] = kinds[name].targets(tasks[name], splits[name], inputs)
            targets[name] = made[same]
        groups.append(Group(options.part, {name: tasks[name] for name in names}, kinds[first], inputs, targets))
    return groups


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

    Attributes:
        groups: The sets of inputs.
        epochs: Learner name -> how many times it goes through its rows.
        size: Rows per step.
        seed: Decides the order.
        max_steps: A learner's steps end there, whatever its epochs.
        stopped: Learner name -> the epoch after which it stopped early.
    """

    groups: Sequence[Group]
    epochs: Mapping[str, int]
    size: int
    seed: int
    max_steps: int | None = None
    stopped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = [-(-len(group.inputs.lengths) // self.size) for group in self.groups]
        if self.max_steps is not None:
            per_epoch = {
                name: count for group, count in zip(self.groups, self._steps, strict=True) for name in group.names
            }
            self.epochs = {name: -(-self.max_steps // per_epoch[name]) for name in self.epochs}

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
        number = next(number for number, group in enumerate(self.groups) if name in group.names)
        whole = self.epochs[name] * self._steps[number]
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def epoch(self, epoch: int) -> list[Step]:
        """The steps of one epoch."""
        streams = []
        for number, group in enumerate(self.groups):
            if self.active(number, epoch):
                order = derive_seed(self.seed, "order", epoch)
                batches = length_batches(group.inputs.lengths, self.size, seed=order)[: self._left(number, epoch)]
                streams.append([((at + 0.5) / len(batches), number, tuple(rows)) for at, rows in enumerate(batches)])
        return [Step(epoch, number, rows) for _, number, rows in heapq.merge(*streams)]

    def _left(self, number: int, epoch: int) -> int:
        """How many steps a group has in an epoch."""
        count = self._steps[number]
        return count if self.max_steps is None else min(count, self.max_steps - epoch * count)

    def __len__(self) -> int:
        return sum(
            self._left(number, epoch)
            for epoch in range(self.last_epoch())
            for number in range(len(self.groups))
            if self.active(number, epoch)
        )


class _Jobs:
    """Batches by their number, for the workers of a loader; what goes wrong is handed on, to be raised where it tells.

    (A loader would raise a copy that has lost its fields, with the worker's traceback for a message.)
    """

    def __init__(self, jobs: Sequence[tuple[Inputs, Sequence[int], int]]) -> None:
        self._jobs = jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, number: int) -> dict[str, Tensor] | LaminaError:
        inputs, rows, epoch = self._jobs[number]
        try:
            return inputs.batch(rows, epoch=epoch)
        except LaminaError as error:
            return error


def batches(jobs: Sequence[tuple[Inputs, Sequence[int], int]], num_workers: int = 0) -> Iterator[dict[str, Tensor]]:
    """The batches of (inputs, rows, epoch), in order; made by loader workers where there are any.

    Raises:
        DataError: If a row cannot be read.
    """
    if num_workers == 0 or len(jobs) < 2:
        for inputs, rows, epoch in jobs:
            yield inputs.batch(rows, epoch=epoch)
        return
    rng = torch.Generator().manual_seed(0)  # a loader would draw from torch's own
    workers = min(num_workers, len(jobs))
    loader: Any = DataLoader(cast("Any", _Jobs(jobs)), batch_size=None, num_workers=workers, generator=rng)
    for batch in loader:
        if isinstance(batch, LaminaError):
            raise batch
        yield batch


def parts_of(rows: Sequence[int], parts: int, rank: int, world_size: int) -> list[tuple[list[int], bool]]:
    """The parts of a step that a process takes, each with whether it counts.

    Where no row is left for a process, it takes the first without counting it, since all of them must run the model.
    """
    own = [(list(rows[part::parts]), True) for part in range(rank, parts, world_size) if part < len(rows)]
    return own or [([rows[0]], False)]
