from __future__ import annotations

from threading import Barrier, Event, Thread

from torch import nn

from lamina.layers.turns import Turns, alone, take_turns

SOON, LONG = 0.1, 10


def started(work) -> Thread:
    thread = Thread(target=work)
    thread.start()
    return thread


def test_passes_run_at_once():
    turns, meet = Turns(), Barrier(2)

    def run() -> None:
        with turns.shared(), turns.shared():
            meet.wait(LONG)

    for thread in [started(run), started(run)]:
        thread.join(LONG)
    assert not meet.broken


def test_who_is_alone_waits_for_passes_and_they_for_it():
    turns, looked, go, passed = Turns(), Event(), Event(), Event()

    def look() -> None:
        with turns.alone(), turns.alone():
            looked.set()
            go.wait(LONG)

    def run() -> None:
        with turns.shared():
            passed.set()

    with turns.shared():
        looking = started(look)
        assert not looked.wait(SOON)
    assert looked.wait(LONG)
    running = started(run)
    assert not passed.wait(SOON)
    go.set()
    for thread in (looking, running):
        thread.join(LONG)
    assert passed.is_set()


def test_a_thread_gives_way_between_its_passes():
    turns, looked = Turns(), Event()

    def look() -> None:
        with turns.alone():
            looked.set()

    turns.give_way()  # nothing is held
    with turns.shared():
        looking = started(look)
        assert not looked.wait(SOON)
        turns.give_way()
        assert looked.is_set() or looked.wait(LONG)
    looking.join(LONG)


def test_two_threads_may_look_between_passes_of_their_own():
    turns, meet, done = Turns(), Barrier(2), []

    def run() -> None:
        with turns.shared():
            meet.wait(LONG)
            with turns.alone():
                done.append(1)

    for thread in [started(run), started(run)]:
        thread.join(LONG)
    assert done == [1, 1]


def test_parts_of_a_model_take_turns_with_it():
    model, looked = nn.Sequential(nn.Linear(1, 1)), Event()
    turns = take_turns(model)
    assert take_turns(model) is turns

    def look() -> None:
        with alone(model[0]):
            looked.set()

    with turns.shared():
        looking = started(look)
        assert not looked.wait(SOON)
    looking.join(LONG)
    assert looked.is_set()
    with alone(nn.Linear(1, 1)):  # of one that takes no turns
        pass
