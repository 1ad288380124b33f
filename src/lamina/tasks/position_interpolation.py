"""Run models on images of a different size than their own, by interpolating their position embeddings."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.types import Batch

_INTERPOLATE = "interpolate_pos_encoding"  # argument of many vision models


def size_arguments(model: PreTrainedModel, batch: Batch) -> dict[str, bool]:
    """Return {"interpolate_pos_encoding": True}, an argument for the model's call on a batch, or {}.

    It is returned if the batch has images of a different size than the model's own, and the model has this argument.
    """
    return {_INTERPOLATE: True} if _other_size(model, batch) and _interpolates(model) else {}


def size_problem(model: PreTrainedModel, batch: Batch) -> str | None:
    """Return, as text, that the batch's images do not have the size that the model needs.

    Returns None if they have it, if a size is not known, or if the model can interpolate.
    """
    sizes = _other_size(model, batch)
    if sizes is None or _interpolates(model):
        return None
    batch_size, model_size = (" x ".join(map(str, size)) for size in sizes)
    return f"{type(model).__name__} is built for images of {model_size}, got {batch_size}, and takes no {_INTERPOLATE}"


def _other_size(model: PreTrainedModel, batch: Batch) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return two (height, width) pairs: of the batch's images, and of those that the model is built for.

    Returns None if they are equal or not known.
    """
    image_size = getattr(getattr(model.config, "vision_config", model.config), "image_size", None)
    values = batch.get("pixel_values")
    if values is None or values.ndim != 4 or image_size is None:
        return None
    batch_size = tuple(values.shape[-2:])
    model_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    return None if batch_size == model_size else (batch_size, model_size)


def _interpolates(model: PreTrainedModel) -> bool:
    """Return whether a model's `forward` has the argument for interpolation, or passes it on to a child that has it."""
    parameters = inspect.signature(model.forward).parameters
    if _INTERPOLATE in parameters:
        return True
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    parts = (inspect.signature(part.forward).parameters for part in model.children())
    return passes_on and any(_INTERPOLATE in part_parameters for part_parameters in parts)
