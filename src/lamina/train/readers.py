"""The readers of a bank as what is trained and scored, and its base where that is trained along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import torch

from lamina.data.cache import CacheSettings, obstacle, open_states
from lamina.errors import ConfigError, check_known
from lamina.layers.fingerprints import fingerprint_of
from lamina.train.identity import reader_settings, starting_weights
from lamina.train.learner import BASE, Learner, reader_groups
from lamina.train.rates import parameter_groups
from lamina.train.subjects import Subject, placed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.options import FitOptions
    from lamina.train.plan import Group, Plan

GIB = 1 << 30


class BankSubject(Subject):
    """The readers of a bank, and its base where that is trained along."""

    def __init__(self, bank: ReaderBank, op: str, processor: Any = None) -> None:
        self.bank, self.base, self.op, self.draws = bank, bank.model, op, bank.train_base
        self.modules = (bank, bank.model) if bank.train_base else (bank,)
        self.processor = bank.processor if processor is None else processor
        if self.processor is None:
            raise ConfigError(
                f"{op}: the bank has no processor; it is needed to read examples. Use ReaderBank(model, processor=...)."
            )

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Raise an error unless every task has these parts, and fits its reader's head."""
        if not tasks:
            raise ConfigError(f"{self.op}: no task was given; at least one is needed, as {{reader name: task}}.")
        super().check(tasks, parts)
        for name, task in tasks.items():
            check_known(self.op, [name], self.bank, "reader")
            head = self.bank[name].config.head
            for what in ("kind", "problem_type", "labels"):
                has, needs = getattr(head, what), getattr(task, what)
                if tuple(has) != tuple(needs):
                    raise ConfigError(
                        f"task {task.name}: its {what} is {needs}, reader '{name}' was made for {has}; they must "
                        "agree. Build the head from the task: labels=task.labels, problem_type=task.problem_type."
                    )

    def settings(self, name: str) -> dict[str, Any]:
        """The reader's config."""
        return {**reader_settings(self.bank[name].config), "stack": self.bank[name].stack}

    def starting_weights(self, learnt: Sequence[Tensor]) -> str:
        """All that the readers read; of a model that is trained too, all that did not start at random."""
        if self.bank.train_base:
            return starting_weights(self.base, learnt)
        used = sorted({self.bank[name].stack for name in self.bank})
        return " ".join(fingerprint_of(self.bank.stacks[name]) for name in used)

    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:
        """See that the states that some fusions keep fit in memory, and open the cache where it is asked for."""
        for group in groups:
            if group.part == "train":
                self._check_memory(group, options.batch_size)
        if options.cache == "off":
            return
        settings = CacheSettings(
            mode=options.cache,
            dtype=options.cache_dtype,
            folder=options.cache_dir,
            precision=options.precision,
            batch_size=options.scoring_batch_size,
            passes=passes,
            progress=options.progress,
        )
        readable = [group for group in groups if obstacle(self.bank, group.names, group.inputs) is None]
        used = {self.bank[name].stack for group in readable for name in group.names}
        marks = {name: fingerprint_of(stack) for name, stack in self.bank.stacks.items() if name in used}
        for group in groups:
            group.states = open_states(self.bank, group.inputs, group.names, fingerprints=marks, settings=settings)

    def kept_bytes(self, names: Sequence[str], tokens: int) -> int:
        """Bytes that the readers whose fusions need all states at once hold for one batch, at least.

        The states themselves are shared; while training every such reader also keeps what it computed from each.
        `tokens` counts padding.
        """
        bank = self.bank
        buffered = [bank[name] for name in names if not bank[name].config.fusion.streams]
        layers = {(reader.stack, layer) for reader in buffered for layer in reader.layers}
        shared = sum(bank.stacks[stack].width for stack, _ in layers) * bank.model.dtype.itemsize
        own = sum(len(reader.layers) * bank.stacks[reader.stack].width * 4 for reader in buffered)
        return tokens * (shared + own)

    def _check_memory(self, group: Group, batch_size: int) -> None:
        lengths = group.inputs.lengths
        count, longest = min(batch_size, len(lengths)), int(max(lengths))
        needed, free = self.kept_bytes(group.names, count * longest), free_bytes(self.device)
        if needed > free:
            names = ", ".join(name for name in group.names if not self.bank[name].config.fusion.streams)
            raise ConfigError(
                f"{self.op}: the fusions of {names} need all layers' states at once, {needed / GIB:.1f} GiB for "
                f"{count} windows of {longest} tokens; {free / GIB:.1f} GiB are free. Use a smaller batch_size or "
                "max_length, fewer layers or readers, or a fusion that streams."
            )

    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """The readers, each with its own rate; then the base, over all steps of the run."""
        learners = []
        for name, task in tasks.items():
            groups, total = reader_groups(self.bank[name], rates[name], options.weight_decay), plan.steps_of(name)
            learners.append(Learner(name, self.bank[name], groups, metric=task.metric, total=total, options=options))
        if self.bank.train_base:
            groups = parameter_groups(self.bank.model, options, options.base_learning_rate, self.op)
            learners.append(Learner(BASE, self.bank.model, groups, metric="mean", total=len(plan), options=options))
        return learners

    def _run(self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: Any) -> Any:
        batch = self.arguments(batch)
        if states is not None:
            return self.bank.read_states(states, batch, readers=names, labels=labels)
        return self.bank(**batch, readers=names, labels=labels)

    def losses(
        self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: Any
    ) -> list[Tensor]:
        """Each reader's loss and its regularisation."""
        out = self._run(batch, placed(labels, self.device), names, states)
        return [out[name].loss for name in names]

    def count(self, name: str, labels: Tensor) -> float:
        """As its head counts."""
        return float(self.bank[name].head.count(labels.to(self.device)))

    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: Any
    ) -> dict[str, Any]:
        """The readers' logits; where the inputs make the labels, perhaps of labelled positions alone."""
        given = {} if labels is None else dict.fromkeys(names, labels)
        out = self._run(batch, given, names, states)
        return {name: out[name].logits for name in names}

    def outputs_per_position(self, name: str) -> int:
        """What the head says."""
        return self.bank[name].head.outputs

    def trained_with(self, names: Sequence[str], option: str) -> int | None:
        """The largest value of an option that readers were trained with; None where one does not say."""
        values = [self.bank[name].info.get(option) for name in names]
        known = [int(value) for value in values if value is not None]
        return max(known) if len(known) == len(values) else None


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
