"""Texts to predict from: a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lamina.data.read import Table

Texts = list[str] | list[tuple[str, str]]
USUAL_COLUMNS = ("text", "sentence")


def from_stdin() -> list[str]:
    """One text per line of standard input; empty lines are empty texts.

    Raises:
        ConfigError: If standard input is a terminal, where nobody would know what is waited for.
        DataError: If it is not UTF-8.
    """
    if sys.stdin.isatty():
        raise ConfigError("predict: there is no text; texts are arguments, --file or standard input. Give one of them.")
    return _lines(sys.stdin.buffer.read(), "standard input")


def from_file(path: Path, *, column: str | None = None, pair_column: str | None = None) -> Texts:
    """Texts of a file, by its ending: .txt has one per line; .tsv, .csv, .jsonl and .parquet have columns.

    Args:
        path: The file.
        column: The text's column; by default "text" or "sentence", or the only one.
        pair_column: Column of the second text, for readers of pairs.

    Raises:
        DataError: If the file or a column is missing, or a row does not fit.
        ConfigError: If columns are named for a file that has none.
    """
    if path.suffix.lower() == ".txt":
        if column or pair_column:
            raise ConfigError(f"predict: {path} has no columns; a .txt file has one text per line. Leave --column out.")
        return _lines(_bytes(path), str(path))
    from lamina.data.read import read_table

    table = read_table(path)
    first = _texts(table, column or _usual(table))
    return first if pair_column is None else list(zip(first, _texts(table, pair_column), strict=True))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"read: {path} cannot be read ({error.strerror}); a file of texts is needed. Check the path.",
            path=str(path),
        ) from None


def _lines(data: bytes, name: str) -> list[str]:
    try:
        lines = data.decode("utf-8").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"read: {name} is not UTF-8 at byte {error.start} (row {row}); texts are read as UTF-8. Convert it.",
            path=name,
            row=row,
        ) from None
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _usual(table: Table) -> str:
    names = list(table.columns)
    if len(names) == 1:
        return names[0]
    found = next((name for name in USUAL_COLUMNS if name in names), None)
    if found is None:
        raise DataError(
            f"read: {table.path} has no column 'text' or 'sentence'; its columns are: {', '.join(names)}. "
            "Name one with --column.",
            path=table.path,
        )
    return found


def _texts(table: Table, column: str) -> list[str]:
    cells = table.column(column)
    for row, cell in zip(table.rows, cells, strict=True):
        if not isinstance(cell, str):
            raise DataError(
                f"read: {table.path} row {row} has {type(cell).__name__} in column '{column}'; a text is needed. "
                "Correct this row.",
                path=table.path,
                row=row,
                column=column,
            )
    return cells
