"""Find tensors that hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def first_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity; None if all numbers are finite.

    `tensors` are (name, tensor) pairs. Tensors that are not of floating point, have no values (empty, or on the meta
    device) or are of a subclass (quantised weights) are skipped.
    """
    detached = [(name, tensor.detach()) for name, tensor in tensors]
    floats = [(name, part) for name, part in detached if type(part) is Tensor and part.is_floating_point()]
    present = [(name, part) for name, part in floats if part.numel() and not part.is_meta]
    present = [(name, part.float() if part.dtype.itemsize == 1 else part) for name, part in present]
    if not present:
        return None
    # it is enough to test the smallest and the largest number, which takes 1/20 of the time of `isfinite` on all
    finite = [torch.stack(torch.aminmax(part)).isfinite().all() for _, part in present]
    bad = (~torch.stack([flag.to(finite[0].device) for flag in finite])).nonzero()  # only this waits for the device
    return present[int(bad[0])][0] if len(bad) else None
