"""`lamina evaluate`: the scores of a bank's readers on labelled texts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import BankArgument, BatchSizeOption, DeviceOption, JsonOption, ModelOption, open_bank
from lamina.cli.output import print_json, print_table
from lamina.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.heads.base import HeadConfig
    from lamina.tasks.task import Task

PER_CLASS = ("label", "precision", "recall", "f1", "count")


def evaluate(  # noqa: PLR0913
    bank: BankArgument,
    task: Annotated[
        list[str],
        typer.Option("--task", metavar="READER=TASK", help="A reader, and a preset's name or a file; once per reader."),
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with a folder per preset; by default presets come from the hub."),
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help='Part of a preset: "train", "validation" or "test".')
    ] = "validation",
    text: Annotated[str | None, typer.Option("--text", help="Column of the text in files.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="Column of the second text in files.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Column of the label in files.")] = None,
    per_class: Annotated[bool, typer.Option("--per-class", help="Add a table per reader, a row per label.")] = False,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    batch_size: BatchSizeOption = 32,
    as_json: JsonOption = False,
) -> None:
    """Score readers on labelled texts."""
    sources = _sources(task)
    from lamina.train import evaluate as run

    opened = open_bank(bank, model=model, device=device)
    columns = {"text": text, "text_pair": pair, "label": label}
    tasks = {
        reader: _task(opened, reader, source, data=data, split=split, columns=columns)
        for reader, source in sources.items()
    }
    scores = run(opened, tasks, split=split, batch_size=batch_size, progress=sys.stderr.isatty(), per_class=per_class)
    if as_json:
        print_json(scores)
        return
    _show(scores, tasks)


def _sources(pairs: list[str]) -> dict[str, str]:
    """Reader -> preset or file."""
    sources: dict[str, str] = {}
    for pair in pairs:
        reader, equals, source = pair.partition("=")
        if not (reader and equals and source):
            raise ConfigError(
                f"evaluate: --task {pair} is not READER=TASK; it names a reader and its task. Write ner=conll2003."
            )
        if reader in sources:
            raise ConfigError(f"evaluate: --task names '{reader}' twice; each reader has one task.")
        sources[reader] = source
    return sources


def _task(
    bank: ReaderBank, reader: str, source: str, *, data: Path | None, split: str, columns: dict[str, str | None]
) -> Task:
    """The task of one reader: a file that is there, else a preset."""
    from lamina.tasks.presets import PRESETS, find_preset
    from lamina.tasks.task import Task

    head = bank[reader].config.head
    if Path(source).is_file():
        return _from_file(head, Path(source), split, columns)
    try:
        find_preset(source)
    except UnknownNameError:
        raise UnknownNameError(op="evaluate", got=source, known=PRESETS, what="file or preset") from None
    return Task.preset(source, files=None if data is None else data / source.removeprefix("glue/"))


def _from_file(head: HeadConfig, path: Path, split: str, columns: dict[str, str | None]) -> Task:
    """A task of the reader's own kind and labels; the whole file is the part that is scored."""
    from lamina.tasks.task import Task

    named: dict[str, Any] = {
        key: int(column) if column.lstrip("-").isdigit() else column for key, column in columns.items() if column
    }
    task = Task.from_files(head.kind, test=path, labels=head.labels, problem_type=head.problem_type, **named)
    return replace(task, splits={split: task.splits["test"]})


def _show(scores: dict[str, dict[str, Any]], tasks: dict[str, Task]) -> None:
    rows = [
        (reader, tasks[reader].name, metric, value)
        for reader, found in scores.items()
        for metric, value in found.items()
        if metric != "per_class"
    ]
    print_table("", ("reader", "task", "metric", "value"), rows)
    for reader, found in scores.items():
        if "per_class" in found:
            print_table(f"\n{reader}", PER_CLASS, [[row.get(key) for key in PER_CLASS] for row in found["per_class"]])
