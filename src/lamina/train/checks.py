"""Whether tasks fit the readers they are given to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task


def check_processor(bank: ReaderBank, op: str) -> None:
    """Raise ConfigError unless the bank can read texts."""
    if bank.processor is None:
        raise ConfigError(
            f"{op}: the bank has no processor; it is needed to read texts. Use ReaderBank(model, processor=...)."
        )


def check_tasks(bank: ReaderBank, tasks: Mapping[str, Task], *, parts: Sequence[str]) -> None:
    """See that every task fits its reader.

    Raises:
        UnknownNameError: If a reader, or a part of a task, does not exist.
        ConfigError: If there is no task, or one does not fit its reader's head.
    """
    check_processor(bank, "tasks")
    if not tasks:
        raise ConfigError("tasks: none was given; at least one is needed. Give {reader name: task}.")
    for name, task in tasks.items():
        if name not in bank:
            raise UnknownNameError(op="tasks", got=name, known=bank, what="reader")
        for part in parts:
            if not len(task.split(part)):
                raise ConfigError(f"task {task.name}: its {part} part is empty; it needs a row at least. Add rows.")
        head = bank[name].config.head
        for what, has, needs in (
            ("kind", head.kind, task.kind),
            ("problem_type", head.problem_type, task.problem),
            ("labels", head.labels, task.labels),
        ):
            if has != needs:
                raise ConfigError(
                    f"task {task.name}: its {what} is {needs}, reader '{name}' was made for {has}; they must agree. "
                    f"Build the head from the task: labels=task.labels, problem_type=task.problem."
                )
