"""`Runner`, the interface through which the training engine runs a bank's readers or a whole model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.layers.devices import main_device
from lamina.tasks.position_interpolation import size_arguments
from lamina.train.learner import BASE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from lamina.bank.stack_pass import States
    from lamina.layers.types import Batch, Processor
    from lamina.tasks.task import Task
    from lamina.train.groups import Group
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Plan
    from lamina.utils import JSON

logger = logging.getLogger(__name__)


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return a copy of the mapping `batch` with all of its tensors on `device`."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class Runner(ABC):
    """Runs batches for the engine: `BankRunner` through a bank's readers, `ModelRunner` through a whole model.

    A learner is a module with an optimizer of its own: one reader, a base model that is trained with its readers, or a
    whole model.

    Attributes:
        base: The transformers model: the whole model, or the one that the bank's readers read.
        modules: The modules that are set to train or eval mode.
        uses_global_rng: Whether training uses torch's global random state, as dropout in a model does.
        op: The public operation, which errors name: "fit", "predict" ...
        processor: Tokenizer, image processor or feature extractor.
    """

    base: PreTrainedModel
    modules: tuple[nn.Module, ...]
    uses_global_rng: bool
    op: str
    processor: Processor

    @property
    def device(self) -> torch.device:
        """The device to which batches must be moved."""
        # The first parameter decides for a model on one device; only offloaded and split models need a closer look.
        first = next(self.base.parameters(), None)
        if first is None or first.is_meta or hasattr(self.base, "hf_device_map"):
            return main_device(self.base)
        return first.device

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the model's keyword arguments for a batch: tensors on the device, and image size options."""
        tensors = to_device(batch, self.device)
        return tensors | size_arguments(self.base, tensors)

    def title(self, name: str) -> str:
        """Return how error messages name the learner `name`: "reader 'x'", or "the base"."""
        return "the base" if name == BASE else f"reader '{name}'"

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Raise an error unless every task has labelled rows in each part that `parts` names, such as "train".

        Raises:
            UnknownNameError: If a task does not have the part at all.
            ConfigError: If the part has no rows, or none with a label.
        """
        for name, task in tasks.items():
            for part in parts:
                if not len(split := task.split(part)):
                    raise ConfigError(f"task {task.name}: its {part} part is empty; it needs at least one row.")
                if split.unlabelled == len(split):
                    got = f"none of the {len(split)} rows of the {part} part has a label for '{name}'"
                    raise ConfigError(f"{self.op}: {got}; at least one needs one. Give more labelled rows.")

    def trained_with(self, names: Sequence[str], option: str) -> int | None:  # noqa: B027 not abstract
        """Return the value of `option` with which the learners `names` were trained; here None: it is not known."""

    def info(self, name: str) -> dict[str, JSON]:  # noqa: ARG002
        """Return the facts that are saved with the learner `name`, to be read or changed; here an empty dict."""
        return {}

    def warn_about_pairs(self, pairs: Mapping[str, bool]) -> None:
        """Log a warning for each learner that was trained on pairs of texts and now reads single texts, or the reverse.

        Args:
            pairs: Learner name -> whether the texts that it reads now are pairs.
        """
        for name, paired in pairs.items():
            if (trained := self.trained_with([name], "pair")) is not None and bool(trained) != paired:
                before, now = ("pairs of texts", "single texts") if trained else ("single texts", "pairs of texts")
                logger.warning("%s: '%s' was trained on %s and now reads %s", self.op, name, before, now)

    @abstractmethod
    def settings(self, name: str) -> dict[str, JSON]:
        """Return the settings of the learner `name`, JSON-ready. A checkpoint of other settings is refused."""

    @abstractmethod
    def starting_weights(self, trained: Sequence[Tensor]) -> str:
        """Return a fingerprint of the weights at the start of a run.

        Args:
            trained: The parameters that the run trains, which its checkpoints hold anyway.
        """

    @abstractmethod
    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:
        """Prepare for training on `groups`, and raise an error if it cannot begin.

        Args:
            groups: Examples to train on and to score.
            options: Options of the run.
            passes: How many times each row would go through the model.
        """

    @abstractmethod
    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """Return the learners of a run. A base that is trained with its readers comes last.

        Args:
            tasks: Learner name -> task.
            plan: The steps of the run, which give each learner's number of steps.
            rates: Learner name -> highest learning rate.
            options: Options of the run.
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
        """Return the number of labels over which the learner `name` averages its loss; ignored labels do not count."""

    @abstractmethod
    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: States | None
    ) -> Mapping[str, object]:
        """Return learner name -> the outputs of a batch, in the form that `Results.add` of its kind of task expects.

        Args:
            batch: Inputs of the model, without labels.
            labels: Labels that the inputs themselves contain, such as masked tokens. None: the inputs contain none.
            names: The learners that run.
            states: Cached hidden states of the batch. None: the model computes the states.
        """

    @abstractmethod
    def outputs_per_position(self, name: str) -> int:
        """Return how many numbers the learner `name` outputs for each text or token: its classes, or the vocabulary."""
