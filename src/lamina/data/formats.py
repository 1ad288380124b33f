"""The formats of files of examples: each is read row by row, with the line of every row.

TSV is read as the GLUE files are written: a quote is a quote, a line is a row. CSV follows RFC 4180. Lines end at line
feeds alone, as texts hold other separators. In place of a line or row that cannot be read comes the error that says so.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lamina.errors import DataError, convert_errors
from lamina.utils import MAX_BYTES, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

Lines = Iterator[tuple[int, str | DataError]]
Grid = Iterator[tuple[int, list[str] | DataError]]
Records = Iterator[tuple[int, dict[str, Any] | DataError]]

_BLANKS = re.compile(r"[ \t]+")
_LONGEST_CELL = 2**31 - 1  # the csv module refuses texts above 131072 characters; more than this Windows cannot count
_EXAMPLE = 'every line is one object, as {"text": "...", "label": "..."}'


def read_records(path: Path, kind: str, header: Sequence[str] | None = None) -> Records:
    """The rows of a file of any kind but Parquet; the first line of "tsv" and "csv" is a header if none is given.

    Of "lines" blank ones are no rows, of "all_lines" they are; "conll" has blank lines between sentences.
    """
    lines = read_lines(path)
    if kind == "tsv":
        return _grid(path, _per_line(lines, lambda _, text: text.split("\t") if text else []), header)
    if kind == "csv":
        return _grid(path, _csv(path, lines), header)
    if kind == "conll":
        return _conll(path, lines)
    if kind == "jsonl":
        return _per_line(lines, lambda number, text: _object(path, number, text) if text.strip() else None)
    return _per_line(lines, lambda _, text: {"text": text} if text.strip() or kind == "all_lines" else None)


def read_lines(path: Path) -> Lines:
    """The lines of a UTF-8 file with their numbers and ends."""
    start = 0
    said = f"read: {path} cannot be read"
    with (
        convert_errors(lambda reason: DataError(f"{said} ({reason}).", path=str(path)), OSError),
        path.open("rb") as file,
    ):
        for number, data in enumerate(_limited(file), start=1):
            try:
                line: str | DataError = data.decode("utf-8")
            except UnicodeDecodeError as error:
                what = f"is not UTF-8 at byte {start + error.start} (row {number}); convert it, for example with iconv"
                line = DataError(f"read: {path} {what}.", path=str(path), row=number)
            if len(data) > MAX_BYTES:
                line = _bad_row(path, number, f"has more than {MAX_BYTES:,} bytes; it is too long to be an example")
            if number == 1 and isinstance(line, str):
                line = line.removeprefix("\ufeff")
            if line:
                yield number, line
            start += len(data)


def _limited(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; of one that is too long what is one byte too long."""
    while data := file.readline(MAX_BYTES + 1):
        yield data
        while len(data) > MAX_BYTES and not data.endswith(b"\n"):
            data = file.readline(MAX_BYTES + 1) or b"\n"


def _per_line(lines: Lines, parse: Callable[[int, str], Any]) -> Iterator[tuple[int, Any]]:
    """What `parse` makes of each line without its end; None is no row."""
    for number, line in lines:
        row = line if isinstance(line, DataError) else parse(number, line.removesuffix("\n").removesuffix("\r"))
        if row is not None:
            yield number, row


def _csv(path: Path, lines: Lines) -> Grid:
    again: deque[tuple[int, str | DataError]] = deque()
    taken: list[tuple[int, str | DataError]] = []

    def feed() -> Iterator[str]:
        size = 0
        for item in chain(iter(lambda: again.popleft() if again else None, None), lines):
            taken.append(item)
            if isinstance(item[1], DataError):
                raise item[1]
            size += len(item[1])
            if size > MAX_BYTES:
                raise csv.Error(f"a quote that is not closed within {MAX_BYTES:,} characters")
            yield item[1]

    while True:
        taken.clear()
        limit = csv.field_size_limit(_LONGEST_CELL)
        try:
            row = next(csv.reader(feed(), strict=True), None)
        except (csv.Error, DataError) as error:
            row = _no_csv(path, taken, error)
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if isinstance(row, DataError):  # an open quote takes the lines that follow; they are rows of their own
            again.extendleft(reversed(taken[1:]))
        yield taken[0][0], row


def _no_csv(path: Path, taken: Sequence[tuple[int, str | DataError]], error: csv.Error | DataError) -> DataError:
    """What is wrong with the lines that were taken as one row."""
    if not taken:
        raise error  # the file itself cannot be read
    if isinstance(error, DataError) and len(taken) == 1:
        return error
    why = f"row {error.row} is not UTF-8" if isinstance(error, DataError) else error
    return _bad_row(path, taken[0][0], f"is not CSV ({why}); a quote inside a quoted cell is written twice")


def _grid(path: Path, rows: Grid, header: Sequence[str] | None) -> Records:
    """Cells with their names."""
    names = header if header is not None else next(rows, (0, []))[1]
    if isinstance(names, DataError):
        raise names
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"read: {path} has two columns '{twice}'.", path=str(path), column=twice)
    held: list[tuple[int, list[str] | DataError]] = []
    for number, cells in rows:
        held.append((number, cells or [""]))
        for at, row in held if cells else ():  # blank rows at the end are none
            if isinstance(row, DataError):
                yield at, row
            elif len(row) == len(names):
                yield at, dict(zip(names, row, strict=True))
            else:
                yield at, _bad_row(path, at, f"has {len(row)} columns; the file has {len(names)}")
        held = [] if cells else held


def _object(path: Path, number: int, text: str) -> dict[str, Any] | DataError:
    try:
        record = parse_json(text)
    except ValueError as error:
        return _bad_row(path, number, f"is not JSON ({error}); {_EXAMPLE}")
    return record if isinstance(record, dict) else _bad_row(path, number, f"is not an object; {_EXAMPLE}")


def _conll(path: Path, lines: Lines) -> Records:
    words: list[list[str]] = []
    first = width = 0
    problem: DataError | None = None
    for number, text in chain(_per_line(lines, lambda _, text: text), ((0, ""),)):
        if isinstance(text, DataError):
            first, problem = first or number, problem or text
            continue
        cells = text.split("\t") if "\t" in text else _BLANKS.split(text.strip(" "))
        if text.strip() and cells[0] != "-DOCSTART-":
            width = width or len(cells)
            if len(cells) != width:
                problem = problem or _bad_row(path, number, f"has {len(cells)} columns; the file has {width}")
            words.append(cells)
            first = first or number
            continue
        if first:
            yield first, problem or {str(i): list(column) for i, column in enumerate(zip(*words, strict=True))}
        words, first, problem = [], 0, None


def read_parquet(path: Path, columns: Sequence[str] | None, rows: int) -> Records:
    """The rows of a Parquet file with their numbers, so many in memory at once; `columns` may name "outer.inner"."""
    with parquet_errors(path), pq.ParquetFile(path) as file:
        known = file.schema_arrow.names
        wanted = None if columns is None else [n if n in known else n.partition(".")[0] for n in columns]
        for name, outer in zip(columns or (), wanted or (), strict=True):
            if outer not in known:
                raise no_column(path, name, known)
        start = 1
        for batch in file.iter_batches(rows, columns=wanted):
            yield from _records(path, batch, start)
            start += len(batch)


def _records(path: Path, batch: pa.RecordBatch, start: int) -> Records:
    try:
        yield from enumerate(batch.to_pylist(), start)
    except UnicodeDecodeError as error:  # before anything was handed out
        if len(batch) == 1:
            yield start, _bad_row(path, start, f"is not UTF-8 at byte {error.start} of a text")
            return
        half = len(batch) // 2
        yield from _records(path, batch[:half], start)
        yield from _records(path, batch[half:], start + half)


# Errors


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Raise DataError, which names the file, where it cannot be read as Parquet."""
    said = f"read: {path} is not a Parquet file"
    with convert_errors(lambda reason: DataError(f"{said} ({reason}); it may be cut off.", path=str(path))):
        yield


def no_column(path: object, name: str, known: Iterable[str]) -> DataError:
    """The error for a column that is missing."""
    what = f"has no column '{name}'; its columns are: {', '.join(known) or 'none'}"
    return DataError(f"read: {path} {what}.", path=str(path), column=name)


def no_value(path: object, row: int, column: str) -> DataError:
    """The error for a row without a value in a column."""
    return _bad_row(path, row, f"has no value in column '{column}'; every row needs one", column)


def _bad_row(path: object, row: int, what: str, column: str | None = None) -> DataError:
    return DataError(f"read: {path} row {row} {what}.", path=str(path), row=row, column=column)
