"""Models inside wrappers of torch, and compiled ones: their code leaves out hooks that came after it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: Any) -> Any:
    """The model inside of torch's wrappers (compiled, DataParallel, DistributedDataParallel); another as it is."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, DistributedDataParallel)):
            model = cast("nn.Module", model.module)
        else:
            return model


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, not those inside it, runs compiled code."""
    forward = vars(module).get("forward")  # set on the object, as by `model.forward = torch.compile(model.forward)`
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def is_bitsandbytes(model: nn.Module) -> bool:
    """Whether transformers has packed a model's weights with bitsandbytes."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = cast("dict[str, Any]", config if isinstance(config, dict) else getattr(config, "__dict__", {}))
    return settings.get("quant_method") == "bitsandbytes"


@contextmanager
def uncompiled() -> Generator[None]:
    """Run compiled models as plain ones, in all threads, until the last of these contexts ends."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _lock:
        if not _open:
            _stance.append(cast("Any", torch.compiler).set_stance("force_eager"))
        _open.append(None)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            if not _open:
                _stance.pop().__exit__(None, None, None)


_lock, _open, _stance = Lock(), list[None](), list[Any]()  # the stance of torch before the first context
