"""The folder of the hidden-state cache: its entries, the locks of writers, and files that killed writers left.

<folder>/
  <key>/             a whole entry: one file of states per stack, and index.json with checksums of these and of itself
  .<key>.new/        an entry while it is written; its writer holds the lock of the key
  .<key>.gone/       an entry while it is removed
  .locks/<key>.lock  released when its process ends: an unfinished entry whose lock is free can be removed
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from filelock import FileLock, Timeout
from rich.filesize import decimal

from lamina.errors import CacheError, ConfigError, UnknownNameError, convert_errors
from lamina.utils import fsync, is_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

FORMAT = 3
INDEX = "index.json"
GIB = 2**30
_CHECKSUM = "checksum"  # of the index without this
_KEY = re.compile(r"[0-9a-f]{32}")
_PARTIAL = re.compile(r"\.([0-9a-f]{32})\.(new|gone)")


def cache_folder(asked: str | Path | None = None) -> Path:
    """Return the cache folder: `asked`, else $LAMINA_CACHE, else `lamina` in $XDG_CACHE_HOME or ~/.cache."""
    default = os.environ.get("LAMINA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lamina")
    return Path(default if asked is None else asked).expanduser()


@final
@dataclass(frozen=True)
class Entry:
    """A complete entry of the cache, in a folder named by its key."""

    key: str
    facts: Mapping[str, Any]  # its index; empty where that cannot be read
    size_bytes: int
    problem: str | None  # why it cannot be used

    @property
    def foreign(self) -> bool:
        """Whether another version of Lamina wrote the entry."""
        return self.facts.get("format", FORMAT) != FORMAT

    @property
    def age_s(self) -> float | None:
        """Seconds since the entry was written; None if that is not known."""
        date = self.facts.get("made")
        return max(0.0, time.time() - date) if isinstance(date, int | float) else None


def entries(folder: Path) -> list[Entry]:
    """Return all complete entries of a folder, newest first; other files are ignored, and [] if there is no folder."""
    with convert_errors(lambda reason: CacheError(f"cache: {folder} cannot be read ({reason})."), OSError):
        paths = sorted(folder.iterdir()) if os.path.lexists(folder) else []
        own = [path for path in paths if _KEY.fullmatch(path.name) and _is_own(path)]
    whole = [entry for path in own if (entry := read_entry(path))]
    return sorted(whole, key=lambda entry: float("inf") if entry.age_s is None else entry.age_s)


def read_entry(path: Path, expected: Mapping[str, Any] | None = None) -> Entry | None:
    """Return the entry at `path`, or None; its `problem` says if files are incomplete or the index is not `expected`.

    With `expected`, which is for an entry that will be used, the checksums of its files are compared: each is read
    once, about 1.5 GB a second where the disk gives that.
    """
    if not path.is_dir():
        return None
    sizes, facts = dict[str, int](), dict[str, Any]()
    try:
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        facts, problem = _read_index(path / INDEX)
        if problem is None:
            problem = _problem(path, facts, sizes, expected)
    except Exception:  # a file may hold anything
        problem = "its index cannot be read"
    return Entry(path.name, facts, sum(sizes.values()), problem)


def _read_index(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the contents of an index and None, or what can be trusted of it and what is wrong."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise ValueError("no object")
    if (written := facts.get("format")) != FORMAT:
        return {"format": written}, f"written in format {str(written)[:20]}; this version reads {FORMAT}"
    if facts.pop(_CHECKSUM, None) != _hash(facts):
        return {}, "its index is damaged"
    return facts, None


def _problem(
    path: Path, facts: Mapping[str, Any], sizes: Mapping[str, int], expected: Mapping[str, Any] | None
) -> str | None:
    """Return why an entry with an undamaged index cannot be used; None if it can."""
    if wrong := [name for name, size in facts["files"].items() if sizes.get(name) != size]:
        return f"{wrong[0]} is missing or not whole"
    if any(facts.get(name) != value for name, value in (expected or {}).items()):
        return "it does not hold what its key says"
    known = facts["checksums"] if expected is not None else {}
    return next((f"{name} is damaged" for name, crc in known.items() if _crc32(path / name) != crc), None)


def _hash(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while content := file.read(2**20):
            crc = zlib.crc32(content, crc)
    return crc


def unfinished(folder: Path, *, remove: bool = False) -> list[Path]:
    """Return the unfinished files that killed writers left in a folder; with `remove` they are deleted."""
    leftovers = []
    for path in sorted(folder.glob(".*")) if is_dir(folder) else ():
        match = _PARTIAL.fullmatch(path.name)
        if match and not (lock := _lock(folder, match[1])).is_locked:
            with suppress(Timeout), lock.acquire(timeout=0):
                leftovers.append(path)
                if remove:
                    shutil.rmtree(path, ignore_errors=True)
    return leftovers


def clear(folder: Path, which: str) -> list[Entry]:
    """Remove entries and return them; unfinished files of killed writers are removed too.

    Args:
        folder: The cache folder.
        which: The key of an entry, the beginning of one key, or "all".

    Raises:
        UnknownNameError: If no key begins so.
        ConfigError: If several do.
    """
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
    """Raise CacheError unless `needed_bytes` fit on the disk and a reserve (5 %, at most 1 GiB) stays free."""
    usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    reserve = min(GIB, usage.total // 20)
    if needed_bytes + reserve > usage.free:
        free = f"{decimal(usage.free)} are free, and {decimal(reserve)} of them are left alone"
        hint = "Make room (lamina cache), choose another folder with cache_dir, use float16, or go without a cache."
        message = f"cache: {decimal(needed_bytes)} of states are needed in {folder}; {free}. {hint}"
        raise CacheError(message, needed_bytes=needed_bytes, free_bytes=usage.free)


@contextmanager
def claim(folder: Path, key: str, expected: Mapping[str, Any] | None = None) -> Iterator[Path | None]:
    """Hold the lock for writing an entry; wait if another process holds it.

    Yields a private folder to write to, which is removed at the end unless `publish` was called; None if the entry is
    complete by now and its index is as `expected`. Unfinished files of killed writers are removed.
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
    """Move the private folder of `claim` to its place as a complete entry, with `facts` as its index."""
    entry = path.with_name(path.name[1:33])
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    own = {
        "format": FORMAT,
        "made": time.time(),
        "files": sizes,
        "checksums": {name: _crc32(path / name) for name in sizes},
    }
    index = {"key": entry.name, **facts, **own}
    (path / INDEX).write_text(json.dumps({**index, _CHECKSUM: _hash(index)}, indent=1), encoding="utf-8")
    for name in (*sizes, INDEX):
        fsync(path / name)
    _remove(entry)  # one that could not be used
    path.replace(entry)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the operating system inside the context to CacheError, which names the cache folder."""
    hint = "Choose another folder with cache_dir or LAMINA_CACHE."
    with convert_errors(lambda reason: CacheError(f"cache: {folder} cannot be written ({reason}). {hint}"), OSError):
        yield


def _lock(folder: Path, key: str) -> FileLock:
    return FileLock(folder.absolute() / ".locks" / f"{key}.lock", thread_local=False, is_singleton=True)


def _is_own(path: Path) -> bool:
    """Return whether a folder has the files of an entry and no others."""
    names = {file.name for file in path.iterdir() if file.is_file()} if path.is_dir() else set()
    return INDEX in names and all(file.name in names and file.suffix in (".bin", ".json") for file in path.iterdir())


def _remove(path: Path) -> None:
    """Delete an entry after renaming it, so that nobody opens it while it is deleted; open files stay readable."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        path.replace(gone)
        gone.unlink() if gone.is_file() else shutil.rmtree(gone)
