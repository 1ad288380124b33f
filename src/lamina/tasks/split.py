"""One part of a task, and drawing rows from it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

HELD_OUT = 0.1


@dataclass(frozen=True)
class Split:
    """Texts with their labels.

    Attributes:
        texts: A text each, or a pair of texts. Token tasks: the words joined by one space. Image tasks: pictures, which
            are opened when they are needed.
        labels: Per text a class id, a number (regression) or zeros and ones, one per label (multi-label).
            Token tasks: one class id per word. Masked language modelling: None. Summaries and translations: the text
            that is to be written.
        words: Token tasks: the character span of every word in its text. Else None.
    """

    texts: tuple[Any, ...]
    labels: tuple[Any, ...]
    words: tuple[tuple[tuple[int, int], ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Split:
        """The rows named, in the order named."""
        words = None if self.words is None else tuple(self.words[row] for row in rows)
        return Split(tuple(self.texts[row] for row in rows), tuple(self.labels[row] for row in rows), words)


def limited(split: Split, limit: int | None, seed: int, *, option: str = "limit") -> Split:
    """At most `limit` rows, drawn uniformly without replacement; the rows keep their order.

    Args:
        split: Some part.
        limit: How many rows, at most; None: all.
        seed: Which rows.
        option: What the limit is called in the error.

    Raises:
        ConfigError: If `limit` is below 1.
    """
    if limit is None:
        return split
    if limit < 1:
        raise ConfigError(f"task: {option} is {limit}; at least one row must be left. Give a limit of 1 or more.")
    if limit >= len(split):
        return split
    return split.take(sorted(random.Random(seed).sample(range(len(split)), limit)))


def held_out(split: Split, *, stratify: bool, seed: int, last: bool = False) -> tuple[Split, Split]:
    """Set a tenth of the rows aside for validation.

    Args:
        split: The training rows.
        stratify: Keep the share of each class; needs one class id per row.
        seed: Which rows go.
        last: The last rows go, whatever the seed: for running text, whose lines belong together.

    Returns:
        What is left for training, and the part set aside; both keep the order of the rows.

    Raises:
        DataError: If there are fewer than two rows.
    """
    count = len(split)
    if count < 2:
        raise DataError(
            f"task: the train part has {count} rows; two are needed to set one aside for validation. "
            "Give more rows or a validation file."
        )
    tenth = max(1, round(HELD_OUT * count))
    if last:
        return split.take(range(count - tenth)), split.take(range(count - tenth, count))
    rng = random.Random(seed)
    groups: dict[Any, list[int]] = defaultdict(list)
    for row in range(count):
        groups[split.labels[row] if stratify else None].append(row)
    aside: set[int] = set()
    for group, share in zip(groups.values(), shares([len(g) for g in groups.values()], tenth), strict=True):
        aside.update(rng.sample(group, share))
    return split.take([row for row in range(count) if row not in aside]), split.take(sorted(aside))


def shares(sizes: list[int], total: int) -> list[int]:
    """How many of each group make up `total`: in proportion, rounded down, the rest to the largest remainders."""
    exact = [total * size / sum(sizes) for size in sizes]
    whole = [int(x) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: (whole[i] - exact[i], -sizes[i]))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def without_labels(split: Split) -> Split:
    """The texts alone, those of a pair one after the other; blank ones are no rows."""
    texts = [part for text in split.texts for part in ((text,) if isinstance(text, str) else text) if part.strip()]
    return Split(tuple(texts), (None,) * len(texts))
