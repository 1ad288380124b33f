"""Labels as tensors, window by window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.batches import pad
from lamina.data.windows import IGNORED, word_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lamina.data.windows import Encoded
    from lamina.tasks.split import Split


@dataclass(frozen=True)
class Targets:
    """One reader's labels of every window.

    Attributes:
        values: Per window a label, or a list of them, one per token.
        per_token: Whether they are lists, one label per token.
    """

    values: list[Any]
    per_token: bool

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """The labels of some windows: `[batch]` or `[batch, classes]`; for token tasks `[batch, tokens]`."""
        values = [self.values[row] for row in rows]
        if not self.per_token:
            return torch.tensor(values)
        return pad(values, IGNORED)


def targets(encoded: Encoded, split: Split) -> Targets:
    """Labels of every window: a text's label goes to its first window, a word's to the one window that counts it."""
    if split.words is not None:
        return Targets(word_labels(encoded, split.words, split.labels), per_token=True)
    values = [
        split.labels[text] if window == 0 else _none_like(split.labels[text])
        for text, window in zip(encoded.text, encoded.window, strict=True)
    ]
    return Targets(values, per_token=False)


def _none_like(label: Any) -> Any:
    """The label that stands for "none" beside labels such as this one."""
    if isinstance(label, float):
        return math.nan
    return [-1] * len(label) if isinstance(label, tuple | list) else IGNORED
