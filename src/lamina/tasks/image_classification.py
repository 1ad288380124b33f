"""The kind of task that asks for the class of an image."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, final

import torch
from PIL import Image
from torch import Tensor

from lamina.errors import ConfigError
from lamina.tasks.base import EncodeOptions, TaskLike
from lamina.tasks.file_kind import FileKind
from lamina.tasks.image_size import image_processor, resized, set_image_size, target_of
from lamina.tasks.images import LazyImage
from lamina.tasks.split import Split
from lamina.utils import derive_seed

SCALE = (0.08, 1.0)  # share of an image's area that a crop takes, as most vision models are trained with
_ASPECT = (3 / 4, 4 / 3)  # of a crop, as width through height
_TRIES = 10
_NO_RESIZING = ("do_resize", "do_center_crop")


@final
class ImageClassificationKind(FileKind):
    """A class for every image."""

    name = "image_classification"
    draws = True
    auto_class = "AutoModelForImageClassification"
    processor = "image_processor"
    inputs = predict_inputs = "image"
    usual_columns = ("image", "label")
    file = LazyImage

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> ImageInputs:
        """Pixels, augmented in the train part if that is wanted."""
        own = processor if options.image_size is None else resized(processor, options.image_size)
        return ImageInputs(split, own, augment=options.augment and options.part == "train", seed=options.seed)

    def length_limit(self, model: Any, processor: Any, asked: int | None) -> int:
        """An image has no length."""
        return 1

    def fit_processor(self, processor: Any, task: TaskLike) -> bool:
        """Have the image processor make images of the task's size, if it has one."""
        size = getattr(task, "image_size", None)
        if size is not None:
            set_image_size(processor, size)
        return size is not None

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: Any, *, by_row: bool = False
    ) -> tuple[int, int]:
        """A token per patch and one more; without patches, as many as usual."""
        config = getattr(config, "vision_config", config)
        side, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
        return rows, (side // patch) ** 2 + 1 if isinstance(side, int) and isinstance(patch, int) else round(tokens)


@final
class ImageInputs:
    """Images as pixels; an `Inputs`.

    `augment`, for training, takes a random part of each image, which has a share of its area between those in `scale`,
    resizes it and mirrors it at random: what is drawn depends on the seed, the epoch and the row alone.
    """

    uncacheable = "the inputs are images; only texts are cached"

    def __init__(
        self, split: Split, processor: Any, *, augment: bool = False, seed: int = 0, scale: tuple[float, float] = SCALE
    ) -> None:
        if not 0 < scale[0] <= scale[1] <= 1:
            rule = "it must be two shares of the image, the smaller first"
            raise ConfigError(f"images: scale is {scale[0]} to {scale[1]}; {rule}.")
        self._processor = image_processor(processor)
        self.target = target_of(self._processor)
        self._split, self._seed, self._scale, self._augment = split, seed, scale, augment
        resize = getattr(self._processor, "resample", None)
        self._resample = Image.Resampling(resize) if isinstance(resize, int) else Image.Resampling.BILINEAR
        self._settings = {key: False for key in _NO_RESIZING if augment and hasattr(self._processor, key)}
        self.lengths = [1] * len(split)

    @property
    def digest(self) -> str:
        """Equal for equal images of equal names."""
        return self._split.key

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some images as `pixel_values`, float32 `[batch, channels, height, width]`."""
        lazy = self._split.texts.read_rows(rows)
        images = [self._pixels(image, row, epoch) for image, row in zip(lazy, rows, strict=True)]
        values = self._processor(images, return_tensors="pt", **self._settings)["pixel_values"]
        return {"pixel_values": values.to(torch.float32)}

    def _pixels(self, lazy: LazyImage, row: int, epoch: int) -> Image.Image:
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


def random_box(size: tuple[int, int], rng: random.Random, *, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """A random part of an image of a width and height: left, top, right and bottom.

    Drawn are its share of the area (from `scale`), its aspect ratio (3/4 to 4/3, uniform in its logarithm) and its
    place. If ten draws do not fit into the image, it is the largest middle part of such a shape.
    Source: Szegedy et al. 2015, arXiv:1409.4842, section 6, with the place drawn over whole pixels.
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
    """Left, top, right and bottom of the largest middle part with an aspect ratio (width by height) in a range."""
    width, height = size
    wide, high = width, height
    if width < aspect[0] * height:
        high = max(1, round(width / aspect[0]))
    elif width > aspect[1] * height:
        wide = max(1, round(height * aspect[1]))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high
