"""Where numbers are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def first_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first floating-point tensor that holds NaN or infinity; None if all numbers are finite.

    Tensors without values (on the meta device) and of classes of their own (quantised ones) are left out.
    """
    plain = [(name, tensor.detach()) for name, tensor in tensors]
    floats = [(name, own) for name, own in plain if type(own) is Tensor and own.is_floating_point() and own.numel()]
    present = [(name, own.float() if own.dtype.itemsize == 1 else own) for name, own in floats if not own.is_meta]
    if not present:
        return None
    ends: list[Any] = [torch.stack(torch.aminmax(own)).isfinite().all() for _, own in present]  # 1/20 of `isfinite`
    bad = (~torch.stack([flag.to(ends[0].device) for flag in ends])).nonzero()  # the only wait for a device
    return present[int(bad[0])][0] if len(bad) else None


def first_invalid_row(logits: Tensor) -> int | None:
    """Number of the first row `[rows, classes]` that gives no probabilities; -inf beside finite numbers is a 0."""
    bad = (~logits.float().logsumexp(-1).isfinite()).nonzero()
    return int(bad[0]) if len(bad) else None
