"""Make tasks from one labelled file for readers that remember the columns on which they were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, DataError, check_known
from lamina.tasks import kind_of
from lamina.tasks.task import Task
from lamina.train.model_runner import task_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank.reader import Info
    from lamina.heads.base import HeadConfig, TaskLike
    from lamina.utils import JSONObject

WHOLE = "model"  # name of the task of a whole model


@dataclass(frozen=True)
class FileColumns:
    """The columns of a file that a user has named. A column that is None is the one on which a reader was trained.

    Attributes:
        text: Column of the text.
        text_pair: Column of the second text.
        labels: Reader name -> column of its label, or one column for all readers.
    """

    text: str | int | None = None
    text_pair: str | int | None = None
    labels: Mapping[str, str | int] | str | int | None = None

    def of(self, reader: str) -> dict[str, str | int]:
        """Return the columns named for a reader, as arguments of `Task.from_files`."""
        label = self.labels.get(reader) if isinstance(self.labels, Mapping) else self.labels
        columns = {"text": self.text, "text_pair": self.text_pair, "label": label}
        return {key: column for key, column in columns.items() if column is not None}


def tasks_of_file(
    bank_or_model: ReaderBank | PreTrainedModel,
    path: str | Path,
    split: str,
    columns: FileColumns,
    *,
    positive: Mapping[str, str | int] | str | int | None = None,
    train: str | Path | None = None,
) -> dict[str, Task]:
    """Return reader name -> a task that scores the reader on all rows of a file.

    Args:
        bank_or_model: The bank, whose readers remember their columns, or a whole model.
        path: The file, in a form that `Task.from_files` reads.
        split: Name of the split that the rows become.
        columns: The columns that the user has named.
        positive: Reader name -> positive class, or one class for all readers. None: the classes with which the readers
            learnt.
        train: File of the train split, for scores that need one. None: there is none.

    Raises:
        ConfigError: If the bank has no readers, or a reader does not remember its columns and none were given.
        UnknownNameError: If a reader does not exist.
        DataError: If a file cannot be read, or has no such column; the message names the reader.
    """
    heads: dict[str, TaskLike | HeadConfig]
    infos: dict[str, Info]
    if isinstance(bank_or_model, ReaderBank):
        heads = {name: bank_or_model[name].config.head for name in bank_or_model}
        infos = {name: bank_or_model[name].info for name in bank_or_model}
    else:
        heads, infos = {WHOLE: task_of(bank_or_model)}, {WHOLE: {"columns": {}}}
    if not heads:
        raise ConfigError("evaluate: the bank has no readers; there is nothing to score.")
    for given in (columns.labels, positive):
        check_known("evaluate", given if isinstance(given, Mapping) else (), heads, "reader")
    files = {"validation": path} if train is None else {"train": train, "validation": path}
    has_binary = any(len(head.labels) == 2 for head in heads.values())  # one class for all is for these readers
    tasks: dict[str, Task] = {}
    for name, head in heads.items():
        own = positive.get(name) if isinstance(positive, Mapping) else positive
        task = _task(name, head, infos[name], files, columns.of(name))
        if own is not None and (len(head.labels) == 2 or isinstance(positive, Mapping) or not has_binary):
            task = task.with_positive(own)
        kept = {"train": task.split("train")} if train is not None else {}
        tasks[name] = replace(task, splits={**kept, split: task.split("validation")})
    return tasks


def _task(
    name: str,
    head: TaskLike | HeadConfig,
    info: Info,
    files: Mapping[str, str | Path],
    chosen: Mapping[str, str | int],
) -> Task:
    """Return the task of one reader over files; see `tasks_of_file`.

    Args:
        name: Name of the reader.
        head: Its head, which has the kind of task and the labels.
        info: The record of the reader's training: its columns, and its positive class.
        files: Split name -> file.
        chosen: The columns that the user has named: "text", "text_pair" and "label".
    """
    kind = kind_of(str(head.kind))
    if "columns" not in info and kind.has_classes and "label" not in chosen:
        got = f"reader '{name}' does not say which columns it learnt from"
        raise ConfigError(f"evaluate: {got}. Name them: labels={{'{name}': column}}, or --label {name}=COLUMN.")
    columns: JSONObject = {**info.get("columns", {}), **chosen}
    is_binary = len(head.labels) == 2 and kind.single_label(head.problem_type)
    sources: dict[str, Any] = dict(files)
    try:
        return Task.from_files(
            kind,
            labels=head.labels,
            problem_type=head.problem_type,
            missing_labels="mask" if "mask" in kind.missing else None,
            positive=info.get("positive") if is_binary else None,
            name=Path(files["validation"]).stem,
            **sources,
            **columns,
        )
    except DataError as error:
        if error.column is None or error.row is not None:
            raise
        hint = f"Name the columns of reader '{name}', as in --label {name}=COLUMN or --text COLUMN"
        raise DataError(f"{error} {hint}.", path=error.path, column=error.column) from error
