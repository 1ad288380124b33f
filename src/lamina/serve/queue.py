"""The requests in the scheduler's queue, and the choice of those that share the next batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from lamina.data.batches import Budget, length_batches
from lamina.serve.uploads import Example, Upload

if TYPE_CHECKING:
    from lamina.serve.workers import Worker

_PLANNED = 1024  # number of texts, oldest first, among which those of the next batch are chosen
_FILE_TOKENS, _SIZE_OF_TOKEN = 256, 4096  # least tokens a file counts for; its pixels or samples per token beyond that

AnswerT = TypeVar("AnswerT")


class Answers(Future[AnswerT]):
    """The future of a request's answers. It also records if the client leaves while the answers are being computed."""

    has_left = False

    def cancel(self) -> bool:
        """Record that the client has left; return whether the request could be cancelled because it had not begun."""
        self.has_left = True
        return super().cancel()


@dataclass(eq=False)
class Job(Generic[AnswerT]):
    """A queued request.

    Attributes:
        texts: Its texts, pairs of texts or files; all of one kind, and at least one. `fit` shortens them.
        worker: The worker that answers it.
        truncate: Whether texts that are too long are cut. False: the job fails with TooLongError.
        future: Future of the answers, one per text in their order.
        since: When the job was created, in seconds of `time.perf_counter`.
        lengths: Estimated number of tokens of each text.
        size: Estimated number of tokens of all texts.
    """

    texts: Sequence[Example]
    worker: Worker[Any, AnswerT]
    truncate: bool
    future: Answers[list[AnswerT]] = field(default_factory=Answers)
    since: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.lengths = [_estimated_tokens(text) for text in self.texts]
        self.size = sum(self.lengths)
        self._started = self._fits = False
        self._group = (self.worker, isinstance(self.texts[0], tuple))

    def fit(self, limit: int) -> None:
        """Cut texts that are too long, if `truncate` is set. A second call changes nothing.

        Raises:
            TooLongError: If all texts together have more than `limit` tokens.
        """
        if not self._fits:
            self.texts, self._fits = self.worker.fit(self.texts, truncate=self.truncate, limit=limit), True

    def start(self) -> bool:
        """Mark the job as running, so that its client can no longer cancel it. Return False if it is cancelled.

        A second call returns the same value, because a batch may be split and run again.
        """
        if not self._started:
            self._started = self.future.set_running_or_notify_cancel()
        return self._started

    def is_like(self, other: AnyJob) -> bool:
        """Return whether two jobs can share a batch: they have the same worker, and both have pairs or neither has."""
        return self._group == other._group


AnyJob: TypeAlias = Job[Any]  # a job whose type of answer does not matter


def next_batch(waiting: Iterable[AnyJob], budget: Budget) -> list[AnyJob]:
    """Return the jobs of the next batch: the oldest job, and the jobs that are cheapest to run along with it.

    All queued jobs that can share a batch with the oldest one are divided by length into passes with the lowest total
    cost. The batch is the jobs whose texts all fall into the oldest job's passes, up to the budget. So no job waits for
    long, and texts of other lengths stay queued until they can share a pass with texts of their length.

    Args:
        waiting: The queued jobs, oldest first; at least one.
        budget: Maximum tokens of a pass, and its fixed cost in tokens. The oldest job is chosen even if it has more
            tokens.
    """
    jobs: list[AnyJob] = []
    count = 0
    for job in waiting:
        if count < _PLANNED and (not jobs or job.is_like(jobs[0])):
            jobs.append(job)
            count += len(job.texts)
    lengths = [length for job in jobs for length in job.lengths]
    passes = length_batches(lengths, _PLANNED, budget=budget)
    pass_of = {row: number for number, rows in enumerate(passes) for row in rows}
    oldest_passes = {pass_of[row] for row in range(len(jobs[0].texts))}
    chosen: list[AnyJob] = []
    room, first_row = budget.max_tokens, 0  # rows number the texts of all jobs one after the other
    for job in jobs:
        job_passes = {pass_of[first_row + offset] for offset in range(len(job.texts))}
        first_row += len(job.texts)
        if not chosen or (job_passes <= oldest_passes and job.size <= room):
            chosen.append(job)
            room -= job.size
    return chosen


def _estimated_tokens(text: Example) -> int:
    """Estimate the number of tokens of a text, pair or file before it is tokenised.

    Four characters count as a token. A batch that turns out too large is still split into passes of the right size.
    """
    if isinstance(text, Upload):
        return max(_FILE_TOKENS, text.size // _SIZE_OF_TOKEN)
    parts = [text] if isinstance(text, str) else text
    return 2 + sum(len(part) // 4 + 1 for part in parts)  # 2: special tokens at both ends
