"""Models that are called with images of another size than they are built for."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

_INTERPOLATE = "interpolate_pos_encoding"  # what models of transformers take to fit their positions to an image's size


def size_arguments(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a model takes besides a batch whose images are of another size than its own: its positions interpolated."""
    return {_INTERPOLATE: True} if _other_size(model, batch) and _interpolates(model) else {}


def size_problem(model: PreTrainedModel, batch: Mapping[str, Any]) -> str | None:
    """What is wrong with images of another size for a model that failed on them; None if that cannot be it."""
    sizes = _other_size(model, batch)
    if sizes is None or _interpolates(model):
        return None
    came, own = (" x ".join(map(str, size)) for size in sizes)
    return f"{type(model).__name__} is built for images of {own}, got {came}, and takes no {_INTERPOLATE}"


def _other_size(model: PreTrainedModel, batch: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Height and width of a batch's images, and those of the model; None if they are the same, or not known."""
    config: Any = model.config
    own = getattr(getattr(config, "vision_config", config), "image_size", None)
    values = batch.get("pixel_values")
    if values is None or values.ndim != 4 or own is None:
        return None
    came = tuple(values.shape[-2:])
    size = (own, own) if isinstance(own, int) else tuple(own)
    return None if came == size else (came, size)


def _interpolates(model: PreTrainedModel) -> bool:
    """Whether a model takes the option itself, or hands what it does not know to a part that takes it."""
    own = inspect.signature(model.forward).parameters
    if _INTERPOLATE in own:
        return True
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    parts = (inspect.signature(part.forward).parameters for part in model.children())
    return hands_on and any(_INTERPOLATE in parameters for parameters in parts)
