"""Look inside torch's wrappers of a model, and ask how its weights are stored."""

from __future__ import annotations

from os import PathLike
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lamina.errors import ConfigError

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


def checked_model(got: M, op: str, wanted: str = "a transformers model") -> M:
    """Return the model inside torch's wrappers, after checking that `got` can be a model.

    A class whose instances hold a model, or belong to one, has the attribute `instead_of_model`: it says what to pass
    instead of an instance.

    Raises:
        ConfigError: If `got` is not a torch module, was compiled by torch.jit, or has such an attribute. The message
            begins with `op` and says that `wanted` is needed.
    """
    model = unwrapped(got)
    hint = getattr(type(model), "instead_of_model", None)
    if isinstance(model, torch.jit.ScriptModule):
        hint = "It was compiled by torch.jit: give the model that was traced or scripted"
    if isinstance(model, nn.Module) and hint is None:
        return model
    name, hint = f"a {type(model).__name__}", hint or "Give the first value that lamina.load returns"
    if isinstance(model, (str, PathLike)):
        name, hint = f"'{model}'", "Load it first, by lamina.load"
        hint += ", or a bank by ReaderBank.from_pretrained" * (op != "load")  # its `model` is a model only
    raise ConfigError(f"{op}: got {name}, which is not a model; {wanted} is needed. {hint}.")


def is_bitsandbytes(model: nn.Module) -> bool:
    """Return whether transformers quantised a model's weights with bitsandbytes."""
    config: object = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = cast("dict[str, object]", config if isinstance(config, dict) else getattr(config, "__dict__", {}))
    return settings.get("quant_method") == "bitsandbytes"
