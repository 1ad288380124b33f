"""The readers of a bank as what is trained and scored, and its base where that is trained along."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from lamina.data.state_cache import CacheSettings, obstacle, open_states
from lamina.errors import ConfigError, check_known
from lamina.layers.fingerprints import fingerprint_of
from lamina.layers.preserve import evaluating
from lamina.tasks import kind_of
from lamina.train.base import Runner, placed
from lamina.train.identity import reader_settings, starting_weights
from lamina.train.learner import BASE, Learner
from lamina.train.memory import reader_memory, scoring_memory
from lamina.train.parameter_groups import parameter_groups, reader_groups
from lamina.train.scoring import autocast, scoring_rows
from lamina.utils import world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.groups import Group
    from lamina.train.memory import KeptBytes, Readers
    from lamina.train.options import FitOptions, PassOptions
    from lamina.train.plan import Plan

GIB = 1 << 30


class BankRunner(Runner):
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
            if self.bank[name].stack == "decoder" and kind_of(task.kind).processor != "tokenizer":
                came = f"reader '{name}' reads the decoder, and a task of kind {task.kind} has no texts for it"
                raise ConfigError(f"{self.op}: {came}. Make the reader with stack='encoder'.")
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
        """See that batches to train on and to score fit in memory, and open the cache where it is asked for."""
        for group in groups:
            (self._check_training if group.part == "train" else self._check_scoring)(group, options)
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

    def kept(self, group: Group, options: FitOptions) -> KeptBytes:
        """What the group's readers keep for the gradients of rows as long as the longest."""
        tokens = self._tokens(group)
        with autocast(self, options):
            kept = reader_memory(self.bank.model, self._readers(group), tokens, partial(self._labels, group))
        return kept._replace(row=max(kept.row, tokens * self._buffered_bytes(group.names)))

    def held(self, group: Group, options: PassOptions) -> KeptBytes:
        """What they hold at most to score such rows."""
        made = group.inputs.batch([0]).get("labels")  # heads that know them read labelled positions alone
        labels = None if made is None else partial(self._labels, group)
        with autocast(self, options):
            return scoring_memory(self.bank.model, self._readers(group), self._tokens(group), labels)

    def _tokens(self, group: Group) -> int:
        """Tokens of the longest row, as the readers see them: of images and sound the model says how many."""
        lengths = group.inputs.lengths
        batch = group.inputs.batch([int(np.argmax(lengths))])
        if "input_ids" in batch:
            return int(max(lengths))
        batch.pop("labels", None)
        first = {self.bank[name].stack: [0] for name in group.names}
        with evaluating(self.bank.model):
            states = self.bank.record_states(first, self.arguments(batch))
        return max(own[0].shape[1] for own in states.values())

    def _readers(self, group: Group) -> Readers:
        return {name: (self.bank.stacks[self.bank[name].stack], self.bank[name]) for name in group.names}

    def _labels(self, group: Group, rows: int) -> dict[str, Tensor]:
        """The labels of the longest row, so many times."""
        row = int(np.argmax(group.inputs.lengths))
        made = group.inputs.batch([row]).get("labels")
        of_inputs = None if made is None else made.expand(rows, -1)
        return placed(group.labels([row] * rows, of_inputs, group.names), self.device)

    def _buffered_bytes(self, names: Sequence[str]) -> int:
        """Bytes per token of the states that fusions which need all at once hold, those of several readers once."""
        bank = self.bank
        buffered = [bank[name] for name in names if not bank[name].config.fusion.streams]
        layers = {(reader.stack, layer) for reader in buffered for layer in reader.layers}
        return sum(bank.stacks[stack].width for stack, _ in layers) * bank.model.dtype.itemsize

    def _check_scoring(self, group: Group, options: FitOptions) -> None:
        """Raise ConfigError if what is held to score a batch is more than is free."""
        rows = min(scoring_rows(self, group, group.names, options), len(group.inputs.lengths))
        held, free, tokens = self.held(group, options), free_bytes(self.device), self._tokens(group)
        if held.of(rows) <= free:
            return
        fit = held.fitting(free)
        hint = f"Use eval_batch_size={fit}, or a" if fit else "Not one row fits. Use a"
        raise ConfigError(
            f"{self.op}: scoring {', '.join(group.names)} takes {held.of(rows) / GIB:.1f} GiB for {rows} rows of "
            f"{tokens} tokens; {free / GIB:.1f} GiB are free. {hint} smaller max_length, fewer layers or fewer readers."
        )

    def _check_training(self, group: Group, options: FitOptions) -> None:
        """Raise ConfigError if what must be kept for the gradients of a batch is more than is free."""
        rows = min(math.ceil(options.batch_size / world_size()), len(group.inputs.lengths))
        kept, free, tokens = self.kept(group, options), free_bytes(self.device), self._tokens(group)
        if kept.of(rows) <= free:
            return
        steps = kept.accumulation(options.step_size, free * world_size())
        hint = "Not one row fits. Use a smaller max_length, fewer layers or fewer readers."
        if steps is not None:
            size = options.step_size // steps
            hint = (
                f"Use batch_size={size} with gradient_accumulation_steps={steps}, which makes the same steps, or a "
                "smaller max_length, fewer layers or fewer readers."
            )
        raise ConfigError(
            f"{self.op}: the gradients of {', '.join(group.names)} keep {kept.of(rows) / GIB:.1f} GiB for {rows} rows "
            f"of {tokens} tokens; {free / GIB:.1f} GiB are free. {hint}"
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
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch hands it out again
        return torch.cuda.mem_get_info(device)[0] + kept
    return psutil.virtual_memory().available
