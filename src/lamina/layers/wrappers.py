"""Look inside torch's wrappers of a model, and ask how its weights are stored."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

M = TypeVar("M")


def unwrapped(model: M) -> M:
    """Return the model inside torch's wrappers (torch.compile, DataParallel, DistributedDataParallel).

    Anything else is returned unchanged.
    """
    inside: object = model
    while True:
        if hasattr(inside, "_orig_mod"):
            inside = cast("nn.Module", inside)._orig_mod
        elif isinstance(inside, (nn.DataParallel, DistributedDataParallel)):
            inside = cast("nn.Module", inside.module)
        else:
            return cast("M", inside)


def is_bitsandbytes(model: nn.Module) -> bool:
    """Return whether transformers quantised a model's weights with bitsandbytes."""
    config: object = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = cast("dict[str, object]", config if isinstance(config, dict) else getattr(config, "__dict__", {}))
    return settings.get("quant_method") == "bitsandbytes"
