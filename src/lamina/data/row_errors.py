"""Errors of files of examples. Each names the file, the row and the column."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from lamina.errors import DataError, listed
from lamina.utils import is_dir, is_file, pluralize, similar_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

T = TypeVar("T")
# Lines, rows of cells, or records: each with its number in the file, or with the error that describes it.
Numbered: TypeAlias = Iterator[tuple[int, T | DataError]]
_QUOTED = re.compile(r'"([^"]|"")*"')
logger = logging.getLogger(__name__)
_SET_BY = {  # default name of a column -> the advice if a file has no such column
    "sentence": " Name the column of the texts with `text`.",
    "image": " Name the column of the images with `inputs`.",
    "audio": " Name the column of the clips with `inputs`.",
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
    if not close and str(path).lower().endswith((".csv", ".tsv")):
        hint += " Columns of such a file are named, not counted." if name.isdecimal() else ""
        hint += " Row 1 is read as the header; if it is data, write a line with the names of the columns above it."
    reason = f"has no column '{name}'; its columns are: {listed(name, known)}"
    return DataError(f"read: {path} {reason}.{hint}", path=str(path), column=name)


def missing_value(path: object, row: int, column: str, known: Collection[str] = ()) -> DataError:
    """Return the DataError for a row without a value in a column.

    `known` are the columns that the row has; the error lists them if `column` is not one of them. (): unknown.
    """
    there = f" (it has {listed(column, list(known))})" if known and column.partition(".")[0] not in known else ""
    return bad_row(path, row, f"has no value in column '{column}'{there}; every row needs one", column)


def check_line_feeds(path: object, text: str) -> None:
    """Raise DataError if a file has carriage returns but no line feed. `text` is its first line, or the whole file."""
    if "\n" not in text and "\r" in text.rstrip("\r"):
        problem = f"{path} has carriage returns and no line feed"
        raise DataError(f"read: {problem}. Convert them, for example with: tr '\\r' '\\n'", path=str(path))


def as_csv(path: Path) -> str:
    """Return the advice to save a TSV file whose cells are in quotes as CSV."""
    return f"save the file as CSV, as with pandas.read_csv({path.name!r}, sep='\\t').to_csv('new.csv', index=False)"


def watch_quotes(path: Path, rows: Numbered[list[str]]) -> Numbered[list[str]]:
    """Yield the numbered rows of a TSV file unchanged; warn at its end if they have cells that are quoted as in CSV.

    Such a cell begins and ends with a quote, and has doubled quotes and no others inside.
    """
    numbers: list[int] = []
    for number, cells in rows:
        if not isinstance(cells, DataError) and any('""' in cell[1:-1] and _QUOTED.fullmatch(cell) for cell in cells):
            numbers.append(number)
        yield number, cells
    if numbers:
        what = "cells are in quotes with doubled quotes inside, as in CSV, in %s (the first is row %d)"
        hint = "In TSV files quotes are ordinary characters. If the quotes are not part of the cells, %s"
        logger.warning(f"read: %s: {what}. {hint}", path, pluralize(len(numbers), "row"), numbers[0], as_csv(path))


def bad_row(path: object, row: int, reason: str, column: str | None = None) -> DataError:
    """Return the DataError for a row of a file. `reason` says what is wrong; it follows "row 3 " in the message.

    `column` is the column at fault. None: the whole row is.
    """
    return DataError(f"read: {path} row {row} {reason}.", path=str(path), row=row, column=column)
