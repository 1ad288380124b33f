"""From requests to passes: what waits is read together, and run together."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, final

from lamina.data.arrow import spills
from lamina.data.batches import Budget
from lamina.errors import ConfigError, LaminaError
from lamina.layers.pass_lock import pass_lock
from lamina.serve.explain import ExplainWorker
from lamina.serve.queue import Job, next_batch
from lamina.serve.uploads import readers_of, sized
from lamina.serve.workers import PredictWorker, Worker

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.serve.settings import Settings

logger = logging.getLogger(__name__)

_OVERHEAD = {"cpu": 64, "accelerator": 4096}  # of a pass: so many tokens take as long
_WORTH_READING = 256  # tokens that wait, before they are read while all passes run that may
_SETTLED = 0.005  # seconds in which no request comes, after which they are
_KEPT = 256  # works: what was asked lately is not made anew


class OverloadedError(LaminaError):
    """More requests wait than a server takes."""


class ClosedError(LaminaError):
    """A server that ends takes no more requests."""


@dataclass(frozen=True)
class BatchTiming:
    """A batch: seconds that each part took, and how much was in it."""

    queue: Sequence[float]  # of each request, until its pass began, but for what follows
    read: float  # tokenising
    run: float  # passes, and making answers of them
    requests: int
    texts: int
    tokens: int


@dataclass(frozen=True, eq=False)
class ServedBank:
    """What is served at one time."""

    bank: ReaderBank
    number: int  # of this state; each change makes the next
    versions: Mapping[str, int]  # reader -> how often one of its name was put in place


@dataclass
class _Turn:
    """A batch, and whether its pass was begun."""

    jobs: Sequence[Job]
    begun: bool


@final
class Scheduler:
    """Runs a bank for any number of threads that ask.

    A batch is the oldest request that waits and those for the same answers that are best read with it (`next_batch`),
    and is answered as soon as it was run. `settings.max_concurrent_passes` run at once, each in a thread, and one more
    thread reads the texts of the next batch as tokens meanwhile, if those that wait are worth it and no more come. A
    request that nobody waits for any more is left out. Another bank may take the place of the one that is served: a
    request is answered by the bank that it was asked of, whole.

    Args:
        bank: The readers and their model; its processor reads the texts.
        settings: The limits.
        tell: Called with the `BatchTiming` of each batch.
    """

    def __init__(
        self, bank: ReaderBank, settings: Settings, tell: Callable[[Worker, BatchTiming], None] | None = None
    ) -> None:
        if not len(bank):
            raise ConfigError("serve: the bank has no reader; at least one is needed.")
        self.served, self.settings = ServedBank(bank.eval(), 1, dict.fromkeys(bank, 1)), settings
        self._tell = tell
        self.turns = pass_lock(bank.model)  # with threads that write, and those that look at the model
        self.reading = Lock()  # how a tokenizer cuts is a state of it, set before each text
        overhead = _OVERHEAD["cpu" if bank.device.type == "cpu" else "accelerator"]
        self._budget = Budget(settings.max_batch_tokens, overhead)
        self._waiting: deque[Job] = deque()
        self._unanswered = 0
        self._changed = Condition()
        self._closing = False
        self._works: dict[Any, Worker] = {}
        self._free = settings.max_concurrent_passes  # passes that may begin
        self._ready = 0  # batches that were read, and wait for theirs
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(settings.max_concurrent_passes + 1)]
        for thread in self._threads:
            thread.start()

    @property
    def bank(self) -> ReaderBank:
        """The bank that is served now."""
        return self.served.bank

    def serve(self, served: ServedBank) -> None:
        """Serve another bank from the next request on; those accepted before are answered by theirs."""
        if not len(served.bank):
            raise ConfigError("serve: the bank would have no reader; at least one is needed.")
        with self._changed:
            self.served = served
            self._works.clear()

    @property
    def unanswered(self) -> int:
        """Requests that were accepted and are not answered yet."""
        return self._unanswered

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted."""
        return not self._closing and all(thread.is_alive() for thread in self._threads)

    def ask(
        self,
        texts: Sequence[Any],
        tasks: Sequence[str] | None = None,
        *,
        raw: bool = False,
        truncate: bool = True,
        bank: ReaderBank | None = None,
    ) -> Future[list[Any]]:
        """Ask readers about texts, pairs of texts or files.

        Args:
            texts: All texts, all pairs of texts, or all `Upload`s of one medium.
            tasks: Names of the readers; None: all that read such. The pass stops at the highest layer that these need.
            raw: Logits in place of probabilities.
            truncate: Read the start of a text that is too long; else it is an error.
            bank: Which is asked; None: the one that is served now.

        Returns:
            A future of what `lamina.predict` gives. TooLongError is its exception where a text may not be cut.

        Raises:
            UnknownNameError: If a reader does not exist.
            ConfigError: If one does not read what came, or none does.
            DataError: If a file is not what it says.
            TooLargeError: If files are too large once decoded.
            OverloadedError, ClosedError: If the request is not accepted.
        """
        asked = self.bank if bank is None else bank
        names = readers_of(asked, tasks, texts)
        return self.submit(
            sized(asked, names, texts), (asked, names, raw), lambda: PredictWorker(asked, names, raw=raw), truncate
        )

    def explain(self, text: Any, tasks: Sequence[str] | None = None, *, truncate: bool = True) -> Future[list[Any]]:
        """Ask what readers took their answer from, as `ask` does; the future is of a list of one `ExplainWorker` gives.

        Raises:
            LaminaError: As of `ask`.
        """
        asked = self.bank
        names = readers_of(asked, tasks, [text])
        return self.submit(
            sized(asked, names, [text]), (asked, "explain", names), lambda: ExplainWorker(asked, names), truncate
        )

    def submit(self, texts: Sequence[Any], key: Any, make: Callable[[], Worker], truncate: bool) -> Future[list[Any]]:
        """Queue texts for the worker that serves this bank and these tasks; return a future of one answer per text.

        Args:
            texts: Texts, pairs of texts or files of one request.
            key: Identifies the worker: the bank and what is asked of it.
            make: Builds the worker if none is cached under `key`.
            truncate: Cut texts that are too long. False: the future fails with TooLongError.

        Raises:
            ClosedError: If the server is shutting down.
            OverloadedError: If `max_concurrent_requests` requests are not answered yet.
        """
        with self._changed:
            if self._closing:
                raise ClosedError("serve: the server is about to end; ask again later.")
            if self._unanswered >= self.settings.max_concurrent_requests:
                most = self.settings.max_concurrent_requests
                raise OverloadedError(f"serve: {self._unanswered} requests wait; {most} may. Ask again later.")
            job = Job(texts, self._work_for(key, make), truncate)
            self._unanswered += 1
            job.future.add_done_callback(self._answered)
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def _work_for(self, key: Any, make: Callable[[], Worker]) -> Worker:
        """Return the cached worker of `key`, or build one; it is cached only while its bank is the one being served."""
        if key in self._works:
            return self._works[key]
        work = make()
        if work.bank is self.bank:
            if len(self._works) == _KEPT:
                self._works.pop(next(iter(self._works)))
            self._works[key] = work
        return work

    def _answered(self, future: Future[list[Any]]) -> None:
        with self._changed:
            self._unanswered -= 1
            if future.cancelled():  # what nobody waits for is not kept until its turn
                self._waiting = deque(job for job in self._waiting if job.future is not future)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop accepting requests and answer the queued ones; fail what is left at the timeout with ClosedError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + self.settings.shutdown_timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._changed:
            left = [*self._waiting]
            self._waiting.clear()
        for job in left:
            _fail(job, ClosedError("serve: the server ended before this was answered."))

    def _work(self) -> None:
        spills.set(False)  # what a request holds stays in memory
        while self._serve_turn():
            pass

    def _serve_turn(self) -> bool:
        """Answer the next batch; False at the end."""
        if (turn := self._next_turn()) is None:
            return False
        try:
            self._run(turn.jobs, turn)
        finally:
            self._end(turn)
        return True

    def _next_turn(self) -> _Turn | None:
        """Wait for the next batch and return it; None once the scheduler is closed and the queue is empty.

        If a pass is free, any queued request will do. Otherwise the batch is tokenised ahead, once enough tokens are
        queued and no request has arrived for a moment, so that it does not begin with fewer texts than it could.
        """
        with self._changed:
            seen = -1
            while not (self._waiting and self._free > self._ready):
                if self._closing and not self._waiting:
                    return None
                is_worth = not self._ready and sum(job.size for job in self._waiting) >= _WORTH_READING
                if is_worth and seen == len(self._waiting):
                    break
                seen = len(self._waiting)
                self._changed.wait(_SETTLED if is_worth else None)
            turn = _Turn(next_batch(self._waiting, self._budget), begun=self._free > self._ready)
            if turn.begun:
                self._free -= 1
            else:
                self._ready += 1
            taken = set(map(id, turn.jobs))
            self._waiting = deque(job for job in self._waiting if id(job) not in taken)
            return turn

    def _begin(self, turn: _Turn) -> None:
        """Wait until the pass of a batch that was tokenised ahead may begin, and count that pass as running."""
        with self._changed:
            if not turn.begun:
                self._changed.wait_for(lambda: self._free > 0)
                self._free, self._ready, turn.begun = self._free - 1, self._ready - 1, True

    def _end(self, turn: _Turn) -> None:
        with self._changed:
            if turn.begun:
                self._free += 1
            else:  # it failed, or its clients left, before its pass began
                self._ready -= 1
            self._changed.notify_all()

    def _read(self, jobs: Sequence[Job]) -> tuple[Any, float]:
        """Tokenise the texts of `jobs`; return the prepared inputs and the seconds that tokenising took."""
        with self.reading:
            start = time.perf_counter()
            return jobs[0].work.read([text for job in jobs for text in job.texts]), time.perf_counter() - start

    def _whole(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs whose texts fit or may be cut; fail the others with TooLongError."""
        whole: list[Job] = []
        for job in jobs:
            try:
                if not job.truncate:
                    job.work.check_lengths(job.texts)
                whole.append(job)
            except Exception as error:
                _fail(job, error)
        return whole

    def _still_asked(self, jobs: Sequence[Job], prepared: Any, turn: _Turn) -> list[Job]:
        """Wait for the pass to begin; return the jobs whose client still waits and whose texts fit or may be cut."""
        if prepared.cut:
            with self.reading:
                jobs = self._whole(jobs)
        if jobs:
            self._begin(turn)
        return [job for job in jobs if job.start()]

    def _run(self, jobs: Sequence[Job], turn: _Turn) -> None:
        work = jobs[0].work
        try:
            prepared, read = self._read(jobs)
            still = self._still_asked(jobs, prepared, turn)
            if len(still) < len(jobs):
                if still:
                    self._run(still, turn)
                return
            begin = time.perf_counter()
            with self.turns.shared():
                answers = iter(work.run(prepared, self._budget))
        except Exception as error:
            if len(jobs) == 1:
                _fail(jobs[0], error)
                return
            for job in jobs:  # one that fails spoils no other
                self._run([job], turn)
            return
        end = time.perf_counter()
        if self._tell is not None:  # first, so that who has an answer finds it counted
            queue, texts = [begin - read - job.since for job in jobs], sum(len(job.texts) for job in jobs)
            self._tell(work, BatchTiming(queue, read, end - begin, len(jobs), texts, prepared.tokens))
        for job in jobs:
            own = [next(answers) for _ in job.texts]
            job.future.set_result(own)


def _fail(job: Job, error: Exception) -> None:
    """Fail a job with `error`; an unexpected error is logged, and the client gets only its type."""
    if not isinstance(error, LaminaError):
        logger.error("serve: a request failed", exc_info=error)
        error = LaminaError(f"serve: the model could not answer ({type(error).__name__}); the log says more.")
    if job.start():
        job.future.set_exception(error)
