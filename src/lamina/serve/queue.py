"""The requests in the scheduler's queue, and the choice of those that share the next batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, final

from lamina.data.batches import Budget, length_batches
from lamina.serve.uploads import Example, Upload

if TYPE_CHECKING:
    from lamina.serve.workers import Truncate, Worker

_PLANNED = 1024  # number of texts, oldest first, among which those of the next batch are chosen
_SHORTER = 3  # a request overtakes the oldest one if a pass over it costs at most a third
_PATIENCE = 1.0  # a request is no longer overtaken once the passes that went before it cost this many times its own
_FILE_TOKENS, _SIZE_OF_TOKEN = 256, 4096  # least tokens a file counts for; its pixels or samples per token beyond that

AnswerT = TypeVar("AnswerT")


class Answers(Future[AnswerT]):
    """The future of a request's answers. It also records whether the client has left while they were computed."""

    has_left = False

    def cancel(self) -> bool:
        """Record that the client has left. Return whether this cancels the request: False if it has already begun."""
        self.has_left = True
        return super().cancel()


@dataclass(eq=False)
class Job(Generic[AnswerT]):
    """A queued request; the scheduler makes it.

    Attributes:
        texts: Its texts, pairs of texts or files; all of one kind, and at least one. `fit` shortens them.
        worker: The worker that answers it.
        truncate: Whether texts that are too long are cut; see `Scheduler.ask`.
        future: Future of the answers, one per text in their order.
        since: When the job was created, in seconds of `time.perf_counter`.
        lengths: Estimated number of tokens of each text.
        size: Estimated number of tokens of all texts.
        group: Jobs can share a batch if this is equal: the worker, and whether the texts are pairs.
        overtaken: Total cost, in tokens, of the batches that were started before this job although it was queued first.
    """

    texts: Sequence[Example]
    worker: Worker[Any, AnswerT]
    truncate: Truncate
    future: Answers[list[AnswerT]] = field(default_factory=Answers)
    since: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.lengths = [_estimated_tokens(text) for text in self.texts]
        self.size, self.overtaken = sum(self.lengths), 0
        self._started = self._fits = False
        self.group = self.worker, isinstance(self.texts[0], tuple)

    def fit(self, limit: int) -> None:
        """Cut `texts` to the part that is read, if `truncate` is set. A second call changes nothing.

        `limit` is the number of tokens that the request may have. Raises TooLongError or ConfigError, and leaves
        `texts` as they are, in the cases of `Worker.fit`.
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


AnyJob: TypeAlias = Job[Any]  # a job whose type of answer does not matter


@final
class JobQueue:
    """The requests that wait for a pass, oldest first. The scheduler holds its lock while it uses the queue.

    Attributes:
        tokens: Estimated number of tokens of all requests.
    """

    def __init__(self) -> None:
        self._jobs: list[AnyJob] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: AnyJob) -> None:
        """Add a request at the end."""
        self._jobs.append(job)
        self.tokens += job.size

    def remove(self, leaves: Callable[[AnyJob], bool]) -> list[AnyJob]:
        """Remove the requests for which `leaves` returns True, and return them."""
        removed, kept = list[AnyJob](), list[AnyJob]()
        for job in self._jobs:
            (removed if leaves(job) else kept).append(job)
        self._jobs = kept
        self.tokens -= sum(job.size for job in removed)
        return removed

    def has(self, largest: float) -> bool:
        """Return whether a request of at most `largest` estimated tokens waits."""
        return any(job.size <= largest for job in self._jobs)

    def take(self, budget: Budget, piece: int | None = None, largest: float = math.inf) -> list[AnyJob]:
        """Remove the requests of the next batch from the queue; return them, oldest first.

        The batch has the oldest request, and the requests that are cheapest to run along with it (see `next_batch`). A
        request that costs at most a third may overtake the oldest one, but not for long: once the batches that overtook
        a request cost as much as a pass over itself, it is next.

        Args:
            budget: Maximum tokens of a batch, and the fixed cost of a pass in tokens.
            piece: A request of more tokens than this is a batch by itself, so that others do not wait for all of it.
                None: the maximum of the budget.
            largest: Requests of more tokens than this stay in the queue. There must be a smaller one; see `has`.
        """

        def cost(job: AnyJob) -> int:
            return budget.overhead + job.size

        jobs = [job for job in self._jobs if job.size <= largest]
        patient = (place for place, job in enumerate(jobs) if job.overtaken >= _PATIENCE * cost(job))
        shorter = (place for place, job in enumerate(jobs) if _SHORTER * cost(job) <= cost(jobs[0]))
        first = next(patient, next(shorter, 0))
        batch = next_batch(jobs, budget, first, piece)
        for job in jobs[:first]:
            job.overtaken += budget.overhead + sum(other.size for other in batch)
        chosen = set(map(id, batch))
        return self.remove(lambda job: id(job) in chosen)


def next_batch(jobs: Sequence[AnyJob], budget: Budget, first: int = 0, piece: int | None = None) -> list[AnyJob]:
    """Return the jobs of a batch, oldest first: the job `first` (the leader), and the cheapest to run along with it.

    The queued jobs that can share a batch with the leader (only the oldest 1,000 texts or so) are divided by text
    length into passes, so that the total cost is lowest. The batch has the jobs whose texts are all in the leader's
    passes, up to the budget. Other jobs stay queued until they can share a pass with texts of their length.

    Args:
        jobs: The queued jobs, oldest first.
        budget: Maximum tokens of a batch, and the fixed cost of a pass in tokens.
        first: Index of the leader, which is chosen even if it has more tokens than the budget.
        piece: A job of more tokens than this is not joined with others. None: the maximum of the budget.
    """
    piece = budget.max_tokens if piece is None else piece
    if jobs[first].size > piece:
        return [jobs[first]]
    leader, alike, count = jobs[first], list[AnyJob](), 0
    for job in jobs:
        if job is leader or (count < _PLANNED and job.size <= piece and job.group == leader.group):
            alike.append(job)
            count += len(job.texts)
    lengths = [length for job in alike for length in job.lengths]
    passes = length_batches(lengths, _PLANNED, budget=budget)
    pass_of = {row: number for number, rows in enumerate(passes) for row in rows}
    rows = iter(range(len(lengths)))  # they number the texts of all jobs one after the other
    passes_of = {id(job): {pass_of[next(rows)] for _ in job.texts} for job in alike}
    chosen: list[AnyJob] = []
    room = budget.max_tokens - leader.size
    for job in alike:
        if job is leader:
            chosen.append(job)
        elif passes_of[id(job)] <= passes_of[id(leader)] and job.size <= room:
            chosen.append(job)
            room -= job.size
    return chosen


def _estimated_tokens(text: Example) -> int:
    """Return a rough number of tokens of a text, pair or file, without tokenising it.

    Four characters, or 4,096 pixels or audio samples, count as a token; a file counts as at least 256. A batch that
    turns out too large is still split into passes of the right size.
    """
    if isinstance(text, Upload):
        return max(_FILE_TOKENS, text.size // _SIZE_OF_TOKEN)
    parts = [text] if isinstance(text, str) else text
    return 2 + sum(len(part) // 4 + 1 for part in parts)  # 2: special tokens at both ends
