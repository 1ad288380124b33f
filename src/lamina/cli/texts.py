"""Texts to predict from: a file, or standard input."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

Texts = list[str] | list[tuple[str, str]]


def from_stdin() -> list[str]:
    """One text per line of standard input, unless that is a terminal; empty lines are empty texts."""
    if sys.stdin.isatty():
        raise ConfigError("predict: there is no text; texts are arguments, --file or standard input.")
    data = sys.stdin.buffer.read()
    try:
        lines = data.decode("utf-8").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8 at byte {error.start} (row {row}); texts are read as UTF-8"
        raise DataError(f"read: standard input {reason}.", row=row) from None
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def from_file(path: Path, *, text: str | None = None, pair: str | None = None) -> Texts:
    """Texts of a file, with a second text of the column `pair`; columns are found as by `predict_file`."""
    from lamina.train.bulk import read_examples, usual_column

    columns = [text or usual_column(path), *([pair] if pair else [])]
    return [example for _, examples, _ in read_examples(path, columns) for example in examples]
