"""Classify images: read them from files or arrays, resize and augment them, and predict a class for each."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast, final

import numpy as np
import torch
from torch import Tensor

from lamina.errors import ConfigError, DataError, MissingExtraError, convert_errors, first_line
from lamina.heads.base import TaskLike
from lamina.tasks.base import EncodeOptions
from lamina.tasks.file_classification import FileKind
from lamina.tasks.lazy_file import REMOVE, LazyFile
from lamina.tasks.split import Split
from lamina.utils import derive_seed, pluralize

try:
    from PIL import Image, ImageOps
except ImportError as error:
    raise MissingExtraError.of(error, op="images", extra="images") from error

if TYPE_CHECKING:
    from transformers import ImageProcessingMixin, PreTrainedConfig, PreTrainedModel
    from transformers.image_utils import SizeDict

    from lamina.data.arrow import Column
    from lamina.layers.types import Processor

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow's others start programs (EPS) or are rare
_MOST_PIXELS = 1 << 26  # size of the largest image that is read
_TOO_LARGE = f"at most {_MOST_PIXELS:,} are read. Save it smaller."
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes of Pillow that PNG files preserve
_ALPHA = {"PA": "RGBA", "RGBa": "RGBA", "La": "LA"}  # other modes with transparency -> such a mode
_ENDINGS = "jpg jpeg png bmp gif webp tif tiff ppm pgm pbm"

SCALE = (0.08, 1.0)  # share of an image's area that a random crop covers; the usual one for vision models
_ASPECT = (3 / 4, 4 / 3)  # width through height of a random crop
_TRIES = 10
_NO_RESIZING = ("do_resize", "do_center_crop")  # settings of processors that are off for images of the final size


@final
@dataclass(frozen=True)
class LazyImage(LazyFile):
    """An image that is read and decoded only when `open` is called."""

    column: ClassVar = "image"
    op: ClassVar = "images"
    one: ClassVar = "an image"
    many: ClassVar = "images"
    endings: ClassVar = frozenset(f".{ending}" for ending in _ENDINGS.split())
    feature: ClassVar = "Image"
    units: ClassVar = "pixels"
    forms: ClassVar = "a path, bytes, a Pillow image or a uint8 array [height, width] or [height, width, 1, 3 or 4]"

    @classmethod
    def of_object(cls, name: str, entry: object) -> Self | None:
        """Return a `LazyImage` named `name`, made from a Pillow image or an array; None for any other object.

        Arrays are uint8 `[height, width]` or `[height, width, 1, 3 or 4]`. Raises DataError if the Pillow image fails
        to decode.
        """
        if isinstance(entry, np.ndarray) and entry.dtype == np.uint8 and entry.size and _is_image(entry.shape):
            entry = Image.fromarray(entry.squeeze(2) if entry.shape[2:] == (1,) else entry)
        if not isinstance(entry, Image.Image):
            return None
        wide, file = entry.mode in ("I", "F"), BytesIO()
        try:
            exif = entry.getexif()
            if entry.mode.startswith("I;16") and entry.mode not in _PNG_MODES:  # of another byte order
                entry = Image.fromarray(np.asarray(entry).astype(np.uint16))
            whole = entry if wide or entry.mode in _PNG_MODES else entry.convert(_ALPHA.get(entry.mode, "RGB"))
            whole.save(file, "TIFF" if wide else "PNG", exif=exif, compress_level=1)
        except Exception as error:  # Pillow decodes an image that it has opened from a file only now
            raise cls.bad(name, f"cannot be decoded ({first_line(error)}).") from error
        return cls(name, data=file.getvalue())

    def open(self) -> Image.Image:
        """Decode the image, and return it in RGB on white, rotated as its EXIF orientation says.

        Only the first frame of an animation is read. Raises DataError if the image cannot be read, has an uncommon
        format (even with a common extension), has more than 2**26 pixels, or has pixels of 32 bits.
        """
        with self._opened() as image:
            image.load()
            return _rgb(ImageOps.exif_transpose(image), self.name)

    def decoded_size(self) -> int:
        """Return the number of pixels by the image's header, without decoding it.

        Raises DataError if the header cannot be read or says more than 2**26 pixels.
        """
        with self._opened() as image:
            return image.width * image.height

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """Yield the Pillow image, of which only the header is read.

        Raises DataError if it cannot be opened or has more than 2**26 pixels. Any error in the block becomes a
        DataError too.
        """
        try:
            with Image.open(BytesIO(self.read()), formats=_FORMATS) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise self.bad(self.name, f"has {image.width} x {image.height} pixels; {_TOO_LARGE}")
                yield image
        except DataError:
            raise
        except Image.DecompressionBombError:  # Pillow's own limit
            raise self.bad(self.name, f"has too many pixels; {_TOO_LARGE}") from None
        except Exception as error:  # decoders raise errors of many types
            unknown = isinstance(error, Image.UnidentifiedImageError)  # its text names an object in memory
            reason = f"no image format known: {', '.join(_FORMATS)}" if unknown else first_line(error)
            problem = f"cannot be decoded ({reason}); every row of an image task is a whole image. {REMOVE}"
            raise self.bad(self.name, problem) from error


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Return an image in RGB, on white; DataError, naming the image `name`, if its pixels have 32 bits."""
    if image.mode in ("I", "F"):
        problem = f"has pixels of 32 bits (mode {image.mode}); their white level is not known."
        raise LazyImage.bad(name, f"{problem} Save it with 8 or 16 bits per channel.")
    if image.mode.startswith("I;16"):
        # without scaling, Pillow turns all values above 255 into white
        values, transparent = np.asarray(image), image.info.get("transparency")
        image = Image.fromarray((values >> 8).astype(np.uint8))
        if isinstance(transparent, int):
            image.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


@final
class ImageInputs:
    """Images as pixel values for a model. It is a `lamina.tasks.base.Inputs`.

    With `augment`, a random part of each image is cropped and resized, and mirrored with probability 1/2. The random
    numbers depend only on the seed, the epoch and the row. Raises ConfigError if there is no image processor, it fails
    or makes images of several sizes, or `scale` is not two fractions above 0 and at most 1, the smaller first.

    Args:
        split: The images.
        processor: The image processor, or a processor that contains one.
        augment: Whether to augment the images.
        seed: Seed of the augmentation.
        scale: Smallest and largest fraction of an image's area that a random crop covers.

    Attributes:
        target: The size of the outputs.
        lengths: 1 for each image.
    """

    uncacheable = "the inputs are images; only texts are cached"

    def __init__(
        self,
        split: Split,
        processor: object,
        *,
        augment: bool = False,
        seed: int = 0,
        scale: tuple[float, float] = SCALE,
    ) -> None:
        if not 0 < scale[0] <= scale[1] <= 1:
            rule = "it must be two shares of the image, the smaller first"
            raise ConfigError(f"images: scale is {scale[0]} to {scale[1]}; {rule}.")
        self._processor: Any = image_processor(processor)
        self.target = target_of(self._processor)
        self._split, self._seed, self._scale, self._augment = split, seed, scale, augment
        resample = getattr(self._processor, "resample", None)
        self._resample = Image.Resampling(resample) if isinstance(resample, int) else Image.Resampling.BILINEAR
        self._settings = {key: False for key in _NO_RESIZING if augment and hasattr(self._processor, key)}
        self.lengths = [1] * len(split)

    @property
    def digest(self) -> str:
        """A hash of all images in their order; files count by their names and paths."""
        return self._split.key

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the images with the indices `rows` as `pixel_values`, float32 `[batch, channels, height, width]`.

        With augmentation, crops differ in each `epoch`. Raises DataError if an image cannot be read, or the processor
        fails.
        """
        lazy = cast("Column", self._split.texts).read_rows(rows)
        images = [self._pixels(image, row, epoch) for image, row in zip(lazy, rows, strict=True)]
        got = f"{type(self._processor).__name__} fails on {pluralize(len(images), 'image')}"
        with convert_errors(lambda reason: DataError(f"images: {got} ({reason}); check its settings.")):
            values = self._processor(images, return_tensors="pt", **self._settings)["pixel_values"]
        return {"pixel_values": values.to(torch.float32)}

    def _pixels(self, lazy: LazyImage, row: int, epoch: int) -> Image.Image:
        """Open the image `lazy` and crop it.

        With augmentation, the crop is random, seeded by `row` and `epoch`, then resized, and mirrored or not. Without
        augmentation, the image is cropped to the aspect ratio of the processor's output, unless the processor
        itself brings all images to one size. Raises DataError if the image cannot be read.
        """
        image, target = lazy.open(), self.target
        if self._augment:
            rng = random.Random(derive_seed("pictures", self._seed, epoch, row))
            image = image.crop(random_box(image.size, rng, scale=self._scale))
            image = image.resize((target.width, target.height), self._resample)
            if rng.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        elif not target.fixed:
            aspect = target.width / target.height
            image = image.crop(middle_box(image.size, (aspect, aspect)))
        return image


@final
class ImageClassificationKind(FileKind[ImageInputs]):
    """The kind of task that predicts a class for every image."""

    name = "image_classification"
    draws = True
    auto_class = "AutoModelForImageClassification"
    processor = "image_processor"
    inputs = predict_inputs = "image"
    usual_columns = ("image", "label")
    file = LazyImage

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> ImageInputs:
        """Return the images of a split as `ImageInputs`, resized to `options.image_size` if it is set.

        The processor is not changed. Training images are augmented if `options.augment` is set. Raises ConfigError if
        the processor cannot make such images.
        """
        if options.image_size is not None:
            processor = copy.deepcopy(processor)
            set_image_size(processor, options.image_size)
        return ImageInputs(split, processor, augment=options.augment and options.part == "train", seed=options.seed)

    def length_limit(self, model: PreTrainedModel, processor: Processor, asked: int | None) -> int:
        """Return 1; the arguments are not used."""
        return 1

    def fit_processor(self, processor: Processor, task: TaskLike) -> bool:
        """Set the task's `image_size` on the image processor, in place; return whether the task has one.

        Raises ConfigError, and changes nothing, if the processor cannot make images of this size.
        """
        size = getattr(task, "image_size", None)
        if size is not None:
            set_image_size(processor, size)
        return size is not None

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: PreTrainedConfig | None, *, by_row: bool = False
    ) -> tuple[int, int]:
        """Return `rows`, and the tokens per row: a token per patch plus one; `tokens` without a config or patch size.

        The other arguments are not used.
        """
        config = getattr(config, "vision_config", config)
        side, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
        return rows, (side // patch) ** 2 + 1 if isinstance(side, int) and isinstance(patch, int) else round(tokens)


# Crops


def random_box(size: tuple[int, int], rng: random.Random, *, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return the place of a random crop in an image: (left, top, right, bottom) in pixels, the last two excluded.

    `size` is the width and height of the image. `rng` draws the crop's area, as a fraction of the image's area within
    the range `scale`; the crop's aspect ratio, from 3/4 to 4/3, log-uniform; and the crop's place. If ten draws
    do not fit into the image, the result is the largest crop around the middle with an allowed aspect ratio.

    Source:
        Szegedy et al. 2015, arXiv:1409.4842, section 6.
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - high)
            return left, top, left + wide, top + high
    return middle_box(size, _ASPECT)


def middle_box(size: tuple[int, int], aspect: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return the largest crop around the middle of an image with a ratio (width / height) in the range `aspect`.

    `size` is the image's width and height; the result is (left, top, right, bottom).
    """
    width, height = size
    wide, high = width, height
    if width < aspect[0] * height:
        high = max(1, round(width / aspect[0]))
    elif width > aspect[1] * height:
        wide = max(1, round(height * aspect[1]))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


# The size of images


class Target(NamedTuple):
    """The size of an image processor's output, in pixels.

    Attributes:
        height: Height of an image.
        width: Width of an image.
        fixed: Whether images of every aspect ratio get this size. False: square images do, others may not.
    """

    height: int
    width: int
    fixed: bool


def image_processor(processor: object) -> ImageProcessingMixin:
    """Return the image processor that a processor is or contains; raise ConfigError if there is none."""
    from transformers import ImageProcessingMixin

    candidate = getattr(processor, "image_processor", processor)
    if not isinstance(candidate, ImageProcessingMixin):
        rule = "images need the model's image processor"
        hint = "Give the one that AutoImageProcessor.from_pretrained finds for the model."
        raise ConfigError(f"images: the processor is a {type(processor).__name__}; {rule}. {hint}")
    return candidate


def target_of(processor: Processor) -> Target:
    """Return the output size of an image processor, found by running it on three images of different sizes.

    Raises ConfigError if the processor fails, or its outputs for two square images differ in size or are no images.
    """
    small, large, wide = (_shape(processor, size) for size in ((64, 64), (80, 80), (96, 64)))
    if len(small) != 4 or small != large:
        got = f"makes pixel_values of shape {small} of an image of 64 x 64, and {large} of one of 80 x 80"
        rule = "a classifier takes [1, channels, height, width], the same for all. Set its do_resize and size"
        raise ConfigError(f"images: {type(processor).__name__} {got}; {rule}.")
    return Target(small[2], small[3], fixed=wide == small)


def _shape(processor: Processor, size: tuple[int, int]) -> tuple[int, ...]:
    """Return `pixel_values`' shape `[1, ...]` for an image of `size` (width, height); ConfigError on failure."""
    got = f"{type(processor).__name__} fails on an RGB image of {size[0]} x {size[1]}"
    with convert_errors(lambda reason: ConfigError(f"images: {got} ({reason}); check its settings.")):
        return tuple(processor([Image.new("RGB", size)], return_tensors="pt")["pixel_values"].shape)


def set_image_size(processor: object, size: int) -> None:
    """Change a processor in place, so that its outputs are images of `size` x `size` pixels.

    A processor that resizes and then crops still crops the same fraction of the image. Raises ConfigError, and changes
    nothing, if there is no image processor, it fails, or changing `size` and `crop_size` does not lead to that size.
    """
    resizer: Any = image_processor(processor)
    before, changed = target_of(resizer), copy.deepcopy(resizer)
    settings = {
        name: setting for name in ("size", "crop_size") if (setting := getattr(resizer, name, None)) is not None
    }
    crop = settings.get("crop_size") if getattr(resizer, "do_center_crop", False) else None
    scale = size / (max(_edges(crop).values()) if crop else size)
    for name, setting in settings.items():
        exact = name == "crop_size" or not crop
        edges = {edge: size if exact else round(scale * length) for edge, length in _edges(setting).items()}
        setattr(changed, name, type(setting)(**edges))
    after = target_of(changed)
    if after[:2] != (size, size):
        got = f"{type(resizer).__name__} makes images of {after.height} x {after.width} when asked for {size} x {size}"
        rule = "image_size is for processors whose size and crop_size say what they make"
        raise ConfigError(f"images: {got}; {rule}. Leave it out for {before.height} x {before.width}.")
    for name in settings:
        setattr(resizer, name, getattr(changed, name))


def _edges(setting: SizeDict | Mapping[str, int | None]) -> dict[str, int]:
    """Return the lengths in an image processor's size setting as a dict, such as {"shortest_edge": 224}.

    Edges without a length are left out.
    """
    return {edge: length for edge, length in dict(setting).items() if length is not None}
