"""Files of a saved folder: written whole or not at all, and read with every damage turned into one sentence."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors

from lamina.errors import StoreError, foreign_errors
from lamina.utils import is_file, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


def damaged(place: object, what: str) -> StoreError:
    """The error for a file or folder that holds something else than was saved."""
    return StoreError(f"load: {place} {what}. Copy or save it again.")


# How files are replaced: all is written to WORK/new; PLAN appears in one rename; the old go to WORK/old, the new take
# their places; PLAN goes, then WORK. A process may die anywhere: whoever claims or reads the folder next undoes a PLAN
# that is there, and finds the old files; without one the folder holds the old or the new, and a claim sweeps WORK.
WORK, LOCK, PLAN = ".lamina-swap", ".lamina-lock", "plan.json"


@contextmanager
def claimed(folder: Path, names: Sequence[str] = (), *, force: bool = False) -> Generator[None]:
    """Hold the right to write files of these names to a folder, made if it is not there; its thread may claim it again.

    The first name is that of the mark: without it (unless `force`) such files were made by something else.

    Raises:
        StoreError: If another run holds the folder, it cannot be written, or it holds such files without the mark.
    """
    with _disk_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"save: {folder} is a file, not a folder.")
        lock = FileLock(folder.absolute() / LOCK, is_singleton=True)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=1.0, poll_interval=0.02)  # longer than another needs to undo a plan
        except Timeout as error:
            what = "is being written by another run. Give another folder, or wait."
            raise StoreError(f"save: {folder} {what}") from error
    with held:
        try:
            with _disk_errors(folder):
                _recover(folder)
            _check_names(folder, names, force=force)
            yield
        finally:
            with suppress(OSError):
                if lock.lock_counter == 1:
                    (folder / LOCK).unlink()  # filelock gives no lock on a file that is gone
                for path in new:
                    path.rmdir()  # if it is empty


def settle(folder: Path) -> None:
    """Undo what a process that died while it replaced files began; whoever reads a folder calls this first."""
    if is_file(folder / WORK / PLAN):
        with claimed(folder):
            pass


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
    return foreign_errors(lambda reason: StoreError(f"save: {folder} {what.format(reason)}. {hint}"))


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
    """Write an object as indented JSON; StoreError if a value is not one that JSON has."""
    holds = "`info` can hold text, numbers, lists and mappings"
    with foreign_errors(lambda reason: StoreError(f"save: {path.name} cannot be written ({reason}); {holds}.")):
        text = json.dumps(fields, indent=2, ensure_ascii=False).encode()
    path.write_bytes(text + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; StoreError if it is missing, damaged, or holds something else."""
    fields: object = _read(path, lambda content: json.loads(content.decode()), "JSON")
    if not isinstance(fields, dict):
        raise damaged(path, "holds no JSON object")
    return cast("dict[str, Any]", fields)


def _read(path: Path, parse: Callable[[bytes], Any], form: str) -> Any:
    with foreign_errors(lambda reason: StoreError(f"load: {path} cannot be read ({reason}).")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise damaged(path, "is not there; the folder is incomplete") from None
    with foreign_errors(lambda reason: damaged(path, f"is not {form} ({reason}); the file is damaged or cut off")):
        return parse(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in the safetensors format; those that share memory are written one by one."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(dump_safetensors(plain, metadata={"format": "pt"}))


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors from a safetensors file; StoreError if it is damaged, or a name or shape is not as expected.

    Floats must be floats, of whichever precision was saved.
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
    return tensors
