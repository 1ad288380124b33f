"""The size of images: what a processor brings them to, and another one for it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from lamina.errors import ConfigError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping


class Target(NamedTuple):
    """The size in pixels that a processor brings images to: all if `fixed`, else those of the same aspect ratio."""

    height: int
    width: int
    fixed: bool


def image_processor(processor: Any) -> Any:
    """The image processor that a processor holds, or the image processor itself; without one a ConfigError."""
    from transformers import ImageProcessingMixin

    own = getattr(processor, "image_processor", processor)
    if not isinstance(own, ImageProcessingMixin):
        rule = "images are resized and normalised by the model's image processor"
        hint = "Give the one that AutoImageProcessor.from_pretrained finds for the model."
        raise ConfigError(f"images: the processor is a {type(processor).__name__}; {rule}. {hint}")
    return own


def target_of(processor: Any) -> Target:
    """The size that an image processor brings images to, found by giving it some; one of many sizes is a ConfigError.

    Its settings are not enough to tell: processors name and use `size` and `crop_size` in many ways.
    """
    small, large, wide = (_shape(processor, size) for size in ((64, 64), (80, 80), (96, 64)))
    if len(small) != 4 or small != large:
        came = f"makes pixel_values of shape {small} of an image of 64 x 64, and {large} of one of 80 x 80"
        rule = "a classifier takes [1, channels, height, width], the same for all. Set its do_resize and size"
        raise ConfigError(f"images: {type(processor).__name__} {came}; {rule}.")
    return Target(small[2], small[3], fixed=wide == small)


def _shape(processor: Any, size: tuple[int, int]) -> tuple[int, ...]:
    try:
        return tuple(processor([Image.new("RGB", size)], return_tensors="pt")["pixel_values"].shape)
    except Exception as error:  # each processor raises what it likes
        came = f"{type(processor).__name__} fails on an RGB image of {size[0]} x {size[1]} ({first_line(error)})"
        raise ConfigError(f"images: {came}; a classifier's images are made by it.") from error


def resized(processor: Any, size: int) -> Any:
    """A copy of a processor that makes images of `size` x `size` pixels; the errors are those of `set_image_size`."""
    own = copy.deepcopy(processor)
    set_image_size(own, size)
    return own


def set_image_size(processor: Any, size: int) -> None:
    """Have a processor make images of `size` x `size` pixels, in place; what it cuts off at the edges keeps its share.

    Raises:
        ConfigError: If it has no image processor, or one whose `size` and `crop_size` do not give such images.
    """
    own = image_processor(processor)
    before = target_of(own)
    settings = {name: getattr(own, name, None) for name in ("size", "crop_size")}
    crop = settings["crop_size"] if getattr(own, "do_center_crop", False) else None
    scale = size / (max(_edges(crop).values()) if crop else size)
    fits = False
    try:
        for name, setting in settings.items():
            exact = name == "crop_size" or not crop
            edges = {edge: size if exact else round(scale * length) for edge, length in _edges(setting).items()}
            if setting is not None:
                setattr(own, name, type(setting)(**edges))
        made = target_of(own)
        fits = made[:2] == (size, size)
    finally:
        for name, setting in settings.items() if not fits else ():
            setattr(own, name, setting)
    if not fits:
        came = f"{type(own).__name__} makes images of {made.height} x {made.width} when asked for {size} x {size}"
        raise ConfigError(
            f"images: {came}; image_size is for processors whose size and crop_size say what they make. "
            f"Leave it out for {before.height} x {before.width}."
        )


def _edges(setting: Mapping[str, int | None] | None) -> dict[str, int]:
    """The lengths that such a setting of a processor names."""
    return {edge: length for edge, length in dict(setting or {}).items() if length is not None}
