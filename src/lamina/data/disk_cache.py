"""The folder of the hidden-state cache: its entries, the locks of processes that write, and unfinished files.

<folder>/
  <key>/             a complete entry: one file of states per stack, and index.json with checksums of all files
  .<key>.new/        an entry while it is written; the thread that writes it holds the lock of the key
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
from typing import TYPE_CHECKING, TypeAlias, final

from filelock import FileLock, Timeout
from rich.filesize import decimal

from lamina.errors import CacheError, ConfigError, UnknownNameError, convert_errors
from lamina.utils import MAX_BYTES, JSONObject, fsync, is_dir, no_pipe, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

# What the states of an entry depend on, and facts about its files, as `index.json` holds them: name -> JSON value.
Facts: TypeAlias = JSONObject

FORMAT = 4  # version of the format of an entry's files
INDEX = "index.json"
GIB = 2**30
_CHECKSUM = "checksum"  # key of the index: the checksum of all other keys
_KEY = re.compile(r"[0-9a-f]{32}")
_PARTIAL = re.compile(r"\.([0-9a-f]{32})\.(new|gone)")


def cache_folder(asked: str | Path | None = None) -> Path:
    """Return the cache folder: `asked`, else $LAMINA_CACHE, else the folder "lamina" in the user's cache folder.

    The user's cache folder is $XDG_CACHE_HOME or ~/.cache. Empty variables count as not set. The result need not exist.
    """
    default = os.environ.get("LAMINA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lamina")
    return Path(default if asked is None else asked).expanduser()


@final
@dataclass(frozen=True)
class Entry:
    """A complete entry of the cache, in a folder of its own.

    Attributes:
        key: Hash of the facts that the states depend on; the name of the folder.
        facts: The contents of its index. Empty if the index cannot be read; only "format" if it has another format.
        size_bytes: Size of its files.
        problem: Why it cannot be used; None if it can.
    """

    key: str
    facts: Facts
    size_bytes: int
    problem: str | None

    @property
    def age_s(self) -> float | None:
        """Seconds since the entry was written; None if its index does not say."""
        date = self.facts.get("made")
        return max(0.0, time.time() - date) if isinstance(date, int | float) else None


def entries(folder: Path) -> list[Entry]:
    """Return all complete entries of the cache folder, those with a `problem` too: newest first, of unknown age last.

    Other files and folders are ignored. If the folder does not exist, the list is empty. Raises CacheError if it cannot
    be read.
    """
    with convert_errors(lambda reason: CacheError(f"cache: {folder} cannot be read ({reason})."), OSError):
        paths = sorted(folder.iterdir()) if os.path.lexists(folder) else []
        folders = [path for path in paths if _KEY.fullmatch(path.name) and _is_entry(path)]
    complete = [entry for path in folders if (entry := read_entry(path))]
    return sorted(complete, key=lambda entry: float("inf") if entry.age_s is None else entry.age_s)


def read_entry(path: Path, expected: Mapping[str, object] | None = None) -> Entry | None:
    """Read the index of an entry, and check its files.

    Args:
        path: The folder of the entry.
        expected: The facts that the entry must have been computed from. The checksums of all files are then compared
            too, so each file is read once. None: only the names and sizes of the files are checked.

    Returns:
        The entry; its `problem` says why it cannot be used. None if there is no folder at `path`.
    """
    sizes, facts = dict[str, int](), Facts()
    try:
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        facts, problem = _read_index(path / INDEX)
        if problem is None:
            problem = _problem(path, facts, sizes, expected)
    except Exception:  # the index may hold anything, so that errors of any type may be raised
        problem = "its index cannot be read"
    # at the end, because another process may remove the entry while it is read
    return Entry(path.name, facts, sum(sizes.values()), problem) if path.is_dir() else None


def _read_index(path: Path) -> tuple[Facts, str | None]:
    """Return the contents of an entry's `index.json` without its checksum, and the problem with it (None: no problem).

    If the index has another format, only the key "format" is returned; if its checksum is wrong, {}. Raises ValueError
    if the file is not a JSON object, and OSError if it cannot be read.
    """
    facts = json.loads(read_bytes(path, MAX_BYTES))
    if not isinstance(facts, dict):
        raise ValueError("not a JSON object")
    if (written := facts.get("format")) != FORMAT:
        return {"format": written}, f"written in format {str(written)[:20]}; this version reads {FORMAT}"
    if facts.pop(_CHECKSUM, None) != _hash(facts):
        return {}, "its index is damaged"
    return facts, None


def _problem(path: Path, facts: Facts, sizes: Mapping[str, int], expected: Mapping[str, object] | None) -> str | None:
    """Return why an entry with an intact index (`facts`) cannot be used; None if it can.

    `sizes` are the sizes of the files in the folder, in bytes. `expected` is the argument of `read_entry`; if it is
    None, checksums are not compared.
    """
    if wrong := [name for name, size in facts["files"].items() if sizes.get(name) != size]:
        return f"{wrong[0]} is missing or incomplete"
    if any(facts.get(name) != value for name, value in (expected or {}).items()):
        return "its content does not match its key"
    known = facts["checksums"] if expected is not None else {}
    return next((f"{name} is damaged" for name, crc in known.items() if _crc32(path / name) != crc), None)


def _hash(facts: Facts) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    """Return the CRC-32 checksum of a file; raise OSError if it cannot be read."""
    crc = 0
    with no_pipe(path).open("rb", buffering=0) as file:
        while content := file.read(2**20):
            crc = zlib.crc32(content, crc)
    return crc


def unfinished(folder: Path, *, remove: bool = False) -> list[Path]:
    """Return the `.new` and `.gone` folders that dead processes left in the cache.

    Entries that a thread of a living process is writing are not among them: their lock is held. With `remove`, the
    folders are deleted as far as the disk allows; OSError if a lock cannot be written. Without it, a folder whose lock
    cannot be written is left out, so that a read-only cache can be listed.
    """
    leftovers = []
    for path in sorted(folder.glob(".*")) if is_dir(folder) else ():
        match = _PARTIAL.fullmatch(path.name)
        if match:
            with suppress(Timeout if remove else OSError), _lock(folder, match[1]).acquire(timeout=0):
                leftovers.append(path)
                if remove:
                    shutil.rmtree(path, ignore_errors=True)
    return leftovers


def clear(folder: Path, which: str) -> list[Entry]:
    """Remove entries from the cache folder, and the unfinished entries of processes that died; return removed entries.

    `which` is the key of an entry, the beginning of a single key, or "all". Raises UnknownNameError if no key begins
    with `which`, or it is ""; ConfigError if several keys do; CacheError if the folder cannot be read or written.
    """
    chosen = known = entries(folder)
    if which != "all":
        chosen = [entry for entry in known if which and entry.key.startswith(which)]
        if not chosen:
            raise UnknownNameError(op="cache", got=which, known=[entry.key for entry in known], what="entry")
        if len(chosen) > 1:
            raise ConfigError(f"cache: '{which}' is the start of {len(chosen)} keys. Give more of the key, or 'all'.")
    with disk_errors(folder):
        for entry in chosen:
            _remove(folder / entry.key)
        unfinished(folder, remove=True)
    return chosen


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise CacheError unless `needed_bytes` fit on the disk of the cache folder and leave a reserve free.

    The reserve is 5 % of the disk, at most 1 GiB. The folder need not exist.
    """
    usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    reserve = min(GIB, usage.total // 20)
    if needed_bytes + reserve > usage.free:
        free = f"{decimal(usage.free)} are free, and {decimal(reserve)} of them stay reserved"
        hint = "Make room (lamina cache), choose another folder with cache_dir, use float16, or go without a cache."
        message = f"cache: {decimal(needed_bytes)} of states are needed in {folder}; {free}. {hint}"
        raise CacheError(message, needed_bytes=needed_bytes, free_bytes=usage.free)


@contextmanager
def claim(folder: Path, key: str, expected: Mapping[str, object] | None = None) -> Iterator[Path | None]:
    """Wait until no other process or thread writes the entry of `key`, and hold its lock inside the `with` block.

    Waiting is logged. Unfinished entries of processes that died are removed. Raises CacheError if this thread holds the
    lock already, and OSError if the folder cannot be written (see `disk_errors`).

    Args:
        folder: The cache folder.
        key: The key of the entry.
        expected: The facts that the entry must have been computed from; see `read_entry`.

    Yields:
        A private folder for the files of the entry. It is removed at the end of the block unless `publish` moved it.
        None if the entry exists and is usable.
    """
    lock, path = _lock(folder, key), folder / f".{key}.new"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("cache: another process or thread writes the states of %s; waiting for it", key)
        with convert_errors(
            lambda _: CacheError(f"cache: this thread is writing {path} already; one at a time."), RuntimeError
        ):
            lock.acquire(poll_interval=0.2)  # filelock's RuntimeError: it would wait for itself
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


def publish(path: Path, facts: Mapping[str, object]) -> None:
    """Complete an entry: write its index, flush its files to disk, and rename its folder to the key.

    An older entry of the same key is removed. Raises OSError if the disk refuses; see `disk_errors`.

    Args:
        path: The private folder from `claim`, with the files of states.
        facts: Everything on which the states depend, JSON-ready; it is stored in the index.
    """
    entry = path.with_name(path.name[1:33])  # the name is ".<key>.new"
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    checksums = {name: _crc32(path / name) for name in sizes}
    made = {"format": FORMAT, "made": time.time(), "files": sizes, "checksums": checksums}
    index = {"key": entry.name, **facts, **made}
    (path / INDEX).write_text(json.dumps({**index, _CHECKSUM: _hash(index)}, indent=1), encoding="utf-8")
    for name in (*sizes, INDEX):
        fsync(path / name)
    _remove(entry)
    path.replace(entry)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert OSErrors raised in the `with` block to CacheErrors that name the cache folder."""
    hint = "Choose another folder with cache_dir or LAMINA_CACHE."
    with convert_errors(lambda reason: CacheError(f"cache: {folder} cannot be written ({reason}). {hint}"), OSError):
        yield


def _lock(folder: Path, key: str) -> FileLock:
    """Return a new lock for the entry of a key: the thread that holds it writes the entry, and excludes all others."""
    return FileLock(folder.absolute() / ".locks" / f"{key}.lock")


def _is_entry(path: Path) -> bool:
    """Return whether a path is the folder of an entry: it has an index, and otherwise only `.bin` and `.json` files."""
    files: list[Path] = []
    with suppress(FileNotFoundError):  # another process may remove the entry meanwhile
        files = list(path.iterdir()) if path.is_dir() else []
    known = all(file.is_file() and file.suffix in (".bin", ".json") for file in files)
    return known and any(file.name == INDEX for file in files)


def _remove(path: Path) -> None:
    """Delete the entry at `path`, if it exists. Files that a process has open stay readable.

    The entry is renamed first, so that no process opens it while it is deleted.
    """
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        path.replace(gone)
        gone.unlink() if gone.is_file() else shutil.rmtree(gone)
