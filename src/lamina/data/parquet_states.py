"""Unpack hidden states in a Parquet file into a temporary file that can be read row by row."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lamina.data.parquet import parquet_errors
from lamina.data.row_errors import missing_column
from lamina.errors import DataError
from lamina.store.files import check_room

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROWS = 256  # rows that are unpacked at a time


def unpacked(path: Path, column: str, shape: Sequence[int]) -> tuple[IO[bytes], tuple[int, ...]]:
    """Return a temporary file with the numbers of a column as float32, and the shape of the column.

    Parquet compresses groups of rows, so that single rows cannot be read. The file is removed when the returned object
    is collected, or the process ends.

    Args:
        path: The Parquet file.
        column: A column whose cells are lists of numbers, one list in the other.
        shape: The shape of the column, the rows first, then the lists.

    Raises:
        DataError: If there is no such column, or a cell has another shape.
        StoreError: If the disk for temporary files is too small.
    """
    check_room(Path(gettempdir()), int(np.prod(shape)) * 4)
    file = NamedTemporaryFile(prefix="lamina-states-", suffix=".bin")  # noqa: SIM115  it lives as long as its states
    rows = 0
    with parquet_errors(path), pq.ParquetFile(path) as table:
        if column not in table.schema_arrow.names:
            raise missing_column(path, column, table.schema_arrow.names)
        for batch in table.iter_batches(_ROWS, columns=[column]):
            cells = batch.column(0)
            file.write(_numbers(path, cells, rows, shape[1:]).tobytes())
            rows += len(cells)
    file.flush()
    return cast("IO[bytes]", file), (rows, *shape[1:])


def column_shape(path: Path, column: str) -> tuple[int, ...]:
    """Return the shape of a column of nested lists: its rows, then the lengths of the lists in its first cell."""
    with parquet_errors(path), pq.ParquetFile(path) as table:
        if column not in table.schema_arrow.names:
            raise missing_column(path, column, table.schema_arrow.names)
        shape = [table.metadata.num_rows]
        if shape == [0]:
            raise DataError(f"states: {path} has no rows.", path=str(path))
        cell = next(table.iter_batches(1, columns=[column])).column(0)[0].as_py()
    while isinstance(cell, list):
        shape.append(len(cell))
        cell = cell[0] if cell else None
    return tuple(shape)


def _numbers(path: Path, cells: pa.Array, first: int, shape: Sequence[int]) -> np.ndarray:
    """Return the cells of a column as numbers; raise DataError, naming the row, if a cell has another shape.

    `first` is the number of the first row in `cells`.
    """
    values = cells
    for size in shape:
        if not isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            got = f"a column of {cells.type}, and the shape says {len(shape)} lists, one in the other"
            raise DataError(f"states: {path} has {got}.", path=str(path))
        lengths = np.diff(values.offsets.to_numpy()) if hasattr(values, "offsets") else np.full(len(values), size)
        wrong = np.flatnonzero(lengths != size)
        if len(wrong) or values.null_count:
            each = len(values) // max(1, len(cells))
            row = first + (int(wrong[0]) // max(1, each) if len(wrong) else 0)
            got = f"row {row} (from 0) has a list of {int(lengths[wrong[0]]) if len(wrong) else 'no'} numbers"
            raise DataError(f"states: {path} {got}, and the shape says {size}.", path=str(path), row=row)
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).astype(np.float32)
