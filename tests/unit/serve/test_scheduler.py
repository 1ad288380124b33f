# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportReturnType=false, reportAssignmentType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from threading import Event, Thread
from typing import Any

import pytest
from tests.support.portions import one_in
from tests.support.stored import TEXTS, tiny_bank

import lamina
from lamina.bank import ReaderBank
from lamina.data import arrow
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.layers.preserve import preserve_model
from lamina.serve import Scheduler, Settings
from lamina.serve import scheduler as scheduling
from lamina.serve.scheduler import ClosedError, OverloadedError, ServedBank
from lamina.serve.telemetry import BatchTiming
from lamina.serve.uploads import Upload
from lamina.serve.workers import TOKENIZER_LOCK, Lengths, TooLongError, Worker


class Slow(Worker):
    """A worker that holds each pass until `go` is set, and answers each text with the text itself."""

    lengths = Lengths((10,))

    def __init__(self, bank: ReaderBank) -> None:
        self.bank = bank
        self.go, self.begun, self.seen = Event(), Event(), list[str]()
        self.read_at_once: list[int] = []

    def read(self, texts: Sequence[Any]) -> Any:
        self.read_at_once.append(len(texts))
        return Texts(texts)

    def run(self, prepared: Any, budget: Any) -> Generator[None, None, Sequence[Any]]:
        self.begun.set()
        assert self.go.wait(10)
        self.seen += prepared
        if "bad" in prepared:
            raise ZeroDivisionError("bad")
        yield from ()  # a generator whose only pass is the last
        return list(prepared)


class Texts(list[str]):
    tokens, cut = 1, 0


@pytest.fixture
def make() -> Iterator[Callable[..., Scheduler]]:
    engines: list[Scheduler] = []

    def made(bank: ReaderBank | None = None, **settings: Any) -> Scheduler:
        limits = {"shutdown_timeout": 5, "max_concurrent_passes": 1, **settings}
        engines.append(Scheduler(bank or tiny_bank(), Settings.of(**limits)))
        return engines[-1]

    yield made
    for scheduler in engines:
        scheduler.close()


def held(scheduler: Scheduler) -> tuple[Slow, Callable[..., Future[list[Any]]]]:
    """Return a worker that holds a first request, and a function that queues further requests for it."""
    slow = Slow(scheduler.bank)

    def ask(*texts: str) -> Future[list[Any]]:
        return scheduler.submit(texts, "slow", lambda: slow, truncate=True)

    ask("first")
    assert slow.begun.wait(10)
    return slow, ask


def test_simultaneous_requests_get_the_answers_of_each_alone(make: Callable[..., Scheduler]):
    scheduler = make(max_batch_tokens=40)
    texts = [TEXTS[at % 3] + " the film" * (at % 5) for at in range(30)]
    tasks = [None, ["mood"], ["who"]]
    futures = [scheduler.ask([text], tasks[at % 3], raw=at % 2 == 0) for at, text in enumerate(texts)]
    for at, future in enumerate(futures):
        (found,) = future.result(30)
        (alone,) = lamina.predict(scheduler.bank, [texts[at]], readers=tasks[at % 3])
        assert list(found) == list(alone)
        if "who" in found:
            assert [span["label"] for span in found["who"]] == [span["label"] for span in alone["who"]]
        if "mood" in found and at % 2:
            assert found["mood"]["probabilities"] == pytest.approx(alone["mood"]["probabilities"], abs=1e-5)
    assert scheduler.unanswered == 0


def test_queued_requests_share_a_batch(make: Callable[..., Scheduler]):
    told: list[BatchTiming] = []
    scheduler = make()
    scheduler._on_batch = lambda _, timing: told.append(timing)
    slow, ask = held(scheduler)
    waiting = [ask(f"text {number}") for number in range(5)]
    slow.go.set()
    assert [future.result(10) for future in waiting] == [[f"text {number}"] for number in range(5)]
    assert [timing.requests for timing in told] == [1, 5]


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


LONG = "a word " * 57  # three are worth a pass, two are not


def test_enough_queued_tokens_are_tokenised_while_a_pass_runs(make: Callable[..., Scheduler]):
    told: list[BatchTiming] = []
    scheduler = make()
    scheduler._on_batch = lambda _, timing: told.append(timing)
    slow, ask = held(scheduler)
    waiting = [ask(f"{LONG}{number}") for number in range(3)]
    until(lambda: slow.read_at_once == [1, 3])
    time.sleep(0.2)
    slow.go.set()
    assert [future.result(10) for future in waiting] == [[f"{LONG}{number}"] for number in range(3)]
    assert slow.read_at_once == [1, 3]
    assert [timing.requests for timing in told] == [1, 3]
    assert told[1].read > 0
    assert min(told[1].queue) >= 0.2  # until its pass began, not until it was read


def test_a_tokenised_batch_is_tokenised_again_if_a_job_is_cancelled(make: Callable[..., Scheduler]):
    scheduler = make()
    slow, ask = held(scheduler)
    waiting = [ask(f"{LONG}{number}") for number in range(3)]
    until(lambda: slow.read_at_once == [1, 3])
    assert waiting.pop().cancel()
    slow.go.set()
    answers = [future.result(10) for future in waiting]
    assert slow.seen[1:] == [text for (text,) in answers]
    assert slow.read_at_once == [1, 3, 2]


def test_a_request_after_tokenising_is_in_the_next_batch(make: Callable[..., Scheduler]):
    scheduler = make()
    slow, ask = held(scheduler)
    waiting = [ask(f"{LONG}{number}") for number in range(3)]
    until(lambda: slow.read_at_once == [1, 3])
    waiting.append(ask("one more"))
    slow.go.set()
    answers = [text for future in waiting for text in future.result(10)]
    assert slow.seen[1:] == answers
    assert slow.read_at_once == [1, 3, 1]


def test_an_error_while_tokenising_ahead_fails_that_job_only(
    make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
):
    scheduler = make()
    slow, ask = held(scheduler)

    def fail(texts: Sequence[Any]) -> Any:
        if 3 * LONG in texts:
            raise LaminaError("cannot be read")
        return Texts(texts)

    monkeypatch.setattr(slow, "read", fail)
    bad, good = ask(3 * LONG), ask(f"{LONG}good")
    with pytest.raises(LaminaError, match="cannot be read"):
        bad.result(10)
    assert not good.done()
    slow.go.set()
    assert good.result(10) == [f"{LONG}good"]


def test_a_request_does_not_wait_for_others_while_a_pass_is_free(
    make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
):
    """Neither alone, nor after a pass: the queue is only allowed to settle while all passes are running."""
    monkeypatch.setattr(scheduling, "_SETTLED_S", 3600)
    scheduler = make()
    slow, ask = held(scheduler)
    waiting = [ask(f"{LONG}{number}") for number in range(3)]  # worth tokenising ahead, and not settled
    slow.go.set()
    for future in [*waiting, ask("alone")]:
        future.result(10)


def test_the_next_pass_begins_before_the_answers_of_the_last_are_sent(make: Callable[..., Scheduler]):
    scheduler, sending = make(), Event()
    slow, ask = held(scheduler)
    first_batch = [True]

    def hold_first(*_: Any) -> None:
        if first_batch.pop() if first_batch else False:
            assert sending.wait(10)

    scheduler._on_batch = hold_first
    second = ask("second")
    slow.go.set()
    assert second.result(10) == ["second"]  # while the answers of the first batch are held
    sending.set()


@pytest.mark.parametrize(
    ("cores", "threads", "attention", "passes"),
    [(2, 2, None, 1), (2, 1, None, 2), (64, 1, None, 8), (1, 4, None, 1), (2, 1, "block_sparse", 1)],
)
def test_as_many_passes_run_by_default_as_the_cores_suffice_for(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, attention: str | None, passes: int
):
    bank = tiny_bank()
    bank.model.config.attention_type = attention
    monkeypatch.setattr(scheduling, "usable_cores", lambda: cores)
    monkeypatch.setattr(scheduling.torch, "get_num_threads", lambda: threads)
    assert scheduling.default_passes(bank) == passes


def test_passes_run_at_the_same_time_if_allowed(make: Callable[..., Scheduler]):
    scheduler = make(max_concurrent_passes=2)
    running = list[str]()
    both, go = Event(), Event()

    class Held(Slow):
        def run(self, prepared: Any, budget: Any) -> Generator[None, None, Sequence[Any]]:
            yield from ()
            running.extend(prepared)
            if len(running) == 2:
                both.set()
            assert go.wait(10)
            for text in prepared:
                running.remove(text)
            return list(prepared)

    work = Held(scheduler.bank)
    futures = [scheduler.submit(["0"], "held", lambda: work, truncate=True)]
    until(lambda: running == ["0"])
    futures.append(scheduler.submit(["1"], "held", lambda: work, truncate=True))
    assert both.wait(10)
    later = [scheduler.submit([f"later {number}"], "held", lambda: work, truncate=True) for number in range(3)]
    assert work.read_at_once == [1, 1]  # too little to be read ahead
    go.set()
    assert [future.result(10) for future in futures] == [["0"], ["1"]]
    assert [future.result(10) for future in later] == [[f"later {number}"] for number in range(3)]


@pytest.mark.long
def test_answers_are_the_same_with_several_passes_at_a_time(make: Callable[..., Scheduler]):
    scheduler = make(max_concurrent_passes=3, max_batch_tokens=40)
    texts = [TEXTS[at % 3] + " the film" * (at % 7) for at in range(80)]
    futures = [scheduler.ask([text], ["mood"]) for text in texts]
    for text, future in zip(texts, futures, strict=True):
        (alone,) = lamina.predict(scheduler.bank, [text], readers=["mood"])
        assert future.result(30)[0]["mood"]["probabilities"] == pytest.approx(alone["mood"]["probabilities"], abs=1e-5)
    assert scheduler.unanswered == 0


def test_exclusive_access_to_the_model_alternates_with_passes(make: Callable[..., Scheduler]):
    scheduler = make(max_concurrent_passes=3)
    futures: list[Future[list[Any]]] = []
    for number in range(24):
        futures.append(scheduler.ask([TEXTS[number % 3]]))
        if number % 4 == 0:
            futures.append(scheduler.explain(TEXTS[number % 3]))
        if number % 8 == 0:
            with preserve_model(scheduler.bank.model):
                pass
    assert all(len(future.result(30)) == 1 for future in futures)
    assert scheduler.unanswered == 0


def test_pairs_share_no_batch_with_single_texts(make: Callable[..., Scheduler]):
    told: list[int] = []
    scheduler = make()
    scheduler._on_batch = lambda _, timing: told.append(timing.requests)
    slow, ask = held(scheduler)
    given: list[Any] = ["a", ("a", "b"), "c"]
    waiting = [ask(text) for text in given]
    slow.go.set()
    assert [future.result(10) for future in waiting] == [[text] for text in given]
    assert told == [1, 2, 1]


def test_a_batch_is_counted_before_its_answers_are_given(make: Callable[..., Scheduler]):
    answered: list[bool] = []
    scheduler = make()
    slow, ask = held(scheduler)
    future = ask("a text")
    scheduler._on_batch = lambda *_: answered.append(future.done())
    slow.go.set()
    future.result(10)
    assert answered == [False, False]  # the first is the text that held the scheduler


def test_requests_are_answered_even_if_counting_fails(make: Callable[..., Scheduler], caplog: pytest.LogCaptureFixture):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a metric")

    scheduler = make()
    scheduler._on_batch = fail
    for texts in (["a text"], ["the film", "is good"], [("a", "b")]):
        assert len(scheduler.ask(texts).result(10)) == len(texts)
        assert scheduler.is_open
    assert "a batch could not be counted" in caplog.text


def test_cancelled_requests_are_dropped_from_the_queue(make: Callable[..., Scheduler]):
    scheduler = make(max_concurrent_requests=4)
    slow, ask = held(scheduler)
    for number in range(100):
        assert ask(f"text {number}").cancel()
    assert (scheduler.unanswered, len(scheduler._waiting)) == (1, 0)
    slow.go.set()


def test_texts_of_requests_never_reach_the_disk(make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrow, "SPILL_BYTES", 1)
    monkeypatch.setattr(arrow, "_on_disk", lambda _: pytest.fail("a file was written"))
    assert make().ask(["the film is good ."]).result(30)


def test_a_tokenizer_is_used_by_one_thread_at_a_time(make: Callable[..., Scheduler]):
    scheduler = make()
    with TOKENIZER_LOCK:
        future = scheduler.ask(["the film is good ."])
        with pytest.raises(TimeoutError):
            future.result(0.2)
        work = Slow(scheduler.bank)
        checking = Thread(target=work.check_lengths, args=([Upload("image", b"", 1)],))
        checking.start()
        checking.join(0.2)
        assert not work.read_at_once
    checking.join(10)
    assert work.read_at_once == [1]
    assert future.result(30)


@pytest.mark.parametrize(
    ("texts", "count"),
    [(["a text"] * 20_000, 1), ([("a", "text")] * 20_001, 1), (["good " * 40] * 12_000, 1), (["a text"] * 6_000, 3)],
)
def test_others_have_a_turn_while_requests_of_many_texts_are_tokenised(
    make: Callable[..., Scheduler], texts: Any, count: int
):
    class Slower(Slow):
        def read(self, texts: Sequence[Any]) -> Any:
            time.sleep(0.1)
            return super().read(texts)

    scheduler = make(max_request_tokens=10_000_000)
    scheduler.ask(["the film is good ."]).result(60)
    slow = Slower(scheduler.bank)
    large = [scheduler.submit(texts, "slow", lambda: slow, truncate=True) for _ in range(count)]
    assert scheduler.ask(["the film is good ."]).result(60)
    assert not slow.begun.is_set()  # no large request has a pass yet
    slow.go.set()
    assert all(future.result(60) == texts for future in large)
    assert max(slow.read_at_once) == 1024


def test_exclusive_access_to_the_model_waits_for_the_running_pass(make: Callable[..., Scheduler]):
    scheduler = make()
    slow, ask = held(scheduler)
    looked = Event()

    def look() -> None:
        with preserve_model(scheduler.bank.model):
            looked.set()

    looking = Thread(target=look)
    looking.start()
    assert not looked.wait(0.2)
    slow.go.set()
    assert looked.wait(10)
    looking.join()
    assert ask("after").result(10) == ["after"]


def test_a_cancelled_request_is_not_computed(make: Callable[..., Scheduler]):
    scheduler = make()
    slow, ask = held(scheduler)
    gone, kept = ask("gone"), ask("kept")
    assert gone.cancel()
    slow.go.set()
    assert kept.result(10) == ["kept"]
    assert "gone" not in slow.seen
    with pytest.raises(CancelledError):
        gone.result(1)


def test_too_many_requests_are_refused(make: Callable[..., Scheduler]):
    scheduler = make(max_concurrent_requests=2)
    slow, ask = held(scheduler)
    second = ask("second")
    with pytest.raises(OverloadedError, match=r"serve: 2 requests are waiting; at most 2 may wait. Try again later"):
        ask("third")
    slow.go.set()
    second.result(10)
    assert ask("fourth").result(10) == ["fourth"]


def test_a_request_that_fails_does_not_fail_others(make: Callable[..., Scheduler], caplog: pytest.LogCaptureFixture):
    scheduler = make()
    slow, ask = held(scheduler)
    futures = {text: ask(text) for text in ("good", "bad", "fine")}
    slow.go.set()
    assert futures["good"].result(10) == ["good"]
    assert futures["fine"].result(10) == ["fine"]
    with pytest.raises(LaminaError, match=r"serve: the model could not answer \(ZeroDivisionError\)"):
        futures["bad"].result(10)
    assert "serve: a request failed" in caplog.text


def test_accepted_requests_are_answered_on_close(make: Callable[..., Scheduler]):
    scheduler = make()
    slow, ask = held(scheduler)
    last = ask("last")
    slow.go.set()
    scheduler.close()
    assert last.result(0) == ["last"]
    assert not scheduler.is_open
    with pytest.raises(ClosedError, match=r"serve: the server is shutting down"):
        ask("late")


def test_requests_that_are_not_answered_in_time_fail_on_close():
    scheduler = Scheduler(tiny_bank(), Settings.of(shutdown_timeout=0.05, max_concurrent_passes=1))
    slow, ask = held(scheduler)
    late = ask("late")
    scheduler.close()
    with pytest.raises(ClosedError, match=r"serve: the server was shut down before this request was answered"):
        late.result(1)
    slow.go.set()


@pytest.mark.parametrize("tokens", [1, 10**6])
def test_a_request_that_lasts_longer_than_a_shutdown_fails_after_its_pass(
    tokens: int, make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
):
    """So does one that waits: in the queue, or (from 1 queued token on) tokenised while the pass runs."""
    monkeypatch.setattr("lamina.serve.scheduler._READ_AHEAD_TOKENS", tokens)
    scheduler = make(max_batch_tokens=40, max_concurrent_passes=1)
    large = ByPass(scheduler.bank, 41)
    running = scheduler.submit(["1", "2"], "large", lambda: large, truncate=True)
    assert large.begun.wait(10)
    waiting = scheduler.submit(["3"], "large", lambda: large, truncate=True)
    until(lambda: scheduler._ready == (tokens == 1))
    scheduler.end(0.1)
    for future in (waiting, running):
        with pytest.raises(ClosedError, match="the server was shut down before this request was answered"):
            future.result(10)  # the one that waits fails while the pass still runs
        large.go.set()
    assert large.seen == ["1"]


def test_a_second_end_replaces_the_timer_and_cannot_make_the_end_later(make: Callable[..., Scheduler]):
    scheduler = make()
    slow, ask = held(scheduler)
    late = ask("late")
    scheduler.end(60)
    first = scheduler._timer
    scheduler.end(0.05)
    first.join(5)
    assert not first.is_alive()  # it would keep the bank in memory
    scheduler.end(60)
    with pytest.raises(ClosedError, match="the server was shut down before this request was answered"):
        late.result(10)
    slow.go.set()


def test_without_truncate_a_long_text_is_an_error(make: Callable[..., Scheduler]):
    scheduler = make()
    assert len(scheduler.ask(["film " * 30], ["mood"], truncate=False).result(10)) == 1
    with pytest.raises(TooLongError, match=r"serve: text 1 has 33 tokens; at most 32 are read"):
        scheduler.ask(["film", "film " * 31], ["mood"], truncate=False).result(10)


def test_a_lone_surrogate_in_a_text_that_may_not_be_cut(make: Callable[..., Scheduler]):
    with pytest.raises(TooLongError, match=r"serve: text 0 has 43 tokens; at most 32 are read"):
        make().ask(["\ud800 " + "film " * 40], ["mood"], truncate=False).result(10)


def test_a_text_that_is_read_in_windows_by_one_task_is_cut_for_another(make: Callable[..., Scheduler]):
    scheduler = make()
    assert len(scheduler.ask(["film " * 40], ["mood", "who"]).result(10)) == 1
    with pytest.raises(TooLongError, match=r"serve: text 0 has 42 tokens; at most 32 are read"):
        scheduler.ask(["film " * 40], ["mood", "who"], truncate=False).result(10)


def test_tasks_must_exist(make: Callable[..., Scheduler]):
    with pytest.raises(UnknownNameError, match=r"serve: unknown task 'mod'; known: mood, who. Did you mean 'mood'"):
        make().ask(["a"], ["mod"])
    with pytest.raises(ConfigError, match=r"serve: no text came; at least one is needed"):
        make().ask([])


class ByPass(Slow):
    """A worker that needs a pass for each text, and more tokens than one pass has."""

    def __init__(self, bank: ReaderBank, tokens: int) -> None:
        super().__init__(bank)
        self.tokens = tokens

    def read(self, texts: Sequence[Any]) -> Any:
        read = Texts(texts)
        read.tokens = self.tokens
        return read

    def run(self, prepared: Any, budget: Any) -> Generator[None, None, Sequence[Any]]:
        for number, text in enumerate(prepared):
            if number:
                yield
            self.begun.set()
            assert self.go.wait(10)
            self.seen.append(text)
        return list(prepared)


def test_other_requests_have_a_turn_between_the_passes_of_a_large_one(make: Callable[..., Scheduler]):
    scheduler = make(max_batch_tokens=40)
    large = ByPass(scheduler.bank, tokens=41)
    first = scheduler.submit(["1", "2", "3", "4"], "large", lambda: large, truncate=True)
    assert large.begun.wait(10)
    second = scheduler.submit(["5", "6"], "large", lambda: large, truncate=True)
    small = Slow(scheduler.bank)
    small.seen = large.seen  # the order of all passes
    small.go.set()
    others = scheduler.submit(["other"], "small", lambda: small, truncate=True)
    large.go.set()
    assert [len(future.result(10)) for future in (first, second, others)] == [4, 2, 1]
    # the oldest is not overtaken by those that came later: it has every second pass
    assert large.seen == ["1", "5", "2", "other", "3", "4", "6"]
    assert scheduler.unanswered == 0


def test_a_request_that_fits_into_a_pass_is_not_interrupted(make: Callable[..., Scheduler]):
    scheduler = make(max_batch_tokens=40)
    whole = ByPass(scheduler.bank, tokens=40)
    first = scheduler.submit(["1", "2", "3"], "whole", lambda: whole, truncate=True)
    assert whole.begun.wait(10)
    second = scheduler.submit(["4"], "whole", lambda: whole, truncate=True)
    whole.go.set()
    assert (first.result(10), second.result(10)) == (["1", "2", "3"], ["4"])
    assert whole.seen == ["1", "2", "3", "4"]


@pytest.mark.parametrize("tokens", [40, 41])
def test_the_passes_of_a_request_end_when_its_client_leaves(make: Callable[..., Scheduler], tokens: int):
    scheduler = make(max_batch_tokens=40)
    large = ByPass(scheduler.bank, tokens)
    left = scheduler.submit(["1", "2", "3"], "large", lambda: large, truncate=True)
    assert large.begun.wait(10)
    assert not left.cancel()  # it has begun, and so ends after its pass
    large.go.set()
    until(lambda: scheduler.unanswered == 0)
    assert large.seen == ["1"]


def test_large_requests_that_are_paused_fail_on_close():
    scheduler = Scheduler(tiny_bank(), Settings.of(shutdown_timeout=0.05, max_batch_tokens=40, max_concurrent_passes=1))
    slow, _ = held(scheduler)
    late = scheduler.submit(["1", "2"], "large", lambda: ByPass(scheduler.bank, 41), truncate=True)
    scheduler.close()
    with pytest.raises(ClosedError, match=r"serve: the server was shut down before this request was answered"):
        late.result(1)
    slow.go.set()


LIMITS = [
    (["film " * 20], 22, None),
    (["film " * 21], 22, "the request has 23 tokens; at most 22 are accepted"),
    (["film " * 10, "film " * 9], 22, "the request has 23 tokens; at most 22 are accepted"),
    ([("film " * 10, "film " * 10)], 22, "the request has 23 tokens; at most 22 are accepted"),
    (["film " * 7999], 5000, r"the request has at least \d+ tokens; at most 5000 are accepted"),
    (["film" * 40], 22, None),  # a word that the tokenizer does not know is one token
    (["film" * 400], 22, "the request has 1600 characters; at most 176 are accepted"),
]


@pytest.mark.parametrize(("texts", "limit", "error"), LIMITS)
def test_a_request_has_a_limited_number_of_tokens(
    make: Callable[..., Scheduler], texts: list[Any], limit: int, error: str | None
):
    scheduler = make(max_request_tokens=limit)
    asked = scheduler.ask(texts, ["who"], truncate=False)
    if error is None:
        assert len(asked.result(10)) == len(texts)
        return
    with pytest.raises(TooLongError, match=error):
        asked.result(10)


@pytest.mark.parametrize("tasks", one_in(3, [["mood"], ["who"], ["mood", "who"]]))
@pytest.mark.parametrize("more", ["and ", "anna "])
def test_truncate_cuts_a_text_at_the_same_token_for_every_reader(
    make: Callable[..., Scheduler], tasks: list[str], more: str
):
    """The limit of tokens counts what is read, and what lies behind changes no answer."""
    scheduler = make(max_request_tokens=200)
    begin = "anna went to paris . " * 6  # of its 30 tokens, all are read
    (found,) = scheduler.ask([begin + more * 30_000], tasks).result(10)
    (read,) = lamina.predict(scheduler.bank, [begin.strip()], readers=tasks)
    if "mood" in tasks:
        assert found["mood"]["probabilities"] == pytest.approx(read["mood"]["probabilities"], abs=1e-5)
    if "who" in tasks:
        assert [(span["start"], span["end"], span["label"]) for span in found["who"]] == [
            (span["start"], span["end"], span["label"]) for span in read["who"]
        ]


def test_truncate_cuts_pairs_for_readers_of_tokens(make: Callable[..., Scheduler]):
    """The first text has at most half of the 29 tokens beside special ones; the reader answers about the second."""
    scheduler = make(max_request_tokens=200)
    (found,) = scheduler.ask([("film " * 500, "anna went to paris " * 500)], ["who"]).result(10)
    (read,) = lamina.predict(scheduler.bank, [("film " * 14, ("anna went to paris " * 4)[:-7])], readers=["who"])
    assert [(span["start"], span["end"]) for span in found["who"]] == [
        (span["start"], span["end"]) for span in read["who"]
    ]


PAIRS = [("film " * 40, "bad"), ("anna", "bad " * 40), ("film " * 40, "bad " * 39), ("film " * 20, "bad " * 5)]


def test_a_pair_is_cut_alike_beside_readers_of_tokens(make: Callable[..., Scheduler]):
    """They read half of the first text at most; the others keep what the tokenizer keeps, whoever else is asked."""
    scheduler = make()
    alone, both = (scheduler.ask(PAIRS, tasks).result(10) for tasks in (["mood"], ["mood", "who"]))
    predicted = lamina.predict(scheduler.bank, PAIRS)
    for one, other, third in zip(alone, both, predicted, strict=True):
        for found in (other, third):
            assert found["mood"]["probabilities"] == pytest.approx(one["mood"]["probabilities"], abs=1e-5)


def test_a_text_is_cut_for_each_reader_of_tokens_or_refused(make: Callable[..., Scheduler]):
    bank = tiny_bank()
    bank["who"].info["max_length"] = 16
    scheduler = make(bank)
    assert len(scheduler.ask(["film " * 14]).result(10)) == 1
    with pytest.raises(
        ConfigError, match="text 0 is too long; these readers cut texts at different lengths, 16 and 32"
    ):
        scheduler.ask(["film " * 15], ["mood", "who"]).result(10)


def test_the_first_text_of_a_pair_is_cut_only_with_truncate(make: Callable[..., Scheduler]):
    asked = make().ask([("anna", "film " * 60), ("film " * 15, "bad")], ["who"], truncate=False)
    with pytest.raises(TooLongError, match="the first text of pair 1 has 15 tokens; at most 14 are read"):
        asked.result(10)
    whole = make().ask([("film " * 14, "anna went to paris " * 30)], ["who"], truncate=False)
    assert max(span["end"] for span in whole.result(10)[0]["who"]) > 300  # the second text is read in windows


def test_texts_are_cut_on_the_side_that_is_asked_for_or_not_at_all(make: Callable[..., Scheduler]):
    scheduler = make()
    long = ["bad " * 40 + "good " * 30]
    with pytest.raises(ConfigError, match="are to be cut on the left for these readers; they cut on the right"):
        scheduler.ask(long, truncate="left").result(10)
    scheduler.bank.processor.truncation_side = "left"
    left = make(bank=scheduler.bank)
    (end,) = left.ask(["good " * 30], ["mood"]).result(10)
    (found,) = left.ask(long, ["mood"], truncate="left").result(10)
    for other in (found, lamina.predict(scheduler.bank, long)[0]):
        assert other["mood"]["probabilities"] == pytest.approx(end["mood"]["probabilities"], abs=1e-5)
    with pytest.raises(ConfigError, match="a text is too long; these readers cut such texts on different sides"):
        left.ask(long).result(10)
    assert set(left.ask(["good"]).result(10)[0]) == {"mood", "who"}


def test_the_cache_of_workers_is_limited(make: Callable[..., Scheduler]):
    scheduler = make()
    slow = Slow(scheduler.bank)
    slow.go.set()
    for number in range(300):
        scheduler.submit(["a"], number, lambda: slow, truncate=True).result(10)
    assert len(scheduler._workers) == 256


def test_a_replaced_bank_is_freed(make: Callable[..., Scheduler]):
    scheduler = make()
    old, new = scheduler.bank, tiny_bank(scheduler.bank.model)
    scheduler.ask(["bad"]).result(10)
    scheduler.serve(ServedBank(new, 2, dict.fromkeys(new, 2)))
    scheduler.ask(["bad"], bank=old).result(10)  # by a request that looked before
    scheduler.ask(["bad"]).result(10)
    gone = weakref.ref(old)
    del old
    gc.collect()
    assert gone() is None


def test_a_bank_that_cannot_be_served_replaces_nothing(make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch):
    scheduler = make()
    served, new = scheduler.served, tiny_bank(scheduler.bank.model)

    def fail(_: object, _bank: ReaderBank) -> None:
        raise ConfigError("the frozen model has changed")

    monkeypatch.setattr(type(scheduler.engine), "follow", fail)
    with pytest.raises(ConfigError, match="has changed"):
        scheduler.serve(ServedBank(new, 2, dict.fromkeys(new, 2)))
    assert scheduler.served is served


def test_large_files_share_no_batch(make: Callable[..., Scheduler]):
    scheduler = make(max_batch_tokens=16384)
    slow, _ = held(scheduler)
    taken: list[int] = []

    class Counted(Slow):
        def run(self, prepared: Any, budget: Any) -> Generator[None, None, Sequence[Any]]:
            yield from ()
            taken.append(len(prepared))
            return list(prepared)

    work = Counted(scheduler.bank)
    for size in (1 << 26, 1 << 26, 40_000, 40_000, 40_000):
        scheduler.submit([Upload("image", b"", size)], "files", lambda: work, truncate=True)
    slow.go.set()
    deadline = time.monotonic() + 10
    while scheduler.unanswered and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(taken) == [1, 1, 3]


def test_the_old_name_of_the_scheduler_works_for_one_release_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"lamina.serve.Engine is now lamina.serve.Scheduler"):
        assert lamina.serve.Engine is Scheduler
    with pytest.raises(AttributeError, match=r"has no attribute 'Motor'; it has Scheduler, Settings, create_app"):
        _ = lamina.serve.Motor
