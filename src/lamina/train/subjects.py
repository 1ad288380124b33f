"""What the readers of a bank (`readers`) and a whole model (`model`) share as subjects of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from lamina.tasks.task import Task
    from lamina.train.model import ModelSubject
    from lamina.train.readers import BankSubject

    Subject = BankSubject | ModelSubject


def placed(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on a device."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class Common:
    """What both kinds of subject have."""

    base: PreTrainedModel
    modules: tuple[nn.Module, ...]  # their modes are changed for training and scoring
    draws: bool  # whether training draws from torch's own random numbers
    op: str  # named in errors
    processor: Any  # tokenizer or image processor

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.base.parameters()).device

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Raise an error unless every task has these parts, and rows in each."""
        for task in tasks.values():
            for part in parts:
                if not len(task.split(part)):
                    raise ConfigError(f"task {task.name}: its {part} part is empty; it needs at least one row.")

    def trained_with(self, names: Sequence[str], option: str) -> int | None:
        """The value of an option that learners were trained with; None where that is not known."""
