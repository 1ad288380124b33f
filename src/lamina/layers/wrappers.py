"""Remove torch's wrappers of a model, and run compiled models uncompiled while they have hooks.

Compiled code ignores hooks that were registered after it was compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import TypeVar, cast

import torch
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


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module itself is compiled; modules inside it do not count."""
    forward = vars(module).get("forward")  # an instance attribute after `model.forward = torch.compile(...)`
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def is_bitsandbytes(model: nn.Module) -> bool:
    """Return whether transformers quantised a model's weights with bitsandbytes."""
    config: object = getattr(getattr(model, "config", None), "quantization_config", None)
    settings = cast("dict[str, object]", config if isinstance(config, dict) else getattr(config, "__dict__", {}))
    return settings.get("quant_method") == "bitsandbytes"


@contextmanager
def uncompiled() -> Generator[None]:
    """Run compiled models uncompiled inside the `with` block, in all threads.

    The switch is global to torch, so overlapping `with` blocks share it: it is reset when the last of them ends.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _lock:
        if not _open:
            _stance.append(torch.compiler.set_stance("force_eager"))  # pyright: ignore[reportUnknownMemberType]
        _open.append(None)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            if not _open:
                _stance.pop().__exit__(None, None, None)


_lock = Lock()  # guards the two lists
_open = list[None]()  # one entry for each open block
# the context manager that the first block entered, which the last block exits
_stance = list[AbstractContextManager[None]]()
