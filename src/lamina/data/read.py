"""Read a file into columns, keeping the line of every row so that errors can name it.

TSV is read as the GLUE files are written: a quote is a quote, a line is a row. CSV follows RFC 4180. JSONL has one
object per line. CoNLL columns have one word per line, a blank line between sentences and perhaps `-DOCSTART-` lines.
Plain text has a paragraph per line; blank lines are no rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_BLANKS = re.compile(r"[ \t]+")


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
                raise DataError(
                    f"read: {self.path} row {row} has no value in column '{name}'; every row needs one. "
                    "Fill it in or leave the row out.",
                    path=self.path,
                    row=row,
                    column=str(name),
                )
        return cells

    def _cells(self, name: str | int) -> Sequence[Any]:
        key = self._key(name)
        outer, dot, inner = key.partition(".")
        if key in self.columns:
            return self.columns[key]
        if dot and outer in self.columns and all(isinstance(cell, Mapping) for cell in self.columns[outer]):
            return [cell.get(inner) for cell in self.columns[outer]]
        known = ", ".join(self.columns) or "none"
        raise DataError(
            f"read: {self.path} has no column '{name}'; its columns are: {known}. Name one of these.",
            path=self.path,
            column=str(name),
        )

    def _key(self, name: str | int) -> str:
        if self.numbered and re.fullmatch(r"-\d+", str(name)):
            return str(len(self.columns) + int(name))
        return str(name)


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
    path = _there(Path(path))
    kind = _kind(path, other)
    if kind == "parquet":
        return _filled(_parquet(path))
    text = _text(path)
    if kind in ("tsv", "csv"):
        return _filled(_grid(path, _LINES[kind](path, text), header))
    return _filled(_TEXTS[kind](path, text))


def read_pair(paths: Sequence[str | Path], columns: tuple[str, str]) -> Table:
    """Read two plain text files whose lines belong together, as translations are published.

    Args:
        paths: The two files. Blank lines stay, so that row n is line n of both.
        columns: What the lines of each are called.

    Raises:
        DataError: Unless these are two files, each is there and UTF-8, and they have as many lines.
    """
    if len(paths) != 2:
        raise DataError(f"read: {len(paths)} files were given as a pair; a pair has a source and a target. Give both.")
    lines = [_aligned(Path(path)) for path in paths]
    if len(lines[0]) != len(lines[1]):
        raise DataError(
            f"read: {paths[0]} has {len(lines[0])} lines, {paths[1]} has {len(lines[1])}; line n of one belongs to "
            "line n of the other. Give files of as many lines.",
            path=str(paths[1]),
        )
    rows = range(1, len(lines[0]) + 1)
    return _filled(Table(f"{paths[0]} and {paths[1]}", dict(zip(columns, lines, strict=True)), rows))


def _aligned(path: Path) -> list[str]:
    """All lines, blank ones too."""
    text = _text(_there(path))
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def _there(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"read: {path} is not there; a task needs its files. Check the path.", path=str(path))
    return path


_KINDS = {
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


def _kind(path: Path, other: str | None) -> str:
    kind = _KINDS.get(path.suffix.lower(), other)
    if kind is None:
        raise DataError(
            f"read: {path} ends in '{path.suffix}'; the endings known are {', '.join(_KINDS)}. "
            "Rename or convert the file.",
            path=str(path),
        )
    return kind


def _filled(table: Table) -> Table:
    if not table.rows:
        raise DataError(
            f"read: {table.path} is empty; a task needs at least one row. Give a file with rows.", path=table.path
        )
    return table


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"read: {path} is not UTF-8 at byte {error.start} (row {row}); files are read as UTF-8. "
            "Convert the file, for example with iconv.",
            path=str(path),
            row=row,
        ) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, split at line feeds alone as texts hold other separators; blank ones at the end go."""
    for number, line in enumerate(text.rstrip("\r\n").split("\n"), start=1):
        yield number, line.removesuffix("\r")


def _tsv(_path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    if text.strip("\r\n"):
        yield from ((number, line.split("\t")) for number, line in _lines(text))


def _csv(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    limit = csv.field_size_limit(sys.maxsize)  # the default refuses texts above 131072 characters
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True)
    number = 1
    try:
        for cells in reader:
            yield number, cells or [""]
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"read: {path} row {number} is not CSV ({error}); a quote inside a quoted cell is written twice. "
            "Correct this row.",
            path=str(path),
            row=number,
        ) from None
    finally:
        csv.field_size_limit(limit)


_LINES: dict[str, Callable[[Path, str], Iterator[tuple[int, list[str]]]]] = {"tsv": _tsv, "csv": _csv}


def _grid(path: Path, lines: Iterable[tuple[int, list[str]]], header: Sequence[str] | None) -> Table:
    rows = list(lines)
    if header is None:
        header = rows[0][1] if rows else []
        rows = rows[1:]
    twice = next((name for name in header if list(header).count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"read: {path} has two columns '{twice}'; every column has a name of its own. Rename one.",
            path=str(path),
            column=twice,
        )
    for number, cells in rows:
        _same_width(path, number, len(cells), len(header))
    columns: dict[str, list[Any]] = {name: [cells[i] for _, cells in rows] for i, name in enumerate(header)}
    return Table(str(path), columns, [number for number, _ in rows])


def _same_width(path: Path, row: int, got: int, expected: int) -> None:
    if got != expected:
        raise DataError(
            f"read: {path} row {row} has {got} columns; the file has {expected}. Correct this row.",
            path=str(path),
            row=row,
        )


def _jsonl(path: Path, text: str) -> Table:
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    for number, line in _lines(text):
        if line.strip():
            records.append(_record(path, number, line))
            numbers.append(number)
    names = dict.fromkeys(name for record in records for name in record)
    return Table(str(path), {name: [record.get(name) for record in records] for name in names}, numbers)


def _record(path: Path, row: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        record = error
    if not isinstance(record, dict):
        came = f"is not JSON ({record})" if isinstance(record, ValueError) else "is not an object"
        raise DataError(
            f'read: {path} row {row} {came}; every line is one object, as {{"text": "...", "label": "..."}}. '
            "Correct this row.",
            path=str(path),
            row=row,
        )
    return record


def _parquet(path: Path) -> Table:
    columns = _arrow(path).to_pydict()
    count = len(next(iter(columns.values()), []))
    return Table(str(path), columns, range(1, count + 1))


def _arrow(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"read: {path} is not a Parquet file ({str(error).splitlines()[0]}); it may be cut off. Get it again.",
            path=str(path),
        ) from None


def parquet_rows(path: str | Path, image: str | int) -> Any:
    """A Parquet file as a `datasets.Dataset`, whose pictures stay as they are until they are asked for.

    Args:
        path: The file.
        image: Column of the pictures: objects with "bytes" or "path".

    Raises:
        DataError: If the file is missing or damaged.
    """
    import datasets

    rows = datasets.Dataset(_arrow(_there(Path(path))))
    kind = rows.features.get(str(image))
    if isinstance(kind, dict) and set(kind) <= {"bytes", "path"}:
        rows = rows.cast_column(str(image), datasets.Image())
    return rows


def _conll(path: Path, text: str) -> Table:
    numbers: list[int] = []
    sentences: list[list[list[str]]] = []
    width, open_ = 0, False
    for number, line in _lines(text):
        cells = line.split("\t") if "\t" in line else _BLANKS.split(line.strip(" "))
        if not line.strip() or cells[0] == "-DOCSTART-":
            open_ = False
            continue
        width = width or len(cells)
        _same_width(path, number, len(cells), width)
        if not open_:
            sentences.append([])
            numbers.append(number)
            open_ = True
        sentences[-1].append(cells)
    columns: dict[str, list[Any]] = {
        str(i): [[cells[i] for cells in sentence] for sentence in sentences] for i in range(width)
    }
    return Table(str(path), columns, numbers, numbered=True)


def _plain(path: Path, text: str) -> Table:
    rows = [(number, line) for number, line in _lines(text) if line.strip()]
    return Table(str(path), {"text": [line for _, line in rows]}, [number for number, _ in rows])


_TEXTS: dict[str, Callable[[Path, str], Table]] = {"jsonl": _jsonl, "conll": _conll, "lines": _plain}
