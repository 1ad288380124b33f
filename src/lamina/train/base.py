"""Runners pass batches through a bank's readers or a whole model, to train or to score them."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from lamina.bank import ReaderBank
from lamina.data.batches import Budget, length_batches
from lamina.errors import ConfigError, LaminaError, NotFiniteError
from lamina.layers.devices import check_has_weights, main_device
from lamina.layers.preserve import evaluating
from lamina.layers.wrappers import checked_model
from lamina.tasks.position_interpolation import size_arguments
from lamina.train.learner import BASE, Learner
from lamina.utils import JSON, progress_bar

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from lamina.bank.stack_pass import States
    from lamina.layers.types import Batch, Processor
    from lamina.tasks.base import Inputs
    from lamina.tasks.outputs import Results
    from lamina.tasks.task import Task
    from lamina.train.options import FitOptions, PassOptions
    from lamina.train.plan import Group, Plan
    from lamina.train.results import Scores

    Job = tuple[Inputs, Sequence[int], int]
    """A batch that will be prepared: the inputs that prepare it, the indices of its rows, and the epoch (from 0)."""

logger = logging.getLogger(__name__)
TargetT = TypeVar("TargetT")


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return the dict of a batch with all of its tensors on `device`."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def checked_target(op: str, target: TargetT) -> TargetT:
    """Return a bank unchanged, or the model inside torch's wrappers; for anything else raise ConfigError.

    `op` is the operation, for the message.
    """
    return target if isinstance(target, ReaderBank) else checked_model(target, op, "a bank or a transformers model")


class Runner(ABC):
    """Base class that runs batches for the engine: `BankRunner` for a bank's readers, `ModelRunner` for a model.

    A learner is a module with an optimizer of its own: one reader, a base model that is trained with its readers, or a
    whole model. A subclass defines the abstract methods, and sets the attributes when it is built.

    Attributes:
        base: The transformers model: the whole model, or the one that the bank's readers read.
        modules: The modules that are set to train or eval mode.
        uses_global_rng: Whether training uses torch's global random state, as dropout in a model does.
        op: The public operation, for messages: "fit", "predict" ...
        processor: Tokenizer, image processor or feature extractor.
    """

    base: PreTrainedModel
    modules: tuple[nn.Module, ...]
    uses_global_rng: bool
    op: str
    processor: Processor

    @property
    def device(self) -> torch.device:
        """The device for batches: that of the model's first weights, or as `main_device` says if it is offloaded.

        Raises ConfigError if the model has no weights (meta device).
        """
        # The first parameter decides for a model on one device; only offloaded and split models need a closer look.
        first = next(self.base.parameters(), None)
        if first is None or first.is_meta or hasattr(self.base, "hf_device_map"):
            device = main_device(self.base)
            if device.type == "meta":
                check_has_weights(self.op, self.base)  # raises
            return device
        return first.device

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the model's keyword arguments for a batch: its tensors on the device, and options for image sizes."""
        tensors = to_device(batch, self.device)
        return tensors | size_arguments(self.base, tensors) if "pixel_values" in tensors else tensors

    def title(self, name: str) -> str:
        """Return the learner's name for error messages: "reader 'x'", or "the base"."""
        return "the base" if name == BASE else f"reader '{name}'"

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Check that every task has labelled rows in each split that `parts` names, such as "train".

        Raises:
            UnknownNameError: If a task does not have the split at all.
            ConfigError: If the split has no rows, or none with a label.
        """
        for name, task in tasks.items():
            for part in parts:
                if not len(split := task.split(part)):
                    raise ConfigError(f"task {task.name}: its {part} part is empty; it needs at least one row.")
                if split.unlabelled == len(split):
                    got = f"none of the {len(split)} rows of the {part} part has a label for '{name}'"
                    raise ConfigError(f"{self.op}: {got}; at least one needs one. Give more labelled rows.")

    def trained_with(self, names: Sequence[str], option: str) -> int | None:  # noqa: B027 not abstract
        """Return the largest value of `option`, such as "max_length", with which the learners `names` were trained.

        None if it is not known for all of them, as in this default.
        """

    def info(self, name: str) -> dict[str, JSON]:  # noqa: ARG002
        """Return the dict of facts that is saved with the learner `name`. Callers may write to it.

        This default returns a new dict.
        """
        return {}

    def set_learnt(self, name: str, facts: Mapping[str, JSON]) -> None:
        """Store `facts`, which `Kind.learnt` found in the training data, in the `info` of the learner `name`.

        Facts of earlier runs stay, unless the caller has removed them.
        """
        self.info(name).update(facts)

    def warn_about_pairs(self, pairs: Mapping[str, bool]) -> None:
        """Log a warning for each learner that was trained on pairs and now reads single texts, or the other way round.

        There is none for a learner that does not record which it was.

        Args:
            pairs: Learner name -> whether the texts that it reads now are pairs.
        """
        for name, paired in pairs.items():
            if (trained := self.trained_with([name], "pair")) is not None and bool(trained) != paired:
                before, now = ("pairs of texts", "single texts") if trained else ("single texts", "pairs of texts")
                logger.warning("%s: '%s' was trained on %s and now reads %s", self.op, name, before, now)

    @abstractmethod
    def settings(self, name: str) -> dict[str, JSON]:
        """Return the settings of the learner `name`, JSON-ready. A checkpoint with other settings is refused."""

    @abstractmethod
    def starting_weights(self, trained: Sequence[Tensor]) -> str:
        """Return a fingerprint of the weights at the start of a run.

        Args:
            trained: The parameters that the run trains. Those that start at random are left out of the fingerprint.
        """

    @abstractmethod
    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:
        """Prepare for training on `groups`; raise a LaminaError if training cannot begin.

        Args:
            groups: The encoded examples to train on and to score.
            options: Options of the run.
            passes: How many times each row would go through the model if its states were not cached.
        """

    @abstractmethod
    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """Return the learners of a run. A base model that is trained with its readers comes last.

        Args:
            tasks: Learner name -> task.
            plan: The steps of the run, which give each learner's number of steps.
            rates: Learner name -> highest learning rate.
            options: Options of the run.

        Raises:
            LaminaError: The errors of `parameter_groups`, if learning rates or weight decay do not fit.
        """

    @abstractmethod
    def losses(
        self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: States | None
    ) -> list[Tensor]:
        """Return the losses of a batch, one per name in `names`.

        Args:
            batch: Inputs of the model, without labels.
            labels: Learner name -> labels of the batch.
            names: The learners, in the order of the losses.
            states: Cached hidden states of the batch. None: the model computes the states.
        """

    @abstractmethod
    def count_labels(self, name: str, labels: Tensor) -> float:
        """Return the divisor of the mean loss: the number of labels that count, or the sum of their class weights."""

    @abstractmethod
    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: States | None
    ) -> Mapping[str, object]:
        """Return learner name -> the outputs of a batch, in the form that its kind's `Results.add` expects.

        Args:
            batch: Inputs of the model.
            labels: Labels that are made with the inputs, such as masked tokens. None: there are none.
            names: The learners that run.
            states: Cached hidden states of the batch. None: the model computes the states.
        """

    @abstractmethod
    def outputs_per_position(self, name: str) -> int:
        """Return the number of outputs of the learner `name` for each token."""

    # Passes without gradients

    def autocast(self, options: PassOptions) -> AbstractContextManager[object]:
        """Return a context for a pass of the model: torch's autocast to `options.precision`, or nothing for float32."""
        if options.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, options.precision))

    def score(
        self,
        groups: Iterable[Group],
        options: PassOptions,
        *,
        names: Collection[str] | None = None,
        more: Callable[[Results, Sequence[str]], Mapping[str, object]] | None = None,
        progress: bool = False,
        collected: dict[str, Results] | None = None,
    ) -> Scores:
        """Compute the metrics of learners on encoded examples.

        Args:
            groups: The encoded examples, with their tasks.
            options: Options of each pass.
            names: Learners that are scored. None: all learners of the groups.
            more: Called with a learner's results and the names of its metrics; returns further entries, such as a table
                per class. None: no further entries.
            progress: Show a progress bar per group on standard error.
            collected: A dict to which learner name -> results is added, so that the caller can compute other scores.
                None: not needed.

        Returns:
            Learner name -> metric -> value, and the entries that `more` returned.

        Raises:
            NotFiniteError: If the outputs for a row, or a score, are NaN or infinite.
            LaminaError: If an example cannot be read, for example a damaged image.
        """
        scores: Scores = {}
        for group in groups:
            tasks = {name: task for name, task in group.tasks.items() if names is None or name in names}
            results = {
                name: task.kind.results(task, task.split(group.part), group.inputs) for name, task in tasks.items()
            }
            if results:
                self.collect(group, results, options, progress=progress)
            for name, result in results.items():
                scores[name] = dict(result.scores(tasks[name].metrics))
                if bad := [metric for metric, value in scores[name].items() if not math.isfinite(value)]:
                    what = f"the {bad[0]} of {self.title(name)} is {scores[name][bad[0]]}; a score is a finite number"
                    raise NotFiniteError(f"{self.op}: {what}.", name=name)
                if more is not None:
                    scores[name] |= more(result, tasks[name].metrics)
            if collected is not None:
                collected.update(results)
        return scores

    def rows_per_pass(self, group: Group, names: Iterable[str], options: PassOptions) -> int:
        """Return the number of rows of a group that the learners `names` score in one batch, at least 1.

        It is `options.scoring_batch_size`, or less if a learner's kind of task says so (`Kind.batch_size`).
        """
        size = options.scoring_batch_size
        for name in names:
            size = group.tasks[name].kind.batch_size(size, group.inputs, self.outputs_per_position(name))
        return max(1, size)

    def collect(
        self, group: Group, results: Mapping[str, Results], options: PassOptions, *, progress: bool = False
    ) -> None:
        """Run learners over all rows of a group without gradients, and add their outputs to `results`, in place.

        The arguments are those of `passes`. Raises NotFiniteError, or LaminaError for an unreadable example, as there.
        """
        for _ in self.passes(group, results, options, progress=progress):
            pass

    def passes(
        self,
        group: Group,
        results: Mapping[str, Results],
        options: PassOptions,
        *,
        progress: bool = False,
        budget: Budget | None = None,
    ) -> Iterator[None]:
        """Run learners over all rows of a group without gradients. It is a generator that yields between two batches.

        Train or eval modes, and whether gradients are computed, are restored before each yield, so that the caller may
        continue in another thread.

        Args:
            group: The encoded examples.
            results: Learner name -> the collection to which its outputs are added, in place. Only these learners run.
            options: Options of each pass.
            progress: Show a progress bar on standard error.
            budget: Maximum number of tokens per batch, in addition to the maximum number of rows (`rows_per_pass`).
                None: no such limit.

        Raises:
            NotFiniteError: If a learner outputs NaN or infinity for a row; raised after the last batch.
            LaminaError: If an example cannot be read, for example a damaged image.
        """
        names, inputs = list(results), group.inputs
        for name in names:
            if group.tasks[name].kind.learnt_keys:
                results[name].set_learnt(self.info(name))
        order = [[0]]  # a single row needs no other order
        if len(inputs.lengths) != 1:
            size = self.rows_per_pass(group, names, options)
            order = length_batches(inputs.lengths, size, equal=group.equal_lengths, budget=budget)
        source = inputs if group.states is None else group.batched
        loader = batches(list(product([source], order, [0])), options.num_workers)
        bar = progress_bar(order, show=True, unit="batch", leave=False) if progress else order
        for number, (rows, batch) in enumerate(zip(bar, loader, strict=True)):
            if number:
                yield
            with evaluating(*self.modules), torch.no_grad(), self.autocast(options):
                labels = batch.pop("labels", None)
                labels = None if labels is None else labels.to(self.device)
                states = None if group.states is None else group.states.batch(rows)
                outputs = self.outputs(batch, labels, names, states)
                for name in names:
                    results[name].add(rows, outputs[name], labels)
        for name, result in results.items():
            if (row := result.first_not_finite()) is not None:
                what = f"example {row}" if group.part == "predict" else f"row {row} of the {group.part} part"
                message = f"{self.op}: {self.title(name)} gives NaN or infinity for {what}, counted from 0"
                raise NotFiniteError(f"{message}; a score is a finite number.", name=name, row=row)


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
