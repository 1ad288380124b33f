"""The folder of the hidden-state cache: what lies in it, who may write, and what a killed writer leaves behind.

    <folder>/
      .lock              held for a moment by whoever adds or removes an entry
      <key>/             a whole entry: index.json and one file of states per stack
      .<key>.new/        an entry while it is written; its writer holds the lock on the file `writer` inside
      .<key>.old/        an entry on its way out

A lock ends with the process that holds it, so an unfinished entry whose lock is free belongs to nobody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from lamina.errors import CacheError, ConfigError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

FORMAT = 1
INDEX = "index.json"
GIB = 2**30
_WRITER = "writer"
_OWN: set[tuple[int, Path]] = set()  # process and folder of every claim, since no process can wait for itself
_KEY = re.compile(r"[0-9a-f]{32}")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.(new|old)")


def cache_folder(asked: str | Path | None = None) -> Path:
    """Where states are cached: `asked`, else $LAMINA_CACHE, else `lamina` in $XDG_CACHE_HOME or ~/.cache."""
    if asked is not None:
        return Path(asked).expanduser()
    if own := os.environ.get("LAMINA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lamina"


@final
@dataclass(frozen=True)
class Entry:
    """One whole entry of the cache.

    Attributes:
        path: Its folder, named by its key.
        facts: Its index; empty where that cannot be read.
        size_bytes: Of its files.
        problem: Why it cannot be used, or None.
        foreign: Whether another version wrote it.
    """

    path: Path
    facts: Mapping[str, Any]
    size_bytes: int
    problem: str | None = None
    foreign: bool = False

    @property
    def key(self) -> str:
        """What names it."""
        return self.path.name

    @property
    def age_s(self) -> float | None:
        """Seconds since it was made, or None where that is not known."""
        made = self.facts.get("made")
        return max(0.0, time.time() - made) if isinstance(made, int | float) else None


def entries(folder: Path) -> list[Entry]:
    """Every whole entry, newest first; a folder that does not exist has none."""
    found = [entry for path in _subfolders(folder) if _KEY.fullmatch(path.name) and (entry := read_entry(path))]
    return sorted(found, key=lambda entry: entry.age_s if entry.age_s is not None else float("inf"))


def read_entry(path: Path) -> Entry | None:
    """One entry, with what is wrong with it if anything is; None if there is none at `path`."""
    if not path.is_dir():
        return None
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        facts = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Entry(path, {}, size, "its index cannot be read")
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        made_by = facts.get("format", "unknown") if isinstance(facts, dict) else "unknown"
        return Entry(path, {}, size, f"written in format {made_by}; this version reads {FORMAT}", foreign=True)
    for name, expected in facts.get("files", {INDEX: -1}).items():
        file = path / name
        if not file.is_file() or file.stat().st_size != expected:
            return Entry(path, facts, size, f"{name} is missing or not whole")
    return Entry(path, facts, size)


def unfinished(folder: Path) -> list[Path]:
    """What killed writers left behind."""
    return [path for path in _subfolders(folder) if _PARTIAL.fullmatch(path.name) and not _is_held(path)]


def clear(folder: Path, which: str) -> list[Entry]:
    """Remove entries, and whatever killed writers left behind. Entries that are being written stay.

    Args:
        folder: The cache.
        which: A key, the beginning of one, or "all".

    Returns:
        The entries that were removed.

    Raises:
        UnknownNameError: If there is no such entry.
        ConfigError: If several keys begin so.
        CacheError: If the folder cannot be written.
    """
    known = entries(folder)
    chosen = known if which == "all" else [entry for entry in known if which and entry.key.startswith(which)]
    if which != "all" and not chosen:
        raise UnknownNameError(op="cache", got=which, known=[entry.key for entry in known], what="entry")
    if which != "all" and len(chosen) > 1:
        raise ConfigError(
            f"cache: '{which}' begins {len(chosen)} keys; one is removed at a time. Give more of the key, or 'all'."
        )
    if folder.is_dir():
        with _locked(folder):
            for entry in chosen:
                _remove(entry.path)
            _sweep(folder)
    return chosen


def room(folder: Path, needed_bytes: int) -> None:
    """Raise CacheError unless so much can be written and a reserve (5 %, at most 1 GiB) stays free."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    reserve = min(GIB, usage.total // 20)
    if needed_bytes + reserve > usage.free:
        raise CacheError(
            f"cache: {size_text(needed_bytes)} of states are needed in {folder}; {size_text(usage.free)} are free, and "
            f"{size_text(reserve)} of them are left alone. Make room (lamina cache), choose another folder with "
            "cache_dir, use float16, or go without a cache.",
            needed_bytes=needed_bytes,
            free_bytes=usage.free,
        )


def size_text(size_bytes: float) -> str:
    """A size that people can read, such as 470.3 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} bytes" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


@final
class Claim:
    """The right to write one entry, until `publish` or `drop`; the process's end drops it too.

    Attributes:
        path: The private folder that is written to.
    """

    def __init__(self, folder: Path, key: str, path: Path, lock: int) -> None:
        self._folder, self._key, self._lock = folder, key, lock
        self.path = path
        _OWN.add((os.getpid(), path))

    def publish(self, facts: Mapping[str, Any]) -> Entry:
        """Write the index and put the entry in its place, whole or not at all.

        Args:
            facts: What the index says; the format, the time and the files' sizes are added.
        """
        sizes = {file.name: file.stat().st_size for file in self.path.iterdir() if file.name != _WRITER}
        index = {"format": FORMAT, "key": self._key, **facts, "made": time.time(), "files": sizes}
        (self.path / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for name in (INDEX, *sizes):
            _sync(self.path / name)
        final = self._folder / self._key
        with _locked(self._folder):
            _remove(final)  # one that could not be used
            (self.path / _WRITER).unlink()
            _sync(self.path)
            self.path.rename(final)
            _sync(self._folder)
            self._release()
        entry = read_entry(final)
        if entry is None:  # cleared by somebody in the same moment
            raise CacheError(f"cache: {final} is gone; it was removed as soon as it was written. Run again.")
        return entry

    def drop(self) -> None:
        """Remove what was written, if it was not published."""
        if (os.getpid(), self.path) in _OWN:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        _OWN.discard((os.getpid(), self.path))
        os.close(self._lock)


def claim(folder: Path, key: str) -> Claim | None:
    """Begin an entry; leftovers of killed writers are removed on the way.

    Returns:
        None if another process has written it in the meantime.

    Raises:
        CacheError: If the folder cannot be written, or this process writes the entry already.
    """
    path = folder / f".{key}.new"
    if (os.getpid(), path) in _OWN:
        raise CacheError(f"cache: {path} is being written by this very process; one writes at a time. Finish it first.")
    while True:
        with _locked(folder):
            _sweep(folder)
            there = read_entry(folder / key)
            if there is not None and there.problem is None:
                return None
            if not path.exists():
                return Claim(folder, key, path, _begin(path))
        logger.info("cache: another process writes the states of %s; waiting for it", key)
        _wait(path)


def _begin(path: Path) -> int:
    try:
        path.mkdir()
        lock = os.open(path / _WRITER, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise not_writable(path.parent, error) from error
    return lock


def _wait(path: Path) -> None:
    """Sleep until the writer of an unfinished entry is done with it."""
    try:
        lock = os.open(path / _WRITER, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _is_held(path: Path) -> bool:
    try:
        lock = os.open(path / _WRITER, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _sweep(folder: Path) -> None:
    for path in unfinished(folder):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Take an entry out of sight at once, then delete it; whoever reads it keeps what is open."""
    if not path.exists():
        return
    out = path.with_name(f".{path.name}.old")
    shutil.rmtree(out, ignore_errors=True)
    path.rename(out)
    shutil.rmtree(out, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the cache's lock.

    Raises:
        CacheError: If the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise not_writable(folder, error) from error
    try:
        yield
    finally:
        os.close(lock)


def not_writable(folder: Path, error: OSError) -> CacheError:
    """The error for a folder that the system does not let us write to."""
    return CacheError(
        f"cache: {folder} cannot be written ({os.strerror(error.errno or errno.EIO)}); states are kept there. "
        "Choose another folder with cache_dir or LAMINA_CACHE, or go without a cache."
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
