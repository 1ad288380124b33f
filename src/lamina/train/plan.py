"""Which texts a training step sees: tasks over the same texts share a pass, the others take turns."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lamina.data.batches import collate, length_batches
from lamina.data.encode import blocks, encode
from lamina.errors import ConfigError
from lamina.tasks.kinds import MASKED
from lamina.tasks.masking import Masking
from lamina.tasks.targets import targets
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lamina.data.cached_states import CachedStates
    from lamina.data.windows import Encoded
    from lamina.tasks.split import Split
    from lamina.tasks.targets import Targets
    from lamina.tasks.task import Task


@dataclass
class Group:
    """Tasks over the same texts: encoded once, run in one pass.

    Attributes:
        part: Which part of the tasks they are: "train", "validation" or "test".
        names: Readers that learn from these texts.
        encoded: Their windows.
        targets: Per reader the labels of every window; empty where the labels are the texts' own tokens.
        masking: How tokens are hidden, for masked language modelling; else None.
        seed: Decides which tokens are hidden in the train part; those of the other parts are the same in every run.
        states: The cached states of the windows, where the model is not to be run; else None.
    """

    part: str
    names: tuple[str, ...]
    encoded: Encoded
    targets: dict[str, Targets]
    masking: Masking | None = None
    seed: int = 0
    states: CachedStates | None = None

    @property
    def fixed(self) -> bool:
        """Whether the model reads the same tokens in every epoch, so that its states may be kept."""
        return self.masking is None or self.part != "train"

    def cut(self, name: str) -> int:
        """How many texts a reader sees without their end: none, if it reads window by window."""
        if self.masking is not None or self.targets[name].per_token:
            return 0
        return self.encoded.truncated or self.encoded.window.count(1)

    def batch(self, rows: Sequence[int], names: Sequence[str], processor: Any, *, epoch: int = 0) -> dict[str, Any]:
        """What the bank is called with for these windows.

        Args:
            rows: Which windows.
            names: Which readers.
            processor: The tokenizer.
            epoch: In masked language modelling, every epoch hides other tokens of the train part.
        """
        if self.masking is not None:
            hidden = collate([self._hidden(self.masking, row, epoch) for row in rows], processor)
            tokens = hidden.pop("labels")
            return {**hidden, "labels": dict.fromkeys(names, tokens), "readers": list(names)}
        inputs = collate([self.encoded.features[row] for row in rows], processor)
        labels = {name: self.targets[name].tensor(rows) for name in names}
        known = {} if self.states is None else {"states": self.states.batch(rows)}
        return {**inputs, **known, "labels": labels, "readers": list(names)}

    def _hidden(self, masking: Masking, row: int, epoch: int) -> dict[str, list[int]]:
        """One window with some tokens hidden: which ones depends on nothing but part, seed, epoch and row."""
        feature = self.encoded.features[row]
        when = (self.seed, epoch) if self.part == "train" else ()
        read, labels = masking.hide(feature["input_ids"], derive_seed("mask", self.part, *when, row))
        return {**feature, "input_ids": read, "labels": labels}


def group_tasks(
    tasks: Mapping[str, Task], part: str, processor: Any, *, max_length: int, stride: int | None = None
) -> list[Group]:
    """Put the tasks whose texts in `part` are the same together, and encode each set of texts once.

    Tasks of masked language modelling are kept apart from the others: what they read has hidden tokens.

    Args:
        tasks: Reader name -> task.
        part: "train", "validation" or "test".
        processor: The tokenizer.
        max_length: Tokens per window.
        stride: Tokens two windows share; see `encode`.
    """
    splits = {name: task.split(part) for name, task in tasks.items()}
    by_texts: dict[tuple[bool, tuple[Any, ...]], list[str]] = defaultdict(list)
    for name, split in splits.items():
        by_texts[tasks[name].kind == MASKED, split.texts].append(name)
    groups: list[Group] = []
    for (masked, texts), names in by_texts.items():
        if masked:
            masking = Masking.of(processor)
            groups.append(Group(part, tuple(names), blocks(texts, processor, max_length=max_length), {}, masking))
            continue
        per_word = any(splits[name].words is not None for name in names)
        encoded = encode(texts, processor, max_length=max_length, windows=per_word, stride=stride, offsets=per_word)
        groups.append(Group(part, tuple(names), encoded, _targets(encoded, {name: splits[name] for name in names})))
    return groups


def _targets(encoded: Encoded, splits: Mapping[str, Split]) -> dict[str, Targets]:
    """Per reader the labels of every window; made once for readers of the same split."""
    made = {id(split): targets(encoded, split) for split in splits.values()}
    return {name: made[id(split)] for name, split in splits.items()}


@dataclass(frozen=True)
class Step:
    """One training step: windows of one group, in one epoch of that group."""

    epoch: int
    group: int
    rows: tuple[int, ...]


@dataclass
class Plan:
    """Every step of a run, in order; the same for a group whatever else is trained beside it.

    Within an epoch the groups take turns in proportion to their numbers of batches, so that all of them end it
    together. A reader that has stopped gets no more batches, and a group all of whose readers have stopped none at all.

    Attributes:
        groups: The sets of texts.
        epochs: Reader name -> how many times it goes through its texts.
        batch_size: Windows per step.
        seed: Decides the order, and which tokens are hidden in masked language modelling.
        stopped: Reader name -> the epoch after which it stopped early.
    """

    groups: Sequence[Group]
    epochs: Mapping[str, int]
    batch_size: int
    seed: int
    stopped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"fit: batch_size is {self.batch_size}; it must be at least 1. Give a larger one.")
        self.groups = [replace(group, seed=self.seed) for group in self.groups]

    def last_epoch(self) -> int:
        """Number of epochs of the longest reader."""
        return max(self.epochs.values())

    def active(self, group: int, epoch: int) -> tuple[str, ...]:
        """Readers of a group that still learn in an epoch (from 0)."""
        return tuple(
            name
            for name in self.groups[group].names
            if epoch < self.epochs[name] and epoch <= self.stopped.get(name, epoch)
        )

    def steps_of(self, name: str) -> int:
        """How many steps a reader takes if it does not stop early."""
        group = next(group for group in self.groups if name in group.names)
        return self.epochs[name] * -(-len(group.encoded.features) // self.batch_size)

    def epoch(self, epoch: int) -> list[Step]:
        """The steps of one epoch."""
        streams = []
        for number, group in enumerate(self.groups):
            if self.active(number, epoch):
                order = derive_seed(self.seed, "order", epoch)
                batches = length_batches(group.encoded.lengths, self.batch_size, seed=order)
                streams.append([((at + 0.5) / len(batches), number, tuple(rows)) for at, rows in enumerate(batches)])
        return [Step(epoch, number, rows) for _, number, rows in heapq.merge(*streams)]

    def __len__(self) -> int:
        return sum(self.size(epoch) for epoch in range(self.last_epoch()))

    def size(self, epoch: int) -> int:
        """Steps of an epoch, counted without drawing them."""
        return sum(
            -(-len(group.encoded.features) // self.batch_size)
            for number, group in enumerate(self.groups)
            if self.active(number, epoch)
        )

    def walk(self, done: int = 0) -> Iterator[tuple[Step, bool]]:
        """The steps from number `done` on, each with whether it ends its epoch.

        Whether a group still takes part is looked up when an epoch begins, so readers may stop while this runs, and
        a later call that knows when they stopped walks the same way.
        """
        for epoch in range(self.last_epoch()):
            size = self.size(epoch)
            if done >= size > 0:
                done -= size
                continue
            steps = self.epoch(epoch)
            for at in range(done, len(steps)):
                yield steps[at], at == len(steps) - 1
            done = 0
