"""What the engine trains and scores: the contract of the readers of a bank (`readers`) and a whole model (`model`)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.layers.devices import main_device
from lamina.tasks.interpolation import size_arguments
from lamina.train.learner import BASE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from lamina.tasks.task import Task
    from lamina.train.groups import Group
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Plan


logger = logging.getLogger(__name__)


def placed(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on a device."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class Runner(ABC):
    """What is trained or scored; one method per thing that the engine asks of it."""

    base: PreTrainedModel
    modules: tuple[nn.Module, ...]  # their modes are changed for training and scoring
    draws: bool  # whether training draws from torch's own random numbers
    op: str  # named in errors
    processor: Any  # tokenizer or image processor

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        first = next(self.base.parameters(), None)  # of a model that is in one place, as most are, it tells
        if first is None or first.is_meta or hasattr(self.base, "hf_device_map"):
            return main_device(self.base)
        return first.device

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """A batch where the model is, and what else the model takes for it."""
        tensors = placed(batch, self.device)
        return tensors | size_arguments(self.base, tensors)

    def title(self, name: str) -> str:
        """What errors call a learner."""
        return "the base" if name == BASE else f"reader '{name}'"

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Raise an error unless every task has these parts, and rows in each."""
        for task in tasks.values():
            for part in parts:
                if not len(task.split(part)):
                    raise ConfigError(f"task {task.name}: its {part} part is empty; it needs at least one row.")

    def trained_with(self, names: Sequence[str], option: str) -> int | None:  # noqa: B027 not abstract
        """The value of an option that learners were trained with; None where that is not known."""

    def warn_about_pairs(self, pairs: Mapping[str, bool]) -> None:
        """Log which learners are asked about pairs of texts and learnt from single ones, or the other way round."""
        for name, asked in pairs.items():
            if (learnt := self.trained_with([name], "pair")) is not None and bool(learnt) != asked:
                of, by = ("pairs of texts", "single texts") if learnt else ("single texts", "pairs of texts")
                logger.warning("%s: '%s' learnt from %s and is asked about %s", self.op, name, of, by)

    @abstractmethod
    def settings(self, name: str) -> dict[str, Any]:
        """What a learner is, JSON-ready: a run goes on only from a checkpoint of the same."""

    @abstractmethod
    def starting_weights(self, learnt: Sequence[Tensor]) -> str:
        """A fingerprint of the model that a run begins with; `learnt` is what the checkpoints of the run hold."""

    @abstractmethod
    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:
        """See that training can begin on these groups, whose rows will be read in so many passes."""

    @abstractmethod
    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """What is trained, each with its own rate; a base that is trained along comes last."""

    @abstractmethod
    def losses(
        self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: Any
    ) -> list[Tensor]:
        """The loss of each of the learners named; `states` are cached ones, in place of a run of the model."""

    @abstractmethod
    def count(self, name: str, labels: Tensor) -> float:
        """Over how many labels a learner's loss is a mean."""

    @abstractmethod
    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: Any
    ) -> dict[str, Any]:
        """Learner name -> what its kind collects for scores and answers."""

    @abstractmethod
    def outputs_per_position(self, name: str) -> int:
        """How many scores a learner gives per position."""
