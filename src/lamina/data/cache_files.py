"""The folder of the hidden-state cache: what lies in it, who may write, and what a killed writer leaves behind.

<folder>/
  <key>/             a whole entry: index.json and one file of states per stack
  .<key>.new/        an entry while it is written; its writer holds the lock of the key
  .locks/<key>.lock  ends with the process that holds it, so an unfinished entry whose lock is free is nobody's
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from filelock import FileLock, Timeout
from rich.filesize import decimal

from lamina.errors import CacheError, ConfigError, UnknownNameError, foreign_errors
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

FORMAT = 2
INDEX = "index.json"
GIB = 2**30
_KEY = re.compile(r"[0-9a-f]{32}")
_PARTIAL = re.compile(r"\.([0-9a-f]{32})\.new")


def cache_folder(asked: str | Path | None = None) -> Path:
    """Where states are cached: `asked`, else $LAMINA_CACHE, else `lamina` in $XDG_CACHE_HOME or ~/.cache."""
    default = os.environ.get("LAMINA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lamina")
    return Path(default if asked is None else asked).expanduser()


@final
@dataclass(frozen=True)
class Entry:
    """A whole entry of the cache, in a folder named by its key."""

    key: str
    facts: Mapping[str, Any]  # its index; empty where that cannot be read
    size_bytes: int
    problem: str | None  # why it cannot be used

    @property
    def foreign(self) -> bool:
        """Whether another version wrote it."""
        return self.facts.get("format", FORMAT) != FORMAT

    @property
    def age_s(self) -> float | None:
        """Seconds since it was made, or None where that is not known."""
        date = self.facts.get("made")
        return max(0.0, time.time() - date) if isinstance(date, int | float) else None


def entries(folder: Path) -> list[Entry]:
    """Every whole entry, newest first; a folder that does not exist has none."""
    with foreign_errors(lambda reason: CacheError(f"cache: {folder} cannot be read ({reason})."), OSError):
        paths = sorted(folder.iterdir()) if os.path.lexists(folder) else []
    whole = [entry for path in paths if _KEY.fullmatch(path.name) and (entry := read_entry(path))]
    return sorted(whole, key=lambda entry: float("inf") if entry.age_s is None else entry.age_s)


def read_entry(path: Path, expected: Mapping[str, Any] | None = None) -> Entry | None:
    """The entry at `path`, or None; its problem says if files are not whole, or the index is not as `expected`."""
    if not path.is_dir():
        return None
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    facts, problem = {}, None
    try:
        facts = json.loads((path / INDEX).read_text(encoding="utf-8"))
        wrong = [name for name, size in facts.get("files", {INDEX: -1}).items() if sizes.get(name) != size]
        if facts.get("format") != FORMAT:
            problem = f"written in format {facts.get('format')}; this version reads {FORMAT}"
        elif wrong:
            problem = f"{wrong[0]} is missing or not whole"
        elif not _is_sound(facts):
            facts, problem = {}, "its index cannot be read"
        elif any(facts.get(name) != value for name, value in (expected or {}).items()):
            problem = "it does not hold what its key says"
    except Exception:  # a file may hold anything
        facts, problem = {}, "its index cannot be read"
    return Entry(path.name, facts, sum(sizes.values()), problem)


def _is_sound(facts: Mapping[str, Any]) -> bool:
    """Whether an index has the types that the list of entries needs; raises some error if not."""
    layers = [int(layer) for numbers in (facts.get("layers") or {}).values() for layer in numbers]
    return min(layers, default=0) >= 0 and float(facts.get("made") or 0) >= 0


def unfinished(folder: Path, *, remove: bool = False) -> list[Path]:
    """What killed writers left behind; with `remove` it is deleted."""
    leftovers = []
    for path in sorted(folder.glob(".*.new")) if is_dir(folder) else ():
        match = _PARTIAL.fullmatch(path.name)
        if match and not (lock := _lock(folder, match[1])).is_locked:
            with suppress(Timeout), lock.acquire(timeout=0):
                leftovers.append(path)
                if remove:
                    shutil.rmtree(path, ignore_errors=True)
    return leftovers


def clear(folder: Path, which: str) -> list[Entry]:
    """Remove and return the entries that a key, its beginning or "all" names; leftovers of killed writers go too."""
    known = entries(folder)
    chosen = known if which == "all" else [entry for entry in known if which and entry.key.startswith(which)]
    if which != "all" and not chosen:
        raise UnknownNameError(op="cache", got=which, known=[entry.key for entry in known], what="entry")
    if which != "all" and len(chosen) > 1:
        raise ConfigError(f"cache: '{which}' begins {len(chosen)} keys. Give more of the key, or 'all'.")
    with disk_errors(folder):
        for entry in chosen:
            _remove(folder / entry.key)
        unfinished(folder, remove=True)
    return chosen


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise CacheError unless so much can be written and a reserve (5 %, at most 1 GiB) stays free."""
    usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    reserve = min(GIB, usage.total // 20)
    if needed_bytes + reserve > usage.free:
        free = f"{decimal(usage.free)} are free, and {decimal(reserve)} of them are left alone"
        hint = "Make room (lamina cache), choose another folder with cache_dir, use float16, or go without a cache."
        message = f"cache: {decimal(needed_bytes)} of states are needed in {folder}; {free}. {hint}"
        raise CacheError(message, needed_bytes=needed_bytes, free_bytes=usage.free)


@contextmanager
def claim(folder: Path, key: str, expected: Mapping[str, Any] | None = None) -> Iterator[Path | None]:
    """Hold the right to write an entry whose index must be as `expected`; waits for another process that has it.

    Yields a private folder, which is gone at the end unless `publish` was called; None if the entry is whole by now.
    Leftovers of killed writers are removed on the way.
    """
    lock, path = _lock(folder, key), folder / f".{key}.new"
    if lock.is_locked:
        raise CacheError(f"cache: {path} is being written by this very process; one writes at a time.")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("cache: another process writes the states of %s; waiting for it", key)
        lock.acquire(poll_interval=0.2)
    try:
        shutil.rmtree(path, ignore_errors=True)
        unfinished(folder, remove=True)
        entry = read_entry(folder / key, expected)
        if entry is None or entry.problem is not None:
            path.mkdir()
        yield path if path.exists() else None
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def publish(path: Path, facts: Mapping[str, Any]) -> None:
    """Put what was written to a private folder of `claim` in its place, whole or not at all, with an index of facts."""
    entry = path.with_name(path.name[1:33])
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    index = {"key": entry.name, **facts, "format": FORMAT, "made": time.time(), "files": sizes}
    (path / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for name in (*sizes, INDEX):
        with (path / name).open("r+b") as file:
            os.fsync(file.fileno())
    _remove(entry)  # one that could not be used
    path.replace(entry)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise CacheError, which names the cache's folder, where the system does not let us write to it."""
    hint = "Choose another folder with cache_dir or LAMINA_CACHE."
    with foreign_errors(lambda reason: CacheError(f"cache: {folder} cannot be written ({reason}). {hint}"), OSError):
        yield


def _lock(folder: Path, key: str) -> FileLock:
    return FileLock(folder.absolute() / ".locks" / f"{key}.lock", thread_local=False, is_singleton=True)


def _remove(path: Path) -> None:
    """Delete an entry, from its index on, without which nothing is read; who reads it keeps what is open."""
    (path / INDEX).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
