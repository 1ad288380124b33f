"""Files of a saved folder: written whole or not at all, and read with every damage turned into one sentence."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from rich.filesize import decimal
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors

from lamina.errors import NotFiniteError, StoreError, convert_errors
from lamina.layers.nan_checks import first_non_finite
from lamina.utils import MAX_BYTES, fsync, is_file, parse_json, read_bytes, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

Files = dict[str, "Callable[[Path], object]"]  # name in a folder -> what writes the file of that path
T = TypeVar("T")


def damaged(place: object, what: str) -> StoreError:
    """The error for a file or folder that holds something else than was saved."""
    return StoreError(f"load: {place} {what}. Copy or save it again.")


# How files are replaced: all is written to WORK/new; PLAN appears in one rename; the old go to WORK/old, the new take
# their places; PLAN goes, then WORK. A process may die anywhere: whoever claims or reads the folder next undoes a PLAN
# that is there, and finds the old files; without one the folder holds the old or the new, and a claim sweeps WORK.
# That is for processes that die. Should the power fail, the files are on the disk before PLAN is, and the renames keep
# their order where the file system keeps it, as journals do; folders are not synced, so the last save may be undone.
# Checkpoints are large and many, and are not synced at all: the one before stays, and a damaged one is refused.
WORK, LOCK, PLAN = ".lamina-swap", ".lamina-lock", "plan.json"
_READS = 3  # of a folder that is replaced while it is read


@contextmanager
def locked(path: Path, output: Path, op: str = "save") -> Generator[None]:
    """Hold a lock file, which goes at the end, while an output is written; the thread may take it again.

    Raises:
        StoreError: If another run holds it.
    """
    lock = FileLock(path.absolute(), is_singleton=True)
    try:
        held = lock.acquire(timeout=1.0, poll_interval=0.02)  # longer than another needs to undo a plan
    except Timeout:
        raise StoreError(f"{op}: {output} is being written by another run. Give another output, or wait.") from None
    with held:
        try:
            yield
        finally:
            if lock.lock_counter == 1:
                with suppress(OSError):
                    path.unlink()  # filelock gives no lock on a file that is gone


@contextmanager
def claimed(folder: Path, names: Sequence[str] = (), *, force: bool = False) -> Generator[None]:
    """Hold the right to write files of these names to a folder, made if it is not there; its thread may claim it again.

    The first name is that of the mark: without it (unless `force`) such files were made by something else.

    Raises:
        StoreError: If another run holds the folder, it cannot be written, or it holds such files without the mark.
    """
    with ExitStack() as stack:
        with _disk_errors(folder):
            if folder.exists() and not folder.is_dir():
                raise StoreError(f"save: {folder} is a file, not a folder.")
            stack.callback(_remove_empty, [path for path in (folder, *folder.parents) if not path.exists()])
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / LOCK, folder))
            _recover(folder)
        _check_names(folder, names, force=force)
        yield


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def settle(folder: Path) -> None:
    """Undo what a process that died while it replaced files began; whoever reads a folder calls this first."""
    if is_file(plan := folder / WORK / PLAN):
        try:
            with claimed(folder):
                pass
        except StoreError:
            if plan.exists():  # or the run that holds the folder is done with it, and goes on
                raise


def read_steady(folder: Path, mark: str, read: Callable[[], T]) -> T:
    """What `read` makes of the files of a folder; it is called again if they were replaced meanwhile.

    Raises:
        StoreError: If they are replaced again and again.
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
    """Differs between before, during and after a replacement of a folder's files."""
    try:
        facts = (folder / mark).stat()
    except OSError:
        return (None, (folder / WORK / PLAN).exists())
    return (facts.st_ino, facts.st_mtime_ns, (folder / WORK / PLAN).exists())


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise StoreError unless so much can be written to a folder."""
    if needed_bytes > (free := shutil.disk_usage(folder).free):
        what = f"needs about {decimal(needed_bytes)} for what will be written, and {decimal(free)} are free"
        raise StoreError(f"save: {folder} {what}. Make room there, or give another folder.")


@contextmanager
def staged(folder: Path, names: Sequence[str], listed: Iterable[str] = (), *, force: bool = False) -> Generator[Path]:
    """Yield an empty folder to write the files of a folder into; they replace the old ones all at once, or not at all.

    Takes and raises what `claimed` does. The mark goes first and comes last: whoever reads past `settle` finds the old
    files, the new ones, or no mark. Of what is not replaced only `names` and `listed` files go.
    """
    with claimed(folder, names, force=force), _disk_errors(folder):
        (stage := folder / WORK / "new").mkdir(parents=True)
        try:
            yield stage
            written = sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
            _check_names(folder, [names[0], *written], force=force)
            known = [name for name in dict.fromkeys([*names, *listed, *written]) if _is_inside(folder, name)]
            if outside := [name for name in written if name not in known]:
                raise StoreError(f"save: {folder / outside[0]} is outside of {folder}, by a link. Give another folder.")
            old, new = ([name for name in known if (place / name).is_file()] for place in (folder, stage))
            (usual := folder / WORK / "usual").touch()
            for name in new:
                shutil.copymode(usual, stage / name)  # safetensors gives weights to their owner alone
                fsync(stage / name)
            write_text(folder / WORK / PLAN, json.dumps([old, new]))
            _move(old, folder, folder / WORK / "old")
            _move(reversed(new), stage, folder)
            (folder / WORK / PLAN).unlink()
        finally:
            _recover(folder)


def _check_names(folder: Path, names: Sequence[str], *, force: bool) -> None:
    foreign = [name for name in names if os.path.lexists(folder / name)]
    if foreign and names[0] not in foreign and not force:
        what = f"holds {', '.join(foreign)} but no {names[0]}; it was made by something else and is not overwritten"
        raise StoreError(f"save: {folder} {what}. Give an empty folder.")


def _disk_errors(folder: Path) -> AbstractContextManager[None]:
    what, hint = "cannot be written ({}); nothing in it was changed", "Check the rights and the space there."
    return convert_errors(lambda reason: StoreError(f"save: {folder} {what.format(reason)}. {hint}"))


def _recover(folder: Path) -> None:
    """Undo a plan, and sweep what was staged."""
    work, stage = folder / WORK, folder / WORK / "new"
    if (work / PLAN).exists():
        old, new = _read(work / PLAN, TypeAdapter(tuple[list[str], list[str]]).validate_json, "a plan")
        places = [place.relative_to(folder) / name for place in (folder, work / "old", stage) for name in (*old, *new)]
        if not all(_is_inside(folder, place) for place in places):
            raise damaged(work / PLAN, "leads out of the folder")
        _move([name for name in new if not (stage / name).exists()], folder, stage)
        _move(reversed(old), work / "old", folder)
        if old and (folder / old[0]).exists():
            os.utime(folder / old[0])  # so that who reads meanwhile (`read_steady`) knows that it was away
        (work / PLAN).unlink()
    if work.exists():
        shutil.rmtree(work)


def _is_inside(folder: Path, name: str | Path) -> bool:
    """Whether a file of a folder is in it, which ".." and links can prevent."""
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            os.renames(source / name, target / name)  # with the folders on its way, which go when they are empty


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write an object as indented JSON; StoreError if a value is of a type that JSON has not.

    NaN and infinity are written as Python's `json` does, which reads them again.
    """
    holds = "`info` can hold text, numbers, lists and mappings"
    with convert_errors(lambda reason: StoreError(f"save: {path.name} cannot be written ({reason}); {holds}.")):
        text = json.dumps(fields, indent=2, ensure_ascii=False).encode()
    path.write_bytes(text + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; StoreError if it is missing, damaged, or holds something else."""
    fields: object = _read(path, lambda content: parse_json(content.decode()), "JSON", MAX_BYTES)
    if not isinstance(fields, dict):
        raise damaged(path, "holds no JSON object")
    return cast("dict[str, Any]", fields)


def _read(path: Path, parse: Callable[[bytes], Any], form: str, most: int | None = None) -> Any:
    with convert_errors(lambda reason: StoreError(f"load: {path} cannot be read ({reason}).")):
        try:
            content = path.read_bytes() if most is None else read_bytes(path, most)
        except FileNotFoundError:
            raise damaged(path, "is not there; the folder is incomplete") from None
    with convert_errors(lambda reason: damaged(path, f"is not {form} ({reason}); the file is damaged or cut off")):
        return parse(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in the safetensors format; those that share memory are written one by one."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(dump_safetensors(plain, metadata={"format": "pt"}))


def check_finite(what: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NotFiniteError if a tensor that is to be saved holds NaN or infinity."""
    if name := first_non_finite(tensors):
        raise NotFiniteError(f"save: {what} holds NaN or infinity in '{name}'; such weights are not saved.", name=name)


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors from a safetensors file; StoreError if it is damaged, or a name or shape is not as expected.

    Floats must be floats, of whichever precision was saved, and finite.
    """
    tensors: dict[str, Tensor] = _read(path, load_safetensors, "safetensors")
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
