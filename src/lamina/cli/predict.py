"""`lamina predict`: predictions of a bank's readers, or of a whole model, for texts, a file or standard input."""

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

SHOWN = 60  # characters of a text that the table shows
_TEXTS = "Texts to predict from. Default: --file or, without it, standard input with one text per line."
_FILE = "File of texts: .txt with one text per line, .tsv, .csv, .jsonl or .parquet."
_OUTPUT = "Write the predictions to this .jsonl, .csv or .parquet file. Default: print them."
_SKIP_BAD = "With --output: skip rows that cannot be read and count them. Default: the first one is an error."
_RAY = "With --output: predict on Ray workers of this machine, of the running cluster or of the one at HOST:PORT."
_WORKERS = "With --ray: number of workers. Default: one per GPU, or one per core without GPUs."
_RESUME = "With --output: continue a run that was interrupted."


def predict(  # noqa: PLR0913
    bank_or_model: options.SavedArgument,
    texts: Annotated[list[str] | None, Argument(metavar="TEXT", help=_TEXTS)] = None,
    file: Annotated[Path | None, Option(help=_FILE)] = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    text: options.TextOption = None,
    pair: options.PairOption = None,
    readers: Annotated[str | None, Option(help="Names of the readers to run, such as a,b. Default: all.")] = None,
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

    All readers share one pass of the model. --json prints one object per line and text.
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
    """Return the lines of standard input, a text each; an empty line is an empty text.

    Raises:
        ConfigError: If standard input is a terminal or closed.
        DataError: If it is empty, is not UTF-8 or cannot be read.
    """
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
    """Return the texts in column `text` of a file; with `pair` as pairs with the texts of that column.

    Without `text` the column is the one that `predict_file` would use.
    """
    from lamina.prediction.bulk import read_examples, usual_column

    columns = [text or usual_column(path), *([pair] if pair else [])]
    return [example for _, examples, _ in read_examples(path, columns) for example in examples]


def _chosen(target: ReaderBank | PreTrainedModel, names: str | None) -> list[str] | None:
    """Return the reader names in a text such as "a,b"; None, which stands for all readers, stays None."""
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
    """Return a text or a pair of texts on one line, at most `SHOWN` characters long."""
    line = " ".join((text if isinstance(text, str) else " | ".join(text)).split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def summary(answer: Any) -> str:
    """Return a prediction as a short text: labels with their scores, spans, a number, or the likeliest tokens."""
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
