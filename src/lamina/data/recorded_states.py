"""Hidden states in files that other programs wrote, described by `states.json`: check them, and read batches.

Files are mapped into memory. After each batch, the pages that it has read are given back to the system, so that memory
stays small however large the files are.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from bisect import bisect_right
from collections import OrderedDict
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, Self, cast, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lamina.data.parquet import parquet_errors
from lamina.data.row_errors import missing_column
from lamina.errors import ConfigError, DataError, check_known, convert_errors
from lamina.store.files import check_room
from lamina.store.manifest import STATES, StatesArray, StatesManifest
from lamina.utils import parse_json, pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from torch import Tensor

    from lamina.layers.recorded import RecordedFacts

ENDINGS = (".npy", ".safetensors", ".parquet")
_OPEN = 32  # files that are mapped at a time
_DTYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "BOOL": "?", "U8": "u1", "I64": "<i8", "I32": "<i4"}
_HEADER_BYTES = 100_000_000  # largest header that the safetensors format allows


class RowStates(Protocol):
    """Hidden states of encoded rows that need no model: cached states, or recorded ones in files."""

    def batch(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        """Return the states of rows: stack -> layer -> `[batch, tokens, width]`, padded with zeros on the right."""
        ...


class Place(NamedTuple):
    """The place of a tensor's numbers in a file.

    Attributes:
        path: The file.
        start: Offset of the first byte.
        dtype: Numpy's name of the type; `shape` is the tensor's shape.
        bfloat16: Whether the numbers are the bits of bfloat16 numbers.
    """

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]
    bfloat16: bool = False


@final
class RecordedStates:
    """Hidden states in the files of a folder, read row by row.

    Args:
        folder: The folder.
        manifest: The contents of `states.json`. The files are checked against it; DataError if one does not fit.
            Parquet files are unpacked to temporary files; StoreError if the disk is too small for them.

    Attributes:
        lengths: Array with the number of tokens of each row; 1 if states are pooled and the manifest names no file.
    """

    def __init__(self, folder: Path, manifest: StatesManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._maps: OrderedDict[Path, mmap.mmap] = OrderedDict()
        self._stamps: dict[Path, tuple[int, int] | None] = {}  # size and date of each file when it was checked
        self._unchanged: set[Path] = set()  # files that this batch has found unchanged
        self._unpacked: list[object] = []  # temporary files, which are removed with this object
        self._places = [self._checked_place(array) for array in manifest.arrays]
        self._masks: list[np.ndarray | None] = [self._mask(array) for array in manifest.arrays]
        self._by_layers = self._group()
        self.lengths = self._lengths()
        self._tokens_before = np.cumsum([0, *self.lengths])  # number of tokens of all rows before each row

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Self:
        """Open a folder, and check that its files have the shapes of its manifest.

        Raises:
            StoreError: If there is no manifest, it is damaged or contradicts itself, or the disk for temporary files is
                too small to unpack a Parquet file.
            DataError: If a file is missing or damaged, or its shape is not that in the manifest.
            UnknownNameError: If the manifest has an unknown key.
        """
        return cls(Path(folder), StatesManifest.of_folder(folder))

    @property
    def facts(self) -> RecordedFacts:
        """The facts about the model that the manifest holds."""
        return self.manifest.facts

    @cached_property
    def digest(self) -> str:
        """A hash of the manifest and of the files' sizes and dates: equal as long as the files are not changed."""
        arrays = self.manifest.arrays
        masks = {array.mask for array in arrays if array.mask and array.mask.lower().endswith(".npy")}
        names = {array.file for array in arrays} | masks | ({self.manifest.lengths} if self.manifest.lengths else set())
        stats = [(self.folder / name).stat() for name in sorted(names)]
        files = [(facts.st_size, facts.st_mtime_ns) for facts in stats]
        return hashlib.sha256(json.dumps([self.manifest.model_dump(), files]).encode()).hexdigest()

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to open the folder again, so that a copy maps the files itself."""
        return type(self), (self.folder, self.manifest)

    def __len__(self) -> int:
        return self.manifest.rows

    def tokens(self, row: int) -> int:
        """Return the number of states of a row: its tokens, or 1 if the states are pooled."""
        return 1 if self.manifest.pooling else int(self.lengths[row])

    def batch(
        self, rows: Sequence[int], layers: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, dict[int, Tensor]]:
        """Return rows' states as float32: stack -> layer -> `[batch, tokens, width]`, padded with zeros on the right.

        Args:
            rows: Indices of the rows, at least one.
            layers: The layers to read. None: all.
            device: Where to put the states.

        Raises:
            UnknownNameError: If a layer is not among the manifest's.
            ConfigError: If a row does not exist.
            DataError: If a state is NaN or infinite; the message names the row. Or if a file has changed since the
                folder was opened.
        """
        self._unchanged.clear()
        wanted = list(dict.fromkeys(self.manifest.layers if layers is None else layers))
        check_known(f"states: {self.folder}", map(str, wanted), map(str, self.manifest.layers), "layer")
        if outside := [row for row in rows if not 0 <= row < len(self)]:
            raise ConfigError(f"states: {self.folder} has no row {outside[0]}; its rows are 0 to {len(self) - 1}.")
        counts = [self.tokens(row) for row in rows]
        states = torch.zeros(len(wanted), len(rows), max(counts), self.manifest.width)
        for at, row in enumerate(rows):
            for members, arrays, ends in self._by_layers:
                read = [layer for layer in members if layer in wanted]
                if not read:
                    continue
                index = bisect_right(ends, row)
                part = self._read(arrays[index], row - (ends[index - 1] if index else 0), row, read)
                for place, layer in enumerate(read):
                    states[wanted.index(layer), at, : counts[at]] = part[:, place]
        for mapped in self._maps.values() if hasattr(mmap, "MADV_DONTNEED") else ():
            mapped.madvise(mmap.MADV_DONTNEED)  # the system may drop the pages of memory that were read
        if not bool(torch.isfinite(states).all()):
            raise self._not_finite(states, rows, wanted)
        moved = states.to(device)
        return {self.manifest.stack: dict(zip(wanted, moved.unbind(0), strict=True))}

    def _not_finite(self, states: Tensor, rows: Sequence[int], layers: Sequence[int]) -> DataError:
        """Return the DataError for a state that is NaN or infinite, in the first such layer and its first such row.

        `states` is `[layers, rows, tokens, width]`, for the `rows` and `layers` that were read.
        """
        bad = (~torch.isfinite(states)).flatten(2).any(2)
        layer, at = (int(number) for number in bad.nonzero()[0])
        what = f"row {rows[at]} (from 0) has a state of layer {layers[layer]} that is NaN or infinite"
        hint = "Compute that row again, or leave it out"
        return DataError(f"states: in {self.folder}, {what}; states must be finite. {hint}.", row=rows[at])

    # Reading a row

    def _read(self, number: int, local: int, row: int, layers: Sequence[int]) -> Tensor:
        """Return the states `[tokens, layers, width]` of a row.

        `number` is the array's index in the manifest. `local` is the row's number in the array, `row` among all rows.
        `layers` are layers of the array.
        """
        array, place = self.manifest.arrays[number], self._places[number]
        own = array.layers or self.manifest.layers
        axes, mask, count = array.axes, self._masks[number], int(self.lengths[row])
        index: list[int | slice] = [slice(None)] * len(axes)
        if "rows" in axes:
            index[axes.index("rows")] = local
        if "tokens" in axes and mask is None:
            before = self._tokens_before
            start = 0 if "rows" in axes else int(before[row] - before[row - local])
            index[axes.index("tokens")] = slice(start, start + count)
        part = self._view(place)[tuple(index)]
        names = [axis for axis in axes if axis != "rows"]
        for axis in ("layers", "tokens"):
            if axis not in names:
                part, names = part[np.newaxis], [axis, *names]
        part = part.transpose([names.index(axis) for axis in ("tokens", "layers", "width")])
        part = part[:, [own.index(layer) for layer in layers]]
        if mask is not None and "tokens" in axes:
            part = part[mask[local]]
        return as_tensor(part, bfloat16=place.bfloat16)

    def _view(self, place: Place) -> np.ndarray:
        """Return the tensor at `place` as an array over its file, which is mapped into memory on first use.

        Raises DataError if the file is gone or has changed since it was first seen: its numbers may be elsewhere now.
        """
        if place.path not in self._unchanged:
            stamp = _stamp(place.path)
            if stamp is None or stamp != self._stamps.setdefault(place.path, stamp):
                got = f"{place.path} was {'removed' if stamp is None else 'changed'} after the states were opened"
                raise DataError(f"states: {got}. Open them again, by making the task again.", path=str(place.path))
            self._unchanged.add(place.path)
        if place.path not in self._maps:
            with place.path.open("rb") as file:
                self._maps[place.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._maps) > _OPEN:
                self._maps.popitem(last=False)
        self._maps.move_to_end(place.path)
        count = int(np.prod(place.shape))
        return np.frombuffer(self._maps[place.path], place.dtype, count, place.start).reshape(place.shape)

    # Checking

    def _checked_place(self, array: StatesArray) -> Place:
        """Return where the tensor of an array is. An array in a `.parquet` file is first unpacked to a temporary file.

        Raises DataError if the file is missing or damaged, differs from the manifest, or holds numbers that are not
        floating-point; StoreError if the disk for temporary files is too small.
        """
        path = self.folder / array.file
        place = self._place(path, array.tensor, array.shape)
        if list(place.shape) != array.shape:
            got = f"{array.file} has the shape {list(place.shape)}, and {STATES} says {array.shape}"
            raise DataError(f"states: {self.folder}: {got}. Correct the manifest, or write the states again.")
        if np.dtype(place.dtype).kind != "f" and not place.bfloat16:
            got = f"{array.file} holds numbers of the type {np.dtype(place.dtype)}"
            raise DataError(f"states: {self.folder}: {got}; states are floating-point numbers.", path=str(path))
        return place

    def _place(self, path: Path, tensor: str | None, shape: Sequence[int] | None = None) -> Place:
        """Return where a tensor is in a `.npy`, `.safetensors` or `.parquet` file.

        `tensor` is its name in the file: for `.parquet` a column, for `.npy` ignored. A `.parquet` file is unpacked to
        a temporary file; `shape` is its number of rows, then the lengths of the nested lists (None: as the file and its
        first cell show). Raises DataError if the file is missing or damaged, or lacks the tensor, and StoreError if the
        disk for temporary files is too small.
        """
        if not path.is_file():
            raise DataError(f"states: {path} is not there; {STATES} names it.", path=str(path))
        self._stamps.setdefault(path, _stamp(path))
        if path.suffix.lower() == ".parquet":
            column = tensor or ""
            file, found = unpacked(path, column, column_shape(path, column) if shape is None else shape)
            self._unpacked.append(file)
            return Place(Path(file.name), 0, "<f4", found)
        return place_of(path, tensor)

    def _mask(self, array: StatesArray) -> np.ndarray | None:
        """Return the mask of an array, `[rows, tokens]`; None if it has none. A file of one row may hold `[tokens]`.

        Raises DataError if the mask is missing or damaged, or its shape does not fit the states; StoreError as
        `_place`.
        """
        if array.mask is None:
            return None
        path, is_file = self.folder / array.mask, array.mask.lower().endswith(".npy")
        place = self._place(path, None) if is_file else self._place(self.folder / array.file, array.mask)
        sizes = dict(zip(array.axes, array.shape, strict=True))
        expected = (array.rows, sizes.get("tokens", 0))
        if place.shape not in (expected, expected[1:] if array.rows == 1 else expected):
            got = f"the mask '{array.mask}' has the shape {list(place.shape)}, and the states {list(expected)}"
            raise DataError(f"states: {self.folder}: {got}; both are [rows, tokens].")
        return np.array(self._view(place)).reshape(expected).astype(bool)

    def _group(self) -> list[tuple[list[int], list[int], list[int]]]:
        """Return groups of layers that are in the same arrays, as (layers, arrays, ends).

        `arrays` are indices in the manifest; `ends` has the number of rows up to the end of each array. The arrays of a
        group hold all rows; their layers may have other orders.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        arrays, layers = self.manifest.arrays, self.manifest.layers
        for layer in layers:
            holding = tuple(number for number, array in enumerate(arrays) if layer in (array.layers or layers))
            groups.setdefault(holding, []).append(layer)
        return [
            (members, list(numbers), list(accumulate(arrays[number].rows for number in numbers)))
            for numbers, members in groups.items()
        ]

    def _lengths(self) -> np.ndarray:
        """Return the number of tokens of each row, from the manifest's file or from the arrays.

        All sources that give the numbers must agree. Without a file, pooled rows have length 1. Raises DataError if
        lengths are missing, disagree, or are below 1.
        """
        manifest, given = self.manifest, None
        if manifest.lengths is not None:
            place = _npy_place(self.folder / manifest.lengths) if (self.folder / manifest.lengths).is_file() else None
            if place is None or place.shape != (manifest.rows,) or np.dtype(place.dtype).kind not in "iu":
                raise DataError(f"states: {self.folder / manifest.lengths} does not hold {manifest.rows} lengths.")
            given = np.array(self._view(place), dtype=np.int64)
            if given.min() < 1:
                row, rule = int(np.argmax(given < 1)), "every row has at least 1"
                got = f"{manifest.lengths} gives row {row} (from 0) {given[row]} tokens"
                raise DataError(f"states: {self.folder}: {got}; {rule}.", row=row)
        for _, numbers, _ in self._by_layers if manifest.pooling is None else ():
            given = self._agreed(given, numbers)
        return np.ones(manifest.rows, np.int64) if given is None else given

    def _agreed(self, given: np.ndarray | None, numbers: Sequence[int]) -> np.ndarray:
        """Return the length of every row. `numbers` are indices of the manifest's arrays that together hold all rows.

        `given` are the lengths that the manifest's file or other arrays gave, or None. Raises DataError if these arrays
        contradict `given`, a row has no token, or nothing says where a row ends.
        """
        counted: list[np.ndarray] = []
        at = 0
        for number in numbers:
            array, mask = self.manifest.arrays[number], self._masks[number]
            size = array.shape[array.axes.index("tokens")]
            own = None if given is None else given[at : at + array.rows]
            if mask is not None:
                found = mask.sum(1)
            elif "rows" in array.axes:
                found = np.full(array.rows, size) if own is None else np.minimum(own, size)
            elif array.rows == 1:
                found = np.array([size])
            elif own is None:
                got = f"{array.file} has {array.rows} rows of unknown lengths"
                raise DataError(f"states: {self.folder}: {got}. Give their tokens in a file 'lengths'.")
            else:
                found = own
                if found.sum() != size:
                    raise self._wrong_lengths(array, f"{size} tokens", int(found.sum()))
            if not found.all():
                row, source = at + int(found.argmin()), "" if mask is None else f"the mask '{array.mask}' of "
                got = f"{source}{array.file} has no token in row {row} (from 0)"
                raise DataError(f"states: {self.folder}: {got}; every row has at least 1.", row=row)
            if own is not None and (wrong := np.flatnonzero(own != found)).size:
                row = int(wrong[0])
                has = f"{pluralize(int(found[row]), 'token')} in row {at + row} (from 0)"
                raise self._wrong_lengths(array, has, int(own[row]), row=at + row)
            counted.append(found)
            at += array.rows
        return np.concatenate(counted).astype(np.int64)

    def _wrong_lengths(self, array: StatesArray, has: str, said: int, row: int | None = None) -> DataError:
        got = f"{array.file} has {has}, and the lengths of its rows say {said}"
        return DataError(f"states: {self.folder}: {got}. Correct the lengths, or write the states again.", row=row)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the size of a file and the time of its last change; None if it cannot be seen."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns


def place_of(path: Path, tensor: str | None) -> Place:
    """Return where a tensor is in a `.npy` or `.safetensors` file; for a column of a `.parquet` file, only its shape.

    `tensor` is not read for a `.npy` file, which has one tensor. Raises DataError if there is no such file or tensor,
    or the file is damaged or has an unknown type.
    """
    if not path.is_file():
        raise DataError(f"states: {path} is not there.", path=str(path))
    if path.suffix.lower() == ".parquet":
        return Place(path, 0, "<f4", column_shape(path, tensor or ""))
    return _tensor_place(path, tensor) if path.suffix.lower() == ".safetensors" else _npy_place(path)


def as_tensor(numbers: np.ndarray, *, bfloat16: bool = False) -> Tensor:
    """Return a copy of an array as a float32 tensor. With `bfloat16`, the array holds the bits of bfloat16 numbers."""
    if bfloat16:
        return torch.from_numpy(np.ascontiguousarray(numbers).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(numbers.astype(np.float32))


def _npy_place(path: Path) -> Place:
    """Return where a `.npy` file's array is.

    Raises DataError if the file is damaged, or the array has Python objects or Fortran's order of axes.
    """
    with (
        convert_errors(lambda reason: DataError(f"states: {path} is not a .npy file ({reason}).", path=str(path))),
        path.open("rb") as file,
    ):
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject or fortran:
            raise ValueError("it holds Python objects" if dtype.hasobject else "its axes are in Fortran's order")
        return _sized(Place(path, file.tell(), dtype.str, tuple(shape)))


def _tensor_place(path: Path, tensor: str | None) -> Place:
    """Return where a tensor in a safetensors file is.

    Raises DataError if the tensor is missing or has an unknown type, `tensor` is None, or the file is damaged.
    """
    problem = f"states: {path} is not a safetensors file"
    with (
        convert_errors(lambda reason: DataError(f"{problem} ({reason}).", path=str(path))),
        path.open("rb") as file,
    ):
        size = int.from_bytes(file.read(8), "little")
        if size > min(_HEADER_BYTES, path.stat().st_size):
            raise ValueError("its header is longer than the file")
        header = parse_json(file.read(size).decode())
        if tensor not in header:
            known = ", ".join(sorted(name for name in header if name != "__metadata__"))
            raise DataError(f"states: {path} has no tensor '{tensor}'; it has {known}.", path=str(path))
        entry = header[tensor]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"'{tensor}' has the type {entry['dtype']}")
        start = 8 + size + int(entry["data_offsets"][0])
        return _sized(Place(path, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["dtype"] == "BF16"))


def _sized(place: Place) -> Place:
    end = place.start + int(np.prod(place.shape)) * np.dtype(place.dtype).itemsize
    if (size := place.path.stat().st_size) < end:
        raise ValueError(f"it has {size} bytes and needs {end}, so it was cut off")
    return place


_ROWS = 256  # rows that are unpacked at a time


def unpacked(path: Path, column: str, shape: Sequence[int]) -> tuple[IO[bytes], tuple[int, ...]]:
    """Return a temporary file with the numbers of a column as float32, because single rows of Parquet cannot be read.

    The column's cells are nested lists of numbers; `shape` is the number of rows, then the lengths of the lists. Also
    returns the shape that was read. The file is removed when the returned object is collected, or the process ends.
    Raises DataError if there is no such column, or the shape of a cell differs; StoreError if the disk for temporary
    files is too small.
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
    """Return the shape of a column of nested lists: its rows, then the lengths of the lists in its first cell.

    Raises DataError if there is no such column or no row, or the file is not a Parquet file.
    """
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
    """Return the cells of a column of nested lists as a flat array of numbers.

    `shape` has the lengths of the lists, outer ones first, and `first` is the number of the first row in `cells`.
    Raises DataError if the lists are not so deep, or, naming the row, if one is missing or has another length.
    """
    values = cells
    for size in shape:
        if not isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            got = f"a column of {cells.type}, and the shape says {len(shape)} lists, one in the other"
            raise DataError(f"states: {path} has {got}.", path=str(path))
        whole = np.full(len(values), getattr(values.type, "list_size", 0))
        lengths = np.diff(values.offsets.to_numpy()) if hasattr(values, "offsets") else whole
        lengths = np.where(values.is_null().to_numpy(zero_copy_only=False), -1, lengths)
        if len(wrong := np.flatnonzero(lengths != size)):
            row, length = first + int(wrong[0]) // max(1, len(values) // len(cells)), int(lengths[wrong[0]])
            got = f"row {row} (from 0) has a list of {length if length >= 0 else 'no'} numbers"
            raise DataError(f"states: {path} {got}, and the shape says {size}.", path=str(path), row=row)
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).astype(np.float32)
