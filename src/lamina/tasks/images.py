"""Images as rows of a task, in class folders, plain tar files or a data set's column, opened in place when needed."""

from __future__ import annotations

import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from errno import EISDIR
from functools import partial
from io import SEEK_END, BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa
from PIL import Image, ImageOps

from lamina.data.arrow import Column, dataset_of, derived
from lamina.data.read import Table
from lamina.errors import DataError, first_line
from lamina.tasks.split import Split

if TYPE_CHECKING:
    import datasets

    Member = tuple[tuple[str, ...], "LazyImage | None"]  # the parts of a file's name; None: it is a link or special

logger = logging.getLogger(__name__)

_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of Pillow's; others start programs (EPS) or are rare
_MOST_PIXELS, _MOST_BYTES = 1 << 26, 1 << 30  # of one image
_CELL = {"name": pa.string(), "path": pa.string(), "offset": pa.int64(), "size": pa.int64(), "data": pa.binary()}
_NAMES = ("text", "row")  # columns that images are made from
_BLOCK = 512  # a tar file is made of blocks of this many bytes, and ends with some that are zero
_TAR_ERRORS = (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError, RecursionError)  # of damaged headers
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@final
@dataclass(frozen=True)
class LazyImage:
    """An image that is read when it is opened."""

    name: str  # what messages call it
    path: str | None = None  # the file, or the tar file that holds it
    offset: int = 0  # where in the file its bytes start
    size: int | None = None  # how many bytes it has; None: all from `offset` on
    data: bytes | None = None  # its bytes, where they are at hand

    def open(self) -> Image.Image:
        """The image in RGB, turned as its EXIF orientation says; of several frames the first.

        Its format is one of seven, whatever its name, and it has at most 2^26 pixels, in at most 2^30 bytes.
        """
        try:
            with Image.open(BytesIO(self._bytes()), formats=_FORMATS) as image:
                _check_size(self.name, *image.size)
                image.load()
                return _rgb(ImageOps.exif_transpose(image), self.name)
        except DataError:
            raise
        except Image.DecompressionBombError:  # Pillow has a limit of its own
            raise _too_large(self.name, "too many pixels") from None
        except Exception as error:  # the decoders raise many unrelated kinds
            unknown = isinstance(error, Image.UnidentifiedImageError)  # whose text names an object in memory
            reason = f"no image format known: {', '.join(_FORMATS)}" if unknown else first_line(error)
            problem = f"cannot be decoded ({reason}); every row of an image task is a whole image."
            raise _bad(self.name, problem) from error

    def _bytes(self) -> bytes:
        if self.data is not None:
            return self.data
        if self.path is None:
            raise _bad(self.name, "is empty; every row of an image task has an image.")
        path = Path(self.path)
        try:
            if path.exists() and not path.is_file():  # a pipe or a device, which may never end
                raise IsADirectoryError(EISDIR, "it is no file")
            with path.open("rb") as file:
                rest = max(0, file.seek(0, SEEK_END) - self.offset)
                file.seek(self.offset)
                size = rest if self.size is None else min(rest, self.size)
                data = file.read(size) if size <= _MOST_BYTES else b""
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _bad(self.name, f"cannot be read ({reason}); images are read again in every epoch.") from None
        if size > _MOST_BYTES:
            raise _bad(self.name, f"has more than {_MOST_BYTES:,} bytes; every row of an image task is one image.")
        if self.size is not None and len(data) < self.size:
            problem = f"is cut off after {len(data)} of {self.size} bytes; the tar file has become shorter."
            raise _bad(self.name, problem)
        return data


def image_column(images: Sequence[LazyImage]) -> Column:
    """Images as a column of a table: nothing is opened."""
    cells = [asdict(image) for image in images]
    table = {"text": pa.array(cells, pa.struct(_CELL)), "row": pa.array(range(len(cells)), pa.int64())}
    return Column(dataset_of([pa.table(table)]), _NAMES, _from_cell)


def dataset_images(rows: datasets.Dataset, column: str) -> Column:
    """The images in a column of a data set; a column of none is a DataError."""
    import datasets

    kind = rows.features.get(column)
    if not isinstance(kind, datasets.Image):
        known = ", ".join(name for name, feature in rows.features.items() if isinstance(feature, datasets.Image))
        came = "has no column" if kind is None else "has no images in column"
        message = f"images: the data set {came} '{column}'; its columns of images are: {known or 'none'}."
        raise DataError(message, column=column)
    plain = rows.with_format(None).select_columns([column]).cast_column(column, datasets.Image(decode=False))
    plain = plain if column == "text" else plain.rename_column(column, "text")
    plain = plain.add_column("row", range(len(rows)))  # pyright: ignore[reportArgumentType]
    return Column(plain, _NAMES, partial(_from_column, column))


def image_split(images: Column, labels: Iterable[int] | None) -> Split:
    """The images of such a column with their class ids."""
    ids = pa.nulls(len(images)) if labels is None else pa.array(labels, pa.int64())
    rows = images.rows.add_column("label", ids)  # pyright: ignore[reportArgumentType]
    return Split(derived(rows, images.rows), images.decode)


def _from_cell(cell: Any, _row: int) -> LazyImage:
    return LazyImage(**cell)


def _from_column(column: str, cell: Any, row: int) -> LazyImage:
    cell = cell or {}
    return LazyImage(f"row {row} of column '{column}'", cell.get("path"), data=cell.get("bytes"))


def image_dataset(name: str, columns: Mapping[str, list[Any]], image: str, label: str) -> datasets.Dataset:
    """A data set of two columns, one of images: by their paths, bytes (as `{"bytes": ...}`) or as images of Pillow."""
    import datasets

    try:
        rows = datasets.Dataset.from_dict({key: columns[key] for key in (image, label) if key in columns})
        return rows.cast_column(image, datasets.Image()) if image in columns else rows
    except (pa.ArrowException, TypeError) as error:
        problem = f"cannot be read ({first_line(error)}); an image is a path, bytes or an image of Pillow."
        raise _bad(name, problem) from error


def _bad(path: str | Path, problem: str) -> DataError:
    return DataError(f"images: {path} {problem}", path=str(path))


def _check_size(name: str, width: int, height: int) -> None:
    if not width * height:
        raise _bad(name, f"has {width} x {height} pixels; an image has at least one.")
    if width * height > _MOST_PIXELS:
        raise _too_large(name, f"{width} x {height} pixels")


def _too_large(name: str, what: str) -> DataError:
    return _bad(name, f"has {what}; at most {_MOST_PIXELS:,} are read. Save it smaller.")


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Grey, palette, CMYK and transparent images in RGB; what lies under transparent pixels shows."""
    if image.mode in ("I", "F"):
        problem = f"has pixels of 32 bits (mode {image.mode}); which of their values is white is not known."
        raise _bad(name, f"{problem} Save it with 8 or 16 bits per channel.")
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")  # else all above 255 becomes white
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def read_images(path: str | Path) -> Table:
    """The images of class folders, in a folder or in a plain tar file, which is read in place; none is opened yet.

    Columns are "image" (of `LazyImage`s) and "label": the name of the folder that an image lies in, as in
    `airplane/0001.jpg` or `train/airplane/0001.jpg`. Rows are sorted by name whatever the file system's order. Other
    files, hidden files and links are left out and counted in a warning.
    """
    path = Path(path)
    if not (path.is_dir() or path.is_file()):
        raise _bad(path, "is not there; images are read from a folder or a tar file.")
    images: dict[tuple[str, ...], LazyImage] = {}
    others: Counter[str] = Counter()
    for parts, image in _in_folder(path) if path.is_dir() else _in_tar(path):
        if image is None:
            others["links and special files, which are not followed"] += 1
        elif any(part.startswith(".") for part in parts) or PurePosixPath(parts[-1]).suffix.lower() not in _ENDINGS:
            others["other files"] += 1
        else:
            others["files that come again later"] += parts in images
            images[parts] = image
    others = +others
    names, ignored = sorted(images), ", ".join(f"{count} {what}" for what, count in sorted(others.items())) or "nothing"
    if not names:
        came = f"has no images (ignored: {ignored}); they end in {', '.join(sorted(_ENDINGS))}"
        raise _bad(path, f"{came}. Put the images of each class into a folder named after it.")
    _check_classes(path, names)
    labels = [parts[-2] for parts in names]
    told, level = "images: %s has %d images of %d classes; ignored: %s", logging.WARNING if others else logging.INFO
    logger.log(level, told, path, len(names), len(set(labels)), ignored)
    columns = {"image": image_column([images[parts] for parts in names]), "label": labels}
    return Table(str(path), columns, range(1, len(names) + 1))


def _in_folder(root: Path) -> Iterator[Member]:
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for file in (Path(folder, name) for name in (*files, *links)):
            plain = file.is_file() and not file.is_symlink()
            yield file.relative_to(root).parts, LazyImage(str(file), str(file)) if plain else None


def _unreadable(error: OSError) -> None:
    raise _bad(error.filename, f"cannot be listed ({error.strerror}); all class folders are read.")


def _in_tar(path: Path) -> Iterator[Member]:
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                if not member.isdir():
                    parts = tuple(part for part in PurePosixPath(member.name).parts if part != "/")
                    plain = member.isreg() and not member.issparse()  # the bytes of a sparse one are not in a row
                    image = LazyImage(f"{path}/{'/'.join(parts)}", str(path), member.offset_data, member.size)
                    yield parts or (".",), image if plain else None
            end = archive.offset
    except _TAR_ERRORS as error:
        raise _not_a_tar(path, error) from None
    with path.open("rb") as file:
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end
            raise _bad(path, f"is cut off or damaged after {end} bytes; a tar file ends with a block of zeros.")


def _not_a_tar(path: Path, error: Exception) -> DataError:
    with path.open("rb") as file:
        start = file.read(8)
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
    if packed is not None:
        return _bad(path, f"is compressed with {packed}; images are read in place. Unpack it first.")
    return _bad(
        path, f"is not a whole tar file ({first_line(error)}); images are read from a folder or a plain tar file."
    )


def _check_classes(source: Path, names: Sequence[tuple[str, ...]]) -> None:
    places: dict[str, str] = {}
    for *folders, name in names:
        if not folders:
            rule = "the class of an image is the name of its folder. Put each class into a folder"
            raise _bad(source, f"has {name} outside all class folders; {rule}.")
        label, folder = folders[-1], "/".join(folders)
        first = places.setdefault(label, folder)
        if first != folder:
            problem = f"has the class folder '{label}' twice, as {first} and {folder}; a class has one folder."
            raise _bad(source, f"{problem} Give the folder, or a tar file, of one part.")
