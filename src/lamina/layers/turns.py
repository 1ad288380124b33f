"""Passes of a model in several threads, and what may not run beside one."""

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
class Turns:
    """Any number of threads run a model at once; one that takes it apart to look at it (`preserve_model`) is alone."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = Counter[int]()  # thread -> how often it has entered
        self._asking = 0  # threads that wait to be alone, or are

    @contextmanager
    def shared(self) -> Generator[None]:
        """A pass, or several of one thread."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._asking or me in self._running)
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                self._running += Counter()  # without what is 0
                self._changed.notify_all()

    def give_way(self) -> None:
        """Between two passes of a thread: let those go first that wait to be alone."""
        me = get_ident()
        with self._changed:
            held = self._running.pop(me, 0)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._asking)
            self._running[me] = held
            self._running += Counter()  # without what is 0

    @contextmanager
    def alone(self) -> Generator[None]:
        """What must not meet a pass; a thread that is between passes of its own may ask."""
        me = get_ident()
        with self._changed:
            held = self._running.pop(me, 0)
            self._asking += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)
            self._running[me] = held + 1  # others that wait to be alone wait for this one
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._running[me] = held
                self._running += Counter()
                self._changed.notify_all()


_turns = WeakKeyDictionary["nn.Module", Turns]()


def take_turns(model: nn.Module) -> Turns:
    """Have whoever looks at a model, or a part of it, wait for its passes from now on; the same again for the same."""
    turns = _turns.get(model) or Turns()
    _turns.update(dict.fromkeys(model.modules(), turns))
    return turns


def alone(model: nn.Module) -> AbstractContextManager[None]:
    """Wait for the passes of a model that takes turns; nothing of one that does not."""
    turns = _turns.get(model)
    return turns.alone() if turns is not None else nullcontext()
