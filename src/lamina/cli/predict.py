"""`lamina predict`: what every reader of a bank says about texts, or about every row of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import (
    BankArgument,
    BatchSizeOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    chosen,
    open_bank,
)
from lamina.cli.output import print_json, print_table
from lamina.cli.texts import from_file, from_stdin
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.cli.texts import Texts

SHOWN = 60  # characters of a text in the table


def predict(  # noqa: PLR0913
    bank: BankArgument,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; without any, --file or standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help=".txt with one text per line, or .tsv, .csv, .jsonl or .parquet.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this .jsonl, .csv or .parquet, of any size.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help='Column of the text; by default "text", "sentence" or the only one.')
    ] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="Column of the second text, for readers of pairs.")] = None,
    readers: Annotated[
        str | None, typer.Option("--readers", help="Names of the readers to run, as a,b; by default all.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="With --output: leave out rows that cannot be read, and count them.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="With --output: go on where a run that was ended early stopped.")] = True,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    batch_size: BatchSizeOption = 32,
    as_json: JsonOption = False,
) -> None:
    """Predict from texts with the readers of a bank.

    Every reader answers off the same pass of the model. With --json, one object per text, a line each.
    """
    if (text or pair) and file is None:
        raise ConfigError("predict: a column was named, but no file; columns are those of a file. Give --file.")
    if texts and file is not None:
        raise ConfigError("predict: texts and --file were both given; they come from one place.")
    if output is not None:
        if file is None:
            raise ConfigError("predict: --output was given, but no file. Give --file.")
        from lamina.train import predict_file

        opened = open_bank(bank, model=model, device=device)
        result = predict_file(
            opened,
            file,
            output,
            text=text,
            text_pair=pair,
            readers=chosen(opened, readers),
            batch_size=batch_size,
            skip_bad=skip_bad,
            resume=resume,
            progress=sys.stderr.isatty(),
        )
        if as_json:
            print_json({"output": str(result.output), "rows": result.rows, "skipped": result.skipped})
        else:
            print(f"{result.rows:,} rows in {result.output}, {result.skipped:,} skipped")
        return
    if skip_bad:
        raise ConfigError("predict: --skip-bad was given, but no --output.")
    given = texts or (from_stdin() if file is None else from_file(file, text=text, pair=pair))
    from lamina.train import predict as run

    opened = open_bank(bank, model=model, device=device)
    names = chosen(opened, readers)
    progress = sys.stderr.isatty() and len(given) > batch_size
    answers = run(opened, given, batch_size=batch_size, readers=names, progress=progress)
    _show(given, answers, names or list(opened), as_json=as_json)


def _show(texts: Texts, answers: Sequence[dict[str, Any]], names: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        for given, answer in zip(texts, answers, strict=True):
            print_json({"text": given, "readers": answer}, indent=None)
        return
    rows = [
        (_short(given), *(summary(answer[name]) for name in names))
        for given, answer in zip(texts, answers, strict=True)
    ]
    print_table("", ("text", *names), rows)


def _short(given: str | tuple[str, str]) -> str:
    joined = given if isinstance(given, str) else " | ".join(given)
    line = " ".join(joined.split())
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
