"""Dropout whose random numbers are a reader's own, for several readers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Generators = Sequence[torch.Generator | None]

_LEVELS = 1 << 16  # 16 random bits per element: drawing them costs a quarter of torch's own Bernoulli numbers


def dropout(part: Tensor, p: float, generators: Generators, *, axis: int = 0) -> Tensor:
    """Dropout of the members' values, which lie along `axis`, each by its own generator (None: torch's own)."""
    return part if p == 0 else drop(part, p, draw(part.shape, generators, part.device, axis=axis))


def draw(shape: torch.Size, generators: Generators, device: torch.device, *, axis: int = 0) -> Tensor:
    """Uniform 16-bit integers of a shape, each member's from its own generator."""
    alone = torch.Size((*shape[:axis], *shape[axis + 1 :]))
    count, bits = alone.numel(), []
    for generator in generators:
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
        words.random_(-(1 << 63), None, generator=generator)
        bits.append(words.view(torch.int16)[:count].view(alone))
    return torch.stack(bits, dim=axis)


def drop(part: Tensor, p: float, bits: Tensor) -> Tensor:
    """Set elements to 0 with probability `p`, to the nearest of 65,536 levels, as `bits` decide; scale the rest up."""
    level = min(round(p * _LEVELS), _LEVELS - 1)
    keep = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    torch.ge(bits, level - _LEVELS // 2, out=keep)  # ones and zeros at once: faster than a conversion
    return part * keep.mul_(_LEVELS / (_LEVELS - level))
