"""`lamina predict`: what a bank's readers, or a whole model, say about texts: given, of a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.output import print_json, print_table
from lamina.errors import ConfigError, DataError, convert_errors
from lamina.utils import pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank

Texts = list[str] | list[tuple[str, str]]

SHOWN = 60  # characters of a text in the table
_TEXTS = "Texts; without any, --file or standard input."
_FILE = ".txt with one text per line, or .tsv, .csv, .jsonl or .parquet."
_OUTPUT = "Write to this .jsonl, .csv or .parquet, of any size."
_SKIP_BAD = "With --output: leave out rows that cannot be read, and count them."
_RAY = "With --output: let workers of Ray answer, of this machine, the cluster that runs here, or the one at HOST:PORT."
_WORKERS = "With --ray: how many; by default one for each GPU, or each core."
_RESUME = "With --output: go on where a run that was ended early stopped."


def predict(  # noqa: PLR0913
    bank_or_model: options.SavedArgument,
    texts: Annotated[list[str] | None, Argument(metavar="TEXT", help=_TEXTS)] = None,
    file: Annotated[Path | None, Option(help=_FILE)] = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    text: options.TextOption = None,
    pair: options.PairOption = None,
    readers: Annotated[str | None, Option(help="Names of the readers to run, as a,b; by default all.")] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help=_SKIP_BAD)] = False,
    resume: Annotated[bool, Option(help=_RESUME)] = True,
    model: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    batch_size: options.BatchSizeOption = 32,
    ray: Annotated[str | None, Option(metavar="local|auto|ADDRESS", help=_RAY)] = None,
    workers: Annotated[int | None, Option(min=1, help=_WORKERS)] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predict from texts with the readers of a bank, or with a fine-tuned model.

    Every reader answers off the same pass of the model. With --json, one object per text, a line each.
    """
    if (text or pair) and file is None:
        raise ConfigError("predict: a column was named, but no file; columns are those of a file. Give --file.")
    if texts and file is not None:
        raise ConfigError("predict: texts and --file were both given; they come from one place.")
    if output is not None and file is None:
        raise ConfigError("predict: --output was given, but no file. Give --file.")
    of_output = {"skip-bad": skip_bad, "no-resume": not resume, "workers": workers is not None, "ray": ray is not None}
    if output is None and any(of_output.values()):
        option = next(name for name, is_given in of_output.items() if is_given)
        raise ConfigError(f"predict: --{option} was given, but no --output.")
    examples: Texts = []
    if output is None:
        examples = texts or (from_stdin() if file is None else from_file(file, text=text, pair=pair))
    from lamina import prediction

    target = options.open_on(bank_or_model, base=model, device=device)
    shared: Any = {"readers": _chosen(target, readers), "batch_size": batch_size}
    if output is not None and file is not None:
        columns: Any = {"text": text, "text_pair": pair, "skip_bad": skip_bad, "resume": resume}
        spread: Any = {"ray": ray, "workers": workers, "progress": sys.stderr.isatty()}
        result = prediction.predict_file(target, file, output, **columns, **shared, **spread)
        line = f"{pluralize(result.rows, 'row')} in {result.output}, {result.skipped:,} skipped"
        print_json(result) if as_json else print(line)
        return
    progress = sys.stderr.isatty() and len(examples) > batch_size
    answers = prediction.predict(target, examples, **shared, progress=progress)
    if as_json:
        for example, answer in zip(examples, answers, strict=True):
            print_json({"text": example, "readers": answer}, indent=None)
    else:
        _show(examples, answers)


def from_stdin() -> list[str]:
    """One text per line of standard input, unless that is a terminal; empty lines are empty texts."""
    if sys.stdin is None or sys.stdin.isatty():  # None: it is closed
        raise ConfigError("predict: there is no text; texts are arguments, --file or standard input.")
    with convert_errors(lambda reason: DataError(f"read: standard input cannot be read ({reason}).")):
        data = sys.stdin.buffer.read()
    try:
        lines = data.decode("utf-8").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8 at byte {error.start} (row {row}); texts are read as UTF-8"
        raise DataError(f"read: standard input {reason}.", row=row) from None
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError("read: standard input is empty; a text in each line is needed.")
    return [line.removesuffix("\r") for line in lines]


def from_file(path: Path, *, text: str | None = None, pair: str | None = None) -> Texts:
    """Texts of a file, with a second text of the column `pair`; columns are found as by `predict_file`."""
    from lamina.prediction.bulk import read_examples, usual_column

    columns = [text or usual_column(path), *([pair] if pair else [])]
    return [example for _, examples, _ in read_examples(path, columns) for example in examples]


def _chosen(target: ReaderBank | PreTrainedModel, names: str | None) -> list[str] | None:
    """The readers named in "a,b"; None stays None, which is all."""
    from lamina.bank import ReaderBank

    if names is None:
        return None
    readers = [name.strip() for name in names.split(",") if name.strip()]
    if not readers and isinstance(target, ReaderBank):
        raise ConfigError(f"readers: '{names}' names none; the bank has {', '.join(target)}.")
    return readers


def _show(texts: Texts, answers: Sequence[dict[str, Any]]) -> None:
    names = list(answers[0]) if answers else []
    rows = [
        (_short(text), *(summary(answer[name]) for name in names)) for text, answer in zip(texts, answers, strict=True)
    ]
    print_table("", ("text", *names), rows)


def _short(text: str | tuple[str, str]) -> str:
    line = " ".join((text if isinstance(text, str) else " | ".join(text)).split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def summary(answer: Any) -> str:
    """A reader's answer in a few words."""
    if isinstance(answer, list) and answer and "candidates" in answer[0]:
        best = [mask["candidates"][0] for mask in answer if mask["candidates"]]
        return ", ".join(f"{token['token']} ({token['score']:.2f})" for token in best)
    if isinstance(answer, list):
        return ", ".join(f"{span['text']} {span['label']} ({span['score']:.2f})" for span in answer) or "-"
    if "value" in answer:
        return f"{answer['value']:.3f}"
    if "labels" in answer:
        return ", ".join(answer["labels"]) or "-"
    if "label" in answer:
        return f"{answer['label']} ({answer['score']:.2f})"
    return ", ".join(map(str, answer.values()))
