"""Read Parquet files with bounded memory, although a small file may hold the same long text many times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lamina.data.arrow import Record, dataset_of
from lamina.data.row_errors import bad_row, existing, missing_column
from lamina.errors import DataError, convert_errors
from lamina.utils import MAX_BYTES

if TYPE_CHECKING:
    import datasets


MOST_BYTES = 1 << 30  # bytes of cells that any file may hold
MOST_RATIO = 100  # a larger file may hold this number of times its own size; texts are compressed about 3 times
_ROWS = 2**14  # rows whose sizes are computed at a time


def read_parquet(path: Path, columns: Sequence[str] | None, rows: int) -> Iterator[tuple[int, Record | DataError]]:
    """Yield the rows of a Parquet file with their numbers, counted from 1; a row that cannot be read is a DataError.

    The iterator raises DataError if the file is not a Parquet file, a column is missing or occurs twice, or the cells
    take more than 1 GiB and more than 100 times the size of the file.

    Args:
        path: The file.
        columns: Names of the columns to read. For "outer.inner", the whole column "outer" of objects is read, unless
            there is a column with the name "outer.inner". None: all columns.
        rows: Number of rows to read at a time.
    """
    with parquet_errors(path), pq.ParquetFile(path) as file:
        known = file.schema_arrow.names
        needed = None if columns is None else [n if n in known else n.partition(".")[0] for n in columns]
        for name, outer in zip(columns or (), needed or (), strict=True):
            if outer not in known:
                raise missing_column(path, name, known)
        start = 1
        for batch in _batches(path, needed, rows):
            yield from _records(path, batch, start)
            start += len(batch)


def _records(path: Path, batch: pa.RecordBatch, start: int) -> Iterator[tuple[int, Record | DataError]]:
    """Yield (row number, row) for a batch, numbered from `start`; a row whose text is not UTF-8 is a DataError.

    Such a row is found by halving the batch, because the error does not tell which row is wrong.
    """
    try:
        yield from enumerate(batch.to_pylist(), start)
    except UnicodeDecodeError as error:  # `to_pylist` raised it, before any row was yielded
        if len(batch) == 1:
            yield start, bad_row(path, start, f"is not UTF-8 at byte {error.start} of a text")
            return
        half = len(batch) // 2
        yield from _records(path, batch[:half], start)
        yield from _records(path, batch[half:], start + half)


def _batches(path: Path, columns: Sequence[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the `columns` (None: all) of a Parquet file in batches of at most `rows` rows and 64 MiB of cells.

    A larger row is a batch by itself. Every row group is first read in a form that stores equal texts once, so that its
    decoded size is known before it is decoded. Raises DataError if a column occurs twice, or all cells together take
    too much memory (see `read_parquet`).
    """
    most, total = max(MOST_BYTES, MOST_RATIO * path.stat().st_size), 0
    with pq.ParquetFile(path) as file:
        known = file.schema_arrow.names
        if twice := [name for name in columns or known if known.count(name) > 1]:
            hint = "Rename one of them, or leave it out"
            raise DataError(f"read: {path} has two columns '{twice[0]}'. {hint}.", path=str(path), column=twice[0])
        metadata, schema = file.metadata, file.metadata.schema
        leaves = [schema.column(index) for index in range(len(schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        wanted = set(known if columns is None else columns)  # a name may have a dot, as the path of a nested column
        read = [i for i, leaf in enumerate(leaves) if not wanted.isdisjoint((leaf.path, leaf.path.partition(".")[0]))]
        groups = range(metadata.num_row_groups)
        chunks = (metadata.row_group(group).column(index) for group in groups for index in read)
        if sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks) > most:
            raise _too_large(path, most)
        with pq.ParquetFile(path, read_dictionary=texts) as compact:
            for group in groups:
                largest = 1
                for batch in compact.iter_batches(_ROWS, [group], columns):
                    sizes = sum(map(_row_sizes, batch.columns), np.zeros(len(batch)))
                    total, largest = total + int(sizes.sum()), max(largest, int(sizes.max()))
                    if total > most:
                        raise _too_large(path, most)
                yield from file.iter_batches(max(1, min(rows, MAX_BYTES // largest)), [group], columns)


def _too_large(path: Path, most: int) -> DataError:
    got = f"{path} has {path.stat().st_size:,} bytes, and its cells take more than {most:,}"
    holds = f"the cells of a file may take {MOST_BYTES:,} bytes, or {MOST_RATIO} times its size"
    return DataError(f"read: {got}; {holds}. Write it as several files.", path=str(path))


def _row_sizes(cells: pa.Array) -> np.ndarray:
    """Return the size in bytes of each cell of a column, `[rows]`. Every cell counts at least 8 bytes.

    A dictionary column stores equal texts once, but each of its cells counts the full length of its text. The sizes
    of lists and objects are the sums of their cells. In all other columns, every cell gets the mean size.
    """
    if isinstance(cells, pa.DictionaryArray):
        lengths = pc.binary_length(cells.dictionary).take(cells.indices)  # pyright: ignore[reportAttributeAccessIssue]
        return 8 + lengths.fill_null(0).to_numpy(zero_copy_only=False)
    if isinstance(cells, pa.StructArray):
        return sum(map(_row_sizes, cells.flatten()), np.full(len(cells), 8))
    if isinstance(cells, pa.MapArray):  # a list of pairs
        pairs = pa.StructArray.from_arrays([cells.keys, cells.items], ["key", "value"])
        cells = pa.ListArray.from_arrays(cells.offsets, pairs)
    if isinstance(cells, pa.ListArray | pa.LargeListArray):
        lengths = pc.list_value_length(cells)  # pyright: ignore[reportAttributeAccessIssue]
        ends = np.cumsum(lengths.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        total = np.cumsum([0, *_row_sizes(cells.flatten())])
        return 8 + np.diff(total[ends], prepend=0)
    return np.full(len(cells), max(8, cells.nbytes // max(1, len(cells))))


def parquet_rows(path: str | Path) -> datasets.Dataset:
    """Read a Parquet file as a dataset; a large one is memory-mapped from a temporary file (see `dataset_of`).

    Raises DataError if the file is missing, is not a Parquet file, has no rows, has a column twice, or takes too much
    memory (see `read_parquet`).
    """
    path = existing(path)
    with parquet_errors(path):
        batches = _batches(path, None, 1024)
        if (first := next(batches, None)) is None:
            raise DataError(f"read: {path} is empty; a task needs at least one row.", path=str(path))
        return dataset_of(pa.Table.from_batches([batch]) for batch in chain([first], batches))


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Convert errors of reading a Parquet file inside the `with` block to DataErrors that name the file."""
    problem = f"read: {path} is not a Parquet file"
    with convert_errors(lambda reason: DataError(f"{problem} ({reason}); it may be cut off.", path=str(path))):
        yield
