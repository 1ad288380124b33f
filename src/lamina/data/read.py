"""Read a file into columns, whole or in chunks, keeping the line of every row so that errors can name it."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lamina.data import formats
from lamina.data.arrow import CHUNK, Column, dataset_of
from lamina.errors import DataError
from lamina.utils import check_range, is_dir, is_file

if TYPE_CHECKING:
    from lamina.data.formats import Records

Bad = Callable[[DataError], None] | None
Columns = Sequence[str] | None

_ENDINGS = {".tsv": "tsv", ".csv": "csv", **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")}
_ENDINGS |= {".parquet": "parquet", **dict.fromkeys((".conll", ".iob", ".iob2", ".bio"), "conll")}
_PARQUET_ROWS = 2**16  # that are made Python objects at a time


@dataclass(frozen=True)
class Table:
    """Columns of a file, in which a cell that the file leaves out is None."""

    path: str  # where they came from, for error messages
    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int]  # the 1-based line of each row in the file, header counted (Parquet: the row's number)
    numbered: bool = False  # columns have numbers (CoNLL); each cell is then the list of a sentence's words

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str | int) -> Sequence[Any]:
        """The cells of a column, none of which is None; see `cells`."""
        cells = self.cells(name)
        for row, cell in zip(self.rows, cells, strict=True):
            if cell is None:
                raise formats.no_value(self.path, row, str(name))
        return cells

    def cells(self, name: str | int) -> Sequence[Any]:
        """The cells of a column, by its name or number; a negative one counts from the last.

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
            raise formats.no_column(self.path, str(name), self.columns)
        return cells

    def select_rows(self, rows: Sequence[int]) -> Table:
        """The rows at these places, in that order."""
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
    """Read two plain text files whose lines belong together as two columns; blank lines are rows too."""
    if len(paths) != 2:
        raise DataError(f"read: {len(paths)} files were given as a pair; a pair has a source and a target.")
    source, target = (_whole(existing(path), "all_lines") for path in paths)
    if len(source) != len(target):
        came = f"{paths[0]} has {len(source)} lines, {paths[1]} has {len(target)}"
        raise DataError(f"read: {came}; line n of one belongs to line n of the other.", path=str(paths[1]))
    cells = {columns[0]: source.column("text"), columns[1]: target.column("text")}
    return Table(f"{paths[0]} and {paths[1]}", cells, source.rows)


def parquet_rows(path: str | Path, column: str, feature: str = "Image") -> Any:
    """A Parquet file as a `datasets.Dataset`; `column` is of a feature if it holds objects with "bytes" or "path"."""
    import datasets

    with formats.parquet_errors(path := existing(path)):
        rows = datasets.Dataset(pq.read_table(path))
    kind = rows.features.get(column)
    if isinstance(kind, dict) and set(kind) <= {"bytes", "path"}:
        rows = rows.cast_column(column, getattr(datasets, feature)())
    return rows


def existing(path: str | Path) -> Path:
    """The path of a file; DataError if there is none."""
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
    """The rows of a file with the asked columns."""
    parquet, number = kind == "parquet", 0
    records = formats.read_parquet(path, columns, rows) if parquet else formats.read_records(path, kind, header)
    for number, record in records:
        if columns is None or isinstance(record, DataError):
            yield number, record
            continue
        chosen = {name: _cell(path, record, name, kind) for name in columns}
        lacking = next((name for name, cell in chosen.items() if cell is None), None)
        yield number, chosen if lacking is None else formats.no_value(path, number, lacking)
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
    raise formats.no_column(path, name, record)
