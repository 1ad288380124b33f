"""Images as rows of a task: decoded from files, arrays or images of Pillow when needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, ClassVar, Self, final

import numpy as np
from PIL import Image, ImageOps

from lamina.errors import DataError, first_line
from lamina.tasks.class_files import LazyFile, dataset_files, file_column, file_split, read_class_files

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of Pillow's; others start programs (EPS) or are rare
_MOST_PIXELS = 1 << 26  # of one image
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of Pillow's that PNG files keep as they are
_ENDINGS = "jpg jpeg png bmp gif webp tif tiff ppm pgm pbm"


@final
@dataclass(frozen=True)
class LazyImage(LazyFile):
    """An image that is read when it is opened."""

    column: ClassVar = "image"
    op: ClassVar = "images"
    one: ClassVar = "an image"
    many: ClassVar = "images"
    endings: ClassVar = frozenset(f".{ending}" for ending in _ENDINGS.split())
    feature: ClassVar = "Image"
    units: ClassVar = "pixels"
    forms: ClassVar = "a path, bytes or an image of Pillow or NumPy (uint8 [height, width] or [height, width, 3])"

    @classmethod
    def of_object(cls, name: str, entry: Any) -> Self | None:
        """One of an image of Pillow, or of an array of bytes `[height, width]` or `[height, width, 3 or 4]`."""
        if isinstance(entry, np.ndarray) and entry.dtype == np.uint8 and entry.size and _is_image(entry.shape):
            entry = Image.fromarray(entry)
        if not isinstance(entry, Image.Image):
            return None
        wide, file = entry.mode in ("I", "F"), BytesIO()
        try:
            whole = entry if wide or entry.mode in _PNG_MODES else entry.convert("RGB")
            whole.save(file, "TIFF" if wide else "PNG", exif=entry.getexif(), compress_level=1)
        except Exception as error:  # one of a file is decoded only now
            raise cls.bad(name, f"cannot be decoded ({first_line(error)}).") from error
        return cls(name, data=file.getvalue())

    def open(self) -> Image.Image:
        """The image in RGB, turned as its EXIF orientation says; of several frames the first.

        Its format is one of seven, whatever its name, and it has at most 2^26 pixels, in at most 2^30 bytes.
        """
        with self._opened() as image:
            image.load()
            return _rgb(ImageOps.exif_transpose(image), self.name)

    def decoded_size(self) -> int:
        """How many pixels it has, of which none is decoded."""
        with self._opened() as image:
            return image.width * image.height

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """Its file with the header read; what goes wrong with it is a DataError."""
        try:
            with Image.open(BytesIO(self.read()), formats=_FORMATS) as image:
                _check_size(self.name, *image.size)
                yield image
        except DataError:
            raise
        except Image.DecompressionBombError:  # Pillow has a limit of its own
            raise _too_large(self.name, "too many pixels") from None
        except Exception as error:  # the decoders raise many unrelated kinds
            unknown = isinstance(error, Image.UnidentifiedImageError)  # whose text names an object in memory
            reason = f"no image format known: {', '.join(_FORMATS)}" if unknown else first_line(error)
            problem = f"cannot be decoded ({reason}); every row of an image task is a whole image."
            raise self.bad(self.name, problem) from error


image_column = partial(file_column, kind=LazyImage)
dataset_images = partial(dataset_files, kind=LazyImage)
read_images = partial(read_class_files, kind=LazyImage)
image_split = file_split


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))


def _check_size(name: str, width: int, height: int) -> None:
    if not width * height:
        raise LazyImage.bad(name, f"has {width} x {height} pixels; an image has at least one.")
    if width * height > _MOST_PIXELS:
        raise _too_large(name, f"{width} x {height} pixels")


def _too_large(name: str, what: str) -> DataError:
    return LazyImage.bad(name, f"has {what}; at most {_MOST_PIXELS:,} are read. Save it smaller.")


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Grey, palette, CMYK and transparent images in RGB; what lies under transparent pixels shows."""
    if image.mode in ("I", "F"):
        problem = f"has pixels of 32 bits (mode {image.mode}); which of their values is white is not known."
        raise LazyImage.bad(name, f"{problem} Save it with 8 or 16 bits per channel.")
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")  # else all above 255 becomes white
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
