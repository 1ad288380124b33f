"""Columns in Arrow: in memory while they are small, memory-mapped from a temporary file once they are large."""

from __future__ import annotations

import itertools
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import datasets

CHUNK = 1000  # rows that are made, or read, at a time
SPILL_BYTES = 64 << 20  # columns larger than this go to a file


def dataset_of(tables: Iterable[pa.Table]) -> datasets.Dataset:
    """One data set of tables that come one by one; large ones are on disk, in a file that is removed with it.

    Args:
        tables: At least one, all of the same schema.
    """
    import datasets

    small: list[pa.Table] = []
    size = 0
    tables = iter(tables)
    for table in tables:
        small.append(table)
        size += table.nbytes
        if size > SPILL_BYTES:
            return _on_disk(itertools.chain(small, tables))
    whole = pa.concat_tables(small).combine_chunks()
    return datasets.Dataset(datasets.table.InMemoryTable(whole), fingerprint=uuid.uuid4().hex)


def _on_disk(tables: Iterator[pa.Table]) -> datasets.Dataset:
    import datasets

    folder = tempfile.TemporaryDirectory(prefix="lamina-", ignore_cleanup_errors=True)
    path = Path(folder.name) / "rows.arrow"
    first = next(tables)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)
    dataset = datasets.Dataset.from_file(str(path))
    weakref.finalize(dataset.data, folder.cleanup)  # copies of the data set share `data`
    return dataset


def chunks(items: Iterable[Any], size: int = CHUNK) -> Iterator[list[Any]]:
    """Items in lists of at most `size`; an empty list if there are none."""
    items = iter(items)
    chunk = list(itertools.islice(items, size))
    yield chunk
    while chunk := list(itertools.islice(items, size)):
        yield chunk


@final
class Column(Sequence[Any]):
    """Some columns of a data set as one sequence, whose items are made when they are asked for.

    Args:
        rows: The data set.
        names: Its columns.
        decode: Makes an item of the cells of a row, in the order of `names`.
    """

    def __init__(self, rows: datasets.Dataset, names: Sequence[str], decode: Callable[..., Any]) -> None:
        self._rows, self._names, self._decode = rows.select_columns(list(names)), list(names), decode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(range(*row.indices(len(self))))
        return self.take([row])[0]

    def take(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """The items of some rows."""
        if not len(rows):
            return ()
        cells = self._rows[rows if isinstance(rows, range) else [int(row) for row in rows]]
        return tuple(self._decode(*row) for row in zip(*(cells[name] for name in self._names), strict=True))

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), CHUNK):
            yield from self.take(range(start, min(start + CHUNK, len(self))))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        del copy
        return np.asarray(list(self), dtype=dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.take(range(min(3, len(self))))))
        return f"Column([{shown}{', ...' if len(self) > 3 else ''}], {len(self)} rows)"
