"""Tasks beside a task that show what a probe's score is worth: a control task, and the portions of an online code."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.nn import functional as F

from lamina.data.windows import IGNORED
from lamina.tasks import kind_of
from lamina.tasks.base import Results
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.tasks.base import Targets
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the training rows up to which the blocks of an online code reach, as in Voita and Titov 2020."""


def control_task(task: Task, parts: Sequence[str], seed: int) -> Task:
    """The same examples with labels that say nothing: one drawn at random per word type, or per distinct text.

    They are drawn from the labels of the train part, so that they have the same shares.

    Source:
        Hewitt and Liang 2019, arXiv:1909.03368, section 2: random labels per word type. Of whole texts the type is the
        text; one that no training text equals cannot be learnt, so that the control's score there is chance.
    """
    tags = kind_of(task.kind).tags_words
    truths = list(task.split("train").labels)
    pool = [tag for row in truths for tag in row] if tags else truths

    def drawn(key: Hashable) -> Any:
        return pool[derive_seed("control", seed, key) % len(pool)]

    splits = {}
    for name in parts:
        split = task.split(name)
        keys = _types(split, name, tags=tags)
        labels = [tuple(map(drawn, key)) for key in keys] if tags else [drawn(key) for key in keys]
        splits[name] = split.with_labels(labels)
    return replace(task, splits=splits)


def _types(split: Split, name: str, *, tags: bool) -> Iterable[Any]:
    """Of each example the words, its text, or (an image) its number."""
    if tags:
        for text, spans in zip(split.texts, split.words or (), strict=True):
            yield [text[start:end] for start, end in spans]
    else:
        for row, text in enumerate(split.texts):
            yield text if isinstance(text, str | tuple) else (name, row)


def code_blocks(rows: int, seed: int) -> list[list[int]]:
    """The training rows, shuffled, in the blocks in which an online code sends their labels; none is empty."""
    order = np.random.default_rng(derive_seed("code", seed)).permutation(rows).tolist()
    ends = sorted({math.ceil(share * rows) for share in PORTIONS})
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def only_rows(task: Task, rows: Iterable[int]) -> Split:
    """The train part with labels for some rows alone."""
    split, kept, tags = task.split("train"), set(rows), kind_of(task.kind).tags_words
    labels = [
        label if row in kept else (IGNORED,) * len(label) if tags else IGNORED for row, label in enumerate(split.labels)
    ]
    return split.with_labels(labels)


def uniform_bits(task: Task, rows: Iterable[int]) -> float:
    """What the labels of some training rows take without any model: log2 of the number of classes each."""
    labels = task.split("train").labels
    tags = kind_of(task.kind).tags_words
    return sum(len(labels[row]) if tags else 1 for row in rows) * math.log2(len(task.labels))


@final
class LabelBits(Results):
    """Sums up what labels cost, in bits, under a probe's probabilities."""

    def __init__(self, targets: Targets) -> None:
        self._targets, self.bits = targets, 0.0

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:  # noqa: ARG002
        """Take in logits `[batch, classes]` or `[batch, tokens, classes]`."""
        logits, given = outputs.float().cpu().flatten(0, -2), self._targets.tensor(rows).flatten()
        loss = F.cross_entropy(logits, given, ignore_index=IGNORED, reduction="sum")
        self.bits += float(loss) / math.log(2)

    def first_not_finite(self) -> int | None:
        """None: a sum has no rows; an infinite one shows in the table."""
        return None


def code_length(bits: Sequence[float], task: Task, blocks: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Bits of the labels under the online code, and how many times shorter it is than the uniform one.

    The first block is sent by the uniform code, each later one by a probe that learnt from all blocks before it.

    Args:
        bits: Of each block but the first.
        task: Whose labels are sent.
        blocks: As `code_blocks` gives them.

    Source:
        Voita and Titov 2020, arXiv:2003.12298, section 2.2, eq. 2.
    """
    total = uniform_bits(task, blocks[0]) + sum(bits)
    uniform = uniform_bits(task, [row for block in blocks for row in block])
    return total, uniform / total if total else math.nan
