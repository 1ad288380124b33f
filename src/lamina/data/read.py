"""Read files of examples: TSV, CSV, JSON Lines, Parquet, CoNLL and plain text.

TSV is read as the GLUE files are written: a quote is an ordinary character and a line is a row. CSV follows RFC 4180.
Lines end at line feeds only, because texts contain other line separators. Inside this module, a DataError that is not
raised takes the place of a row that cannot be read, so that the caller can skip the row.
"""

from __future__ import annotations

import csv
import logging
import re
import reprlib
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from lamina.data.arrow import CHUNK, Cell, Column, Record, columns_of, dataset_of
from lamina.data.class_names import decoder, dictionary_names, names_of, parquet_features
from lamina.data.json_lines import json_rows
from lamina.data.parquet import parquet_errors, read_parquet
from lamina.data.row_errors import (
    Numbered,
    as_csv,
    bad_row,
    check_line_feeds,
    existing,
    missing_column,
    missing_value,
    watch_quotes,
)
from lamina.errors import DataError, convert_errors
from lamina.utils import MAX_BYTES, check_range

T = TypeVar("T")

_MAX_CELL = 2**31 - 1  # by default the csv module refuses more than 131072 characters; Windows cannot count further
# CoNLL
_BLANKS = re.compile(r"[ \t]+")
_REPEATED = re.compile(r"\d+[-.]\d+")  # number of a multi-word token or an empty node in CoNLL-U
_CONLLU_COLUMNS = 10
_SPAN_TAG = re.compile(r"O|[BIESLUMW][-_].+")
_TITLE = r"(#|idx?|sentence|tokens?|words?|form|text|lemma|[ux]?pos|tags?|chunk|labels?|ner|iob2?|bio|entit(y|ies))"
_HEADER = re.compile(rf"{_TITLE}([ _-]{_TITLE})*", re.IGNORECASE)
logger = logging.getLogger(__name__)


def read_records(path: Path, file_format: str, header: Sequence[str] | None = None) -> Numbered[Record]:
    """Yield (line number, row) for the rows of a file. Numbers count from 1; a row is a dict of column name -> cell.

    A row that cannot be read is a DataError in place of the dict. The iterator raises DataError if the file cannot be
    read, or its header is blank or cannot be read, or has a name twice. It does so, too, if the header is a single name
    with a sign that may divide columns, such as ";", or a "jsonl" file is a damaged array (see `json_rows`).

    Args:
        path: The file.
        file_format: "tsv", "csv", "conll" (a row is a sentence; see `sentences`), "jsonl" and "lines" (both skip blank
            lines), or "all_lines" (blank lines are rows). A line of text is in the column "text". A "jsonl" file may
            also be one JSON array of objects, which are then numbered in place of lines; it is read whole.
        header: Names of the columns of "tsv" and "csv". None: they are in the first line.
    """
    if file_format == "conll":
        return sentences(str(path), lambda: _per_line(read_lines(path), lambda _, text: text))
    lines = read_lines(path)
    if file_format == "tsv":
        rows = _per_line(lines, lambda _, text: text.split("\t") if text else [])
        return _to_records(path, watch_quotes(path, rows), header)
    if file_format == "csv":
        return _to_records(path, _csv(path, lines), header)
    if file_format == "jsonl":
        return json_rows(path, lines)
    return _per_line(lines, lambda _, text: {"text": text} if text.strip() or file_format == "all_lines" else None)


def read_lines(path: Path) -> Numbered[str]:
    """Yield (line number, line) for a UTF-8 file. Numbers count from 1, and lines have their line ends.

    A line that is too long (over 64 MiB) or not UTF-8 is replaced by a DataError. A byte order mark at the beginning is
    removed. Raises DataError if the file cannot be opened or read, or has carriage returns but no line feed.
    """
    start = 0  # position of the line's first byte in the file
    problem = f"read: {path} cannot be read"
    with (
        convert_errors(lambda reason: DataError(f"{problem} ({reason}).", path=str(path)), OSError),
        path.open("rb") as file,
    ):
        for number, data in enumerate(_limited(file), start=1):
            try:
                line: str | DataError = data.decode("utf-8")
            except UnicodeDecodeError as error:
                reason = (
                    f"is not UTF-8 at byte {start + error.start} (row {number}); convert it, for example with iconv"
                )
                line = DataError(f"read: {path} {reason}.", path=str(path), row=number)
            if len(data) > MAX_BYTES:
                line = bad_row(path, number, f"has more than {MAX_BYTES:,} bytes; it is too long to be an example")
            if number == 1 and isinstance(line, str):
                line = line.removeprefix("\ufeff")
                check_line_feeds(path, line)
            if line:
                yield number, line
            start += len(data)


def _limited(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file as bytes. A line of more than `MAX_BYTES` bytes is cut to `MAX_BYTES` + 1."""
    while data := file.readline(MAX_BYTES + 1):
        yield data
        while len(data) > MAX_BYTES and not data.endswith(b"\n"):
            data = file.readline(MAX_BYTES + 1) or b"\n"


def _per_line(lines: Numbered[str], parse: Callable[[int, str], T | None]) -> Numbered[T]:
    """Yield (line number, `parse(number, text)`) for each line, with its line end removed.

    A line is skipped if `parse` returns None. A line that is a DataError is yielded unchanged.
    """
    for number, line in lines:
        row = line if isinstance(line, DataError) else parse(number, line.removesuffix("\n").removesuffix("\r"))
        if row is not None:
            yield number, row


def _csv(path: Path, lines: Numbered[str]) -> Numbered[list[str]]:
    """Yield the rows of a CSV file. An invalid row is replaced by a DataError; reading continues with the next line.

    A row may have several lines, because a quoted cell may contain line ends. If a quote is not closed, or a quoted
    cell is not valid, only the first of the lines counts as an invalid row. The others are read again as further rows.
    """
    again: deque[tuple[int, str | DataError]] = deque()  # lines to be read again
    used: list[tuple[int, str | DataError]] = []  # lines of the current row

    def feed() -> Iterator[str]:
        """Yield lines to the csv module, and append them to `used`.

        Raises a DataError that stands for a line; csv.Error if the lines of a row have over `MAX_BYTES` characters.
        """
        size = 0
        for item in chain(iter(lambda: again.popleft() if again else None, None), lines):
            used.append(item)
            if isinstance(item[1], DataError):
                raise item[1]
            size += len(item[1])
            if size > MAX_BYTES:
                raise csv.Error(f"a quote that is not closed within {MAX_BYTES:,} characters")
            yield item[1]

    while True:
        used.clear()
        limit = csv.field_size_limit(_MAX_CELL)  # a setting of the whole process, which is restored below
        try:
            row = next(csv.reader(feed(), strict=True), None)
        except (csv.Error, DataError) as error:
            row = _csv_error(path, used, error)
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if isinstance(row, DataError):
            again.extendleft(reversed(used[1:]))
        yield used[0][0], row


def _csv_error(path: Path, used: Sequence[tuple[int, str | DataError]], error: csv.Error | DataError) -> DataError:
    """Return the DataError for an invalid row of a CSV file.

    `used` has the lines of the row as pairs (line number, text), or (line number, DataError) for a line that is too
    long or not UTF-8. `error` is the exception that reading the row raised. A DataError that is not in `used` says that
    the file could not be read any further, and is raised again.
    """
    if isinstance(error, DataError) and (not used or error is not used[-1][1]):
        raise error
    if isinstance(error, DataError) and len(used) == 1:
        return error
    if "new-line" in str(error):
        return bad_row(path, used[0][0], "has a carriage return outside quotes; cells with line ends are quoted")
    is_line = isinstance(error, DataError)
    why = f"a quote is open, and row {error.row} is too long or not UTF-8" if is_line else error
    return bad_row(path, used[0][0], f"is not CSV ({why}); a quote inside a quoted cell is written twice")


def _to_records(path: Path, rows: Numbered[list[str]], header: Sequence[str] | None) -> Numbered[Record]:
    """Yield rows of cells as records; a row with more or fewer cells than columns is replaced by a DataError.

    A row that is a DataError already is yielded unchanged. Without `header`, the first row has the names of the
    columns. Blank rows at the end of the file are left out; any other blank row has one empty cell. Raises DataError if
    the names cannot be read or are all blank, two are the same, or (without `header`) the only one has a sign that may
    divide columns, such as ";".
    """
    names = header if header is not None else next(rows, (0, []))[1]
    if isinstance(names, DataError):
        raise names
    own = "\t" if ".tsv" in path.name.lower() else ","  # a quoted name may hold it
    if header is None and len(names) == 1 and (signs := sorted({*names[0]} & {*";,|\t"} - {own})):
        rule = "columns are divided by commas in CSV files and by tabs in TSV files, below a header"
        problem = f"has the one column {reprlib.repr(names[0])}, in which {signs[0]!r} may divide columns; {rule}"
        convert = f"pandas.read_csv({path.name!r}, sep={signs[0]!r}).to_csv('new.csv', index=False)"
        raise DataError(f"read: {path} {problem}. Convert it, as with {convert}, or give it a header.", path=str(path))
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        hint = "Rename one of them, or leave it out"
        raise DataError(f"read: {path} has two columns '{twice}'. {hint}.", path=str(path), column=twice)
    held: list[tuple[int, list[str] | DataError]] = []  # blank rows wait here until a row follows that is not blank
    for number, cells in rows:
        if cells and not any(map(str.strip, names)):
            raise DataError(f"read: {path} begins with a blank line; the first line names the columns.", path=str(path))
        held.append((number, cells or [""]))
        for at, row in held if cells else ():
            if isinstance(row, DataError):
                yield at, row
            elif len(row) == len(names):
                yield at, dict(zip(names, row, strict=True))
            else:
                blank = "is blank. Remove it. If blank lines divide sentences, let the file's name end in .conll"
                problem = blank if row == [""] else f"has {len(row)} columns; the file has {len(names)}"
                if own == "\t" and any('"' in cell for cell in row):
                    problem += f". In TSV files quotes do not join cells or lines; {as_csv(path)}"
                yield at, bad_row(path, at, problem)
        held = [] if cells else held


# Called with the error of each row that cannot be read; None: the error is raised.
OnBadRow: TypeAlias = Callable[[DataError], None] | None
Columns = Sequence[str] | None

_ENDINGS = {".tsv": "tsv", ".csv": "csv", **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")}
_ENDINGS |= {".parquet": "parquet", **dict.fromkeys((".conll", ".iob", ".iob2", ".bio"), "conll")}
_PARQUET_ROWS = 2**16  # number of rows of a Parquet file that become Python objects at a time


@dataclass(frozen=True)
class Table:
    """The columns of a file, or of some of its rows.

    Attributes:
        path: Where the columns came from, for error messages.
        columns: Name of each column -> its cells. A cell that is missing in the file is None.
        rows: The line of each row in the file, counted from 1 with the header; for Parquet and JSON arrays, the row's
            number, from 1.
        numbered: Whether the names of the columns are numbers, as in CoNLL files. A cell is then a list with an entry
            for each word of a sentence.
        class_names: Column -> the class names that a schema declares for it; its cells have names in place of ids.
        whole: The table with all rows, if rows without a label were left out here but stay in the task; else None.
        places: For each row, its index in `whole`; empty if `whole` is None.
    """

    path: str
    columns: Mapping[str, Sequence[Cell]]
    rows: Sequence[int]
    numbered: bool = False
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: Table | None = None
    places: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str | int) -> Sequence[Cell]:
        """Return the cells of a column that has a value in every row; `name` is as in `cells`.

        Raises DataError if there is no such column, or a row has no value in it.
        """
        cells = self.cells(name)
        for row, cell in zip(self.rows, cells, strict=True):
            if cell is None:
                raise missing_value(self.path, row, str(name))
        return cells

    def key(self, name: str | int) -> str:
        """Return a column's name as text; in a CoNLL file, -1 becomes the number of the last column.

        It is not checked that there is such a column.
        """
        is_from_end = self.numbered and re.fullmatch(r"-\d+", str(name))
        return str(len(self.columns) + int(name)) if is_from_end else str(name)

    def cells(self, name: str | int) -> Sequence[Cell]:
        """Return the cells of a column; a cell is None if its row has no value.

        Raises DataError if there is no such column.

        Args:
            name: Name of the column; or its number in a CoNLL file, from 0, or -1 for the last. If no column is
                called "translation.en" but all cells of column "translation" are objects or missing, the cells are the
                values that these objects have under "en", or None.
        """
        key = self.key(name)
        outer, dot, inner = key.partition(".")
        cells = self.columns.get(key)
        if cells is None and dot and all(isinstance(cell, Mapping | None) for cell in self.columns.get(outer, [""])):
            cells = [cell.get(inner) if cell else None for cell in self.columns[outer]]
        if cells is None:
            raise missing_column(self.path, str(name), self.columns)
        return cells

    def select_rows(self, rows: Sequence[int]) -> Table:
        """Return a table of the rows with these indices (from 0, not line numbers), in this order, without `whole`."""
        columns = {
            name: cells.select(rows) if isinstance(cells, Column) else [cells[row] for row in rows]
            for name, cells in self.columns.items()
        }
        return replace(self, columns=columns, rows=[self.rows[row] for row in rows], whole=None, places=())


def read_table(path: str | Path, *, header: Columns = None, other: str | None = None) -> Table:
    """Read a whole file. Its extension, such as .tsv, .csv, .jsonl, .parquet or .conll, tells the format.

    Class ids in a Parquet file become the names that its schema declares. Raises DataError if the file is missing or
    too large for its format (see `read_parquet` and `json_rows`), has no row, an unknown extension, or a header or row
    that cannot be read.

    Args:
        path: The file.
        header: Names of the columns of a TSV or CSV file. None: they are in its first line.
        other: Format of a file with an unknown extension, such as `eng.train` or `.txt`: "conll", or "lines" for plain
            text, whose lines become one column "text". None: such a file is an error.
    """
    path = existing(path)
    return _read_whole(path, _format_of(path, other), header)


def read_chunks(
    path: str | Path, *, columns: Columns = None, rows: int = 1000, start: int = 0, on_bad_row: OnBadRow = None
) -> Iterator[Table]:
    """Yield the rows of a file in chunks, as tables. Memory does not grow with the file, unless it is a JSON array.

    Class ids in a Parquet file stay ids. Raises ConfigError if `rows` is below 1, and DataError if the file is missing
    or has an unknown extension. While chunks are read, DataError is raised if there is no row, an invalid header or no
    such column; or if a row cannot be read and `on_bad_row` is None.

    Args:
        path: The file, whose extension tells its format. Each line of a .txt file, even a blank one, is a row with the
            column "text".
        columns: Names of the columns to read; see `Table.cells` for names like "outer.inner". A row without a value in
            one of them (in JSON Lines also: without the column) counts as a row that cannot be read. None: all columns.
        rows: Number of rows in a chunk; the last may have fewer.
        start: Number of valid rows to skip at the beginning of the file; bad rows among them are skipped too.
        on_bad_row: Called with the error of each row that cannot be read. None: the error is raised, after a chunk with
            the rows before it.
    """
    check_range("read", "rows", rows, 1, float("inf"))
    path = existing(path)
    file_format = _format_of(path, "all_lines" if path.suffix.lower() == ".txt" else None)
    return _tables(path, file_format, rows, columns=columns, start=start, on_bad_row=on_bad_row)


def _read_whole(path: Path, file_format: str, header: Columns = None) -> Table:
    """Read a whole file of the format `file_format`: "parquet", or one of `read_records`, which explains `header`.

    A large table of "tsv", "csv" or lines is kept in a temporary file. Raises DataError if the file has no row, or one
    that cannot be read.
    """
    if file_format in ("conll", "jsonl", "parquet"):
        (table,) = _tables(path, file_format)
        return _with_class_names(path, table) if file_format == "parquet" else table
    lines = array("q")

    def parts() -> Iterator[pa.Table]:
        """Yield the file as Arrow tables, and collect the rows' numbers in `lines`."""
        for part in _tables(path, file_format, CHUNK, header=header):
            lines.extend(part.rows)
            yield pa.table(dict(part.columns))

    rows = dataset_of(parts())
    return Table(str(path), columns_of(rows), lines)


def _with_class_names(path: Path, table: Table) -> Table:
    """Return a Parquet file's table with class ids replaced by the class names that its schema declares.

    Its `class_names` also has the values of dictionary columns (a pandas Categorical).
    """
    with parquet_errors(path), pq.ParquetFile(path) as file:
        features = parquet_features(file.schema_arrow) or {}
        dictionaries = [kind.name for kind in file.schema_arrow if pa.types.is_dictionary(kind.type)]
        values = {name: dictionary_names(file.read([name]).column(0)) for name in dictionaries}
    decoders = {name: decode for name, feature in features.items() if (decode := decoder(feature)) is not None}
    columns = {name: [decode(cell) for cell in table.columns[name]] for name, decode in decoders.items()}
    names = {**{name: found for name, found in values.items() if found is not None}, **names_of(features)}
    return replace(table, columns={**table.columns, **columns}, class_names=names)


def _tables(
    path: Path,
    file_format: str,
    rows: int = sys.maxsize,
    *,
    columns: Columns = None,
    header: Columns = None,
    start: int = 0,
    on_bad_row: OnBadRow = None,
) -> Iterator[Table]:
    """Yield the rows of a file in tables of `rows` rows; the last may have fewer.

    `file_format` and `header` are those of `read_records`, where "parquet" is allowed too; `columns`, `start` and
    `on_bad_row` are those of `read_chunks`.

    Raises:
        DataError: If a row after the first `start` good ones cannot be read and `on_bad_row` is None; the good rows
            before it are yielded first. Also if the file is empty or lacks one of the `columns`. In JSON Lines, a row
            without a column is one that cannot be read.
    """
    chunk: dict[int, Record] = {}  # number of a row in the file -> the row
    problem: DataError | None = None
    for number, record in _select_columns(path, file_format, columns, min(rows, _PARQUET_ROWS), header):
        if not isinstance(record, DataError):
            start -= 1
            if start < 0:
                chunk[number] = record
        elif start <= 0 and on_bad_row is not None:
            on_bad_row(record)
        elif start <= 0:
            problem = record
            break
        if len(chunk) == rows:
            yield _table(path, file_format, chunk)
            chunk = {}
    if chunk:
        yield _table(path, file_format, chunk)
    if problem is not None:
        raise problem


def _table(path: Path, file_format: str, records: Mapping[int, Record]) -> Table:
    """Return `records` (row number -> record) as a table with all columns that occur; missing cells are None.

    For the format "conll", the columns are numbered.
    """
    names = dict.fromkeys(chain.from_iterable(records.values()))
    columns = {name: [record.get(name) for record in records.values()] for name in names}
    return Table(str(path), columns, list(records), numbered=file_format == "conll")


def read_pair(paths: Sequence[str | Path], columns: tuple[str, str]) -> Table:
    """Read two text files, whose lines belong together in order, as a table; blank lines are rows too.

    `columns` are the names of the two files' columns. Raises DataError if there are not two files, one is missing,
    empty or has a line that cannot be read, or they differ in their numbers of lines.
    """
    if len(paths) != 2:
        raise DataError(f"read: {len(paths)} files were given as a pair; a pair has a source and a target.")
    source, target = (_read_whole(existing(path), "all_lines") for path in paths)
    if len(source) != len(target):
        problem = f"{paths[0]} has {len(source)} lines, {paths[1]} has {len(target)}"
        raise DataError(f"read: {problem}; line n of one belongs to line n of the other.", path=str(paths[1]))
    cells = {columns[0]: source.column("text"), columns[1]: target.column("text")}
    return Table(f"{paths[0]} and {paths[1]}", cells, source.rows)


def _format_of(path: Path, other: str | None) -> str:
    """Return a file's format by its extension.

    For an unknown extension, return `other`, or raise DataError if that is None.
    """
    if file_format := _ENDINGS.get(path.suffix.lower(), other):
        return file_format
    known = ", ".join(_ENDINGS)
    raise DataError(f"read: {path} ends in '{path.suffix}'; the endings known are {known}.", path=str(path))


def _select_columns(path: Path, file_format: str, columns: Columns, rows: int, header: Columns) -> Numbered[Record]:
    """Yield the rows of a file, with only `columns`; a row without a value in one of them is yielded as a DataError.

    A row that cannot be read is a DataError too. `columns` None: all. `rows` is the number of rows of a Parquet file to
    read at a time. See `read_records` for `header`. Raises DataError if the file has no row or lacks a column; in JSON
    Lines, each row without the column is a DataError instead.
    """
    is_parquet, number = file_format == "parquet", 0
    records = read_parquet(path, columns, rows) if is_parquet else read_records(path, file_format, header)
    for number, record in records:
        if columns is None or isinstance(record, DataError):
            yield number, record
            continue
        selected = {name: _cell(path, record, name, file_format) for name in columns}
        empty = next((name for name, cell in selected.items() if cell is None), None)
        yield number, selected if empty is None else missing_value(path, number, empty, record)
    if not number:
        raise DataError(f"read: {path} is empty; a task needs at least one row.", path=str(path))


def _cell(path: Path, record: Record, name: str, file_format: str) -> Cell:
    """Return a record's cell in column `name`; None if the cell is missing.

    If there is no such column, the cell of "outer.inner" is the value under "inner" of the object in column "outer".
    Raises DataError if the record has neither; in JSON Lines, where rows may differ, that counts as a missing cell.
    """
    outer, dot, inner = name.partition(".")
    if name in record:
        return record[name]
    cell = record.get(outer, "") if dot else ""
    if isinstance(cell, Mapping):
        return cell.get(inner)
    if cell is None or file_format == "jsonl":
        return None
    raise missing_column(path, name, record)


# CoNLL: one line per word with its columns, and a blank line after every sentence


def sentences(path: str, read: Callable[[], Numbered[str]]) -> Numbered[dict[str, list[str]]]:
    """Yield (number of the sentence's first line, {"0": its words' cells in column 0, ...}) from a CoNLL file.

    Comments (lines that begin with `#` before the first word of a sentence), a header, which is logged, and the lines
    of CoNLL-U that repeat words (`1-2`, `8.1`) are skipped. Each other line is a word with its columns, separated by
    tabs or blanks; a blank line or "-DOCSTART-" ends a sentence. A sentence is replaced by a DataError if one of its
    lines cannot be read, or has another number of columns than the file's first word.

    Args:
        path: Name of the file for messages.
        read: Function that yields the file's lines from the first. It is called again if it is not clear whether a line
            is a comment or a word.
    """
    words: list[list[str]] = []  # cells of each word of the current sentence
    first = width = 0  # the sentence's first line; number of columns in the file; 0: not known yet
    problem: DataError | None = None  # what is wrong with the current sentence
    facts: tuple[int, frozenset[str]] | None = None  # of `_columns_and_tags`, once it was needed
    for number, text in chain(read(), ((0, ""),)):
        if isinstance(text, DataError):
            first, problem = first or number, problem or text
            continue
        cells = _cells(text)
        if text.strip() and "-DOCSTART-" not in text:
            if text.startswith("#") and not words:
                facts = facts or _columns_and_tags(read())
                if _is_comment(cells, *facts):
                    continue
            if len(cells) == _CONLLU_COLUMNS and _REPEATED.fullmatch(cells[0]):
                continue
            if not width and _is_header(cells):
                logger.warning("read: %s row %d (%s) is a header, not a word, and is left out", path, number, text)
                continue
            width = width or len(cells)
            if len(cells) != width:
                reason = f"row {number} has {len(cells)} columns; the file has {width}"
                problem = problem or DataError(f"read: {path} {reason}.", path=path, row=number)
            words.append(cells)
            first = first or number
            continue
        if first:
            yield first, problem or {str(i): list(column) for i, column in enumerate(zip(*words, strict=True))}
        words, first, problem = [], 0, None


def _cells(text: str) -> list[str]:
    return [cell.strip(" ") for cell in text.split("\t")] if "\t" in text else _BLANKS.split(text.strip(" "))


def _is_header(cells: list[str]) -> bool:
    return len(cells) > 1 and all(_HEADER.fullmatch(cell.strip()) for cell in cells)


def _columns_and_tags(lines: Numbered[str]) -> tuple[int, frozenset[str]]:
    """Return the first word's number of columns (0: no word), and the set of all words' last cells.

    Lines that begin with `#` and lines with -DOCSTART- do not count.
    """
    texts = (text for _, text in lines if isinstance(text, str) and text.strip() and not text.startswith("#"))
    rows = (_cells(text) for text in texts if "-DOCSTART-" not in text)
    first = next(rows, [])
    return len(first), frozenset(cells[-1] for cells in chain([first], rows) if cells)


def _is_comment(cells: list[str], columns: int, tags: frozenset[str]) -> bool:
    """Return whether a line that begins with `#` is a comment, rather than the word "#" with its columns.

    It is a word if it has `columns` cells, as the file's other words, and the last one is among `tags` (the last cells
    of all lines that do not begin with `#`) or has the form of a span's tag, such as "B-PER".
    """
    return len(cells) != columns or (cells[-1] not in tags and not _SPAN_TAG.fullmatch(cells[-1]))
