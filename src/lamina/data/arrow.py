"""Columns in Arrow: in memory while they are small, memory-mapped from a temporary file if they are large."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final, overload

import numpy as np
import pyarrow as pa

from lamina.errors import DataError, convert_errors

Cell: TypeAlias = Any  # the value of a row in a column, which is whatever a file can hold
Record: TypeAlias = dict[str, Cell]  # a row: column -> cell
if TYPE_CHECKING:
    import datasets

T = TypeVar("T")

CHUNK = 1000  # number of rows that are written or read at a time
SPILL_BYTES = 64 << 20  # tables larger than this are written to a temporary file
spills: ContextVar[bool] = ContextVar("spills", default=True)  # whether large tables go to a file


def join_tables(tables: Iterable[pa.Table]) -> pa.Table | datasets.Dataset:
    """Join tables of one schema; there must be at least one table.

    A result of at most 64 MiB is a table in memory. A larger one is a dataset, memory-mapped from a temporary file that
    is removed together with the dataset. While the context variable `spills` is False, every result is a table in
    memory. Raises DataError if the temporary file cannot be written.
    """
    small, size, tables = [], 0, iter(tables)
    for table in tables:
        small.append(table)
        size += table.nbytes
        if size > SPILL_BYTES and spills.get():
            return _on_disk(itertools.chain(small, tables))
    return pa.concat_tables(small).combine_chunks()


def dataset_of(tables: Iterable[pa.Table]) -> datasets.Dataset:
    """Join tables as `join_tables` does, with its errors, but return a dataset in memory in place of a table."""
    import datasets
    from datasets.table import InMemoryTable

    rows = join_tables(tables)
    if isinstance(rows, datasets.Dataset):
        return rows
    return datasets.Dataset(InMemoryTable(rows), fingerprint=uuid.uuid4().hex)


def _on_disk(tables: Iterator[pa.Table]) -> datasets.Dataset:
    """Write tables to a temporary file, and return a dataset that is memory-mapped from it.

    The file is removed once no dataset refers to it any more. Raises DataError if it cannot be written.
    """
    import datasets

    holder, first = _TemporaryFile(), next(tables)
    problem, hint = f"data: {holder.path} cannot be written", "TMPDIR names another folder."
    with (
        convert_errors(lambda reason: DataError(f"{problem} ({reason}); {hint}"), OSError),
        pa.OSFile(holder.path, "wb") as file,
        pa.ipc.new_stream(file, first.schema) as writer,
    ):
        for table in itertools.chain([first], tables):
            writer.write_table(table)
    dataset = datasets.Dataset.from_file(holder.path)
    vars(dataset)["_lamina_file"] = holder
    return dataset


@final
class _TemporaryFile:
    """Holds a temporary file, at `path`, that is removed when no dataset refers to this object any more.

    Deep copies of a dataset share the object. A pickled dataset has None instead, so that only this process removes the
    file.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="lamina-")
        self.path = str(Path(folder) / "rows.arrow")
        weakref.finalize(self, _remove, folder, os.getpid())

    def __deepcopy__(self, memo: dict[int, object]) -> _TemporaryFile:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a forked worker process has a copy of the object, but must not remove the file
        shutil.rmtree(folder, ignore_errors=True)


def derived(dataset: datasets.Dataset, source: datasets.Dataset) -> datasets.Dataset:
    """Make `dataset`, which was derived from `source`, keep the temporary file of `source`, if any; return `dataset`.

    Otherwise the file would be removed together with `source`, although `dataset` reads from it too.
    """
    vars(dataset)["_lamina_file"] = vars(source).get("_lamina_file")
    return dataset


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Yield items in lists of `size` (default 1000); the last may be shorter. For no items, yield one empty list."""
    items = iter(items)
    yield list(itertools.islice(items, size))
    while chunk := list(itertools.islice(items, size)):
        yield chunk


@final
class Column(Sequence[Cell]):
    """One column of a dataset as a sequence, or several as a sequence of tuples, read from the dataset on access.

    Args:
        rows: The dataset.
        names: Names of the columns.
        decode: Function from the cells of a row, one argument per column, to an item. None: an item is the cell of the
            only column, or the tuple of the cells of several columns.
    """

    def __init__(self, rows: datasets.Dataset, names: Sequence[str], decode: Callable[..., Cell] | None = None) -> None:
        names = list(names)
        self.rows, self.decode = rows if rows.column_names == names else rows.select_columns(names), decode

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, row: int) -> Cell: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Cell, ...]: ...
    def __getitem__(self, row: int | slice) -> Cell:
        if isinstance(row, slice):
            return self.read_rows(range(*row.indices(len(self))))
        return self.read_rows([row])[0]

    def read_rows(self, rows: Sequence[int]) -> tuple[Cell, ...]:
        """Return a tuple with the items of the rows with these indices, in the given order."""
        if not len(rows):
            return ()
        columns = self.rows[rows if isinstance(rows, range) else [int(row) for row in rows]].values()
        if self.decode is None:
            return tuple(*columns) if len(columns) == 1 else tuple(zip(*columns, strict=True))
        return tuple(map(self.decode, *columns))

    def select(self, rows: Sequence[int]) -> Column:
        """Return a Column of the rows with these indices, in the given order, without copying data."""
        return Column(derived(self.rows.select(rows), self.rows), self.rows.column_names, self.decode)

    def then(self, decode: Callable[[Cell], Cell]) -> Column:
        """Return a Column with `decode(item)` for each item, computed on access."""
        return Column(self.rows, self.rows.column_names, partial(_composed, self.decode, decode))

    def __iter__(self) -> Iterator[Cell]:
        """Yield all items, reading at most 1000 rows and (by their mean size) 64 MiB at a time."""
        table = self.rows.data
        size = max(1, min(CHUNK, SPILL_BYTES * len(table) // max(1, table.nbytes)))
        for start in range(0, len(self), size):
            yield from self.read_rows(range(start, min(start + size, len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(item == theirs for item, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.read_rows(range(min(3, len(self))))))
        return f"Column([{shown}{', ...' if len(self) > 3 else ''}], {len(self)} rows)"


def columns_of(
    rows: datasets.Dataset, decoders: Mapping[str, Callable[[Cell], Cell] | None] | None = None
) -> dict[str, Column]:
    """Return name -> column, for every column of a dataset, which must have no format (`set_format`).

    `decoders` is column name -> function from a cell to an item. Without a function, or with None, items are cells.
    """
    import datasets

    table, features = rows.data.replace_schema_metadata(None), rows.features
    columns: dict[str, Column] = {}
    for name, feature in features.items():
        info = datasets.DatasetInfo(features=datasets.Features({name: feature}))
        column = datasets.Dataset(
            table.select([name]), info, indices_table=rows._indices, fingerprint=f"{rows._fingerprint}{len(columns)}"
        )
        columns[name] = Column(derived(column, rows), [name], (decoders or {}).get(name))
    return columns


def _composed(first: Callable[..., Cell] | None, second: Callable[[Cell], Cell], *cells: Cell) -> Cell:
    return second(cells[0] if first is None else first(*cells))


@final
class Ragged:
    """An Arrow column of lists of numbers: `ragged[row]` is an array that shares the column's memory or memory map.

    Rows count from 0; a negative number is not valid. The attribute `lengths` is an array with the number of entries in
    each row.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._values, self._edges, self._starts = list[np.ndarray](), list[np.ndarray](), [0]
        for chunk in column.chunks:
            if len(chunk):
                self._values.append(chunk.values.to_numpy(zero_copy_only=True))
                self._edges.append(chunk.offsets.to_numpy(zero_copy_only=True))
                self._starts.append(self._starts[-1] + len(chunk))
        self.lengths = np.concatenate([np.zeros(0, np.int64), *map(np.diff, self._edges)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1 if len(self._values) > 1 else 0
        edges, at = self._edges[chunk], row - self._starts[chunk]
        return self._values[chunk][edges[at] : edges[at + 1]]

    def digest(self) -> bytes:
        """Return a hash of all rows, which does not depend on how Arrow divides the column into chunks."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.lengths).tobytes(), digest_size=16)
        for edges, values in zip(self._edges, self._values, strict=True):
            digest.update(np.ascontiguousarray(values[edges[0] : edges[-1]]).tobytes())
        return digest.digest()
