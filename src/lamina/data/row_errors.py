"""Errors of files of examples. Each names the file, the row and the column."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.errors import DataError, listed
from lamina.utils import is_dir, is_file, similar_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_SET_BY = {  # default name of a column -> the advice if a file has no such column
    "sentence": " Name the column of the texts with `text`.",
    "label": " Name the column of the labels with `label`.",
}


def existing(path: str | Path) -> Path:
    """Return `path` as a Path; raise DataError unless an ordinary file is there."""
    if not is_file(path):
        exists = os.path.lexists(path)
        problem = "is a folder" if is_dir(path) else "is not a regular file" if exists else "is not there"
        hint = "" if exists else similar_file(path)
        raise DataError(f"read: {path} {problem}; a file is needed.{hint}", path=str(path))
    return Path(path)


def missing_column(path: object, name: str, known: Iterable[str]) -> DataError:
    """Return the DataError for a file without the column `name`; `known` are the names of its columns."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else _SET_BY.get(name, "")
    reason = f"has no column '{name}'; its columns are: {listed(name, known)}"
    return DataError(f"read: {path} {reason}.{hint}", path=str(path), column=name)


def missing_value(path: object, row: int, column: str, known: Collection[str] = ()) -> DataError:
    """Return the DataError for a row without a value in a column; it lists `known`, if `column` is not among these."""
    there = f" (it has {listed(column, list(known))})" if known and column.partition(".")[0] not in known else ""
    return bad_row(path, row, f"has no value in column '{column}'{there}; every row needs one", column)


def check_line_feeds(path: object, text: str) -> None:
    """Raise DataError if a file has carriage returns for line feeds; `text` is its first line, or the whole file."""
    if "\n" not in text and "\r" in text.rstrip("\r"):
        problem = f"{path} has carriage returns and no line feed"
        raise DataError(f"read: {problem}. Convert them, for example with: tr '\\r' '\\n'", path=str(path))


def bad_row(path: object, row: int, reason: str, column: str | None = None) -> DataError:
    """Return the DataError for a row of a file. `reason` says what is wrong; it follows "row 3 " in the message.

    `column` is the column at fault. None: the whole row is.
    """
    return DataError(f"read: {path} row {row} {reason}.", path=str(path), row=row, column=column)
