"""Hidden states as files: one per stack, an array `[tokens, layers, width]` of every row's real tokens.

All layers of a row lie side by side and come with one read. The longest row comes first, as states are computed, so
where a row begins follows from the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from lamina.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

DTYPES = {"float16": torch.float16, "float32": torch.float32}


@final
@dataclass(frozen=True)
class Layout:
    """What an entry holds, and where.

    Attributes:
        lengths: Tokens of each row.
        layers: Stack -> layers, ascending.
        widths: Stack -> width.
        dtype: "float16" or "float32", of the files.
    """

    lengths: Sequence[int]
    layers: Mapping[str, Sequence[int]]
    widths: Mapping[str, int]
    dtype: str = "float16"

    @cached_property
    def order(self) -> list[int]:
        """The rows as they follow one another in the files."""
        return sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row])

    @cached_property
    def starts(self) -> np.ndarray:
        """The first token of each row in the files, and behind those the count of all tokens."""
        ends = np.cumsum([self.lengths[row] for row in self.order], dtype=np.int64)
        starts = np.empty(len(ends) + 1, dtype=np.int64)
        starts[[*self.order, -1]] = [0, *ends]
        return starts

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Stack -> the shape of its file."""
        tokens = int(self.starts[-1])
        return {stack: (tokens, len(layers), self.widths[stack]) for stack, layers in self.layers.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Stack -> bytes of its file."""
        return {stack: int(np.prod(shape)) * DTYPES[self.dtype].itemsize for stack, shape in self.shapes.items()}

    def facts(self) -> dict[str, Any]:
        """What the index of an entry says about it."""
        layers = {stack: list(layers) for stack, layers in self.layers.items()}
        counts = {"rows": len(self.lengths), "tokens": int(self.starts[-1])}
        return {**counts, "layers": layers, "widths": dict(self.widths), "dtype": self.dtype}

    def pack(self, rows: Sequence[int], states: Sequence[Tensor], stack: str) -> np.ndarray:
        """States of some rows as they are stored.

        Args:
            rows: Their numbers, one after another in `order`.
            states: Per layer `[batch, tokens, width]`, padded on the right.
            stack: Whose states these are.

        Raises:
            CacheError: If the states have not as many tokens as the rows, or are too large for the dtype.
        """
        lengths = torch.tensor([self.lengths[row] for row in rows], device=states[0].device)
        shape = (len(rows), int(lengths.max()), self.widths[stack])
        if tuple(states[0].shape) != shape:
            raise CacheError(
                f"cache: the model's states are {tuple(states[0].shape)} for rows of {shape}; only models that keep "
                "every token can be cached. Go without a cache."
            )
        real = torch.arange(shape[1], device=lengths.device) < lengths[:, None]
        packed = torch.stack([state.detach()[real] for state in states], dim=1).to("cpu", DTYPES[self.dtype])
        if not packed.isfinite().all():
            raise CacheError(
                f"cache: some states are beyond the range of {self.dtype}, or not numbers; they would not come back as "
                "they were. Use cache_dtype='float32', or go without a cache."
            )
        return packed.numpy()


@final
class CachedStates:
    """The states of some rows on disk, read in any order and by any number of processes at once.

    Args:
        folder: Where the files are.
        layout: What they hold.
        dtype: Of the states that are handed out.
        device: Where they are wanted.
    """

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.folder, self.layout, self.dtype, self.device = folder, layout, dtype, device
        kind, shapes = np.dtype(layout.dtype), layout.shapes.items()
        self._files = {stack: np.memmap(folder / f"{stack}.bin", kind, "r", shape=shape) for stack, shape in shapes}
        self._stage = np.empty(0, kind)

    def batch(self, rows: Sequence[int], *, tokens: int = 0) -> dict[str, dict[int, Tensor]]:
        """Read some rows.

        Args:
            rows: Their numbers.
            tokens: The batch has at least so many, for a part of a larger one; 0: as many as its longest row.

        Returns:
            Stack -> layer -> states `[batch, tokens, width]`, padded with zeros on the right.
        """
        tokens = max(tokens, *(int(self.layout.lengths[row]) for row in rows))
        states = {}
        for stack, layers in self.layout.layers.items():
            padded = torch.from_numpy(self._padded(rows, tokens, stack)).to(self.device)
            states[stack] = {layer: padded[:, :, at].to(self.dtype, copy=True) for at, layer in enumerate(layers)}
        return states

    def _padded(self, rows: Sequence[int], tokens: int, stack: str) -> np.ndarray:
        """`[batch, tokens, layers, width]` as it is stored, in memory that the next call uses again."""
        file = self._files[stack]
        shape = (len(rows), tokens, *file.shape[1:])
        size = int(np.prod(shape))
        if self._stage.size < size:
            self._stage = np.empty(size, file.dtype)  # kept: fresh memory costs more than the copy into it
        stage = self._stage[:size].reshape(shape)
        for at, row in enumerate(rows):
            start, length = self.layout.starts[row], self.layout.lengths[row]
            stage[at, :length] = file[start : start + length]
            stage[at, length:] = 0
        return stage
