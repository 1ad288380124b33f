"""Print tables for people and JSON for programs, on streams that survive a full disk or a closed pipe."""

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
MIN_HEADER = 12  # least width of a column whose name is broken over several lines, in characters
READER_GONE = 141  # exit code of a command whose output nobody reads any more, as in `lamina ... | head -1`


@final
class Stream:
    """A wrapper of standard output or standard error that handles failed writes: a full disk, or a closed pipe.

    After the first failure, everything that is written is dropped. With `needed=False` (standard error) nothing else
    happens, so that a log on a full disk does not end a training run. With `needed=True` (standard output) the process
    ends too, because results that were not printed are no success: with `StoreError`, or with exit code 141 after a
    closed pipe.
    """

    def __init__(self, stream: TextIO, *, needed: bool) -> None:
        self._stream, self._needed = stream, needed
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text ("+-" for "±" if the encoding has no "±"); return its length. Raises the errors of `_try`."""
        if text != "":  # typer writes "" to learn the type of the stream; on a full disk even that fails
            self._try(lambda: self._stream.write(with_known_signs(text, self._stream.encoding)))
        return len(text)

    def flush(self) -> None:
        """Write the text that the stream has buffered. Raises the errors of `_try`."""
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        """Call `write`; if it raises OSError, redirect the stream to the null device.

        Raises StoreError if the call failed and the stream is needed, and SystemExit if the stream is needed and is a
        pipe that was closed.
        """
        try:
            write()
        except OSError as error:
            # The buffer still holds the text. Python would try to write it again when the process ends.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._needed and isinstance(error, BrokenPipeError):
                raise SystemExit(READER_GONE) from None
            if self._needed:
                raise StoreError(f"output: standard output cannot be written ({first_line(error)}).") from error


def with_known_signs(text: str, encoding: str | None) -> str:
    """Return the text with "+-" instead of "±" if the encoding (None: UTF-8) has no "±"."""
    try:
        "±".encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.replace("±", "+-")
    return text


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print nested dicts, lists, numbers, strings, paths and dataclasses as JSON; NaN and infinity become null.

    `indent` is spaces per level; None: one line. Characters outside ASCII are escaped unless standard output is UTF-8.
    """
    from pydantic_core import to_jsonable_python

    plain, encoding = to_jsonable_python(value, inf_nan_mode="null"), str(sys.stdout.encoding).lower()
    print(json.dumps(plain, indent=indent, ensure_ascii=not encoding.startswith("utf")))


def end_if_failed(failures: Sequence[Mapping[str, object]]) -> None:
    """Print "key" and "error" of each failed cell (a piece of a run), and exit with code 1; do nothing without any."""
    from typer import Exit

    for failure in failures:
        print(f"failed: {failure['key']}: {failure['error']}", file=sys.stderr)
    if failures:
        raise Exit(1)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as wide as the terminal, or 160 characters wide if the output is not a terminal.

    Args:
        title: Line above the table; "" for none.
        columns: Names of the columns. If the table is too wide, long names are broken after underscores.
        rows: The cells of each row: numbers, strings, None or rich texts, printed as `text` returns them. Columns of
            numbers are right-aligned.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)
    shown = [[cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows]
    widths = [max((len(row[number]) for row in shown), default=0) for number in range(len(columns))]
    # A border and two spaces add 3 characters to the width of a column.
    fits = sum(max(len(name), width) + 3 for name, width in zip(columns, widths, strict=True)) < console.width
    share = max(MIN_HEADER, console.width // max(1, len(columns)) - 3)
    table = Table()
    for number, name in enumerate(columns):
        numeric = all(isinstance(row[number], int | float) for row in rows)
        header = name if fits else broken(name, max(share, widths[number]))
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for cells in shown:
        encoding = sys.stdout.encoding
        table.add_row(*(cell if isinstance(cell, Text) else with_known_signs(cell, encoding) for cell in cells))
    if title:
        console.print(Text(title, style="bold"))  # a title inside the table would be broken to the width of the table
    console.print(table)


def broken(name: str, width: int) -> str:
    """Return a column name broken after underscores into lines of at most `width` characters.

    A part without underscores that is longer stays whole.
    """
    lines = textwrap.wrap(name.replace("_", "_ "), width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.replace("_ ", "_") for line in lines)


def text(cell: object) -> str:
    """Return a cell of a table as a string: integers with separators, floats with four decimals, None as ""."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
