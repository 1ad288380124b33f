"""Measures of what a probe's score is worth: a control task with random labels, and an online code.

An online code measures how easily a probe finds the labels: it sends the training labels in portions, each with the
help of a probe that was trained on the portions before.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, final

import numpy as np
from torch.nn import functional as F

from lamina.data.windows import IGNORED
from lamina.tasks.outputs import Results
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.studies.probing.row_scores import Label
    from lamina.tasks.base import Targets
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the training rows at which the portions of an online code end, as in Voita and Titov 2020."""


def control_task(task: Task, parts: Sequence[str], seed: int) -> Task:
    """Return the task with the same examples and random labels: one label per distinct word, or per distinct text.

    Each image or audio clip has its own. Labels are drawn from the labels of the "train" split, so that each class
    stays about as frequent as it was. Raises UnknownNameError if a split does not exist.

    Args:
        task: A task with labels.
        parts: Names of the splits that the returned task has.
        seed: Seed of the labels; together with the word or text it decides the label.

    Source:
        Hewitt and Liang 2019, arXiv:1909.03368, section 2: random labels per word type. In sequence tasks the type is
        the whole text. A probe cannot learn the random label of a text outside the "train" split, so that the control's
        score is at chance there.
    """
    tags = task.kind.tags_words
    truths = list(task.split("train").labels)
    pool = [tag for row in truths for tag in row] if tags else truths

    def random_label(key: Hashable) -> Label:
        return pool[derive_seed("control", seed, key) % len(pool)]

    splits = {}
    for name in parts:
        split = task.split(name)
        if tags:
            labels = [tuple(map(random_label, words)) for words in _words(split)]
        else:
            labels = [random_label(key) for key in _example_keys(split, name)]
        splits[name] = split.with_labels(labels)
    return replace(task, splits=splits)


def _words(split: Split) -> Iterable[list[str]]:
    for text, spans in zip(split.texts, split.words or (), strict=True):
        yield [text[start:end] for start, end in spans]


def _example_keys(split: Split, name: str) -> Iterable[Hashable]:
    """Yield a key for each example of a split, so that equal texts get equal random labels.

    The key is the text or the pair of texts. Each image or audio clip has its own key: the split's `name` and its row.
    """
    for row, text in enumerate(split.texts):
        yield text if isinstance(text, str | tuple) else (name, row)


def code_portions(rows: int, seed: int) -> list[list[int]]:
    """Return the row numbers of the portions of an online code; `seed` decides which row is in which.

    An online code sends the labels of `rows` training rows portion by portion, each with the help of a probe that was
    trained on all portions before it. The portions end at the shares of the rows in `PORTIONS`; no portion is empty.
    """
    order = np.random.default_rng(derive_seed("code", seed)).permutation(rows).tolist()
    ends = sorted({math.ceil(share * rows) for share in PORTIONS})
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def only_rows(task: Task, rows: Iterable[int]) -> Split:
    """Return the "train" split with labels on the given `rows` only; losses ignore the others, which become -100."""
    split, labelled, tags = task.split("train"), set(rows), task.kind.tags_words
    labels = [
        label if row in labelled else (IGNORED,) * len(label) if tags else IGNORED
        for row, label in enumerate(split.labels)
    ]
    return split.with_labels(labels)


def uniform_bits(task: Task, rows: Iterable[int]) -> float:
    """Return the bits that the labels of some training rows take without a model: log2(classes) per label.

    `rows` are row numbers. There is one label per row, or one per word in word tagging tasks.
    """
    labels = task.split("train").labels
    tags = task.kind.tags_words
    return sum(len(labels[row]) if tags else 1 for row in rows) * math.log2(len(task.labels))


@final
class LabelBits(Results):
    """Sums up the bits that it takes to send true labels with a probe: -log2 of each label's predicted probability.

    Labels of -100 do not count.

    Args:
        targets: The true labels of all rows.

    Attributes:
        bits: The sum so far.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets, self.bits = targets, 0.0

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:  # noqa: ARG002
        """Add the bits of the labels of the rows whose numbers are in `rows`; labels of -100 do not count.

        `outputs` are the probe's logits, `[batch, classes]` or `[batch, tokens, classes]`; `labels` is not used.
        """
        logits, truths = outputs.float().cpu().flatten(0, -2), self._targets.tensor(rows).flatten()
        loss = F.cross_entropy(logits, truths, ignore_index=IGNORED, reduction="sum")
        self.bits += float(loss) / math.log(2)

    def first_not_finite(self) -> int | None:
        """Return None: only a sum is stored, so the first row that is not finite is not known.

        The study's table shows an infinite sum.
        """
        return None


def code_length(bits: Sequence[float], task: Task, portions: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the length in bits of the online code of a task's training labels, and the compression that it achieves.

    The labels of the first portion are sent with log2(classes) bits each. The labels of each later portion are sent
    with the help of a probe that was trained on all portions before it.

    Args:
        bits: Bits of each portion, without the first.
        task: The task with the labels.
        portions: Row numbers of each portion, as `code_portions` returns them.

    Returns:
        The length in bits; and the compression: log2(classes) bits for every label, divided by that length (NaN if it
        is 0).

    Source:
        Voita and Titov 2020, arXiv:2003.12298, section 2.2, eq. 2.
    """
    total = uniform_bits(task, portions[0]) + sum(bits)
    uniform = uniform_bits(task, [row for portion in portions for row in portion])
    return total, uniform / total if total else math.nan
