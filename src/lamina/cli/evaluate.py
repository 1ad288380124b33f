"""`lamina evaluate`: the scores of a bank's readers, or of a whole model, on labelled texts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from lamina.cli import shared_options as options
from lamina.cli.output import print_json, print_table
from lamina.errors import ConfigError, UnknownNameError
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from lamina.tasks.base import TaskLike
    from lamina.tasks.task import Task

PER_CLASS = ("label", "precision", "recall", "f1", "count", "guessed")
_ERRORS = "Number of wrong answers to show per reader, the most confident first. Default: none."
_DATA = "Folder with a subfolder per preset. Default: presets come from the hub."
_SPLIT = 'Split of a preset: "train", "validation" (the default) or "test". Files are scored whole.'
_TASK = "A reader and its task: a preset's name or a file; may be repeated. For a whole model READER is any name."


def evaluate(  # noqa: PLR0913
    bank_or_model: options.SavedArgument,
    task: Annotated[list[str], Option(metavar="READER=TASK", help=_TASK)],
    data: Annotated[Path | None, Option(help=_DATA)] = None,
    split: Annotated[str | None, Option(help=_SPLIT)] = None,
    text: options.TextOption = None,
    pair: options.PairOption = None,
    label: Annotated[str | None, Option(help='Column of the label in a file. Default: "label".')] = None,
    per_class: Annotated[
        bool, Option("--per-class", help="Also print a table per reader with the scores of each label.")
    ] = False,
    errors: Annotated[int, Option(min=0, metavar="N", help=_ERRORS)] = 0,
    model: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    batch_size: options.BatchSizeOption = 32,
    as_json: options.JsonOption = False,
) -> None:
    """Score the readers of a bank, or a fine-tuned model, on labelled texts."""
    sources = _sources(task)
    names = {"--text": text, "--pair": pair, "--label": label}
    _check_used(sources, of_files=names, of_presets={"--data": data, "--split": split})
    from lamina.bank import ReaderBank
    from lamina.prediction import evaluate as run
    from lamina.train.model_runner import task_of

    target = options.open_on(bank_or_model, base=model, device=device)
    part, columns = split or "validation", {"text": text, "text_pair": pair, "label": label}
    columns = {key: int(name) if name.removeprefix("-").isdecimal() else name for key, name in columns.items() if name}
    tasks: dict[str, Task] = {}
    for name, source in sources.items():
        asked: Any = target[name].config.head if isinstance(target, ReaderBank) else task_of(target)
        tasks[name] = _task(asked, source, data=data, part=part, columns=columns)
    more: Any = {"per_class": per_class, "errors": errors, "progress": sys.stderr.isatty()}
    scores = run(target, tasks, split=part, batch_size=batch_size, **more)
    print_json(scores) if as_json else _show(scores, tasks)


def _sources(pairs: list[str]) -> dict[str, str]:
    """Return the preset or file of each reader, from texts such as "ner=conll2003"."""
    sources: dict[str, str] = {}
    for pair in pairs:
        reader, _, source = pair.partition("=")
        if not (reader and source):
            raise ConfigError(f"evaluate: --task {pair} is not READER=TASK, such as ner=conll2003.")
        if reader in sources:
            raise ConfigError(f"evaluate: --task names '{reader}' twice; each reader has one task.")
        sources[reader] = source
    return sources


def _check_used(sources: dict[str, str], *, of_files: dict[str, Any], of_presets: dict[str, Any]) -> None:
    """Raise ConfigError if an option was given that none of the tasks uses.

    `of_files` and `of_presets` are the values of the options for files and for presets, by name.
    """
    files = [source for source in sources.values() if is_file(source)]
    for option in (option for option, value in of_files.items() if value is not None and not files):
        came = f"{option} was given, but no task is a file that is there"
        raise ConfigError(f"evaluate: {came}: {', '.join(sources.values())}; columns are those of a file.")
    for option in (option for option, value in of_presets.items() if value is not None and len(files) == len(sources)):
        came = f"{option} was given, but no task is a preset"
        raise ConfigError(f"evaluate: {came}: {', '.join(files)}; a file is scored whole.")


def _task(asked: TaskLike, source: str, *, data: Path | None, part: str, columns: dict[str, Any]) -> Task:
    """Return the task of a preset or of a file.

    Args:
        asked: The reader's head or the model's task, which has the labels of a file.
        source: A file that exists, or the name of a preset. A file is used whole as the split `part`.
        data: Folder with a subfolder per preset; None: the hub.
        part: Name of the split.
        columns: The columns of a file.
    """
    from lamina.tasks.presets import PRESETS, find_preset
    from lamina.tasks.task import Task

    if is_file(path := Path(source)):
        known: Any = {"labels": asked.labels, "problem_type": asked.problem_type}
        task = Task.from_files(str(asked.kind), test=path, **known, **columns)
        return replace(task, splits={part: task.splits["test"]})
    try:
        find_preset(source)
    except UnknownNameError:
        raise UnknownNameError(op="evaluate", got=source, known=PRESETS, what="file or preset") from None
    return Task.preset(source, files=None if data is None else data / source.removeprefix("glue/"))


def _show(scores: dict[str, dict[str, Any]], tasks: dict[str, Task]) -> None:
    tables = {reader: values.pop("per_class") for reader, values in scores.items() if "per_class" in values}
    errors = {reader: values.pop("errors") for reader, values in scores.items() if "errors" in values}
    rows = [(reader, tasks[reader].name, *pair) for reader, values in scores.items() for pair in values.items()]
    print_table("", ("reader", "task", "metric", "value"), rows)
    for reader, table in tables.items():
        if not table:
            print(f"\n{reader}: numbers and running text have no classes")
            continue
        print_table(f"\n{reader}", PER_CLASS, [[row.get(key) for key in PER_CLASS] for row in table])
    for reader, wrong in errors.items():
        print_errors(reader, wrong)


SHOWN = 600  # characters of a text, or of a part without an error between those that are marked
_STYLES = {"wrong": "bold yellow", "missed": "bold red", "extra": "bold magenta"}


def print_errors(reader: str, errors: Sequence[Mapping[str, Any]]) -> None:
    """Print the wrong answers of a reader, as `evaluate` returns them."""
    if not errors:
        print(f"\n{reader}: every answer is right")
        return
    spans = any(isinstance(span, dict) for row in errors for span in (*_list(row["true"]), *_list(row["predicted"])))
    last = "error" if "error" in errors[0] else "confidence"
    texts, values = ("true", "predicted") if spans else ("text",), () if spans else ("true", "predicted")
    rows = [
        [
            str(row["row"]),
            *(marked(row["text"], row[side]) if spans else _plain(row["text"]) for side in texts),
            *(_value(row[side]) for side in values),
            row[last],
        ]
        for row in errors
    ]
    what = "largest errors" if last == "error" else "errors, most confident first"
    print_table(f"\n{reader}: {what}", ("row", *texts, *values, last), rows)


def marked(text: str, spans: Sequence[Mapping[str, Any]]) -> Text:
    """Return a text with its spans in brackets, each with its label and error, as "[Ekeus|PER missed] heads"."""
    from rich.text import Text

    out, at = Text(), 0
    for span in spans:
        out.append(shortened(text[at : span["start"]], SHOWN // 4))
        out.append(f"[{text[span['start'] : span['end']]}|{span['label']} {span['error']}]", _STYLES[span["error"]])
        at = span["end"]
    return out.append(shortened(text[at:], SHOWN // 4 if spans else SHOWN))


def shortened(text: str, most: int) -> str:
    """Return a text of about `most` characters; a longer text loses words from its middle."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2].rsplit(None, 1)[0]} [...] {text[-most // 2 :].split(None, 1)[-1]}"


def _plain(text: Any) -> str:
    return "\n".join(shortened(" ".join(str(part).split()), SHOWN) for part in _list(text))


def _value(value: Any) -> Any:
    return ", ".join(value) or "-" if isinstance(value, list) else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
