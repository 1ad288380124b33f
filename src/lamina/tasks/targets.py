"""Labels as tensors, shared by several kinds of task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from lamina.data.arrow import Ragged, chunks, dataset_of
from lamina.data.encode import Encoded, pad
from lamina.data.windows import IGNORED
from lamina.tasks.split import Split

Array: TypeAlias = npt.NDArray[np.generic]


@final
@dataclass(frozen=True)
class RowTargets:
    """Labels (`values`): `[rows]`, or 0 and 1 per class, `[rows, classes]`. A `lamina.tasks.base.Targets`."""

    values: Array

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """Return the labels of the rows with the indices `rows`, `[batch]` or `[batch, classes]`."""
        return torch.from_numpy(self.values[[int(row) for row in rows]])


@final
class WordTargets:
    """A label for every token of every row, -100 for none, stored in Arrow. It is a `lamina.tasks.base.Targets`.

    The argument `labels` yields the labels of one row after the other.
    """

    def __init__(self, labels: Iterable[Sequence[int]]) -> None:
        tables = (pa.table({"label": pa.array(part, pa.list_(pa.int32()))}) for part in chunks(labels))
        self._rows = dataset_of(tables)  # keeps the temporary file of a large column from being removed
        self._labels = Ragged(self._rows.data.column("label"))

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """Return the labels of the rows with the indices `rows`, padded with -100, int64 `[batch, tokens]`."""
        return pad([self._labels[row] for row in rows], IGNORED)


def first_window_targets(split: Split, encoded: Encoded) -> RowTargets:
    """Return targets with the label of each text of `split` at its first window in `encoded`.

    Further windows have no label: NaN, -1 or -100, as in `Targets.tensor`.
    """
    labels = label_array(split)
    values = labels[encoded.text]
    values[encoded.window > 0] = math.nan if values.dtype == np.float32 else -1 if values.ndim > 1 else IGNORED
    return RowTargets(values)


def label_array(split: Split) -> Array:
    """Return the labels of a split as an array `[rows, ...]`: int64 class ids or 0 and 1, or float32 numbers."""
    labels = np.asarray(list(split.labels))
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)
