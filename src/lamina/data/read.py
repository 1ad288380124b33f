"""Read files of examples: TSV, CSV, JSON Lines, Parquet, CoNLL and plain text.

TSV is read as the GLUE files are written: a quote is an ordinary character and a line is a row. CSV follows RFC 4180.
Lines end at line feeds only, since texts contain other separators. A row that cannot be read is passed on as the error
that describes it.
"""

from __future__ import annotations

import csv
import re
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lamina.data.arrow import CHUNK, Column, dataset_of
from lamina.errors import DataError, convert_errors
from lamina.utils import MAX_BYTES, check_range, is_dir, is_file, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable

Lines = Iterator[tuple[int, str | DataError]]
Grid = Iterator[tuple[int, list[str] | DataError]]
Records = Iterator[tuple[int, dict[str, Any] | DataError]]

_BLANKS = re.compile(r"[ \t]+")
_LONGEST_CELL = 2**31 - 1  # the csv module refuses texts above 131072 characters; more than this Windows cannot count
_EXAMPLE = 'every line is one object, as {"text": "...", "label": "..."}'


def read_records(path: Path, kind: str, header: Sequence[str] | None = None) -> Records:
    """Yield the rows of a file with their line numbers; a row that cannot be read is a DataError.

    Args:
        path: The file.
        kind: "tsv", "csv", "conll" (blank lines between sentences), "jsonl", "lines" (blank lines are skipped) or
            "all_lines" (blank lines are rows).
        header: Names of the columns of "tsv" and "csv"; None: they are in the first line.
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
    """Yield the lines of a UTF-8 file, line ends included, with their numbers; a bad line is a DataError."""
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
    """Yield the lines of a file as bytes; a line that is too long is cut one byte above the limit."""
    while data := file.readline(MAX_BYTES + 1):
        yield data
        while len(data) > MAX_BYTES and not data.endswith(b"\n"):
            data = file.readline(MAX_BYTES + 1) or b"\n"


def _per_line(lines: Lines, parse: Callable[[int, str], Any]) -> Iterator[tuple[int, Any]]:
    """Yield the result of `parse` for each line without its end; lines for which it is None are skipped."""
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
    """Return the error for lines that were read as one row and are not valid."""
    if not taken:
        raise error  # the file itself cannot be read
    if isinstance(error, DataError) and len(taken) == 1:
        return error
    why = f"row {error.row} is not UTF-8" if isinstance(error, DataError) else error
    return _bad_row(path, taken[0][0], f"is not CSV ({why}); a quote inside a quoted cell is written twice")


def _grid(path: Path, rows: Grid, header: Sequence[str] | None) -> Records:
    """Yield rows of cells as dicts by column; the first row is the header if none is given."""
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
    """Yield the rows of a Parquet file with their numbers, reading `rows` at a time; columns may be "outer.inner"."""
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
    """Convert errors of reading Parquet inside the context to DataError, which names the file."""
    said = f"read: {path} is not a Parquet file"
    with convert_errors(lambda reason: DataError(f"{said} ({reason}); it may be cut off.", path=str(path))):
        yield


def no_column(path: object, name: str, known: Iterable[str]) -> DataError:
    """Return the error for a column that is missing."""
    what = f"has no column '{name}'; its columns are: {', '.join(known) or 'none'}"
    return DataError(f"read: {path} {what}.", path=str(path), column=name)


def no_value(path: object, row: int, column: str) -> DataError:
    """Return the error for a row without a value in a column."""
    return _bad_row(path, row, f"has no value in column '{column}'; every row needs one", column)


def _bad_row(path: object, row: int, what: str, column: str | None = None) -> DataError:
    return DataError(f"read: {path} row {row} {what}.", path=str(path), row=row, column=column)


Bad = Callable[[DataError], None] | None
Columns = Sequence[str] | None

_ENDINGS = {".tsv": "tsv", ".csv": "csv", **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")}
_ENDINGS |= {".parquet": "parquet", **dict.fromkeys((".conll", ".iob", ".iob2", ".bio"), "conll")}
_PARQUET_ROWS = 2**16  # that are made Python objects at a time


@dataclass(frozen=True)
class Table:
    """The columns of a file; a cell that the file leaves out is None."""

    path: str  # where they came from, for error messages
    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int]  # the 1-based line of each row in the file, header counted (Parquet: the row's number)
    numbered: bool = False  # columns have numbers (CoNLL); each cell is then the list of a sentence's words

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str | int) -> Sequence[Any]:
        """Return the cells of a column; raise DataError if one is missing. See `cells`."""
        cells = self.cells(name)
        for row, cell in zip(self.rows, cells, strict=True):
            if cell is None:
                raise no_value(self.path, row, str(name))
        return cells

    def cells(self, name: str | int) -> Sequence[Any]:
        """Return the cells of a column by its name or number; a negative number counts from the last column.

        Where cells are objects, "translation.en" is the value that each of column "translation" has under "en".
        """
        key = str(name)
        if self.numbered and re.fullmatch(r"-\d+", key):
            key = str(len(self.columns) + int(key))
        outer, dot, inner = key.partition(".")
        cells = self.columns.get(key)
        if cells is None and dot and all(isinstance(cell, Mapping) for cell in self.columns.get(outer, [None])):
            cells = [cell.get(inner) for cell in self.columns[outer]]
        if cells is None:
            raise no_column(self.path, str(name), self.columns)
        return cells

    def select_rows(self, rows: Sequence[int]) -> Table:
        """Return a table of the rows with these numbers, in that order."""
        columns = {
            name: cells.select(rows) if isinstance(cells, Column) else [cells[row] for row in rows]
            for name, cells in self.columns.items()
        }
        return replace(self, columns=columns, rows=[self.rows[row] for row in rows])


def read_table(path: str | Path, *, header: Columns = None, other: str | None = None) -> Table:
    """Read a file by its ending: .tsv, .csv, .jsonl, .parquet, .conll and the like.

    `header` names the columns of a TSV or CSV file whose first line does not. `other` is what a file holds whose ending
    says nothing (`eng.train`, `.txt`): "conll" columns, or the "lines" of a plain text, as one column "text".
    """
    path = existing(path)
    return _whole(path, _kind(path, other), header)


def read_chunks(
    path: str | Path, *, columns: Columns = None, rows: int = 1000, start: int = 0, bad: Bad = None
) -> Iterator[Table]:
    """Read a file in chunks of so many `rows`, without the first `start`, in memory that does not grow with the file.

    Every row has a value in each of the `columns`; None: all there are. What is wrong with a row that cannot be read is
    handed to `bad`, or raised, once the rows before it were handed out. Each line of .txt is a row in column "text".
    """
    check_range("read", "rows", rows, 1, float("inf"))
    path = existing(path)
    kind = _kind(path, "all_lines" if path.suffix.lower() == ".txt" else None)
    return _tables(path, kind, _chosen(path, kind, columns, min(rows, _PARQUET_ROWS)), rows, start, bad)


def _whole(path: Path, kind: str, header: Columns = None) -> Table:
    records = _chosen(path, kind, header=header)
    if kind in ("conll", "jsonl", "parquet"):
        (table,) = _tables(path, kind, records)
        return table
    lines = array("q")

    def parts() -> Iterator[pa.Table]:  # every cell is a text: Arrow holds them, on disk if they are many
        for part in _tables(path, kind, records, CHUNK):
            lines.extend(part.rows)
            yield pa.table(dict(part.columns))

    rows = dataset_of(parts())
    return Table(str(path), {name: Column(rows, [name]) for name in rows.column_names}, lines)


def _tables(
    path: Path, kind: str, records: Records, rows: int = sys.maxsize, start: int = 0, bad: Bad = None
) -> Iterator[Table]:
    taken: dict[int, dict[str, Any]] = {}
    problem: DataError | None = None
    for number, record in records:
        if not isinstance(record, DataError):
            start -= 1
            if start < 0:
                taken[number] = record
        elif start <= 0 and bad is not None:
            bad(record)
        elif start <= 0:
            problem = record
            break
        if len(taken) == rows:
            yield _table(path, kind, taken)
            taken = {}
    if taken:
        yield _table(path, kind, taken)
    if problem is not None:
        raise problem


def _table(path: Path, kind: str, taken: Mapping[int, dict[str, Any]]) -> Table:
    names = dict.fromkeys(chain.from_iterable(taken.values()))
    columns = {name: [record.get(name) for record in taken.values()] for name in names}
    return Table(str(path), columns, list(taken), numbered=kind == "conll")


def read_pair(paths: Sequence[str | Path], columns: tuple[str, str]) -> Table:
    """Read two text files with corresponding lines as a table of two columns; blank lines are rows too."""
    if len(paths) != 2:
        raise DataError(f"read: {len(paths)} files were given as a pair; a pair has a source and a target.")
    source, target = (_whole(existing(path), "all_lines") for path in paths)
    if len(source) != len(target):
        came = f"{paths[0]} has {len(source)} lines, {paths[1]} has {len(target)}"
        raise DataError(f"read: {came}; line n of one belongs to line n of the other.", path=str(paths[1]))
    cells = {columns[0]: source.column("text"), columns[1]: target.column("text")}
    return Table(f"{paths[0]} and {paths[1]}", cells, source.rows)


def parquet_rows(path: str | Path, column: str, feature: str = "Image") -> Any:
    """Return a Parquet file as a `datasets.Dataset`.

    If `column` holds objects with "bytes" or "path", it gets the type `feature` of `datasets`.
    """
    import datasets

    with parquet_errors(path := existing(path)):
        rows = datasets.Dataset(pq.read_table(path))
    kind = rows.features.get(column)
    if isinstance(kind, dict) and set(kind) <= {"bytes", "path"}:
        rows = rows.cast_column(column, getattr(datasets, feature)())
    return rows


def existing(path: str | Path) -> Path:
    """Return the path of a file; raise DataError if it does not exist or is a folder."""
    if not is_file(path):
        what = "is a folder" if is_dir(path) else "is not there"
        raise DataError(f"read: {path} {what}; a file is needed.", path=str(path))
    return Path(path)


def _kind(path: Path, other: str | None) -> str:
    if kind := _ENDINGS.get(path.suffix.lower(), other):
        return kind
    known = ", ".join(_ENDINGS)
    raise DataError(f"read: {path} ends in '{path.suffix}'; the endings known are {known}.", path=str(path))


def _chosen(
    path: Path, kind: str, columns: Columns = None, rows: int = _PARQUET_ROWS, header: Columns = None
) -> Records:
    """Yield the rows of a file with the requested columns; a row without a value in one of them is a DataError."""
    parquet, number = kind == "parquet", 0
    records = read_parquet(path, columns, rows) if parquet else read_records(path, kind, header)
    for number, record in records:
        if columns is None or isinstance(record, DataError):
            yield number, record
            continue
        chosen = {name: _cell(path, record, name, kind) for name in columns}
        lacking = next((name for name, cell in chosen.items() if cell is None), None)
        yield number, chosen if lacking is None else no_value(path, number, lacking)
    if not number:
        raise DataError(f"read: {path} is empty; a task needs at least one row.", path=str(path))


def _cell(path: Path, record: dict[str, Any], name: str, kind: str) -> Any:
    outer, dot, inner = name.partition(".")
    if name in record:
        return record[name]
    if dot and outer in record:
        return record[outer].get(inner) if isinstance(record[outer], Mapping) else None
    if kind == "jsonl":
        return None
    raise no_column(path, name, record)
