"""The scheduler: group queued requests into batches, tokenise them, run the model and answer each request.

A batch is answered in one or more passes of the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, RLock, Thread, Timer
from typing import TYPE_CHECKING, Literal, TypeVar, final

import torch

from lamina.data.arrow import spills
from lamina.data.batches import Budget
from lamina.errors import ConfigError, LaminaError
from lamina.layers.pass_lock import pass_lock
from lamina.serve.explain import ExplainWorker, Explanation
from lamina.serve.queue import AnyJob, Job, JobQueue
from lamina.serve.served_engine import ServedEngine
from lamina.serve.telemetry import BatchTiming, counting, note_readers
from lamina.serve.uploads import Example, readers_of, sized
from lamina.serve.workers import AnyWorker, Prediction, PredictWorker, Tokenised, TooLongError, Truncate, Worker
from lamina.utils import usable_cores

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.serve.settings import Settings

logger = logging.getLogger(__name__)

# Fixed cost of a pass, in tokens, with which requests are grouped: in PyTorch by device, and in ONNX Runtime. On a CPU
# it is about half of the tokens that take as long. Smaller groups wait less, and passes cost little more.
_OVERHEAD = {"cpu": 32, "accelerator": 4096, "onnx": 12}
_SLICE = {"cpu": 2048, "accelerator": 16384}  # tokens of a pass of several requests
# Tokens of a pass of a larger request, after which others have a turn; `benchmarks/waiting.py` compares other numbers.
_PIECE = {"cpu": 256, "accelerator": 16384}
_LARGE = 16384  # estimated tokens of a request from which it has no pass yet while it is tokenised, which takes long
_READ_AHEAD_TOKENS = 256  # queued tokens from which a batch is tokenised while all allowed passes are running
_SETTLED_S = 0.005  # seconds without a new request before that, so that a batch does not start with too few texts
_MOST_PASSES = 8  # by default; with more, threads mostly wait for Python's lock
_SHUT_DOWN = "serve: the server was shut down before this request was answered."
_MAX_WORKERS = 256  # cached workers; the one that was built first is dropped

TokenisedT = TypeVar("TokenisedT", bound=Tokenised)
AnswerT = TypeVar("AnswerT")


class OverloadedError(LaminaError):
    """Raised when a request is refused because too many are being answered."""


class ClosedError(LaminaError):
    """Raised when a request is refused, or fails, because the server is shutting down or its client has left."""


@dataclass(frozen=True, eq=False)
class ServedBank:
    """The bank that answers requests, with its version numbers. Each change of the readers makes a new one.

    Attributes:
        bank: The readers and their model.
        number: Version of the bank: 1 at the start, and 1 more after each change.
        versions: Reader name -> version of the reader: the number of readers of this name that have been served so far.
        removed: Names of the cascades that this change removed, because one of their readers was replaced.
    """

    bank: ReaderBank
    number: int
    versions: Mapping[str, int]
    removed: Sequence[str] = ()


@dataclass
class _Run:
    """A batch whose passes have begun. Between two passes it may pause, so that passes of other batches can run.

    `jobs` are its requests, with `tokens` tokens in all. Each step of the generator `passes` runs the next pass; the
    last returns the answers of all texts. The first pass began at `begin` (`time.perf_counter`). Tokenising took `read`
    seconds; the passes have taken `seconds` so far.
    """

    jobs: Sequence[AnyJob]
    passes: Generator[None, None, Sequence[object]]
    begin: float
    read: float
    tokens: int
    seconds: float = 0.0


@dataclass
class _Turn:
    """What a thread does next with one free pass: begin a new batch, or run the next pass of one that has begun.

    `jobs` are the requests, and `run` the batch if it has begun. `holds` says what the scheduler counts for this turn:
    "pass" (it is running), "place" (it waits for a free pass), "reading" (it is a very large request that is not yet
    tokenised), or "nothing" (it has ended). `keeps_pass`: the turn does not end with its batch, as another may follow.
    """

    jobs: Sequence[AnyJob]
    holds: Literal["nothing", "reading", "place", "pass"]
    run: _Run | None = None
    keeps_pass: bool = False


def default_passes(bank: ReaderBank) -> int:
    """Return the default number of passes that run at once: CPU cores / threads of a pass, rounded down, from 1 to 8.

    A pass uses as many threads as torch is set to, by default all cores. The result is 1 on a GPU, and for models that
    change their kind of attention when a text is short, for example BigBird.
    """
    if bank.device.type != "cpu" or getattr(bank.model.config, "attention_type", None) == "block_sparse":
        return 1
    return min(_MOST_PASSES, max(1, usable_cores() // torch.get_num_threads()))


@final
class Scheduler:
    """Answers requests of any number of threads with one bank, several requests in one pass of the model.

    A batch consists of the oldest queued request and of those that are cheapest to run along with it; `JobQueue` says
    when a shorter one may overtake it. `max_concurrent_passes + 1` threads run from the start until `close`. Each takes
    a batch from the queue, tokenises it, waits for a free pass, runs the model, and answers the requests. The extra
    thread tokenises the next batch while all passes are running. A request whose client has left is dropped.

    A request of more than 256 tokens (on a GPU: 16,384) pauses between its passes, so that a batch of newer requests
    can run. The two take turns until one of them is done.

    The bank can be replaced while the server runs. A request is answered by the bank that was served when it arrived.

    Args:
        bank: The readers and their model, which are put into evaluation mode; its processor tokenises the texts.
        settings: The limits, and the backend that computes the answers.
        on_batch: Called in a thread of the scheduler after each batch, with its worker and its `BatchTiming`. An error
            that it raises is logged.

    Attributes:
        served: The bank that is served now, with its versions.
        settings: The limits, with the number of passes filled in.
        engine: The engine that answers in place of PyTorch where it can.
        pass_lock: The model's lock, held as `shared` during a pass. Code that briefly changes the model waits for it.
        unanswered: Number of requests that were accepted and are not answered yet.

    Raises:
        ConfigError: If the bank has no reader.
        LaminaError: If the backend is "onnx" or "int8" and cannot answer for the bank.
    """

    def __init__(
        self, bank: ReaderBank, settings: Settings, on_batch: Callable[[AnyWorker, BatchTiming], None] | None = None
    ) -> None:
        if not len(bank):
            raise ConfigError("serve: the bank has no reader; at least one is needed.")
        passes = settings.max_concurrent_passes or default_passes(bank)
        self.settings = settings.model_copy(update={"max_concurrent_passes": passes})
        self.served = ServedBank(bank.eval(), 1, dict.fromkeys(bank, 1))
        self.engine = ServedEngine(settings.backend, bank)
        self._on_batch = on_batch
        self.pass_lock = pass_lock(bank.model)
        self._device = "cpu" if bank.device.type == "cpu" else "accelerator"
        self._slice = min(settings.max_batch_tokens, _SLICE[self._device])
        self._piece = min(settings.max_batch_tokens, _PIECE[self._device])
        # One lock for all fields below and for `served`, which change together. It is never held while texts are
        # tokenised or the model runs. Threads that wait for work and those that wait for a free pass have a condition
        # each: waking a thread that has nothing to do takes processor time from the pass that runs.
        lock = RLock()
        self._changed, self._pass_ended = Condition(lock), Condition(lock)
        self._waiting = JobQueue()
        self.unanswered = 0
        self._closing = False
        self._timer: Timer | None = None  # lets waiting requests fail at `_ends_at`
        self._ends_at = math.inf  # when unanswered requests fail, in seconds of `time.monotonic`; set by `end`
        self._workers: dict[Hashable, AnyWorker] = {}
        self._free = passes  # number of passes that may start now
        self._ready = 0  # tokenised batches that wait for a free pass
        self._reading = 0  # very large requests that are being tokenised
        self._paused: list[_Run] = []  # batches between two passes, oldest first
        self._is_new_next = False  # whether a new batch goes before the paused ones
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(passes + 1)]
        for thread in self._threads:
            thread.start()

    @property
    def _budget(self) -> Budget:
        """The maximum number of tokens of a pass, and its fixed cost with the engine that answers now."""
        return Budget(self._slice, _OVERHEAD[self._device if self.engine.name == "torch" else "onnx"])

    @property
    def _largest(self) -> float:
        """The most tokens of a request that may be taken now: any number, or `_LARGE` if only one thread is left."""
        return _LARGE if self._reading == len(self._threads) - 1 else math.inf

    @property
    def bank(self) -> ReaderBank:
        """The bank that is served now."""
        return self.served.bank

    def serve(self, served: ServedBank) -> None:
        """Replace the bank by `served` for all later requests. The old bank answers those that were accepted before.

        If ONNX Runtime answers, an export of the new bank may start in the background; see `ServedEngine.follow`.
        Raises ConfigError if the new bank has no reader, or its frozen model has changed; the old bank then stays.
        """
        if not len(served.bank):
            raise ConfigError("serve: the bank would have no reader; at least one is needed.")
        self.engine.follow(served.bank)  # first, as it may fail
        with self._changed:
            self.served = served
            self._workers.clear()  # they hold the old bank, which can be freed once its last request is answered

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted. False: the server is closing, or a thread of the scheduler has died."""
        return not self._closing and all(thread.is_alive() for thread in self._threads)

    def ask(
        self,
        texts: Sequence[Example],
        tasks: Sequence[str] | None = None,
        *,
        raw: bool = False,
        truncate: Truncate = True,
        bank: ReaderBank | None = None,
    ) -> Future[list[Prediction]]:
        """Queue texts, pairs of texts or files for prediction; return a future of one prediction per text.

        The errors below are raised by this call, before anything is queued. Errors of the prediction itself are raised
        by the future's `result`.

        Args:
            texts: All texts, all pairs of texts, or all `Upload`s of one medium; at least one.
            tasks: Names of the readers that answer; the pass stops at the highest layer that these need. None: all
                readers that read this kind of example.
            raw: Return logits in place of probabilities.
            truncate: Cut texts that are too long. False: the future fails with TooLongError if there are any. "left" or
                "right": it fails with ConfigError if the readers do not cut on this side. With any value, it fails with
                TooLongError or ConfigError in the other cases of `Worker.fit`, such as too many tokens in all.
            bank: The bank that answers. None: the one that is served now.

        Returns:
            A future of a list with, for each text, task -> prediction, as `lamina.predict` returns it.

        Raises:
            UnknownNameError: If a reader does not exist.
            ConfigError: If `texts` or `tasks` is empty, a named reader does not read such examples, no reader does, or
                the bank has no processor.
            DataError: If a file is not an image or an audio file of a known format.
            TooLargeError: If the files are too large once decoded.
            MissingExtraError: If audio needs soundfile, which is not installed.
            OverloadedError: If too many requests wait already.
            ClosedError: If the server is shutting down.
        """
        bank = self.bank if bank is None else bank
        names = readers_of(bank, tasks, texts)
        note_readers(names)
        examples = sized(bank, names, texts)
        return self.submit(
            examples, (bank, names, raw), lambda: PredictWorker(bank, names, raw=raw, engine=self.engine), truncate
        )

    def explain(
        self, text: Example, tasks: Sequence[str] | None = None, *, truncate: Truncate = True
    ) -> Future[list[Explanation]]:
        """Queue one text, pair or file; return a future of a list with one item, the explanation.

        `tasks`, `truncate` and the errors are those of `ask`.
        """
        bank = self.bank
        names = readers_of(bank, tasks, [text])
        note_readers(names)
        examples = sized(bank, names, [text])
        return self.submit(examples, (bank, "explain", names), lambda: ExplainWorker(bank, names), truncate)

    def check_count(self, texts: Sequence[Example]) -> None:
        """Raise TooLongError if a request has more texts than `max_client_batch_size`."""
        if len(texts) > (limit := self.settings.max_client_batch_size):
            raise TooLongError(f"serve: {len(texts)} texts came in one request; at most {limit} are accepted.")

    def submit(
        self,
        texts: Sequence[Example],
        key: Hashable,
        make: Callable[[], Worker[TokenisedT, AnswerT]],
        truncate: Truncate,
    ) -> Future[list[AnswerT]]:
        """Queue texts for the worker that is cached under `key`; return a future of one answer per text.

        Args:
            texts: The texts, pairs of texts or files of one request, all of one kind; at least one.
            key: Identifies the worker: the bank, and the kind of answer.
            make: Function that builds the worker if none is cached under `key`. Its errors are raised here.
            truncate: Cut texts that are too long; as for `ask`.

        Raises ClosedError at shutdown, and OverloadedError if `max_concurrent_requests` requests are unanswered.
        """
        with self._changed:
            if self._closing:
                raise ClosedError("serve: the server is shutting down. Try again later.")
            limit = self.settings.max_concurrent_requests
            if self.unanswered >= limit:
                raise OverloadedError(
                    f"serve: {self.unanswered} requests are waiting; at most {limit} may wait. Try again later."
                )
            job = Job(texts, self._worker_for(key, make), truncate)
            self.unanswered += 1
            job.future.add_done_callback(self._on_done)
            before = self._waiting.tokens
            self._waiting.add(job)
            if self._free > self._ready or before < _READ_AHEAD_TOKENS <= self._waiting.tokens:
                self._changed.notify()
        return job.future

    def _worker_for(
        self, key: Hashable, make: Callable[[], Worker[TokenisedT, AnswerT]]
    ) -> Worker[TokenisedT, AnswerT]:
        """Return the worker cached under `key`, or else build one by `make`, and cache it if its bank is served now.

        The caller holds the lock. If the cache is full, the worker that was built first is dropped. Errors of `make`
        are raised.
        """
        if key in self._workers:
            return self._workers[key]
        worker = make()
        if worker.bank is self.bank:
            if len(self._workers) == _MAX_WORKERS:
                self._workers.pop(next(iter(self._workers)))
            self._workers[key] = worker
        return worker

    def _on_done(self, future: Future[list[AnswerT]]) -> None:
        """Count a request as answered (`future` has a result or an error); a cancelled one also leaves the queue."""
        with self._changed:
            self.unanswered -= 1
            if future.cancelled():  # drop its texts now, not only when its turn comes
                self._waiting.remove(lambda job: job.future is future)

    def end(self, within_s: float) -> None:
        """Let requests that are not answered after `within_s` seconds fail with ClosedError; return at once.

        At that time, requests that wait for a pass fail at once; for others, the pass that is running is the last. New
        requests are accepted until `close`. A second call can only make that time earlier.
        """
        self._ends_at = min(self._ends_at, (now := time.monotonic()) + within_s)
        if self._timer is not None:  # it would keep the bank in memory
            self._timer.cancel()
        self._timer = Timer(self._ends_at - now, self._fail_waiting)
        self._timer.daemon = True
        self._timer.start()

    def _fail_waiting(self) -> None:
        """Let all requests that wait for a pass fail with ClosedError, also those that pause between two passes."""
        with self._changed:
            left = [*self._waiting.remove(lambda _: True), *(job for run in self._paused for job in run.jobs)]
            self._paused.clear()
            self._pass_ended.notify_all()  # a batch that is tokenised ahead waits there
        for job in left:  # without the lock: failing a job calls `_on_done`, which takes it
            _fail(job, ClosedError(_SHUT_DOWN))

    def close(self) -> None:
        """Stop accepting requests, and wait until the queued ones are answered, at most `shutdown_timeout` seconds.

        Requests that wait for a pass after that fail with ClosedError. A running ONNX export is ended at once.
        """
        self.engine.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + self.settings.shutdown_timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._fail_waiting()
        if self._timer is not None:  # it would keep the bank in memory
            self._timer.cancel()

    def _work(self) -> None:
        """Answer batches until the scheduler is closed, with encoded texts in memory only. Every thread runs this."""
        spills.set(False)  # texts of requests must never reach the disk, so encoded texts stay in memory too
        while self._serve_turn():
            pass

    def _serve_turn(self) -> bool:
        """Wait for the next turn and run it; return False once the scheduler is closed and nothing is queued or paused.

        A turn is a new batch, or the next pass of a paused one. This is a separate method so that its variables are
        freed while the thread waits: they would keep the last batch, and so a replaced bank, in memory.
        """
        if (turn := self._next_turn()) is None:
            return False
        try:
            if turn.run is None:
                self._run(turn.jobs, turn)
            else:
                self._continue(turn.run, turn)
        finally:
            self._end(turn)
        return True

    def _next_turn(self) -> _Turn | None:
        """Wait for the next turn and return it; None once the scheduler is closed and nothing is queued or paused.

        While a pass is free, a paused batch or a request that `_largest` allows is enough. While none is, this returns
        a new batch to be tokenised ahead (at most one waits for a pass), once enough tokens are queued and no request
        has arrived for a moment. The turn counts until `_end`; see `_Turn.holds`.
        """
        with self._changed:
            seen = -1  # length of the queue when it was last looked at
            # A free pass that a tokenised batch already waits for is that batch's, hence `_free > _ready`.
            while not ((self._paused or self._waiting.has(self._largest)) and self._free > self._ready):
                if self._closing and not self._waiting and not self._paused:
                    return None
                # At most one batch is tokenised ahead: a second would only fix its texts earlier than needed. A very
                # large request does not count until its texts are tokenised, so a batch may be tokenised beside it.
                is_worth = not self._ready and self._waiting.tokens >= _READ_AHEAD_TOKENS
                is_worth = is_worth and self._waiting.has(self._largest)
                if is_worth and seen == len(self._waiting):
                    break
                seen = len(self._waiting)
                self._changed.wait(_SETTLED_S if is_worth else None)
            return self._take_turn()

    def _take_turn(self) -> _Turn:
        """Return a new batch from the queue, or the oldest paused batch, alternating between the two.

        The caller holds the lock. The turn counts as running, or as ready if no pass is free. A very large request
        counts as neither until its texts are tokenised ("reading"), because others would wait for its pass meanwhile.
        """
        begun = self._free > self._ready
        if begun and self._paused and not (self._is_new_next and self._waiting.has(self._largest)):
            run = self._paused.pop(0)
            self._free -= 1
            self._is_new_next = True
            return _Turn(run.jobs, "pass", run)
        self._is_new_next = False
        jobs = self._waiting.take(self._budget, self._piece, self._largest)
        if jobs[0].size > _LARGE:
            self._reading += 1
            return _Turn(jobs, "reading")
        if begun:
            self._free -= 1
        else:
            self._ready += 1
        return _Turn(jobs, "pass" if begun else "place")

    def _begin(self, turn: _Turn) -> None:
        """Count the pass of `turn` as running, once one is free; ClosedError if the time of a shutdown is up first."""
        with self._changed:
            if turn.holds == "pass":
                return
            if turn.holds == "reading":
                self._reading, self._ready, turn.holds = self._reading - 1, self._ready + 1, "place"
                self._changed.notify()  # the next very large request may be tokenised now
            self._pass_ended.wait_for(lambda: self._free > 0 or time.monotonic() >= self._ends_at)
            if self._free <= 0:
                raise ClosedError(_SHUT_DOWN)
            self._free, self._ready, turn.holds = self._free - 1, self._ready - 1, "pass"
            if self._waiting.tokens >= _READ_AHEAD_TOKENS:  # the next batch may be tokenised now
                self._changed.notify()

    def _end(self, turn: _Turn) -> None:
        """End a turn: its pass no longer counts as running, and threads that wait for a free pass are woken.

        If a batch that was tokenised ahead fails, or loses all its clients, before its pass began, it no longer counts
        as ready. A second call for the same turn changes nothing.
        """
        with self._changed:
            if turn.holds == "nothing":  # it has ended before
                return
            self._free += turn.holds == "pass"
            self._reading -= turn.holds == "reading"
            self._ready -= turn.holds == "place"
            turn.holds = "nothing"
            self._pass_ended.notify()
            self._changed.notify_all()

    def _still_asked(self, jobs: Sequence[AnyJob], cut: int, turn: _Turn) -> list[AnyJob]:
        """Wait until the pass of `turn` may begin; return the jobs that are neither cancelled nor too long.

        The returned jobs can no longer be cancelled. `cut` is the number of texts in `jobs` that were cut. If it is not
        0, jobs that are too long and may not be cut fail. If all fail, there is no wait. Raises ClosedError if the time
        of a shutdown is up first.
        """
        if cut:
            jobs = _accepted(jobs, lambda job: None if job.truncate else job.worker.check_lengths(job.texts))
        if jobs:
            self._begin(turn)
        return [job for job in jobs if job.start()]

    def _run(self, jobs: Sequence[AnyJob], turn: _Turn) -> None:
        """Answer the jobs of a new batch in the pass of `turn`, once it is free; a job that causes an error fails.

        If jobs drop out after tokenising, the remaining jobs are tokenised and run again. If the pass fails, each job
        is run by itself, so that one bad request does not fail the others.
        """
        jobs = _accepted(jobs, lambda job: job.fit(self.settings.max_request_tokens))
        if not jobs or self._fail_if_over(jobs):
            return
        try:
            parts, read = jobs[0].worker.read_parts([text for job in jobs for text in job.texts])
            still = self._still_asked(jobs, sum(part.cut for part in parts), turn)
        except Exception as error:
            self._run_apart(jobs, error, turn)
            return
        if len(still) < len(jobs):
            if still:
                self._run(still, turn)
            return
        budget = self._budget if len(jobs) > 1 else self._budget._replace(max_tokens=self._piece)
        passes, tokens = jobs[0].worker.answer(parts, budget), sum(part.tokens for part in parts)
        self._continue(_Run(jobs, passes, time.perf_counter(), read, tokens), turn)

    def _run_apart(self, jobs: Sequence[AnyJob], error: Exception, turn: _Turn) -> None:
        """Run each job of a batch that failed with `error` by itself, all in one turn; a single job fails with it."""
        if len(jobs) == 1:
            _fail(jobs[0], error)
            return
        turn.keeps_pass = True
        for job in jobs:
            self._run([job], turn)

    def _continue(self, run: _Run, turn: _Turn) -> None:
        """Run the passes of a batch in a turn, and answer its jobs. If all clients have left, the batch is dropped.

        A single request with more than `_piece` tokens pauses after each pass, so that others can run in between. If a
        pass fails, each job is run by itself.
        """
        is_large = len(run.jobs) == 1 and run.tokens > self._piece
        while True:
            if self._fail_if_over(run.jobs):
                run.passes.close()
                return
            start = time.perf_counter()
            try:
                with self.pass_lock.shared():
                    next(run.passes)
            except StopIteration as end:
                run.seconds += time.perf_counter() - start
                if not turn.keeps_pass:
                    self._end(turn)  # the next pass runs while this thread answers
                self._answer(run, end.value)
                return
            except Exception as error:
                self._run_apart(run.jobs, error, turn)
                return
            run.seconds += time.perf_counter() - start
            if is_large:
                with self._changed:
                    # The first pass of a new batch was its turn, unless others have been paused for longer.
                    self._is_new_next = self._is_new_next or not self._paused
                    self._paused = sorted([*self._paused, run], key=lambda paused: paused.begin)
                return

    def _fail_if_over(self, jobs: Sequence[AnyJob]) -> bool:
        """Fail jobs with ClosedError if all clients have left or a shutdown's time is up; return whether it did so."""
        is_late = time.monotonic() >= self._ends_at
        if not is_late and not all(job.future.has_left for job in jobs):
            return False
        for job in jobs:
            _fail(job, ClosedError(_SHUT_DOWN if is_late else "serve: the client has left."))
        return True

    def _answer(self, run: _Run, answers: Sequence[object]) -> None:
        """Report a batch to `on_batch`, then give each of its jobs its part of `answers`."""
        jobs = run.jobs
        if self._on_batch is not None:  # before the answers: a client that has its answer finds it counted in /metrics
            queue, texts = [run.begin - run.read - job.since for job in jobs], sum(len(job.texts) for job in jobs)
            timing = BatchTiming(queue, run.read, run.seconds, len(jobs), texts, run.tokens)
            with counting("a batch"):
                self._on_batch(jobs[0].worker, timing)
        rest = iter(answers)
        for job in jobs:
            job.future.set_result([next(rest) for _ in job.texts])


def _accepted(jobs: Sequence[AnyJob], check: Callable[[AnyJob], None]) -> list[AnyJob]:
    """Return the jobs for which `check` raises nothing; fail the others."""
    accepted: list[AnyJob] = []
    for job in jobs:
        try:
            check(job)
            accepted.append(job)
        except Exception as error:
            _fail(job, error)
    return accepted


def _fail(job: AnyJob, error: Exception) -> None:
    """Fail a job with `error`, unless its client has cancelled it.

    An unexpected error is logged, and the client is told only its type.
    """
    if not isinstance(error, LaminaError):
        logger.error("serve: a request failed", exc_info=error)
        error = LaminaError(f"serve: the model could not answer ({type(error).__name__}); see the log of the server.")
    if job.start():
        job.future.set_exception(error)
