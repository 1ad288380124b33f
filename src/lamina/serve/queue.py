"""Which of the requests that wait share a pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lamina.data.batches import Budget, length_batches
from lamina.serve.uploads import Upload

if TYPE_CHECKING:
    from lamina.serve.workers import Worker

_PLANNED = 1024  # texts among which those of a pass are chosen, oldest first
_FILE_TOKENS, _SIZE_OF_TOKEN = 256, 4096  # that a file counts for, so that not too much is decoded at once


@dataclass(eq=False)
class Job:
    """A request: some texts or pairs, and what is asked about them."""

    texts: Sequence[Any]
    work: Worker
    truncate: bool
    future: Future[list[Any]] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.lengths = [_about_tokens(text) for text in self.texts]
        self.size = sum(self.lengths)
        self._started = False
        self._kind = (self.work, isinstance(self.texts[0], tuple))

    def start(self) -> bool:
        """Whether somebody still waits for the answer, who then waits to the end."""
        if not self._started:
            self._started = self.future.set_running_or_notify_cancel()
        return self._started

    def is_like(self, other: Job) -> bool:
        """Whether both may be read together: the same is asked, of texts or of pairs."""
        return self._kind == other._kind


def next_batch(waiting: Iterable[Job], budget: Budget) -> list[Job]:
    """The oldest request, and those that are cheapest to read along with it.

    All that wait are parted by length into the passes that cost least together; what shares the passes of the oldest is
    taken. So none waits for long, and the next to come finds as many of its length as there are.
    """
    jobs: list[Job] = []
    texts = 0
    for job in waiting:
        if texts < _PLANNED and (not jobs or job.is_like(jobs[0])):
            jobs.append(job)
            texts += len(job.texts)
    lengths = [length for job in jobs for length in job.lengths]
    batches = length_batches(lengths, _PLANNED, budget=budget)
    batch_of = {row: number for number, rows in enumerate(batches) for row in rows}
    chosen: list[Job] = []
    wanted = {batch_of[row] for row in range(len(jobs[0].texts))}
    room, row = budget.max_tokens, 0
    for job in jobs:
        own = {batch_of[row + at] for at in range(len(job.texts))}
        row += len(job.texts)
        if not chosen or (own <= wanted and job.size <= room):
            chosen.append(job)
            room -= job.size
    return chosen


def _about_tokens(text: Any) -> int:
    """Roughly, before it is read; passes are cut to measure afterwards."""
    if isinstance(text, Upload):
        return max(_FILE_TOKENS, text.size // _SIZE_OF_TOKEN)
    parts = [text] if isinstance(text, str) else text
    return 2 + sum(len(part) // 4 + 1 for part in parts)
