"""Texts with a span of words left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.tasks.token_classification import join
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from lamina.tasks.task import Task


def without_span(task: Task, part: str, share: float, seed: int) -> Split:
    """A part of a task without one span of each text's words, at a random place; a tag goes with its word.

    Words are what stands between spaces, of tasks that tag words those words; of a pair both texts lose a span. The
    span has `share` of the words, rounded, and one word at least stays.
    """
    split = task.split(part)
    if kind_of(task.kind).tags_words:
        kept: list[tuple[list[str], tuple[int, ...]]] = []
        for row, (text, spans, tags) in enumerate(zip(split.texts, split.words or (), split.labels, strict=True)):
            places = _places(len(spans), share, derive_seed("deletion", seed, row))
            words = [text[start:end] for start, end in spans]
            kept.append(([words[place] for place in places], tuple(tags[place] for place in places)))
        joined = [join(words) for words, _ in kept]
        return Split.of((text for text, _ in joined), (tags for _, tags in kept), (spans for _, spans in joined))
    return Split.of((_cut(text, share, seed, row) for row, text in enumerate(split.texts)), split.labels)


def _cut(text: Any, share: float, seed: int, row: int) -> Any:
    if not isinstance(text, str):
        return tuple(_cut(side, share, seed, row) for side in text)
    words = text.split()
    return " ".join(words[place] for place in _places(len(words), share, derive_seed("deletion", seed, row)))


def _places(count: int, share: float, seed: int) -> list[int]:
    """Which of so many words stay."""
    size = min(round(share * count), count - 1) if count else 0
    start = int(np.random.default_rng(seed).integers(0, count - size + 1))
    return [*range(start), *range(start + size, count)]
