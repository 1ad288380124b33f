"""Printing: tables for people, JSON for programs, and streams that survive a full disk or a closed pipe."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO, final

from lamina.errors import StoreError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDE = 160  # characters per line where the output is not a terminal
MIN_HEADER = 12  # characters of a column name that are never broken over two lines
READER_GONE = 141  # exit code of a command whose output is no longer read, as after `| head -1`


@final
class Stream:
    """A wrapper of standard output or standard error that handles streams that cannot be written.

    Text that cannot be written is dropped. If the stream is `needed`, as standard output is, a `StoreError` is raised,
    or the process ends if the reader of a pipe is gone. So a log on a full disk does not end a training run, and an
    answer that cannot be printed does not count as a success.
    """

    def __init__(self, stream: TextIO, *, needed: bool) -> None:
        self._stream, self._needed = stream, needed
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text and return its length; a missing "±" becomes "+-"."""
        if text != "":  # typer writes "" to learn the type of the stream; on a full disk even that fails
            self._try(lambda: self._stream.write(spelt(text, self._stream.encoding)))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        """Run a call that writes; if it fails, redirect the stream to the null device and raise if that is needed."""
        try:
            call()
        except OSError as error:
            with suppress(OSError, ValueError):  # without this, its buffer would fail again when the process ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._needed and isinstance(error, BrokenPipeError):
                raise SystemExit(READER_GONE) from None
            if self._needed:
                raise StoreError(f"output: standard output cannot be written ({first_line(error)}).") from error


def spelt(text: str, encoding: str | None) -> str:
    """Return the text with "+-" in place of "±" if the encoding has no "±"."""
    try:
        "±".encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.replace("±", "+-")
    return text


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value, which may be a dataclass, as JSON; NaN and infinities become null."""
    from pydantic_core import to_jsonable_python

    plain, encoding = to_jsonable_python(value, inf_nan_mode="null"), str(sys.stdout.encoding).lower()
    print(json.dumps(plain, indent=indent, ensure_ascii=not encoding.startswith("utf")))


def end_if_failed(failures: Sequence[Mapping[str, Any]]) -> None:
    """Name the cells of a study or run that failed, on standard error, and end with 1; do nothing if there is none."""
    from typer import Exit

    for failure in failures:
        print(f"failed: {failure['key']}: {failure['error']}", file=sys.stderr)
    if failures:
        raise Exit(1)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns that hold numbers are set to the right. Cells may be texts of rich, with styles."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)
    shown = [[cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows]
    longest = [max((len(row[number]) for row in shown), default=0) for number in range(len(columns))]
    fits = sum(max(len(name), own) + 3 for name, own in zip(columns, longest, strict=True)) < console.width
    share = max(MIN_HEADER, console.width // max(1, len(columns)) - 3)
    table = Table()
    for number, name in enumerate(columns):
        numeric = all(isinstance(row[number], int | float) for row in rows)
        header = name if fits else broken(name, max(share, longest[number]))
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for cells in shown:
        table.add_row(*(cell if isinstance(cell, Text) else spelt(cell, sys.stdout.encoding) for cell in cells))
    if title:
        console.print(Text(title, style="bold"))  # a title inside the table would be broken to the width of the table
    console.print(table)


def broken(name: str, width: int) -> str:
    """Return a column name broken after underscores into lines of at most `width` characters."""
    lines = textwrap.wrap(name.replace("_", "_ "), width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.replace("_ ", "_") for line in lines)


def text(cell: object) -> str:
    """Return a cell as text: integers with separators, floats with four decimals, None as ""."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
