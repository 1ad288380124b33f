from __future__ import annotations

import signal
import sys
from threading import Barrier, Event, Thread

import pytest
from torch import nn

from lamina.layers.pass_lock import PassLock, exclusive, pass_lock

SOON, LONG = 0.1, 10


def started(work) -> Thread:
    thread = Thread(target=work)
    thread.start()
    return thread


def test_passes_run_at_once():
    lock, meet = PassLock(), Barrier(2)

    def run() -> None:
        with lock.shared(), lock.shared():
            meet.wait(LONG)

    for thread in [started(run), started(run)]:
        thread.join(LONG)
    assert not meet.broken


def test_who_is_alone_waits_for_passes_and_they_for_it():
    lock, looked, go, passed = PassLock(), Event(), Event(), Event()

    def look() -> None:
        with lock.exclusive(), lock.exclusive():
            looked.set()
            go.wait(LONG)

    def run() -> None:
        with lock.shared():
            passed.set()

    with lock.shared():
        looking = started(look)
        assert not looked.wait(SOON)
    assert looked.wait(LONG)
    running = started(run)
    assert not passed.wait(SOON)
    go.set()
    for thread in (looking, running):
        thread.join(LONG)
    assert passed.is_set()


def test_who_is_alone_stays_alone_when_it_asks_again():
    lock, asked, entered = PassLock(), Event(), Event()

    def look() -> None:
        asked.set()
        with lock.exclusive():
            entered.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that the other thread runs wherever the lock is free for a moment
    try:
        with lock.exclusive():
            looking = started(look)
            assert asked.wait(LONG)
            for _ in range(2000):
                with lock.exclusive():
                    pass
            assert not entered.is_set()
    finally:
        sys.setswitchinterval(interval)
    looking.join(LONG)
    assert entered.is_set()


def test_a_thread_gives_way_between_its_passes():
    lock, looked = PassLock(), Event()

    def look() -> None:
        with lock.exclusive():
            looked.set()

    lock.give_way()  # nothing is held
    with lock.shared():
        looking = started(look)
        assert not looked.wait(SOON)
        lock.give_way()
        assert looked.is_set() or looked.wait(LONG)
    looking.join(LONG)


def interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("gives_way", [False, True])
def test_an_interrupted_wait_leaves_the_lock_as_it_was(gives_way: bool):
    lock, running, go, passed, looked = PassLock(), Event(), Event(), Event(), Event()

    def run() -> None:
        with lock.exclusive() if gives_way else lock.shared():
            running.set()
            go.wait(LONG)

    def look() -> None:
        with lock.exclusive():
            looked.set()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with lock.shared():
            other = started(run)
            assert running.wait(SOON) is not gives_way
            signal.setitimer(signal.ITIMER_REAL, SOON)
            with pytest.raises(KeyboardInterrupt):
                lock.give_way() if gives_way else lock.exclusive().__enter__()
            looking = started(look)
            go.set()
            other.join(LONG)
            assert not looked.wait(SOON)  # this thread still holds the lock
        looking.join(LONG)
    finally:
        signal.signal(signal.SIGALRM, before)

    def pass_by() -> None:
        with lock.shared():
            passed.set()

    started(pass_by).join(LONG)
    assert looked.is_set()
    assert passed.is_set()


def test_two_threads_may_look_between_passes_of_their_own():
    lock, meet, done = PassLock(), Barrier(2), []

    def run() -> None:
        with lock.shared():
            meet.wait(LONG)
            with lock.exclusive():
                done.append(1)

    for thread in [started(run), started(run)]:
        thread.join(LONG)
    assert done == [1, 1]


def test_parts_of_a_model_take_turns_with_it():
    model, looked = nn.Sequential(nn.Linear(1, 1)), Event()
    lock = pass_lock(model)
    assert pass_lock(model) is lock

    def look() -> None:
        with exclusive(model[0]):
            looked.set()

    with lock.shared():
        looking = started(look)
        assert not looked.wait(SOON)
    looking.join(LONG)
    assert looked.is_set()
    with exclusive(nn.Linear(1, 1)):  # a model without a lock
        pass
