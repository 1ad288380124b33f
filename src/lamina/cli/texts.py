"""Texts to predict from: a file, or standard input."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

Texts = list[str] | list[tuple[str, str]]


def from_stdin() -> list[str]:
    """One text per line of standard input; empty lines are empty texts.

    Raises:
        ConfigError: If standard input is a terminal, where nobody would know what is waited for.
        DataError: If it is not UTF-8.
    """
    if sys.stdin.isatty():
        raise ConfigError("predict: there is no text; texts are arguments, --file or standard input.")
    data = sys.stdin.buffer.read()
    try:
        lines = data.decode("utf-8").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"read: standard input is not UTF-8 at byte {error.start} (row {row}); texts are read as UTF-8.", row=row
        ) from None
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def from_file(path: Path, *, text: str | None = None, pair: str | None = None) -> Texts:
    """Texts of a file, by its ending: .txt has one per line; .tsv, .csv, .jsonl and .parquet have columns.

    Args:
        path: The file.
        text: The text's column; by default "text" or "sentence", or the only one.
        pair: Column of the second text, for readers of pairs.

    Raises:
        DataError: If the file or a column is missing, or a row does not fit.
    """
    from lamina.train.bulk import read_examples, usual_column

    columns = [text or usual_column(path), *([pair] if pair else [])]
    return [example for _, examples, _ in read_examples(path, columns) for example in examples]
