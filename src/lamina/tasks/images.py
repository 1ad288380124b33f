"""Images as rows of a task: found in class folders, plain tar files or a data set's column, opened only when needed.

Nothing is unpacked: a picture knows the file and the bytes in it that it is read from.
"""

from __future__ import annotations

import logging
import os
import stat
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, final

from PIL import Image, ImageOps

from lamina.data.read import Table
from lamina.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})
"""How the names of images end; case does not matter."""

_BLOCK = 512  # a tar file is made of blocks of this many bytes, and ends with some that are zero
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_SPECIAL = "links and special files, which are not followed"
_GET_AGAIN = "Get the file again, or leave the row out."


@final
@dataclass(frozen=True)
class Picture:
    """An image on disk that is read when it is opened.

    Attributes:
        path: The image, or the tar file that holds it.
        offset: Where in the file its bytes start.
        size: How many bytes it has; None: all from `offset` on.
        member: Its name in the tar file; None: the file is the image.
    """

    path: Path
    offset: int = 0
    size: int | None = None
    member: str | None = None

    @property
    def name(self) -> str:
        """What messages call it: the file, and the member of a tar file."""
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    def open(self) -> Image.Image:
        """Read and decode it.

        Returns:
            The image in RGB, turned as its EXIF orientation says; of several frames the first.

        Raises:
            DataError: If it is gone, cut off, damaged, or its pixels cannot be shown in RGB.
        """
        return _decoded(self._bytes(), self.name)

    def _bytes(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(-1 if self.size is None else self.size)
        except OSError as error:
            raise DataError(
                f"image: {self.name} cannot be read ({error.strerror or error}); images are read again in every epoch. "
                "Leave the files in place while they are used.",
                path=self.name,
            ) from None
        if self.size is not None and len(data) < self.size:
            raise DataError(
                f"image: {self.name} is cut off after {len(data)} of {self.size} bytes; the tar file has become "
                "shorter. Get it again.",
                path=self.name,
            )
        return data


def _decoded(data: bytes, name: str) -> Image.Image:
    try:
        with Image.open(BytesIO(data)) as image:
            image.load()
            return _rgb(ImageOps.exif_transpose(image), name)
    except DataError:
        raise
    except Exception as error:  # the decoders raise many unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "no image format known"  # the library's text names an object in memory
        raise DataError(
            f"image: {name} cannot be decoded ({reason}); every row of an image task is a whole image. {_GET_AGAIN}",
            path=name,
        ) from error


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Grey, palette, CMYK and transparent images in RGB; what lies under transparent pixels shows."""
    if image.mode in ("I", "F"):
        raise DataError(
            f"image: {name} has pixels of 32 bits (mode {image.mode}); which of their values is white is not known. "
            "Save it with 8 or 16 bits per channel.",
            path=name,
        )
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")  # else all above 255 becomes white
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@dataclass
class _Found:
    """Images by the parts of their names, and how much else was there."""

    source: Path
    pictures: dict[tuple[str, ...], Picture] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)

    def add(self, parts: tuple[str, ...], picture: Picture, *, plain: bool) -> None:
        if any(part.startswith(".") for part in parts) or PurePosixPath(parts[-1]).suffix.lower() not in ENDINGS:
            self.others["other files"] += 1
        elif not plain:
            self.others[_SPECIAL] += 1
        else:
            self.pictures[parts] = picture

    @property
    def ignored(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self.others.items())) or "nothing"


def read_images(path: str | Path) -> Table:
    """Find the images of class folders, in a folder or in a plain tar file; none is opened yet.

    The class of an image is the name of the folder it lies in: `airplane/0001.jpg`, or `train/airplane/0001.jpg`.
    Other files, hidden files and links are left out and counted in the log.

    Args:
        path: A folder, or a tar file that is not compressed, which is read in place.

    Returns:
        Columns "image" (`Picture`) and "label" (class name), sorted by name whatever the file system's order.

    Raises:
        DataError: If there is nothing at `path`, no image, an image outside all class folders, one class folder at
            two places (two parts of a data set, say), or the tar file is compressed or damaged.
    """
    path = Path(path)
    if path.is_dir():
        found = _in_folder(path)
    elif path.is_file():
        found = _in_tar(path)
    else:
        raise DataError(
            f"images: {path} is not there; images are read from a folder or a tar file. Check the path.",
            path=str(path),
        )
    names = sorted(found.pictures)
    _check_classes(found, names)
    labels = [parts[-2] for parts in names]
    logger.info(
        "images: %s has %d images of %d classes; ignored: %s", path, len(names), len(set(labels)), found.ignored
    )
    columns: dict[str, list[Any]] = {"image": [found.pictures[parts] for parts in names], "label": labels}
    return Table(str(path), columns, range(1, len(names) + 1))


def _in_folder(root: Path) -> _Found:
    found = _Found(root)
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        here = Path(folder)
        for name in [one for one in folders if (here / one).is_symlink()]:
            found.others[_SPECIAL] += 1
            folders.remove(name)
        for name in files:
            file = here / name
            found.add(file.relative_to(root).parts, Picture(file), plain=stat.S_ISREG(file.lstat().st_mode))
    return found


def _unreadable(error: OSError) -> None:
    raise DataError(
        f"images: {error.filename} cannot be listed ({error.strerror}); all class folders are read. "
        "Make it readable, or take it out.",
        path=str(error.filename),
    )


def _in_tar(path: Path) -> _Found:
    found = _Found(path)
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                if not member.isdir():
                    parts = tuple(part for part in PurePosixPath(member.name).parts if part != "/")
                    plain = member.isreg() and not member.issparse()  # the bytes of a sparse one are not in a row
                    picture = Picture(path, member.offset_data, member.size, "/".join(parts))
                    found.add(parts or (".",), picture, plain=plain)
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        raise _not_a_tar(path, error) from None
    with path.open("rb") as file:
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end
            raise DataError(
                f"images: {path} is cut off or damaged after {end} bytes; a tar file ends with a block of zeros. "
                "Get it again.",
                path=str(path),
            )
    return found


def _not_a_tar(path: Path, error: Exception) -> DataError:
    with path.open("rb") as file:
        start = file.read(8)
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
    if packed is not None:
        return DataError(
            f"images: {path} is compressed with {packed}; images are read in place, from a plain tar file or a folder. "
            "Unpack it first.",
            path=str(path),
        )
    return DataError(
        f"images: {path} is not a whole tar file ({error}); images are read from a folder or a plain tar file. "
        "Get it again, or give the folder.",
        path=str(path),
    )


def _check_classes(found: _Found, names: Sequence[tuple[str, ...]]) -> None:
    source = found.source
    if not names:
        raise DataError(
            f"images: {source} has no images (ignored: {found.ignored}); they end in {', '.join(sorted(ENDINGS))}. "
            "Put the images of each class into a folder named after it.",
            path=str(source),
        )
    places: dict[str, str] = {}
    for parts in names:
        *folders, name = parts
        if not folders:
            raise DataError(
                f"images: {name} lies in {source} itself; the class of an image is the name of its folder, as in "
                "airplane/0001.jpg. Put each class into a folder, and give the folder that holds them.",
                path=str(source),
            )
        label, folder = folders[-1], "/".join(folders)
        first = places.setdefault(label, folder)
        if first != folder:
            raise DataError(
                f"images: {source} has the class folder '{label}' twice, as {first} and "
                f"{folder}; a class has one folder, and a part of a data set is read alone. "
                "Give the folder, or a tar file, of one part.",
                path=str(source),
            )


@final
@dataclass(frozen=True, eq=False)
class HubPicture:
    """An image in a column of a data set, decoded when it is opened.

    Attributes:
        rows: A data set with this one column, set not to decode.
        row: Its row.
        column: The column's name.
    """

    rows: Any
    row: int
    column: str

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"row {self.row} of column '{self.column}'"

    def open(self) -> Image.Image:
        """Read and decode it, as `Picture.open` does.

        Raises:
            DataError: If the row has no image, or it is gone or damaged.
        """
        cell = self.rows[self.row][self.column] or {}
        if cell.get("bytes") is not None:
            return _decoded(cell["bytes"], self.name)
        if cell.get("path") is None:
            raise DataError(
                f"image: {self.name} is empty; every row of an image task has an image. Leave the row out.",
                row=self.row,
                column=self.column,
            )
        return Picture(Path(cell["path"])).open()


def hub_pictures(dataset_rows: Any, column: str) -> list[HubPicture]:
    """The images of a data set, one reference per row; none is decoded yet.

    Args:
        dataset_rows: A `datasets.Dataset`.
        column: Its column of images.

    Raises:
        DataError: If there is no such column, or it holds no images.
    """
    import datasets

    kind = dataset_rows.features.get(column)
    if not isinstance(kind, datasets.Image):
        known = ", ".join(name for name, one in dataset_rows.features.items() if isinstance(one, datasets.Image))
        came = "has no column" if kind is None else "has no images in column"
        raise DataError(
            f"images: the data set {came} '{column}'; its columns of images are: {known or 'none'}. Name one of these.",
            column=column,
        )
    plain = dataset_rows.with_format(None).select_columns([column])
    plain = plain.cast_column(column, datasets.Image(decode=False))
    return [HubPicture(plain, row, column) for row in range(len(plain))]
