"""Files that are decoded on access: images, audio clips, or parts of a tar file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from errno import EISDIR
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import ClassVar, Self, TypeGuard

from lamina.errors import DataError, convert_errors
from lamina.utils import is_file

FILE_KEYS = frozenset({"bytes", "path", "array"})  # of a file as `datasets` writes it; one of them is enough
_MOST_BYTES = 1 << 30  # size of the largest file that is read
_PREFIX = "Leave out a prefix 'data:...,'."
REMOVE = "Replace it, or remove its row."  # what to do about a file that cannot be decoded
_SHOWN = 1000  # characters of a path that messages show: a longer one may be a file in Base64


@dataclass(frozen=True)
class LazyFile(ABC):
    """A file, a part of a tar file, or bytes in memory, decoded only on access. Subclasses are images and audio clips.

    A subclass sets the attributes from `column` on, and implements `of_object`, `decoded_size` and its own `open`.

    Attributes:
        name: Name of the file in messages.
        path: The file, or the tar file that contains it. None: the bytes are in `data`, or missing.
        offset: Position of the first byte in `path`.
        size: Number of bytes. None: all from `offset` on.
        data: The bytes, if they are in memory. None: they are read from `path`.
        column: Default name of a column of such files ("image"). Messages use it too ("an image task").
        op: Name of the operation at the start of error messages.
        one: Word for one file in messages, with its article ("an image").
        many: Word for several files in messages ("images").
        endings: Extensions of the files that are read from folders.
        feature: Name of the feature class of `datasets` for a column of such files.
        units: Unit in which `decoded_size` counts ("pixels").
        forms: The forms in which users may pass such files, for messages.
    """

    name: str
    path: str | None = None
    offset: int = 0
    size: int | None = None
    data: bytes | None = None

    column: ClassVar[str]
    op: ClassVar[str]
    one: ClassVar[str]
    many: ClassVar[str]
    endings: ClassVar[frozenset[str]]
    feature: ClassVar[str]
    units: ClassVar[str]
    forms: ClassVar[str]

    @classmethod
    @abstractmethod
    def of_object(cls, name: str, entry: object) -> Self | None:
        """Return a file made from an object in memory, such as an array; None if the object has an unknown form.

        Raises DataError if its values cannot be used.
        """

    @classmethod
    def of(cls, name: str, entry: object) -> Self:
        """Return a file made from a path, bytes, a mapping with either (as in `datasets`), or another object.

        In a mapping, "array" counts first, then "bytes" (also as a text in Base64), then "path". Raises DataError if
        values cannot be used, and TypeError, with a text that begins with a verb, if `entry` has an unknown form.

        Args:
            name: Name of the file in messages, unless `entry` is itself a path.
            entry: What a user passed, or the cell of a table. None gives a file that cannot be read.
        """
        if _holds_file(entry):
            path, data = entry.get("path"), entry.get("bytes")
            if isinstance(data, str):  # JSON has no bytes
                with convert_errors(lambda _: cls.bad(name, f'has a text as "bytes" that is not Base64. {_PREFIX}')):
                    data = from_base64(data)
            if data is None and isinstance(path, str | Path):
                return cls(f"{name} ({path!s:.{_SHOWN}})", str(path))
            return cls.of(name, path if data is None else data)
        if isinstance(entry, str | Path):
            path = str(entry)
            return cls(path if len(path) <= _SHOWN else f"{path[:_SHOWN]}...", path)
        if entry is None or isinstance(entry, bytes | bytearray | memoryview):
            return cls(name, data=None if entry is None else bytes(entry))
        file = cls.of_object(name, entry)
        if file is None:
            raise TypeError(f"is {type(entry).__name__}; {cls.one} is {cls.forms}")
        return file

    @classmethod
    def accepts(cls, entry: object) -> bool:
        """Return whether `entry` has a form that `of` accepts, even if its values are wrong. False for None."""
        if _holds_file(entry):  # not by `of`, which decodes Base64
            return cls.accepts(entry.get("path") if entry.get("bytes") is None else entry["bytes"])
        try:
            cls.of("", entry)
        except (DataError, TypeError) as error:
            return isinstance(error, DataError)
        return entry is not None

    @abstractmethod
    def decoded_size(self) -> int:
        """Return the file's size in `units` by its header, without decoding it; raise DataError on failure."""

    @classmethod
    def bad(cls, path: str | Path, problem: str) -> DataError:
        """Return a DataError about the file `path`. `problem`, the rest of the message, begins with a verb."""
        return DataError(f"{cls.op}: {path} {problem}", path=str(path))

    @classmethod
    def listing(cls, folder: Path) -> str:
        """Return Python code that lists such files in a folder and its subfolders, for messages."""
        ending = "png" if ".png" in cls.endings else "wav"
        return f"sorted(Path({str(folder)!r}).rglob('*.{ending}'))"

    def source(self) -> Path | BytesIO:
        """Return the path if the file is a whole file on disk, else its bytes; raise DataError if reading fails."""
        if self.data is None and self.path is not None and not self.offset and self.size is None:
            self._read(0)
            return Path(self.path)
        return BytesIO(self.read())

    def read(self) -> bytes:
        """Return all bytes; raise DataError if they cannot be read, are more than 2**30, or a tar file was cut off."""
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
        """Return the bytes and their number, for at most `most` bytes; for more, return b"" and the number.

        Raises DataError if there is no file or it cannot be read.
        """
        if self.path is None:
            raise self.bad(self.name, f"is empty; every row of an {self.column} task has {self.one}.")
        path = Path(self.path)
        try:
            if path.exists() and not path.is_file():  # a pipe or device may never end
                raise IsADirectoryError(EISDIR, "it is not a file")
            with path.open("rb") as file:
                rest = max(0, file.seek(0, SEEK_END) - self.offset)
                file.seek(self.offset)
                size = rest if self.size is None else min(rest, self.size)
                return file.read(size) if size <= most else b"", size
        except (OSError, ValueError) as error:
            reason, advice = getattr(error, "strerror", None) or error, f"{self.many} are read again at each use"
            if path.is_dir():
                advice = f"give its files, as in {self.listing(path)}"
            elif "://" in self.path:
                advice = "files are read from disk, so download it first"
            elif len(self.path) > _SHOWN:
                advice = 'a file in Base64 is given as {"bytes": ...}'
            raise self.bad(self.name, f"cannot be read ({reason}); {advice}.") from None


def _holds_file(entry: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether `entry` is a mapping with a path or bytes, as in `datasets`, and not with decoded samples."""
    return isinstance(entry, Mapping) and bool(entry.keys() & {"bytes", "path"}) and entry.get("array") is None


def from_base64(text: str) -> bytes:
    """Return the bytes of a text in Base64, in one line or several; raise ValueError if it is not Base64."""
    return b64decode(text.replace("\n", "").replace("\r", ""), validate=True)  # without them nothing is copied


def beside(folder: Path | None, entry: object) -> object:
    """Return a cell with `folder` before its path, which is a string, or "path" in a mapping without bytes.

    Other cells and URLs stay. So does a path if there is a file at it but not in `folder`. If that is None, all stay.
    """
    if folder is not None and isinstance(entry, Mapping) and "path" in entry and entry.get("bytes") is None:
        return {**entry, "path": beside(folder, entry["path"])}
    if folder is None or not isinstance(entry, str) or "://" in entry:
        return entry
    return entry if is_file(entry) and not is_file(folder / entry) else str(folder / entry)


def name_of(entry: object) -> object:
    """Return what outputs call an example: a text, a pair of texts, or a file's path; None for anything else."""
    entry = entry.get("path") if isinstance(entry, Mapping) else entry
    return str(entry) if isinstance(entry, Path) else entry if isinstance(entry, str | tuple) else None
