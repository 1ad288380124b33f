"""Files as rows of a task, in class folders, plain tar files or a column: images and sound, read when needed."""

from __future__ import annotations

import logging
import os
import tarfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from errno import EISDIR
from functools import partial
from io import SEEK_END, BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from lamina.data.arrow import Column, dataset_of, derived, encodable
from lamina.data.read import Table
from lamina.errors import DataError, first_line
from lamina.tasks.split import Split

if TYPE_CHECKING:
    import datasets

    Member = tuple[tuple[str, ...], "LazyFile | None"]  # the parts of a file's name; None: it is a link or special

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 30  # of one file
_CELL = {
    "name": pa.string(),
    "path": pa.string(),
    "offset": pa.int64(),
    "size": pa.int64(),
    "data": pa.binary(),
    "rate": pa.int64(),
}
_NAMES = ("text", "row")  # columns that files are made from
_BLOCK = 512  # a tar file is made of blocks of this many bytes, and ends with some that are zero
_TAR_ERRORS = (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError, RecursionError)  # of damaged headers
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass(frozen=True)
class LazyFile(ABC):
    """A file, a part of a tar file, or bytes, that are decoded when they are needed."""

    name: str  # what messages call it
    path: str | None = None  # the file, or the tar file that holds it
    offset: int = 0  # where in the file its bytes start
    size: int | None = None  # how many bytes it has; None: all from `offset` on
    data: bytes | None = None  # its bytes, where they are at hand

    column: ClassVar[str]  # the usual name of a column of them; a task is "an {column} task"
    op: ClassVar[str]  # named in errors, before the colon
    one: ClassVar[str]  # what one is called in messages, with its article
    many: ClassVar[str]
    endings: ClassVar[frozenset[str]]  # of the files that are taken from folders
    feature: ClassVar[str]  # the class of `datasets` for a column of them
    units: ClassVar[str]  # what one has many of, once it is decoded
    forms: ClassVar[str]  # in which they may be given

    @classmethod
    @abstractmethod
    def of_object(cls, name: str, entry: Any) -> Self | None:
        """One from an object at hand, such as an array; None if it is of no known form."""

    @classmethod
    def of(cls, name: str, entry: Any) -> Self:
        """One from a path, from bytes, from either in a mapping as `datasets` has it, or from an object at hand.

        Raises:
            TypeError: If it is none of these; its text says what it is.
        """
        if isinstance(entry, Mapping) and (entry.keys() & {"bytes", "path"}) and entry.get("array") is None:
            return cls(name, entry.get("path"), data=entry.get("bytes"))
        if isinstance(entry, str | Path):
            return cls(str(entry), str(entry))
        if entry is None or isinstance(entry, bytes):
            return cls(name, data=entry)
        made = cls.of_object(name, entry)
        if made is None:
            raise TypeError(f"is {type(entry).__name__}; {cls.one} is {cls.forms}")
        return made

    @abstractmethod
    def decoded_size(self) -> int:
        """How many `units` it has, by what its file says, which is not decoded; a DataError if it is no such file."""

    @classmethod
    def bad(cls, path: str | Path, problem: str) -> DataError:
        """The error that something is wrong with a file."""
        return DataError(f"{cls.op}: {path} {problem}", path=str(path))

    def source(self) -> Path | BytesIO:
        """The file, where it is one by itself, which is opened once to see that it can be; else its bytes."""
        if self.data is None and self.path is not None and not self.offset and self.size is None:
            self._read(0)
            return Path(self.path)
        return BytesIO(self.read())

    def read(self) -> bytes:
        """All its bytes, at most 2^30."""
        if self.data is not None:
            return self.data
        data, size = self._read(_MOST_BYTES)
        if size > _MOST_BYTES:
            problem = f"has more than {_MOST_BYTES:,} bytes; every row of an {self.column} task is {self.one}."
            raise self.bad(self.name, problem)
        if self.size is not None and len(data) < self.size:
            problem = f"is cut off after {len(data)} of {self.size} bytes; the tar file has become shorter."
            raise self.bad(self.name, problem)
        return data

    def _read(self, most: int) -> tuple[bytes, int]:
        """Its bytes, none if it has more than `most`, and how many there are."""
        if self.path is None:
            raise self.bad(self.name, f"is empty; every row of an {self.column} task has {self.one}.")
        path = Path(self.path)
        try:
            if path.exists() and not path.is_file():  # a pipe or a device, which may never end
                raise IsADirectoryError(EISDIR, "it is no file")
            with path.open("rb") as file:
                rest = max(0, file.seek(0, SEEK_END) - self.offset)
                file.seek(self.offset)
                size = rest if self.size is None else min(rest, self.size)
                return file.read(size) if size <= most else b"", size
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"cannot be read ({reason}); {self.many} are read again in every epoch."
            raise self.bad(self.name, problem) from None


def file_column(files: Sequence[LazyFile], kind: type[LazyFile]) -> Column:
    """Files of one kind as a column of a table: nothing is opened."""
    cells = [asdict(file) for file in files]
    table = {"text": pa.array(cells, pa.struct(_CELL)), "row": pa.array(range(len(cells)), pa.int64())}
    return Column(dataset_of([pa.table(table)]), _NAMES, partial(_from_cell, kind))


def dataset_files(rows: datasets.Dataset, column: str, kind: type[LazyFile]) -> Column:
    """The files in a column of a data set, none of which is decoded; a column of none is a DataError."""
    import datasets

    feature = getattr(datasets, kind.feature)
    known = [name for name, own in rows.features.items() if isinstance(own, feature) or _is_struct(own)]
    if column not in known:
        came = f"has no {kind.many} in" if column in rows.features else "has no"
        rule = f"its columns of {kind.many} are: {', '.join(known) or 'none'}"
        raise DataError(f"{kind.op}: the data set {came} column '{column}'; {rule}.", column=column)
    plain = rows.with_format(None).select_columns([column])
    if isinstance(rows.features[column], feature):
        plain = plain.cast_column(column, feature(decode=False))
    plain = plain if column == "text" else plain.rename_column(column, "text")
    plain = plain.add_column("row", range(len(rows)))  # pyright: ignore[reportArgumentType]
    return Column(plain, _NAMES, partial(_from_column, kind, column))


def _is_struct(feature: Any) -> bool:
    """Whether cells are objects as `datasets` writes files, or sound at hand."""
    return isinstance(feature, dict) and bool(feature.keys() & {"bytes", "path", "array"})


def object_files(name: str, cells: Sequence[Any], column: str, kind: type[LazyFile], folder: Path | None) -> Column:
    """The files in a column of Python objects; paths are taken from `folder` on, if there is one.

    Raises:
        DataError: If a cell is of no known form.
    """
    files: list[LazyFile] = []
    for row, cell in enumerate(cells):
        own = folder / cell if folder is not None and isinstance(cell, str) else cell
        try:
            files.append(kind.of(f"row {row} of column '{column}'", own))
        except TypeError as error:
            raise kind.bad(name, f"cannot be read (row {row} {error}).") from error
    return file_column(files, kind)


def file_split(files: Column, labels: Iterable[int] | None) -> Split:
    """The files of such a column with their class ids."""
    ids = pa.nulls(len(files)) if labels is None else pa.array(labels, pa.int64())
    rows = files.rows.add_column("label", ids)  # pyright: ignore[reportArgumentType]
    return Split(derived(rows, files.rows), files.decode)


def _from_cell(kind: type[LazyFile], cell: Any, _row: int) -> LazyFile:
    return kind(**{name: value for name, value in cell.items() if name in kind.__dataclass_fields__})


def _from_column(kind: type[LazyFile], column: str, cell: Any, row: int) -> LazyFile:
    return kind.of(f"row {row} of column '{column}'", cell)


def read_class_files(path: str | Path, kind: type[LazyFile]) -> Table:
    """The files of class folders, in a folder or in a plain tar file, which is read in place; none is opened yet.

    Columns are that of the kind ("image", of `LazyImage`s) and "label": the name of the folder that a file lies in, as
    in `airplane/0001.jpg` or `train/airplane/0001.jpg`. Rows are sorted by name whatever the file system's order. Other
    files, hidden files and links are left out and counted in a warning.
    """
    path = Path(path)
    if not (path.is_dir() or path.is_file()):
        raise kind.bad(path, f"is not there; {kind.many} are read from a folder or a tar file.")
    files: dict[tuple[str, ...], LazyFile] = {}
    others: Counter[str] = Counter()
    for parts, file in _in_folder(path, kind) if path.is_dir() else _in_tar(path, kind):
        if encodable(name := "/".join(parts)) != name:
            raise kind.bad(path, f"has the file {name!r}, whose name is not UTF-8; rename it.")
        if file is None:
            others["links and special files, which are not followed"] += 1
        elif any(part.startswith(".") for part in parts) or PurePosixPath(parts[-1]).suffix.lower() not in kind.endings:
            others["other files"] += 1
        else:
            others["files that come again later"] += parts in files
            files[parts] = file
    others = +others
    names, ignored = sorted(files), ", ".join(f"{count} {what}" for what, count in sorted(others.items())) or "nothing"
    if not names:
        came = f"has no {kind.many} (ignored: {ignored}); they end in {', '.join(sorted(kind.endings))}"
        raise kind.bad(path, f"{came}. Put the {kind.many} of each class into a folder named after it.")
    _check_classes(path, names, kind)
    labels = [parts[-2] for parts in names]
    level = logging.WARNING if others else logging.INFO
    told = "%s: %s has %d %s of %d classes; ignored: %s"
    logger.log(level, told, kind.op, path, len(names), kind.many, len(set(labels)), ignored)
    columns = {kind.column: file_column([files[parts] for parts in names], kind), "label": labels}
    return Table(str(path), columns, range(1, len(names) + 1))


def _in_folder(root: Path, kind: type[LazyFile]) -> Iterator[Member]:
    def unreadable(error: OSError) -> None:
        raise kind.bad(error.filename, f"cannot be listed ({error.strerror}); all class folders are read.")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for file in (Path(folder, name) for name in (*files, *links)):
            plain = file.is_file() and not file.is_symlink()
            yield file.relative_to(root).parts, kind(str(file), str(file)) if plain else None


def _in_tar(path: Path, kind: type[LazyFile]) -> Iterator[Member]:
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                if not member.isdir():
                    parts = tuple(part for part in PurePosixPath(member.name).parts if part != "/")
                    plain = member.isreg() and not member.issparse()  # the bytes of a sparse one are not in a row
                    file = kind(f"{path}/{'/'.join(parts)}", str(path), member.offset_data, member.size)
                    yield parts or (".",), file if plain else None
            end = archive.offset
    except _TAR_ERRORS as error:
        raise _not_a_tar(path, error, kind) from None
    with path.open("rb") as file:
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end
            raise kind.bad(path, f"is cut off or damaged after {end} bytes; a tar file ends with a block of zeros.")


def _not_a_tar(path: Path, error: Exception, kind: type[LazyFile]) -> DataError:
    with path.open("rb") as file:
        start = file.read(8)
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
    if packed is not None:
        return kind.bad(path, f"is compressed with {packed}; {kind.many} are read in place. Unpack it first.")
    rule = f"{kind.many} are read from a folder or a plain tar file"
    return kind.bad(path, f"is not a whole tar file ({first_line(error)}); {rule}.")


def _check_classes(source: Path, names: Sequence[tuple[str, ...]], kind: type[LazyFile]) -> None:
    places: dict[str, str] = {}
    for *folders, name in names:
        if not folders:
            rule = f"the class of {kind.one} is the name of its folder. Put each class into a folder"
            raise kind.bad(source, f"has {name} outside all class folders; {rule}.")
        label, folder = folders[-1], "/".join(folders)
        first = places.setdefault(label, folder)
        if first != folder:
            problem = f"has the class folder '{label}' twice, as {first} and {folder}; a class has one folder."
            raise kind.bad(source, f"{problem} Give the folder, or a tar file, of one part.")
