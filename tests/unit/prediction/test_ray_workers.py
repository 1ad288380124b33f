"""What workers of Ray raise; a stand-in for Ray runs them in this process."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.errors import DataError, LaminaError
from lamina.prediction import ray_workers
from lamina.prediction.ray_workers import in_order

exceptions = pytest.importorskip("ray.exceptions")


class Actor:
    def __init__(self, kind: type, work: Any) -> None:
        self.worker = kind(work)
        self.run = SimpleNamespace(remote=lambda item: (self.worker, item))


def answer(call: tuple[Any, Any]) -> Any:
    """Run one item as Ray does: an error of the work comes back in a RayTaskError of its type."""
    worker, item = call
    try:
        return worker.run(item)
    except SystemExit:
        raise exceptions.ActorDiedError from None
    except Exception as error:
        raise exceptions.RayTaskError("run", "trace", error, "proc", 1, "ip").as_instanceof_cause() from None


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 2.0},
        put=lambda work: work,
        get=answer,
        remote=lambda **_: lambda kind: SimpleNamespace(remote=lambda work: Actor(kind, work)),
        exceptions=exceptions,
    )
    monkeypatch.setattr(ray_workers, "import_ray", lambda _op: ray)


class Work:
    """Counts the calls per item; raises the errors in `wrong`, item -> error, every time or only `times` times."""

    def __init__(self, wrong: dict[int, BaseException], times: int = 100) -> None:
        self.calls, self.wrong, self.times = [], wrong, times

    def __call__(self, item: int) -> int:
        self.calls.append(item)
        if item in self.wrong and self.calls.count(item) <= self.times:
            raise self.wrong[item]
        return -item


@pytest.mark.parametrize("error", [ValueError("no"), DataError("row 3", row=3), KeyError("text"), MemoryError()])
def test_an_error_of_the_work_is_raised_as_it_is_and_its_item_is_not_tried_again(error: Exception):
    work = Work({3: error})
    answers = in_order(work, "local", 1, "test", range(6))
    assert [next(answers) for _ in range(3)] == [0, -1, -2]
    with pytest.raises(type(error)) as caught:
        next(answers)
    assert caught.value is error
    assert work.calls.count(3) == 1


@pytest.mark.parametrize("times", [0, 1])  # how often the worker dies first
def test_an_error_that_cannot_be_pickled_is_a_lamina_error_with_its_text(times: int):
    class DiesFirst(Work):
        def __call__(self, item: int) -> int:
            self.calls.append(item)
            raise SystemExit if len(self.calls) <= times else ValueError(Lock())

    with pytest.raises(LaminaError, match=r"test: the work failed \(.*ValueError isn't serializable.*\)"):
        list(in_order(DiesFirst({}), "local", 1, "test", range(1)))


def test_an_error_after_the_death_of_a_worker_is_raised_too():
    work = Work({2: SystemExit()}, times=1)
    assert list(in_order(work, "local", 1, "test", range(4))) == [0, -1, -2, -3]
    assert work.calls.count(2) == 2
    with pytest.raises(LaminaError, match=r"test: a worker of Ray died .* run again to continue"):
        list(in_order(Work({2: SystemExit()}), "local", 1, "test", range(4)))


def test_an_error_in_the_beginning_of_the_work_is_no_death_of_the_worker():
    class Begins(Work):
        def begin(self) -> None:
            raise OSError("no GPU")

    work = Begins({})
    with pytest.raises(OSError, match="no GPU"):
        list(in_order(work, "local", 1, "test", range(4)))
    assert work.calls == []
