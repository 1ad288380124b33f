"""Groups of tasks that share examples, and the steps of a training run, in which groups take turns."""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.data.batches import batch_count, length_batches
from lamina.data.state_cache import CachedStates, FramedInputs, StateMasks
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from lamina.data.recorded_states import RowStates
    from lamina.tasks.base import Inputs, Targets
    from lamina.tasks.task import Task


LEAST_STEPS = 200  # least number of training steps of a reader, unless the number of epochs is given
_USUAL_EPOCHS = 3


def usual_epochs(rows: int, batch_size: int) -> int:
    """Return the default number of epochs of estimators: 3, or more if 200 steps of `batch_size` rows need more."""
    return max(_USUAL_EPOCHS, math.ceil(LEAST_STEPS / math.ceil(rows / batch_size)))


@dataclass
class Group:
    """Tasks over the same examples, which are encoded once and share each pass. `groups_of` makes the groups of a run.

    Attributes:
        part: The split of the tasks that is encoded: "train", "validation", "test", or "predict".
        tasks: Learner name -> its `Task`; for "predict" its `TaskOutline`, which has no examples.
        inputs: The encoded examples, as rows: windows, text blocks, images or audio clips.
        targets: Learner name -> labels of the rows; {} for "predict". None: the labels are made with the inputs (masked
            tokens, target texts).
        states: Cached or recorded hidden states of the rows. None: the model computes the states of every batch.
    """

    part: str
    tasks: Mapping[str, Any]
    inputs: Inputs
    targets: dict[str, Targets | None]
    states: RowStates | None = None

    @property
    def equal_lengths(self) -> bool:
        """Whether all rows of a batch must have the same length, because padding would change the model's results."""
        return bool(getattr(self.inputs, "equal_lengths", False))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the group's learners, in the order of `tasks`."""
        return tuple(self.tasks)

    @property
    def batched(self) -> Inputs:
        """The object that makes batches: usually the group's inputs.

        For audio clips with cached states, it is one whose batches have only the masks of these states.
        """
        if not isinstance(self.states, CachedStates) or not isinstance(self.inputs, FramedInputs):
            return self.inputs
        return StateMasks(self.states.layout.lengths)

    def labels(self, rows: Sequence[int], from_inputs: Tensor | None, names: Iterable[str]) -> dict[str, Tensor]:
        """Return learner name -> labels `[batch, ...]` of a batch, for the learners that have labels.

        Args:
            rows: Indices of the batch's rows.
            from_inputs: Labels that came with the batch's inputs, for learners whose `targets` are None. None: no
                labels came.
            names: Learners whose labels are returned.
        """
        targets = {name: self.targets[name] for name in names}
        labels = {name: from_inputs if held is None else held.tensor(rows) for name, held in targets.items()}
        return {name: tensor for name, tensor in labels.items() if tensor is not None}

    def truncated(self, name: str) -> int:
        """Return the number of examples that are truncated for the learner `name`."""
        return self.tasks[name].kind.truncated(self.inputs)


class Step(NamedTuple):
    """One optimizer step of a run. It trains on rows of one group.

    Attributes:
        epoch: Epoch of the step, from 0.
        group: Index of the group among the groups of the plan.
        rows: Indices of the rows among the group's inputs.
    """

    epoch: int
    group: int
    rows: tuple[int, ...]


@dataclass
class Plan:
    """The steps of a training run, in order. A group's own steps do not depend on the other groups.

    Within an epoch, groups take turns in proportion to their numbers of steps, so that all of them end the epoch
    together. A learner that has stopped gets no more batches. A group whose learners all stopped has no more steps.

    Attributes:
        groups: The encoded training examples, with the tasks that are trained on them.
        epochs: Learner name -> number of passes over its rows; with `max_steps`, the number that the steps need.
        size: Rows per optimizer step, over all processes.
        seed: Seed of the order of the rows.
        max_steps: Number of steps per learner, in place of `epochs`. None: `epochs` decides.
        stopped: Learner name -> epoch (from 0) after which it stopped early. The engine adds entries.
    """

    groups: Sequence[Group]
    epochs: Mapping[str, int]
    size: int
    seed: int
    max_steps: int | None = None
    stopped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = [batch_count(group.inputs.lengths, self.size, equal=group.equal_lengths) for group in self.groups]
        counted = zip(self.groups, self._steps, strict=True)
        self._per_epoch = {name: count for group, count in counted for name in group.names}
        if self.max_steps is not None:
            self.epochs = {name: math.ceil(self.max_steps / self._per_epoch[name]) for name in self.epochs}
        self._limit = sys.maxsize if self.max_steps is None else self.max_steps

    @property
    def tasks(self) -> dict[str, Task]:
        """Learner name -> task, over all groups."""
        return {name: task for group in self.groups for name, task in group.tasks.items()}

    def last_epoch(self) -> int:
        """Return the largest number of epochs among the learners."""
        return max(self.epochs.values())

    def active(self, group: int, epoch: int) -> tuple[str, ...]:
        """Return the names of a group's learners that are still trained in an epoch.

        `group` is the index of the group, and `epoch` counts from 0.
        """
        return tuple(
            name
            for name in self.groups[group].names
            if epoch < self.epochs[name] and epoch <= self.stopped.get(name, epoch)
        )

    def steps_of(self, name: str) -> int:
        """Return how many optimizer steps the learner `name` takes if it does not stop early."""
        return min(self.epochs[name] * self._per_epoch[name], self._limit)

    def epoch(self, epoch: int) -> list[Step]:
        """Return the steps of one epoch (from 0), in order; [] once all learners have ended."""
        streams = []
        for number, group in enumerate(self.groups):
            if self.active(number, epoch):
                order = derive_seed(self.seed, "order", epoch)
                batches = length_batches(group.inputs.lengths, self.size, seed=order, equal=group.equal_lengths)
                batches = batches[: self._left(number, epoch)]
                streams.append([((at + 0.5) / len(batches), number, tuple(rows)) for at, rows in enumerate(batches)])
        return [Step(epoch, number, rows) for _, number, rows in heapq.merge(*streams)]

    def _left(self, number: int, epoch: int) -> int:
        """Return how many optimizer steps group `number` takes in an epoch (from 0), within the limit `max_steps`."""
        return min(self._steps[number], self._limit - epoch * self._steps[number])

    def __len__(self) -> int:
        return sum(
            self._left(number, epoch)
            for epoch in range(self.last_epoch())
            for number in range(len(self.groups))
            if self.active(number, epoch)
        )


def parts_of(rows: Sequence[int], parts: int, rank: int, world_size: int) -> list[tuple[list[int], bool]]:
    """Return this process's batches of a step: for each, its rows, and whether its loss counts.

    Batch i has every `parts`-th row, beginning with row i, and belongs to process i % `world_size`; empty batches are
    left out. Every process must run the model in each step, because processes wait for each other's gradients. So a
    process without rows of its own gets the first row, and its loss does not count.

    Args:
        rows: Rows of the whole step.
        parts: Number of batches of the step, over all processes.
        rank: Rank of this process, from 0.
        world_size: Number of processes.
    """
    shard = [(list(rows[part::parts]), True) for part in range(rank, parts, world_size) if part < len(rows)]
    return shard or [([rows[0]], False)]
