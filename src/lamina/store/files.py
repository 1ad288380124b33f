"""Files of a saved folder: replace them all at once or not at all, and report damage in one clear sentence.

How files are replaced: the new files are written to WORK/new, where WORK is a folder inside the saved folder. Then
PLAN, a file in WORK that lists the old and the new files, appears in one rename. The old files move to WORK/old, the
new files to their places, and PLAN is deleted, then WORK.

The process may die at any point. The next process that reserves or reads the folder finds PLAN and moves everything
back, so that it sees the old files. Without PLAN, the folder has either the old or the new files, and WORK is deleted.

A power failure is covered too if the file system keeps the order of renames, as journaling ones do, because the new
files are synced to disk before PLAN appears. Folders are not synced, so the last save may be lost.

Each kind of saved folder has a mark: a file that lamina always writes there. Without it, files of the same names belong
to other software and are not overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from rich.filesize import decimal
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors

from lamina.errors import NotFiniteError, StoreError, convert_errors
from lamina.layers.nan_checks import first_non_finite
from lamina.utils import MAX_BYTES, RepeatedKeyError, fsync, is_file, parse_json, read_bytes, write_errors, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from lamina.utils import JSON, JSONObject

Files = dict[str, "Callable[[Path], object]"]  # name in a folder -> function that writes the file at the given path
T = TypeVar("T")

WORK, LOCK, PLAN = ".lamina-swap", ".lamina-lock", "plan.json"
LOCK_WAIT_S = 1.0  # seconds to wait for a lock; a process that only undoes a plan holds it for less
_READS = 3  # attempts to read a folder that another process replaces meanwhile


def damaged(place: object, what: str) -> StoreError:
    """Return the StoreError for a damaged file or folder, `place`. `what` follows it in the message: "is not JSON"."""
    return StoreError(f"load: {place} {what}. Copy or save it again.")


# Reserving and replacing


@contextmanager
def locked(path: Path, output: Path, op: str = "save") -> Generator[None]:
    """Hold a lock file during the `with` block, and delete it afterwards. The thread that holds it may lock it again.

    Args:
        path: The lock file.
        output: The file or folder that the lock protects, for messages.
        op: The operation, for messages.

    Raises:
        StoreError: If another process or thread holds the lock for more than a second.
        OSError: If the lock file cannot be created.
    """
    lock = FileLock(path.absolute(), is_singleton=True)
    try:
        held = lock.acquire(timeout=LOCK_WAIT_S, poll_interval=0.02)
    except Timeout:
        raise StoreError(f"{op}: {output} is being written by another run. Give another output, or wait.") from None
    with held:
        try:
            yield
        finally:
            if lock.lock_counter == 1:  # the outermost lock of this thread
                with suppress(OSError):
                    path.unlink()  # safe: filelock does not acquire a lock on a deleted file


@contextmanager
def claimed(folder: Path, names: Sequence[str] = (), *, force: bool = False) -> Generator[None]:
    """Reserve a folder for writing during the `with` block. It is created if it does not exist.

    A replacement of files that a dead process left unfinished is undone first. The same thread may reserve the folder
    again. A folder that was created here and is empty at the end is removed.

    Args:
        folder: The folder.
        names: Names of the files that will be written. The first one is the mark. If it does not exist, other software
            wrote the files, and they may not be overwritten.
        force: Whether to overwrite files even if the mark is missing.

    Raises:
        StoreError: If another process or thread has reserved the folder, it cannot be written, the plan of the
            unfinished replacement is damaged, or the folder has such files but no mark.
    """
    with ExitStack() as stack:
        with _disk_errors(folder):
            if folder.exists() and not folder.is_dir():
                raise StoreError(f"save: {folder} is a file, not a folder.")
            stack.callback(_remove_empty, [path for path in (folder, *folder.parents) if not path.exists()])
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / LOCK, folder))
            _undo_plan(folder)
        _check_names(folder, names, force=force)
        yield


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, given innermost first; stop at the first that is not empty."""
    with suppress(OSError, ValueError):  # ValueError: no folder can have this name
        for folder in folders:
            folder.rmdir()


def settle(folder: Path) -> None:
    """Undo a replacement of files that a dead process left unfinished. Call this before reading a saved folder.

    Raises:
        StoreError: If another process is replacing the files, and does not finish in time; or if the plan is damaged,
            or the folder cannot be written.
    """
    if is_file(plan := folder / WORK / PLAN):
        try:
            with claimed(folder):
                pass
        except StoreError:
            if plan.exists():  # else the run that holds the folder has finished the replacement
                raise


def read_steady(folder: Path, mark: str, read: Callable[[], T]) -> T:
    """Call `read` and return its result; call it again if another process replaced the folder's files meanwhile.

    Args:
        folder: The folder.
        mark: Name of a file that every replacement replaces.
        read: Function that reads the files. Its errors are raised, unless the files were replaced meanwhile.

    Raises:
        StoreError: If the files are replaced during every attempt, or `settle` fails.
    """
    for _ in range(_READS):
        settle(folder)
        before = _version(folder, mark)
        try:
            result = read()
        except Exception:
            if _version(folder, mark) == before:
                raise
            continue
        if _version(folder, mark) == before:
            return result
    raise StoreError(f"load: {folder} is replaced again and again by another run. Load it when that has ended.")


def _version(folder: Path, mark: str) -> tuple[object, ...]:
    """Return a value that changes when a replacement of the folder's files begins, and again when it ends.

    `mark` is the name of a file that every replacement replaces.
    """
    try:
        facts = (folder / mark).stat()
    except OSError:
        return (None, (folder / WORK / PLAN).exists())
    return (facts.st_ino, facts.st_mtime_ns, (folder / WORK / PLAN).exists())


def files_in(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it and with "/", sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise StoreError if the disk of an existing folder has less than `needed_bytes` free bytes."""
    if needed_bytes > (free := shutil.disk_usage(folder).free):
        what = f"needs about {decimal(needed_bytes)} for what will be written, and {decimal(free)} are free"
        raise StoreError(f"save: {folder} {what}. Free disk space there, or give another folder.")


@contextmanager
def staged(folder: Path, names: Sequence[str], listed: Iterable[str] = (), *, force: bool = False) -> Generator[Path]:
    """Replace files of a folder all at once: yield an empty folder, whose content later replaces the old files.

    If the `with` block raises, the folder stays as it was, and any error but Lamina's own becomes a StoreError. Only
    files in `names` and `listed` are deleted; all others stay. The mark is moved away first and put in place last. So
    after `settle`, the folder has all old files, all new files, or no mark.

    Args:
        folder: The folder. It is reserved, see `claimed`.
        names: Names of the files, the mark first. Files of other names may be written too.
        listed: Names of more files that an earlier save wrote. They are deleted if they are not written again.
        force: Whether to overwrite files even if the mark is missing.

    Yields:
        The empty folder to write to.

    Raises:
        StoreError: If another process or thread has reserved the folder; if it has files of these names but no mark; if
            it cannot be written; or if a link leads out of it.
    """
    with claimed(folder, names, force=force), _disk_errors(folder):
        (stage := folder / WORK / "new").mkdir(parents=True)
        try:
            yield stage
            written = files_in(stage)
            _check_names(folder, [names[0], *written], force=force)
            known = [name for name in dict.fromkeys([*names, *listed, *written]) if _is_inside(folder, name)]
            if outside := [name for name in written if name not in known]:
                raise StoreError(f"save: {folder / outside[0]} is outside of {folder}, by a link. Give another folder.")
            old, new = ([name for name in known if (place / name).is_file()] for place in (folder, stage))
            (usual := folder / WORK / "usual").touch()
            for name in new:
                shutil.copymode(usual, stage / name)  # safetensors makes files that only their owner can read
                fsync(stage / name)
            write_text(folder / WORK / PLAN, json.dumps([old, new]))
            _move(old, folder, folder / WORK / "old")
            _move(reversed(new), stage, folder)
            (folder / WORK / PLAN).unlink()
        finally:
            _undo_plan(folder)


def _check_names(folder: Path, names: Sequence[str], *, force: bool) -> None:
    """Raise StoreError if a folder has some of the files `names`, but not the first: other software wrote them.

    The first is the mark, which Lamina always writes. With `force`, nothing is checked.
    """
    present = [name for name in names if os.path.lexists(folder / name)]
    if present and names[0] not in present and not force:
        held = f"{', '.join(present[:4])}{' and others' * (len(present) > 4)}"
        what = f"holds {held} but no {names[0]}; it was made by something else and is not overwritten"
        raise StoreError(f"save: {folder} {what}. Give an empty folder.")


def _disk_errors(folder: Path) -> AbstractContextManager[None]:
    """Return a context manager that turns any error but Lamina's own into a StoreError about `folder`."""
    return write_errors(f"save: {folder}", "nothing in it was changed", of_disk=(OSError, SafetensorError))


def _undo_plan(folder: Path) -> None:
    """Undo a replacement of files that a process left unfinished, as the file PLAN shows; delete the working folder.

    Each step can be repeated, because the process that undoes a plan may die too. Raises StoreError if PLAN is damaged,
    or names a place outside the folder.
    """
    work, stage = folder / WORK, folder / WORK / "new"
    if (work / PLAN).exists():
        old, new = _read(work / PLAN, TypeAdapter(tuple[list[str], list[str]]).validate_json, "a plan")
        places = [place.relative_to(folder) / name for place in (folder, work / "old", stage) for name in (*old, *new)]
        if not all(_is_inside(folder, place) for place in places):
            raise damaged(work / PLAN, "leads out of the folder")
        # a new file that is no longer in the stage was already moved to its place
        _move([name for name in new if not (stage / name).exists()], folder, stage)
        _move(reversed(old), work / "old", folder)
        if old and (folder / old[0]).exists():
            os.utime(folder / old[0])  # the mark gets a new time, so that `read_steady` sees that it was moved away
        (work / PLAN).unlink()
    if work.exists():
        shutil.rmtree(work)


def _is_inside(folder: Path, name: str | Path) -> bool:
    """Return whether a file name leads to a place inside the folder. ".." and links may lead out of it.

    A name that ends in ".." names no file, and is outside.
    """
    return Path(name).name != ".." and (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    """Move files from the folder `source` to `target`, in the given order; names without a file are skipped.

    Folders in `target` are made, and folders in `source` that become empty are removed.
    """
    for name in names:
        if (source / name).is_file():
            os.renames(source / name, target / name)  # also makes the target's folders, and removes empty ones behind


# Reading and writing


def write_json(path: Path, fields: Mapping[str, JSON]) -> None:
    """Write an object as indented JSON; raise StoreError if a value has a type that JSON does not have.

    NaN and infinity are written as Python's `json` writes and reads them.
    """
    holds = "`info` can hold text, numbers, lists and mappings"
    with convert_errors(lambda reason: StoreError(f"save: {path.name} cannot be written ({reason}); {holds}.")):
        text = json.dumps(fields, indent=2, ensure_ascii=False).encode()
    path.write_bytes(text + b"\n")


def read_json(path: Path, *, last_wins: bool = False) -> JSONObject:
    """Read a file with one JSON object; raise StoreError if it is missing, too large, damaged, or holds another value.

    A file in which a key comes twice is refused; with `last_wins`, the last value counts, as in transformers.
    """

    def parse(content: bytes) -> object:
        try:
            return parse_json(content.decode(), last_wins=last_wins)
        except RepeatedKeyError as error:
            raise damaged(path, f"is not clear: {error}") from None

    fields = _read(path, parse, "JSON", MAX_BYTES)
    if not isinstance(fields, dict):
        raise damaged(path, "holds no JSON object")
    return cast("JSONObject", fields)


def _read(path: Path, parse: Callable[[bytes], T], form: str, most: int | None = None) -> T:
    """Return the result of `parse` on a file's bytes; StoreError if it is missing, too large, unreadable or not parsed.

    `form` names the format in messages, and `most` is the maximum number of bytes. None: no limit.
    """
    with convert_errors(lambda reason: StoreError(f"load: {path} cannot be read ({reason}).")):
        if path.exists() and not is_file(path):  # reading a pipe or a device would never end
            raise damaged(path, "is no file")
        try:
            content = path.read_bytes() if most is None else read_bytes(path, most)
        except FileNotFoundError:
            raise damaged(path, "is not there; the folder is incomplete") from None
    with convert_errors(lambda reason: damaged(path, f"is not {form} ({reason}); the file is damaged or cut off")):
        return parse(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in the safetensors format. Tensors that share memory are each written in full."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(dump_safetensors(plain, metadata={"format": "pt"}))


def check_finite(what: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NotFiniteError if one of the (name, tensor) pairs holds NaN or infinity; `what` names their owner."""
    if name := first_non_finite(tensors):
        raise NotFiniteError(f"save: {what} holds NaN or infinity in '{name}'; such weights are not saved.", name=name)


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> tensor from a reader's safetensors file, on the CPU, in the types in which they were saved.

    Args:
        path: The file.
        expected: Name -> tensor whose shape the file must have. Floating-point tensors may have any float type.

    Raises:
        StoreError: If the file is missing or damaged, a name or shape differs, a tensor holds integers in place of
            floats or the reverse, or one holds NaN or infinity.
    """
    tensors = _read(path, load_safetensors, "safetensors")
    wrong = [f"no tensor '{name}'" for name in expected if name not in tensors]
    wrong += [f"an unexpected tensor '{name}'" for name in tensors if name not in expected]
    for name, want in expected.items():
        got = tensors.get(name, want)
        if got.shape != want.shape:
            wrong.append(f"'{name}' is {tuple(got.shape)} instead of {tuple(want.shape)}")
        elif got.is_floating_point() != want.is_floating_point():
            wrong.append(f"'{name}' is {got.dtype} instead of {want.dtype}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise damaged(path, f"does not fit the reader that the folder describes: {wrong[0]}{more}")
    if name := first_non_finite(tensors.items()):
        raise damaged(path, f"holds NaN or infinity in '{name}'")
    return tensors
