"""Train and score the readers of a bank, and with `train_base` also the base model, which the readers read."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import psutil
import torch
from torch import nn

from lamina.bank.reader import READS_WORDS
from lamina.bank.recorded_base import check_reads_recorded, check_recorded_base
from lamina.data.state_cache import CacheSettings, open_states
from lamina.errors import ConfigError, check_known
from lamina.layers.fingerprints import fingerprint_of
from lamina.layers.preserve import evaluating
from lamina.layers.recorded import RecordedModel
from lamina.layers.types import adds_last, tokenizer_of
from lamina.store.processors import check_inputs, check_same_inputs
from lamina.store.save_model import check_reloads
from lamina.tasks import kind_of
from lamina.tasks.causal_lm import shifted
from lamina.tasks.recorded_rows import RowsOfStates
from lamina.tasks.targets import label_array
from lamina.train import memory
from lamina.train.base import Runner, to_device
from lamina.train.checkpoint import reader_settings, starting_weights
from lamina.train.learner import (
    BASE,
    Learner,
    parameter_groups,
    reader_groups,
    restart_output,
    scaled_groups,
    start_output,
)
from lamina.utils import JSON, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lamina.bank import ReaderBank, ReaderModule
    from lamina.bank.reader import BankOutput
    from lamina.bank.stack_pass import States
    from lamina.layers.types import Batch, Processor
    from lamina.tasks.task import Task
    from lamina.train.memory import BatchBytes, Readers
    from lamina.train.options import FitOptions, PassOptions
    from lamina.train.plan import Group, Plan

GIB = 1 << 30


class AnswerEngine(Protocol):
    """An engine that computes readers' answers to a batch in place of PyTorch, such as an ONNX Runtime session."""

    def run(self, bank: ReaderBank, batch: Batch, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return reader name -> logits of a batch for the readers `names`; None if PyTorch must compute this batch."""
        ...


class BankRunner(Runner):
    """Runs batches through the readers of a bank. With the bank's `train_base`, it trains the base model too.

    Args:
        bank: The bank. For "fit", a bank without a processor gets `processor`, so that both are saved together.
        op: The public operation, such as "fit" or "predict", for messages.
        processor: Tokenizer, image processor or feature extractor. None: the bank's.
        reads_inputs: Whether the model reads examples. False: all states are recorded, so that no processor is needed.
        readers: Name -> reader that answers. None: all. The processor must not have changed since these were
            trained or loaded, except for "fit", where readers learn from the processor as it is now.

    Attributes:
        engine: Computes the outputs of batches. None: PyTorch computes them.

    Raises:
        ConfigError: If there is no processor, it has token ids beyond the model's embedding table, or the bank was made
            from recorded states and has no model to read inputs. For "fit" also if `processor` makes other inputs than
            the bank's own; for other operations, if the bank's own was changed since a reader was trained or loaded.
        BaseMismatchError: If, for other operations than "fit", `processor` makes other inputs than the bank's own.
    """

    engine: AnswerEngine | None = None

    def __init__(
        self,
        bank: ReaderBank,
        op: str,
        processor: Processor | None = None,
        *,
        reads_inputs: bool = True,
        readers: Mapping[str, ReaderModule] | None = None,
    ) -> None:
        self.bank, self.base, self.op, self.uses_global_rng = bank, bank.model, op, bank.train_base
        self._spreads: dict[str, float] = {}  # reader of a regression -> standard deviation of its labels
        self.modules = (bank, bank.model) if bank.train_base else (bank,)
        self.processor = bank.processor if processor is None else processor
        if reads_inputs and isinstance(bank.model, RecordedModel):
            hint = "Attach it, by bank.attach(model, tokenizer) or --model MODEL"
            raise ConfigError(f"{op}: the bank was made from recorded states and has no model to read inputs. {hint}.")
        if self.processor is None and reads_inputs:
            raise ConfigError(
                f"{op}: the bank has no processor; it is needed to read examples. Use ReaderBank(model, processor=...)."
            )
        bank.check_ids(op, self.processor)
        if bank.processor is not None and bank.processor is not self.processor:
            check_same_inputs(op, bank.processor, self.processor)
        if op != "fit":
            check_inputs(op, bank.processor, bank.select(None, op) if readers is None else readers)
        if op == "fit" and bank.processor is None:
            bank.processor = processor  # so that it is saved with the readers, which depend on it

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Check that every task has labelled rows in the splits `parts` and fits the head of its reader.

        Raises:
            UnknownNameError: If the bank has no reader of a task's name, or a task does not have a split.
            ConfigError: If there is no task, a split has no labelled row, task and head differ in kind, problem type or
                labels, a reader of the decoder has a task without texts, or tags and a tokenizer without an end token,
                or the frozen model has changed since the bank was made.
        """
        if not tasks:
            raise ConfigError(f"{self.op}: no task was given; at least one is needed, as {{reader name: task}}.")
        super().check(tasks, parts)
        self.bank.seal_base(self.op)
        for name, task in tasks.items():
            check_known(self.op, [name], self.bank, "reader")
            head = self.bank[name].config.head
            if self.bank[name].stack == "decoder" and task.kind.processor != "tokenizer":
                came = f"reader '{name}' reads the decoder, and a task of kind {task.kind} has no texts for it"
                raise ConfigError(f"{self.op}: {came}. Make the reader with stack='encoder'.")
            if self._is_one_late(name, None) and not adds_last(tokenizer_of(self.processor)):
                came = (
                    f"reader '{name}' tags words of the decoder, which does not read the last one without an end token"
                )
                hint = "Use a tokenizer that adds one, or make the reader with stack='encoder'"
                raise ConfigError(f"{self.op}: {came}. {hint}.")
            for what in ("kind", "problem_type", "labels"):
                has, needs = getattr(head, what), getattr(task, what)
                needs = str(needs) if what == "kind" else needs
                if tuple(has) != tuple(needs):
                    raise ConfigError(
                        f"task {task.name}: its {what} is {needs}, reader '{name}' was made for {has}; they must "
                        "agree. Build the head from the task: labels=task.labels, problem_type=task.problem_type."
                    )

    def settings(self, name: str) -> dict[str, JSON]:
        """Return `reader_settings` of the reader `name`, with the stack that it reads as "stack"."""
        return {**reader_settings(self.bank[name].config), "stack": self.bank[name].stack}

    def starting_weights(self, trained: Sequence[Tensor]) -> str:
        """Return a fingerprint of the model's weights at the start of a run.

        For a frozen model, only the stacks that readers read count. With `train_base`, weights that start at random do
        not count. The argument is that of `Runner.starting_weights`.
        """
        if self.bank.train_base:
            return starting_weights(self.base, trained)
        used = sorted({self.bank[name].stack for name in self.bank})
        return " ".join(fingerprint_of(self.bank.stacks[name]) for name in used)

    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:
        """Check that batches fit in memory; unless `options.cache` is "off", attach cached states to the groups.

        States that no earlier run has stored are computed now. With "auto", a group gets none if the cache cannot be
        used or saves no time. The arguments are those of `Runner.prepare`.

        Raises:
            ConfigError: If a batch does not fit in memory (the message says which batch size does), or a reader cannot
                be trained on recorded states. Also if the base model is trained, and could not be loaded again after it
                is saved.
            BaseMismatchError: If a group's states were recorded from a different model than the bank's.
            CacheError: If `cache` is "on" and the states cannot be cached.
        """
        if self.bank.train_base:
            check_reloads(self.bank.model, self.op)
        self.prepare_recorded(groups, options)
        for group in groups:
            self._check_memory(group, options)
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
        fingerprints: dict[str, str] = {}
        for group in (group for group in groups if group.states is None):
            group.states = open_states(
                self.bank, group.inputs, group.names, fingerprints=fingerprints, settings=settings
            )

    def prepare_recorded(self, groups: Sequence[Group], options: PassOptions) -> None:
        """Check that readers can use their groups' recorded states, and set which layers these states return.

        The groups are changed in place; those without recorded states stay as they are. The states will be returned on
        the runner's device. `options` are those of the run.

        Raises:
            ConfigError: If a reader cannot be trained on these states; or all groups have recorded states, and some
                were recorded with another `max_length` or `add_prefix_space` than the run sets.
            BaseMismatchError: If the states were recorded from a different model than the bank's.
        """
        all_recorded = all(isinstance(group.states, RowsOfStates) for group in groups)
        for group in groups:
            if isinstance(group.states, RowsOfStates):
                facts, manifest = group.states.recorded.facts, group.states.recorded.manifest
                for option in ("max_length", "add_prefix_space") if all_recorded else ():
                    asked, known = getattr(options, option), getattr(manifest, option)
                    if asked and known is not None and asked != known:
                        got = f"{option} is {asked}, and the states in {group.states.recorded.folder}"
                        rule = f"were recorded with {known}; they cannot be changed"
                        raise ConfigError(f"{self.op}: {got} {rule}. Leave it out, or record them again.")
                check_recorded_base(self.op, self.bank.stacks, self.bank.model, facts)
                for name in group.names:
                    check_reads_recorded(self.op, name, self.bank[name], facts)
                layers = sorted({layer for name in group.names for layer in self.bank[name].layers})
                group.states = replace(group.states, layers=tuple(layers), device=self.device)

    def training_memory(self, group: Group, options: FitOptions) -> BatchBytes:
        """Return the memory that a training batch of the group needs if every row is as long as the longest one.

        Per row, it is the larger of two amounts: what autograd saves for the gradients, and the states that are kept
        for fusions that need all of their layers at once. A layer that several readers keep counts once.
        """
        bank, tokens = self.bank, self._tokens(group)
        with self.autocast(options):
            saved = memory.reader_memory(bank.model, self._readers(group), tokens, partial(self._labels, group))
        buffered = [bank[name] for name in group.names if not bank[name].config.fusion.streams]
        layers = {(reader.stack, layer) for reader in buffered for layer in reader.layers}
        width = sum(bank.stacks[stack].width for stack, _ in layers)
        return saved._replace(row=max(saved.row, tokens * width * bank.model.dtype.itemsize))

    def scoring_memory(self, group: Group, options: PassOptions) -> BatchBytes:
        """Return the memory that scoring a batch of the group needs if every row is as long as the group's longest."""
        # If the inputs make labels (masked tokens), heads compute the logits of labelled positions only.
        has_labels = "labels" in group.inputs.batch([0])
        labels = partial(self._labels, group) if has_labels else None
        with self.autocast(options):
            return memory.scoring_memory(self.bank.model, self._readers(group), self._tokens(group), labels)

    def _tokens(self, group: Group) -> int:
        """Return how many tokens a group's longest row has, or how many hidden states if it has no tokens.

        Images, audio and recorded states have no tokens. For images and audio, the model runs once on the row, without
        gradients, to count the states.
        """
        lengths = group.inputs.lengths
        if isinstance(group.states, RowsOfStates):
            return group.states.longest()
        batch = group.inputs.batch([int(np.argmax(lengths))])
        if "input_ids" in batch:
            return int(max(lengths))
        batch.pop("labels", None)
        first = {self.bank[name].stack: [0] for name in group.names}
        with evaluating(self.bank.model):
            states = self.bank.record_states(first, self.arguments(batch))
        return max(by_layer[0].shape[1] for by_layer in states.values())

    def _readers(self, group: Group) -> Readers:
        return {name: (self.bank.stacks[self.bank[name].stack], self.bank[name]) for name in group.names}

    def _labels(self, group: Group, rows: int) -> dict[str, Tensor]:
        """Return reader name -> labels of the group's longest row, `rows` times, on the runner's device."""
        row = int(np.argmax(group.inputs.lengths))
        labels = group.inputs.batch([row]).get("labels")
        from_inputs = None if labels is None else labels.expand(rows, -1)
        return to_device(group.labels([row] * rows, from_inputs, group.names), self.device)

    def _check_memory(self, group: Group, options: FitOptions) -> None:
        """Raise ConfigError if a batch of the group needs more memory than is free, and say what would fit.

        In training it is the memory for the gradients. Smaller batches with accumulated gradients leave the rows per
        optimizer step the same.
        """
        trains, free, tokens = group.part == "train", free_bytes(self.device), self._tokens(group)
        size = math.ceil(options.batch_size / world_size())
        rows = min(size if trains else self.rows_per_pass(group, group.names, options), len(group.inputs.lengths))
        needs = (self.training_memory if trains else self.scoring_memory)(group, options)
        if (needed := needs.total(rows)) <= free:
            return
        names, fits = ", ".join(group.names), None
        if trains:
            what = f"the gradients of {names} keep"
            if (steps := needs.accumulation_steps(options.step_size, free * world_size())) is not None:
                smaller = options.step_size // steps
                fits = f"batch_size={smaller} with gradient_accumulation_steps={steps}, which makes the same steps"
        else:
            what = f"scoring {names} takes"
            fits = f"eval_batch_size={most}" if (most := needs.max_rows(free)) else None
        hint = "Not one row fits. Use a" if fits is None else f"Use {fits}, or a"
        raise ConfigError(
            f"{self.op}: {what} {needed / GIB:.1f} GiB for {rows} rows of {tokens} tokens; {free / GIB:.1f} GiB are "
            f"free. {hint} smaller max_length, fewer layers or fewer readers."
        )

    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """Return one learner for each task's reader and, with `train_base`, the base model as the last learner.

        The base takes part in every step, with the learning rate `options.base_learning_rate`. The linear output of a
        regression starts at the mean of the labels and learns at their scale; see `start_output` and `scaled_groups`.
        The arguments are those of `Runner.learners`.

        Raises:
            ConfigError: If a pattern of `weight_decay_on` without "!" matches no parameter.
            LaminaError: With `train_base`, the errors of `parameter_groups`.
        """
        learners = []
        for name, task in tasks.items():
            groups, total = reader_groups(self.bank[name], rates[name], options, self.op), plan.steps_of(name)
            if self._is_one_late(name, None):
                self.bank[name].info[READS_WORDS] = True
            output, on_stage = getattr(self.bank[name].head, "output", None), None
            if task.problem_type == "regression" and isinstance(output, nn.Linear):
                labels = label_array(task.split("train"))
                spread, on_stage = start_output(output, labels), partial(restart_output, output, labels)
                groups = scaled_groups(groups, output, spread**2 if options.optimizer == "sgd" else spread)
                self._spreads[name] = spread
            module, metric = self.bank[name], task.metric
            learners.append(
                Learner(name, module, groups, metric=metric, total=total, options=options, on_stage=on_stage)
            )
        if self.bank.train_base:
            groups = parameter_groups(self.bank.model, options, options.base_learning_rate, self.op)
            learners.append(Learner(BASE, self.bank.model, groups, metric="mean", total=len(plan), options=options))
        return learners

    def _run(
        self, batch: Batch, labels: Mapping[str, Tensor], names: Sequence[str], states: States | None
    ) -> BankOutput:
        """Return the outputs of the readers `names` for a batch, with losses for the readers that have `labels`.

        `states` are the batch's cached states, which the readers then read. None: the model runs.
        """
        batch = self.arguments(batch)
        if states is not None:
            return self.bank.read_states(states, batch, readers=names, labels=labels)
        return self.bank(**batch, readers=names, labels=labels)

    def _is_one_late(self, name: str, states: States | None) -> bool:
        """Return whether a reader tags tokens that its stack reads one step late: a decoder, behind its start token.

        A generated token is read at its own step, so the tag of a token is learnt and predicted at the step that reads
        it. Cached `states` were recorded at that step. Readers of earlier versions learnt the step before.
        """
        reader = self.bank[name]
        if (
            states is not None
            or reader.stack != "decoder"
            or ("task" in reader.info and READS_WORDS not in reader.info)
        ):
            return False
        kind = kind_of(reader.config.head.kind)
        return kind.per_token and kind.has_classes

    def losses(
        self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: States | None
    ) -> list[Tensor]:
        """Return the loss of each reader in `names` for a batch, including the regularization term of its fusion.

        The loss of a regression is divided by the variance of its labels in training, so that gradients are clipped
        alike at any scale. `labels` is reader name -> labels. `states` are the batch's cached states. None: the model
        computes them.
        """
        labels = {name: shifted(own, 1) if self._is_one_late(name, states) else own for name, own in labels.items()}
        out = self._run(batch, to_device(labels, self.device), names, states)
        return [cast("Tensor", out[name].loss) / self._spreads.get(name, 1.0) ** 2 for name in names]

    def count_labels(self, name: str, labels: Tensor) -> float:
        """Return the divisor of the mean loss of the reader `name`; see `Head.count`."""
        return float(self.bank[name].head.count(labels.to(self.device)))

    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: States | None
    ) -> dict[str, Tensor]:
        """Return reader name -> logits of a batch. The arguments are those of `Runner.outputs`.

        Without `states`, the runner's `engine` computes the logits if it can. Otherwise, heads over a vocabulary
        compute only the tokens that `labels` name. Raises ConfigError if an engine that must answer cannot.
        """
        logits = None
        if self.engine is not None and states is None:
            logits = self.engine.run(self.bank, batch, names)
        if logits is None:
            labels_by_reader = {} if labels is None else dict.fromkeys(names, labels)
            out = self._run(batch, labels_by_reader, names, states)
            logits = {name: output.logits for name, output in out.readers.items()}
        if all(self.bank[name].stack != "decoder" for name in names):
            return logits
        # no step reads the last token of the longest row, which is an end token (`check`)
        return {
            name: torch.cat([own[:, 1:], own[:, -1:]], dim=1) if self._is_one_late(name, states) else own
            for name, own in logits.items()
        }

    def outputs_per_position(self, name: str) -> int:
        """Return the number of logits that the head of reader `name` has per sequence or token."""
        return self.bank[name].head.outputs

    def info(self, name: str) -> dict[str, JSON]:
        """Return the dict of facts that is saved with the reader `name`. Callers may write to it."""
        return self.bank[name].info

    def trained_with(self, names: Sequence[str], option: str) -> int | None:
        """Return the largest value of `option`, such as "max_length", with which the readers `names` were trained.

        None if one of the readers has no record of the option, or `names` is empty.
        """
        values = [self.bank[name].info.get(option) for name in names]
        known = [int(value) for value in values if value is not None]
        return max(known, default=None) if len(known) == len(values) else None


def free_bytes(device: torch.device) -> int:
    """Return the bytes of free memory: of the GPU if `device` is one (with PyTorch's cache), else of the machine."""
    if device.type == "cuda":
        # PyTorch's own cache counts as free, since new tensors can use it
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return psutil.virtual_memory().available
