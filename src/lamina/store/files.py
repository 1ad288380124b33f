"""Files of a saved folder: written whole or not at all, and read with every damage turned into one sentence."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors

from lamina.errors import LaminaError, StoreError
from lamina.utils import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from torch import Tensor


def damaged(place: object, what: str) -> StoreError:
    """The error for a file or folder that holds something else than was saved."""
    return StoreError(f"load: {place} {what}. Copy or save it again.")


@contextmanager
def staged(folder: Path, entries: Sequence[str], *, force: bool = False) -> Generator[Path]:
    """Yield an empty folder to write the entries of a folder into; they replace the old ones all at once.

    The first entry marks the folder as complete: it goes first and comes last, so that whoever reads finds the old
    entries, the new ones, or no mark. What else is in the folder stays.

    Raises:
        StoreError: If the folder cannot be written, or holds such an entry without the mark (unless `force`).
    """
    _check_target(folder, entries, force=force)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".lamina-", dir=folder, ignore_cleanup_errors=True) as stage:
            yield Path(stage)
            _swap(folder, Path(stage), entries)
    except LaminaError:
        raise
    except OSError as error:
        what = f"cannot be written ({error.strerror or first_line(error)}); nothing in it was changed"
        raise StoreError(f"save: {folder} {what}. Check the rights and the space there.") from error
    finally:
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def check_folder(folder: Path, entries: Sequence[str]) -> None:
    """Raise the StoreError that `staged` would, and leave the folder as it is."""
    _check_target(folder, entries, force=False)
    with staged(folder, ()):
        pass


def _check_target(folder: Path, entries: Sequence[str], *, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"save: {folder} is a file, not a folder.")
    foreign = [name for name in entries if (folder / name).exists()]
    if foreign and entries[0] not in foreign and not force:
        what = f"holds {', '.join(foreign)} but no {entries[0]}; it was made by something else and is not overwritten"
        raise StoreError(f"save: {folder} {what}. Give an empty folder.")


def _swap(folder: Path, stage: Path, entries: Sequence[str]) -> None:
    """Put the staged entries in place; on failure put the old ones back."""
    old = stage / ".old"
    old.mkdir()
    try:
        _move(entries, folder, old)
        _move(reversed(entries), stage, folder)
    except OSError:
        replaced = [name for name in reversed(entries) if (old / name).exists()]
        _move(replaced, folder, stage)
        _move(replaced, old, folder)
        raise


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            (source / name).replace(target / name)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write an object as indented JSON; StoreError if a value is not one that JSON has."""
    try:
        text = json.dumps(fields, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        what = f"cannot be written ({error}); `info` can hold text, numbers, lists and mappings"
        raise StoreError(f"save: {path.name} {what}.") from None
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; StoreError if it is missing, damaged, or holds something else."""
    fields: object = _read(path, lambda content: json.loads(content.decode()), "JSON")
    if not isinstance(fields, dict):
        raise damaged(path, "holds no JSON object")
    return cast("dict[str, Any]", fields)


def _read(path: Path, parse: Callable[[bytes], Any], form: str) -> Any:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        raise damaged(path, "is not there; the folder is incomplete") from None
    except OSError as error:
        raise StoreError(f"load: {path} cannot be read ({error.strerror or first_line(error)}).") from None
    except (ValueError, SafetensorError) as error:
        raise damaged(path, f"is not {form} ({first_line(error)}); the file is damaged or cut off") from None


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
