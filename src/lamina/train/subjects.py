"""What the engine trains and scores: the readers of a bank (`readers`), or a whole model (`model`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from lamina.tasks.task import Task
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Group, Plan


@runtime_checkable
class Subject(Protocol):
    """What is trained or scored.

    Attributes:
        op: The operation, named in errors.
        processor: Tokenizer or image processor.
        modules: Whose modes are changed for training and scoring.
        base: The model.
        draws: Whether training draws from torch's own random numbers.
    """

    op: str
    processor: Any

    @property
    def modules(self) -> tuple[nn.Module, ...]: ...  # noqa: D102
    @property
    def base(self) -> PreTrainedModel: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def draws(self) -> bool: ...  # noqa: D102
    def to(self, device: torch.device) -> None:
        """Put everything on a device."""
        ...

    def check(self, tasks: Mapping[str, Task], parts: Sequence[str]) -> None:
        """Raise ConfigError unless every task fits and has these parts."""
        ...

    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:
        """See that a run is possible, before anything is changed."""
        ...

    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """What is trained; a base that is trained along comes last."""
        ...

    def losses(
        self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: Any
    ) -> list[Tensor]:
        """The loss of every learner."""
        ...

    def count(self, name: str, labels: Tensor) -> float:
        """Over how many labels a learner's loss is a mean."""
        ...

    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: Any
    ) -> dict[str, Any]:
        """Learner name -> what `Results.add` takes."""
        ...

    def outputs_per_position(self, name: str) -> int:
        """Scores per position: classes, or entries of a vocabulary."""
        ...

    def note(self, name: str, info: dict[str, Any]) -> None:
        """Take note of how a learner was trained."""
        ...

    def trained_with(self, names: Sequence[str], option: str) -> int | None:
        """The value of an option that learners were trained with; None where that is not known."""
        ...

    def importance(self, name: str) -> dict[int, float]:
        """Layer -> share, where a learner mixes layers."""
        ...

    def end_epoch(self, name: str, done: float) -> bool:
        """Let a learner go on to its next stage; whether parameters were started afresh."""
        ...


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
