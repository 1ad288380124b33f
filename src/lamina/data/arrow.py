"""Columns in Arrow: in memory while they are small, memory-mapped from a temporary file once they are large."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa

from lamina.errors import DataError, convert_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import datasets

CHUNK = 1000  # rows that are written or read at a time
SPILL_BYTES = 64 << 20  # tables larger than this are written to a temporary file
spills: ContextVar[bool] = ContextVar("spills", default=True)  # whether large tables go to a file


def encodable(text: str) -> str:
    """Return the text with "\ufffd" in place of lone surrogates, which UTF-8 cannot encode."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def rows_of(tables: Iterable[pa.Table]) -> pa.Table | datasets.Dataset:
    """Join tables of one schema; a large result is a dataset in a temporary file, which is removed with the dataset.

    Results stay in memory, whatever their size, while the context variable `spills` is False.
    """
    small, size, tables = [], 0, iter(tables)
    for table in tables:
        small.append(table)
        size += table.nbytes
        if size > SPILL_BYTES and spills.get():
            return _on_disk(itertools.chain(small, tables))
    return pa.concat_tables(small).combine_chunks()


def dataset_of(tables: Iterable[pa.Table]) -> datasets.Dataset:
    """Join tables of one schema into a dataset, in memory or (if it is large) in a temporary file."""
    import datasets
    from datasets.table import InMemoryTable

    rows = rows_of(tables)
    if isinstance(rows, datasets.Dataset):
        return rows
    return datasets.Dataset(InMemoryTable(rows), fingerprint=uuid.uuid4().hex)


def _on_disk(tables: Iterator[pa.Table]) -> datasets.Dataset:
    """Write tables to a temporary file and return a dataset that is mapped to it; DataError if it cannot be written."""
    import datasets

    holder, first = _TemporaryFile(), next(tables)
    said, hint = f"data: {holder.path} cannot be written", "TMPDIR names another folder."
    with (
        convert_errors(lambda reason: DataError(f"{said} ({reason}); {hint}")),
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
    """A temporary file that is removed when no dataset refers to this object any more.

    Deep copies of a dataset share the object. A pickled dataset has None in its place, so that another process does not
    remove the file.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="lamina-")
        self.path = str(Path(folder) / "rows.arrow")
        weakref.finalize(self, _remove, folder, os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> _TemporaryFile:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _remove(folder: str, process: int) -> None:
    """Remove a folder if this process, by its id, is the one that made it."""
    if os.getpid() == process:  # forked worker processes hold copies of the object, but the file is not theirs
        shutil.rmtree(folder, ignore_errors=True)


def derived(dataset: datasets.Dataset, source: datasets.Dataset) -> datasets.Dataset:
    """Return `dataset`, which now keeps the temporary file of `source`, from which it was derived, in existence."""
    vars(dataset)["_lamina_file"] = vars(source).get("_lamina_file")
    return dataset


def chunks(items: Iterable[Any], size: int = CHUNK) -> Iterator[list[Any]]:
    """Yield items in lists of at most `size`; a single empty list if there are no items."""
    items = iter(items)
    yield list(itertools.islice(items, size))
    while chunk := list(itertools.islice(items, size)):
        yield chunk


@final
class Column(Sequence[Any]):
    """Columns of a dataset as one sequence, whose items are read from the dataset when they are needed.

    `decode` turns the cells of a row into an item. Without it, an item is the cell or the tuple of cells.
    """

    def __init__(self, rows: datasets.Dataset, names: Sequence[str], decode: Callable[..., Any] | None = None) -> None:
        names = list(names)
        self.rows, self.decode = rows if rows.column_names == names else rows.select_columns(names), decode

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.read_rows(range(*row.indices(len(self))))
        return self.read_rows([row])[0]

    def read_rows(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """Return the items of the given row numbers."""
        if not len(rows):
            return ()
        columns = self.rows[rows if isinstance(rows, range) else [int(row) for row in rows]].values()
        if self.decode is None:
            return tuple(*columns) if len(columns) == 1 else tuple(zip(*columns, strict=True))
        return tuple(map(self.decode, *columns))

    def select(self, rows: Sequence[int]) -> Column:
        """Return a column of the given row numbers; no data is copied."""
        return Column(derived(self.rows.select(rows), self.rows), self.rows.column_names, self.decode)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), CHUNK):
            yield from self.read_rows(range(start, min(start + CHUNK, len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == yours for mine, yours in zip(self, other, strict=True))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.read_rows(range(min(3, len(self))))))
        return f"Column([{shown}{', ...' if len(self) > 3 else ''}], {len(self)} rows)"


@final
class Ragged:
    """A column of lists of numbers; each row is an array that shares the column's memory or memory-mapped file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._edges = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.lengths = np.concatenate([np.zeros(0, np.int64), *map(np.diff, self._edges)])  # numbers in each row

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray[Any, np.dtype[Any]]:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1 if len(self._values) > 1 else 0
        edges, at = self._edges[chunk], row - self._starts[chunk]
        return self._values[chunk][edges[at] : edges[at + 1]]

    def digest(self) -> bytes:
        """Return a hash of the rows that does not depend on how they are split into chunks."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.lengths).tobytes(), digest_size=16)
        for edges, values in zip(self._edges, self._values, strict=True):
            digest.update(np.ascontiguousarray(values[edges[0] : edges[-1]]).tobytes())
        return digest.digest()
