"""Files of a saved folder: written whole or not at all, and read with every damage turned into one sentence."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors

from lamina.errors import LaminaError, StoreError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from torch import Tensor


@contextmanager
def staged(folder: Path, entries: Sequence[str], *, force: bool = False) -> Generator[Path]:
    """Write the entries of a folder all at once.

    The first entry marks the folder as complete: it goes first and comes last, so that whoever reads finds the old
    entries, the new ones, or no mark. Everything else in the folder stays.

    Args:
        folder: Where to; made if it is not there.
        entries: Names of the files and folders that may be written; existing ones are replaced, or removed.
        force: Replace them even if the mark is not there.

    Yields:
        An empty folder to write them into.

    Raises:
        StoreError: If the folder cannot be written, or holds such an entry without the mark, as a folder made by
            something else might.
    """
    _check_target(folder, entries, force=force)
    made = not folder.exists()
    stage: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".lamina-", dir=folder))
        yield stage
        _swap(folder, stage, entries)
    except LaminaError:
        raise
    except OSError as error:
        raise StoreError(
            f"save: {folder} cannot be written ({_reason(error)}); nothing in it was changed. "
            "Check the rights and the space there, or give another folder."
        ) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _check_target(folder: Path, entries: Sequence[str], *, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"save: {folder} is a file, not a folder.")
    foreign = [name for name in entries if (folder / name).exists()]
    if foreign and entries[0] not in foreign and not force:
        raise StoreError(
            f"save: {folder} holds {', '.join(foreign)} but no {entries[0]}; it was made by something else and is "
            "not overwritten. Give an empty folder."
        )


def _swap(folder: Path, stage: Path, entries: Sequence[str]) -> None:
    """Put the staged entries in place; on failure put the old ones back."""
    old = stage / ".old"
    old.mkdir()
    try:
        for name in entries:
            if (folder / name).exists():
                (folder / name).replace(old / name)
        for name in reversed(entries):
            if (stage / name).exists():
                (stage / name).replace(folder / name)
    except OSError:
        for name in reversed(entries):
            if (old / name).exists():
                if (folder / name).exists():
                    (folder / name).replace(stage / name)
                (old / name).replace(folder / name)
        raise


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write an object as indented JSON.

    Raises:
        StoreError: If a value is not one that JSON has.
    """
    try:
        text = json.dumps(fields, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"save: {path.name} cannot be written ({error}); everything in it must be text, numbers, lists or "
            "mappings. Check what was put into `info`."
        ) from None
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        StoreError: If it is missing, damaged, or holds something else.
    """
    try:
        fields: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"load: {path} is not there; the folder is incomplete. Copy or save it again.") from None
    except OSError as error:
        raise StoreError(f"load: {path} cannot be read ({_reason(error)}). Check the rights.") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise StoreError(f"load: {path} is not JSON ({error}); the file is damaged. Copy or save it again.") from None
    if not isinstance(fields, dict):
        raise StoreError(f"load: {path} holds no JSON object; the file is damaged. Copy or save it again.")
    return cast("dict[str, Any]", fields)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in the safetensors format."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path.write_bytes(dump_safetensors(plain, metadata={"format": "pt"}))


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors and hold them against those that are expected.

    Args:
        path: A safetensors file.
        expected: Name -> a tensor of the right shape; floats stay floats, of whichever precision was saved.

    Raises:
        StoreError: If the file is missing, damaged or cut off, or its tensors are not the expected ones.
    """
    try:
        found = load_safetensors(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(f"load: {path} is not there; the folder is incomplete. Copy or save it again.") from None
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"load: {path} cannot be read ({_reason(error)}); it is damaged or cut off. Copy or save it again."
        ) from None
    if wrong := _differences(found, expected):
        raise StoreError(
            f"load: {path} does not fit the reader that the folder describes: {wrong[0]}"
            f"{f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''}. Copy or save it again."
        )
    return found


def _differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    wrong = [f"no tensor '{name}'" for name in expected if name not in found]
    wrong += [f"an unexpected tensor '{name}'" for name in found if name not in expected]
    for name, want in expected.items():
        got = found.get(name, want)
        if got.shape != want.shape:
            wrong.append(f"'{name}' is {tuple(got.shape)} instead of {tuple(want.shape)}")
        elif got.is_floating_point() != want.is_floating_point():
            wrong.append(f"'{name}' is {got.dtype} instead of {want.dtype}")
    return wrong


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
