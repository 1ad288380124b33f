"""Read a file into columns, whole or in chunks, keeping the line of every row so that errors can name it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.data.formats import (
    empty,
    no_column,
    no_value,
    not_parquet,
    read_lines,
    read_parquet,
    read_records,
    without_end,
)
from lamina.errors import DataError
from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lamina.data.formats import Records

_ENDINGS = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".conll": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".bio": "conll",
}


@dataclass(frozen=True)
class Table:
    """Columns of a file.

    Attributes:
        path: Where they came from, for error messages.
        columns: Name to cells; a cell that the file leaves out is None.
        rows: The 1-based line of each row in the file, header counted (Parquet: the row's number).
        numbered: The columns have numbers instead of names (CoNLL); each cell is then the list of a sentence's words.
    """

    path: str
    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int]
    numbered: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str | int) -> Sequence[Any]:
        """The cells of one column.

        Args:
            name: Its name, or where columns are numbered its number; negative counts from the last. Where cells are
                objects, "translation.en" is the value that each of column "translation" has under "en".

        Raises:
            DataError: If there is no such column, or a row has no value in it.
        """
        cells = self._cells(name)
        for row, cell in zip(self.rows, cells, strict=True):
            if cell is None:
                raise no_value(self.path, row, str(name))
        return cells

    def _cells(self, name: str | int) -> Sequence[Any]:
        key = str(name)
        if self.numbered and re.fullmatch(r"-\d+", key):
            key = str(len(self.columns) + int(key))
        outer, dot, inner = key.partition(".")
        if key in self.columns:
            return self.columns[key]
        if dot and outer in self.columns and all(isinstance(cell, Mapping) for cell in self.columns[outer]):
            return [cell.get(inner) for cell in self.columns[outer]]
        raise no_column(self.path, str(name), self.columns)


def read_table(path: str | Path, *, header: Sequence[str] | None = None, other: str | None = None) -> Table:
    """Read a file by its ending: .tsv, .csv, .jsonl, .parquet, .conll and the like.

    Args:
        path: The file.
        header: Names of the columns of a TSV or CSV file that has no first line with names.
        other: What a file holds whose ending says nothing (`eng.train`, `.txt`): "conll" columns, or the "lines" of a
            plain text, as one column "text"; None: that is an error.

    Raises:
        DataError: If the file is missing, empty, of an unknown kind, not UTF-8, or a row does not fit.
    """
    path = _existing(path)
    kind = _kind(path, other)
    if kind == "parquet":
        table = _arrow(path)
        return _filled(Table(str(path), table.to_pydict(), range(1, table.num_rows + 1)))
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    for number, record in read_records(path, kind, header):
        if isinstance(record, DataError):
            raise record
        numbers.append(number)
        records.append(record)
    return _filled(_table(path, numbers, records, kind))


def read_chunks(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    rows: int = 1000,
    start: int = 0,
    bad: Callable[[DataError], None] | None = None,
) -> Iterator[Table]:
    """Read a file some rows at a time, in memory that does not grow with the file.

    Args:
        path: The file; endings as in `read_table`, and .txt for plain text, each line of which is a
            row in column "text".
        columns: Which columns to hand out; every row has a value in each. None: all there are.
        rows: How many rows a chunk has; the last one has fewer.
        start: Leave out so many rows that an earlier reading handed out.
        bad: Called with what is wrong with a row that cannot be read; the row is left out and reading goes on. None:
            that is raised, once the rows before it were handed out.

    Yields:
        Tables; their `rows` say where in the file each row is.

    Raises:
        DataError: If the file is missing, empty, damaged or of an unknown kind, a column is missing, or a row cannot be
            read.
        ConfigError: If `rows` is below 1.
    """
    check_range("read", "rows", rows, 1, float("inf"))
    path = _existing(path)
    kind = _kind(path, "all_lines" if path.suffix.lower() == ".txt" else None)
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    problem: DataError | None = None
    for number, record in _chosen(path, kind, columns, rows):
        if isinstance(record, DataError):
            if start <= 0 and bad is None:
                problem = record
                break
            if start <= 0 and bad is not None:
                bad(record)
            continue
        start -= 1
        if start < 0:
            numbers.append(number)
            records.append(record)
        if len(records) == rows:
            yield _table(path, numbers, records, kind)
            numbers, records = [], []
    if records:
        yield _table(path, numbers, records, kind)
    if problem is not None:
        raise problem


def read_pair(paths: Sequence[str | Path], columns: tuple[str, str]) -> Table:
    """Read two plain text files whose lines belong together, as translations are published.

    Args:
        paths: The two files. Blank lines stay, so that row n is line n of both.
        columns: What the lines of each are called.

    Raises:
        DataError: Unless these are two files, each is there and UTF-8, and they have as many lines.
    """
    if len(paths) != 2:
        raise DataError(f"read: {len(paths)} files were given as a pair; a pair has a source and a target.")
    lines = [[_sound(line) for _, line in read_lines(_existing(path))] for path in paths]
    if len(lines[0]) != len(lines[1]):
        raise DataError(
            f"read: {paths[0]} has {len(lines[0])} lines, {paths[1]} has {len(lines[1])}; line n of one belongs to "
            "line n of the other.",
            path=str(paths[1]),
        )
    rows = range(1, len(lines[0]) + 1)
    return _filled(Table(f"{paths[0]} and {paths[1]}", dict(zip(columns, lines, strict=True)), rows))


def parquet_rows(path: str | Path, image: str | int) -> Any:
    """A Parquet file as a `datasets.Dataset`, whose pictures stay as they are until they are asked for.

    Args:
        path: The file.
        image: Column of the pictures: objects with "bytes" or "path".

    Raises:
        DataError: If the file is missing or damaged.
    """
    import datasets

    rows = datasets.Dataset(_arrow(_existing(path)))
    kind = rows.features.get(str(image))
    if isinstance(kind, dict) and set(kind) <= {"bytes", "path"}:
        rows = rows.cast_column(str(image), datasets.Image())
    return rows


def _filled(table: Table) -> Table:
    if not table.rows:
        raise empty(table.path)
    return table


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise DataError(f"read: {path} is not there; a file is needed.", path=str(path))
    return Path(path)


def _kind(path: Path, other: str | None) -> str:
    kind = _ENDINGS.get(path.suffix.lower(), other)
    if kind is None:
        known = ", ".join(_ENDINGS)
        raise DataError(f"read: {path} ends in '{path.suffix}'; the endings known are {known}.", path=str(path))
    return kind


def _sound(line: str | DataError) -> str:
    if isinstance(line, DataError):
        raise line
    return without_end(line)


def _table(path: Path, numbers: list[int], records: list[dict[str, Any]], kind: str) -> Table:
    names = dict.fromkeys(chain.from_iterable(records))
    columns = {name: [record.get(name) for record in records] for name in names}
    return Table(str(path), columns, numbers, numbered=kind == "conll")


def _chosen(path: Path, kind: str, columns: Sequence[str] | None, rows: int) -> Records:
    """The rows of a file with the asked columns."""
    number = 0
    for number, record in read_parquet(path, columns, rows) if kind == "parquet" else read_records(path, kind):
        if columns is None or isinstance(record, DataError):
            yield number, record
            continue
        chosen = {name: _cell(path, record, name, kind) for name in columns}
        lacking = next((name for name, cell in chosen.items() if cell is None), None)
        yield number, chosen if lacking is None else no_value(path, number, lacking)
    if not number:
        raise empty(path)


def _cell(path: Path, record: dict[str, Any], name: str, kind: str) -> Any:
    outer, dot, inner = name.partition(".")
    if name in record:
        return record[name]
    if dot and outer in record:
        return record[outer].get(inner) if isinstance(record[outer], Mapping) else None
    if kind == "jsonl":
        return None
    raise no_column(path, name, record)


def _arrow(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise not_parquet(path, error) from None
