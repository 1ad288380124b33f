"""A lock per model: many threads may run the model at once, but none runs it while another inspects it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from threading import Condition, get_ident
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn


@final
class PassLock:
    """A readers-writer lock for the forward passes of one model; `pass_lock` returns it.

    Several threads can hold it `shared` at a time to run the model. A thread that needs the model for itself, as in
    `preserve_model`, holds it `exclusive`. A thread that waits for exclusive access has priority over threads that
    begin a pass later. A thread may enter either context again while it holds the lock.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = Counter[int]()  # thread id -> how many of its `shared` or `exclusive` blocks are open
        self._exclusive = 0  # number of threads that wait for exclusive access or have it

    @contextmanager
    def shared(self) -> Generator[None]:
        """Hold the lock, together with other threads, while this thread runs the model."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive or me in self._running)
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                self._forget_idle_threads()

    def give_way(self) -> None:
        """Let threads that wait for exclusive access go first: release this thread's shared hold and take it again."""
        me = get_ident()
        with self._changed:
            held = self._running.pop(me, 0)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._exclusive)
            finally:  # Ctrl-C may interrupt the wait
                self._running[me] = held
                self._running += Counter()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Hold the lock alone inside the `with` block: wait until no other thread holds it, and keep others out.

        A thread that holds the lock `shared` may call this between its passes; its own hold does not count.
        """
        me = get_ident()
        with self._changed:
            held = self._running.pop(me, 0)  # this thread's own shared hold must not make it wait
            self._exclusive += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._running)
            except BaseException:  # Ctrl-C may interrupt the wait
                self._end_exclusive(me, held)
                raise
            self._running[me] = held + 1  # so that other threads that ask for exclusive access wait for this one
        try:
            yield
        finally:
            with self._changed:
                self._end_exclusive(me, held)

    def _end_exclusive(self, thread: int, held: int) -> None:
        """End a thread's exclusive access; the thread then holds the lock `held` times as shared.

        The caller must hold `_changed`.
        """
        self._exclusive -= 1
        self._running[thread] = held
        self._forget_idle_threads()

    def _forget_idle_threads(self) -> None:
        """Drop threads that no longer hold the lock, and wake the waiting threads. The caller must hold `_changed`."""
        self._running += Counter()  # adding counters keeps positive counts only
        self._changed.notify_all()


_locks = WeakKeyDictionary["nn.Module", PassLock]()


def pass_lock(model: nn.Module) -> PassLock:
    """Return the lock of a model; the first call makes it.

    All submodules share the lock, in place of one that they had. Models for which this function was never called run
    without a lock.
    """
    lock = _locks.get(model) or PassLock()
    _locks.update(dict.fromkeys(model.modules(), lock))
    return lock


def exclusive(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager that holds a model's lock exclusively, or does nothing if the model has no lock."""
    lock = _locks.get(model)
    return lock.exclusive() if lock is not None else nullcontext()
