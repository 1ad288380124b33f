"""From requests to passes: what waits is read together, and run together."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, final

from lamina.data.arrow import spills
from lamina.data.batches import Budget
from lamina.errors import ConfigError, LaminaError
from lamina.layers.turns import take_turns
from lamina.serve.explain import ExplainWork
from lamina.serve.jobs import AnswerWork, Work
from lamina.serve.uploads import Upload, readers_of, sized

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.serve.settings import Settings

logger = logging.getLogger(__name__)

_WORTH_A_PASS = {"cpu": 256, "accelerator": 8192}  # tokens
_FILE_TOKENS, _SIZE_OF_TOKEN = 256, 4096  # that a file counts for, so that not too much is decoded at once
_SETTLED = 0.005  # seconds in which no request comes, after which those that wait are read ahead
_KEPT = 256  # works: what was asked lately is not made anew


class OverloadedError(LaminaError):
    """More requests wait than a server takes."""


class ClosedError(LaminaError):
    """A server that ends takes no more requests."""


@dataclass(eq=False)
class Job:
    """A request: some texts or pairs, and what is asked about them."""

    texts: Sequence[Any]
    work: Work
    truncate: bool
    future: Future[list[Any]] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Timing:
    """A batch: seconds that each part took, and how much was in it."""

    queue: Sequence[float]  # of each request
    read: float  # tokenising
    run: float  # passes, and making answers of them
    requests: int
    texts: int
    tokens: int


@dataclass(frozen=True)
class _Ahead:
    """What was read for requests that wait while a pass runs."""

    jobs: Sequence[Job] = ()
    prepared: Any = None
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Served:
    """What is served at one time."""

    bank: ReaderBank
    number: int  # of this state; each change makes the next
    versions: Mapping[str, int]  # reader -> how often one of its name was put in place


@final
class Engine:
    """Runs a bank for any number of threads that ask.

    One thread of its own runs the passes. A batch is what waits when the one before is done: requests for the same
    answers, the oldest first, up to about `settings.max_batch_tokens`. A request that nobody waits for any more is left
    out. The texts are read as tokens by another thread while the batch before runs, if they are worth a pass of their
    own and no more came; else when it is their turn. Another bank may take the place of the one that is served: a
    request is answered by the bank that it was asked of, whole.

    Args:
        bank: The readers and their model; its processor reads the texts.
        settings: The limits.
        tell: Called with the `Timing` of each batch.
    """

    def __init__(
        self, bank: ReaderBank, settings: Settings, tell: Callable[[Work, Timing], None] | None = None
    ) -> None:
        if not len(bank):
            raise ConfigError("serve: the bank has no reader; at least one is needed.")
        self.served, self.settings = Served(bank.eval(), 1, dict.fromkeys(bank, 1)), settings
        self._tell = tell
        self.turns = take_turns(bank.model)  # with threads that write, and those that look at the model
        self.reading = Lock()  # how a tokenizer cuts is a state of it, set before each text
        enough = _WORTH_A_PASS["cpu" if bank.device.type == "cpu" else "accelerator"]
        self._budget = Budget(settings.max_batch_tokens, enough)
        self._waiting: deque[Job] = deque()
        self._unanswered = 0
        self._changed = Condition()
        self._closing = False
        self._works: dict[Any, Work] = {}
        self._running, self._ahead = False, _Ahead()
        self._reader = ThreadPoolExecutor(1, initializer=partial(spills.set, False))  # what it holds stays in memory
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def bank(self) -> ReaderBank:
        """The bank that is served now."""
        return self.served.bank

    def serve(self, served: Served) -> None:
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
        return not self._closing and self._thread.is_alive()

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
            sized(asked, names, texts), (asked, names, raw), lambda: AnswerWork(asked, names, raw=raw), truncate
        )

    def explain(self, text: Any, tasks: Sequence[str] | None = None, *, truncate: bool = True) -> Future[list[Any]]:
        """Ask what readers took their answer from, as `ask` does; the future is of a list of one `ExplainWork` gives.

        Raises:
            LaminaError: As of `ask`.
        """
        asked = self.bank
        names = readers_of(asked, tasks, [text])
        return self.submit(
            sized(asked, names, [text]), (asked, "explain", names), lambda: ExplainWork(asked, names), truncate
        )

    def submit(self, texts: Sequence[Any], key: Any, make: Callable[[], Work], truncate: bool) -> Future[list[Any]]:
        """Have texts read and run by the work of a key, of which the bank is a part."""
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

    def _work_for(self, key: Any, make: Callable[[], Work]) -> Work:
        """The work of a key, which is kept while its bank is served."""
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
        """Answer what was accepted, then end; what is not answered in time is told so."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self.settings.shutdown_timeout)
        with self._changed:
            left = [*self._waiting]
            self._waiting.clear()
        for job in left:
            _fail(job, ClosedError("serve: the server ended before this was answered."))

    def _work(self) -> None:
        spills.set(False)  # what a request holds stays in memory
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    self._reader.shutdown(wait=False)
                    return
                jobs = self._take()
            if jobs:
                self._run(jobs)

    def _take(self) -> list[Job]:
        """Those that are next, but for what nobody waits for any more."""
        jobs, self._waiting = self._next()
        return [job for job in jobs if job.future.set_running_or_notify_cancel()]

    def _next(self) -> tuple[list[Job], deque[Job]]:
        """The oldest request and those that may share its passes; and the others."""
        jobs: list[Job] = []
        left: deque[Job] = deque()
        room = self.settings.max_batch_tokens
        for job in self._waiting:
            alike = not jobs or (job.work is jobs[0].work and _is_pair(job) == _is_pair(jobs[0]))
            size = _size(job)
            if alike and (not jobs or size <= room):
                jobs.append(job)
                room -= size
            else:
                left.append(job)
        return jobs, left

    def _read_ahead(self) -> _Ahead:
        """Read what waits while a pass runs, once it is worth a pass and no more comes."""
        with self._changed:
            seen = -1
            while self._running:
                worth = sum(map(_size, self._waiting)) >= self._budget.enough
                if worth and seen == len(self._waiting):
                    break
                seen = len(self._waiting)
                self._changed.wait(_SETTLED if worth else None)
            else:
                return _Ahead()
            jobs, _ = self._next()
        try:
            return self._read(jobs)
        except Exception:  # it is told when their turn comes
            return _Ahead()

    def _read(self, jobs: Sequence[Job]) -> _Ahead:
        with self.reading:
            start = time.perf_counter()
            prepared = jobs[0].work.read([text for job in jobs for text in job.texts])
            return _Ahead(jobs, prepared, time.perf_counter() - start)

    @contextmanager
    def _reading_ahead(self) -> Generator[None]:
        """Have what waits read meanwhile."""
        self._running = True
        ahead = self._reader.submit(self._read_ahead)
        try:
            yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()
            self._ahead = ahead.result()

    def _whole(self, jobs: list[Job]) -> list[Job]:
        """Those whose texts need not be cut, or may be."""
        whole: list[Job] = []
        for job in jobs:
            try:
                if not job.truncate:
                    job.work.check_lengths(job.texts)
                whole.append(job)
            except Exception as error:
                _fail(job, error)
        return whole

    def _run(self, jobs: list[Job]) -> None:
        start, work = time.perf_counter(), jobs[0].work
        try:
            ahead, self._ahead = self._ahead, _Ahead()
            read = ahead if ahead.jobs == jobs else self._read(jobs)
            if read.prepared.cut:
                with self.reading:
                    whole = self._whole(jobs)
                if len(whole) < len(jobs):
                    if whole:
                        self._run(whole)
                    return
            begin = time.perf_counter()
            with self._reading_ahead(), self.turns.shared():
                answers = iter(work.run(read.prepared, self._budget))
        except Exception as error:
            if len(jobs) == 1:
                _fail(jobs[0], error)
                return
            for job in jobs:  # one that fails spoils no other
                self._run([job])
            return
        end = time.perf_counter()
        if self._tell is not None:  # first, so that who has an answer finds it counted
            queue, texts = [start - job.since for job in jobs], sum(len(job.texts) for job in jobs)
            self._tell(work, Timing(queue, read.seconds, end - begin, len(jobs), texts, read.prepared.tokens))
        for job in jobs:
            own = [next(answers) for _ in job.texts]
            if not job.future.done():
                job.future.set_result(own)


def _fail(job: Job, error: Exception) -> None:
    """Tell a request what is wrong; what nobody foresaw is in the log alone."""
    if not isinstance(error, LaminaError):
        logger.error("serve: a request failed", exc_info=error)
        error = LaminaError(f"serve: the model could not answer ({type(error).__name__}); the log says more.")
    if not job.future.done():
        job.future.set_exception(error)


def _size(job: Job) -> int:
    return sum(map(_about_tokens, job.texts))


def _is_pair(job: Job) -> bool:
    return isinstance(job.texts[0], tuple)


def _about_tokens(text: Any) -> int:
    """Roughly, before it is read; passes are cut to measure afterwards."""
    if isinstance(text, Upload):
        return max(_FILE_TOKENS, text.size // _SIZE_OF_TOKEN)
    parts = [text] if isinstance(text, str) else text
    return 2 + sum(len(part) // 4 + 1 for part in parts)
