"""What the readers of a bank (`readers`) and a whole model (`model`) share as subjects of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from lamina.tasks.task import Task
    from lamina.train.model import ModelSubject
    from lamina.train.options import FitOptions
    from lamina.train.readers import BankSubject

    Subject = BankSubject | ModelSubject


def placed(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on a device."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def check_parts(task: Task, parts: Sequence[str]) -> None:
    """Raise an error unless a task has these parts, and rows in each."""
    for part in parts:
        if not len(task.split(part)):
            raise ConfigError(f"task {task.name}: its {part} part is empty; it needs at least one row.")


def refuse(op: str, options: FitOptions, *names: str, where: str) -> None:
    """Raise ConfigError where an option was given that would have no effect."""
    for name in names:
        value = getattr(options, name)
        if value != type(options).model_fields[name].get_default(call_default_factory=True):
            raise ConfigError(f"{op}: {name} is {value!r}; {where} has no use for it.")
