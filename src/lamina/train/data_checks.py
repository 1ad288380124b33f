"""Warnings about the texts of tasks, before they are trained: blank texts, and texts that two splits share."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from lamina.utils import pluralize, rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lamina.tasks.task import Task

logger = logging.getLogger(__name__)


def warn_of_texts(op: str, tasks: Iterable[Task]) -> None:
    """Log a warning for blank texts, and for texts of a validation or test split that are in the train split too.

    Tasks over the same rows get one warning. Running text is left out, because it has blank and repeated lines; so are
    images, audio and recorded states. In a distributed run only the first process logs.

    Args:
        op: The operation that trains, with which the warnings begin.
        tasks: The tasks.
    """
    by_rows: dict[tuple[tuple[str, str], ...], list[Task]] = defaultdict(list)
    for task in tasks if rank() == 0 else ():
        splits = task.splits.values()
        if "train" in task.splits and all(split.written and split.labelled for split in splits):
            by_rows[tuple((part, split.key) for part, split in task.splits.items())].append(task)
    for same in by_rows.values():
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(task.name for task in same))
        for problem in _problems({part: map(_plain, split.texts) for part, split in same[0].splits.items()}):
            logger.warning("%s: %s: %s.", op, names, problem)


def _problems(texts: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield a sentence for each problem in the texts of splits. `texts` is split name -> texts; one is "train"."""
    train: set[int] = set()  # hashes take less memory than texts, and hardly two texts have the same
    for part in sorted(texts, key=lambda name: name != "train"):
        count = blank = repeated = 0
        for text in texts[part]:
            count += 1
            blank += not text
            if part == "train":
                train.add(hash(text))
            elif text:
                repeated += hash(text) in train
        if blank:
            yield f"{pluralize(blank, 'text')} of {count:,} in the {part} split {_are(blank)} blank. Remove these rows"
        if repeated:
            share = f"{repeated:,} of {pluralize(count, 'text')} in the {part} split ({100 * repeated / count:.3g} %)"
            hint = "their scores say little about new texts. Remove them from one of the splits"
            yield f"{share} {_are(repeated)} in the train split too; {hint}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _plain(text: str | Sequence[str]) -> str:
    return text.strip() if isinstance(text, str) else "\0".join(part.strip() for part in text).strip("\0")
