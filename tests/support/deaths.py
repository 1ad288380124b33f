"""A process that dies, or is interrupted, at its n-th change of the file system; and what is left of its files."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import traceback
from functools import cache
from itertools import count
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
Contents = dict[str, bytes]


class DiedError(BaseException):
    """Nothing catches it, and nothing more is changed after it."""


class Death:
    """The change before which the process dies, counted from 1; None: it lives."""

    at: int | None = None
    kind: type[BaseException] = DiedError


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if Death.at is None:
        return
    opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in CHANGES or opens:
        Death.at -= 1
        if Death.at <= 0:
            if Death.kind is KeyboardInterrupt:
                Death.at = None  # once; what is cleaned up is cleaned up
            raise Death.kind


@cache
def _watched() -> None:
    sys.addaudithook(_watch)  # which stays, and costs nothing while nobody dies


def dies(action: Callable[[], Any], at: int) -> bool:
    """Run an action as a process that dies before its change number `at`; False if it comes to its end."""
    return _ends(action, at, DiedError)


def is_interrupted(action: Callable[[], Any], at: int) -> bool:
    """The same with Ctrl-C, after which the process still cleans up."""
    return _ends(action, at, KeyboardInterrupt)


def _ends(action: Callable[[], Any], at: int, kind: type[BaseException]) -> bool:
    _watched()
    Death.at, Death.kind = at, kind
    try:
        action()
        return Death.at is None or Death.at <= 0
    except kind:
        return True
    finally:
        Death.at = None
        gc.collect()  # Python 3.13 keeps the frames of an error, and so the locks in them, longer than 3.11


def is_killed(action: Callable[[], Any], at: int) -> bool:
    """The same in a real process, whose locks and memory go with it."""
    ended = forked(lambda: sys.exit(9 if dies(action, at) else 0))
    assert ended.code in (0, 9), (at, ended.err)
    return ended.code == 9


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int  # less than 0: by that signal
    out: str
    err: str


def forked(action: Callable[[], Any]) -> Ended:
    """Run an action in a process of its own, which need not import anything anew."""
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as err:
        child = os.fork()
        if child == 0:
            code: Any = 1  # of an error of the action's own
            try:
                sys.stdout, sys.stderr = out, err
                try:
                    action()
                    code = 0
                except SystemExit as ended:
                    code = ended.code or 0
                except BaseException:
                    traceback.print_exc()
                out.flush()
                err.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(code, *(file.seek(0) or file.read() for file in (out, err)))


def contents(folder: Path) -> Contents:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shown(folder: Path) -> Contents:
    """What a program sees that knows nothing of plans."""
    return {name: content for name, content in contents(folder).items() if not name.startswith(".lamina-")}


def deaths(
    folder: Path,
    before: Path | None,
    action: Callable[[Path], Any],
    kill: Callable[..., bool] = dies,
    step: int = 1,
    *,
    least: int = 10,
) -> Iterator[int]:
    """Bring a folder to the state before, and let the action die on it, again and again, one change later each time."""
    for at in count(1, step):
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, folder)
        if not kill(lambda: action(folder), at):
            assert at > least
            logger.info("%d times %s", len(range(1, at, step)), kill.__name__)  # pytest --log-cli-level INFO shows it
            return
        yield at


def die_at_step(step: int) -> None:
    """Have this process kill itself before its training step number `step`, counted from 0."""
    from lamina.train.engine import Engine

    calls, plain = iter(range(10**6)), Engine.step

    def dying(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args, **kwargs)

    Engine.step = dying
