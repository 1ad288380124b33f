"""Checkpoints: one folder per saved step, safetensors and JSON, there as a whole or not at all."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors.torch import load_file, save_file

from lamina.errors import ConfigError, StoreError, convert_errors
from lamina.train.identity import difference, seal, unseal
from lamina.utils import barrier, rank

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from lamina.train.identity import Facts

    State = tuple[dict[str, Tensor], dict[str, Any]]

TENSORS, PROGRESS, _OLD = "tensors.safetensors", "progress.json", "readers.json"  # the last is of version 0.1
_FILES = {TENSORS, PROGRESS, _OLD}
_KEPT = 2
_CHUNK = 1 << 24  # bytes


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass
class Checkpoints:
    """The checkpoints of one run, each in a folder "checkpoint-<step>"."""

    folder: Path
    op: str  # named in errors
    run: dict[str, Any] = field(default_factory=dict)  # must be the same for a run to go on from one; see `identity`

    def newest(self) -> Path | None:
        """The newest, or None."""
        return next(reversed(self._own()), None)

    def _own(self, prefix: str = "") -> list[Path]:
        """The checkpoints, the oldest first; with the prefix ".", those that were not wholly written or removed."""
        paths = [path for path in self.folder.glob(f"{prefix}checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
        for path in paths:
            if not path.is_dir() or not _FILES.issuperset(file.name for file in path.iterdir()):
                what = f"holds {path.name}, which was made by something else and is not overwritten"
                raise StoreError(f"{self.op}: {self.folder} {what}. Give another folder.")
        return sorted(paths, key=_step)

    def begin(self, *, resume: bool) -> State | None:
        """Clear the folder for a run; with `resume`, give the tensors and progress of the newest checkpoint, if any.

        Raises:
            StoreError: If it is damaged; says which older one is whole.
            ConfigError: If it is of another run; says what differs.
        """
        barrier()
        leftovers, saved = self._own("."), self._own()
        state = self._newest_state(saved) if resume else None
        barrier()
        if rank() == 0:
            for path in leftovers if resume else [*leftovers, *saved]:
                _remove(path)
        barrier()
        return state

    def _newest_state(self, paths: list[Path]) -> State | None:
        damaged: dict[Path, StoreError] = {}
        for path in reversed(paths):
            try:
                run, tensors, progress = _read(path)
            except StoreError as error:
                damaged[path] = error
                continue
            if damaged:
                names = " and ".join(str(other) for other in damaged)
                raise self._damaged(damaged, f"Remove {names} to go on from {path.name}, which is whole.")
            if differs := difference(run, self.run):
                what = f"was made with {differs}; a run resumes as it began"
                hint = "Use the same settings, or train without resume"
                raise ConfigError(f"{self.op}: the checkpoint in {path} {what}. {hint}.")
            return tensors, progress
        if damaged:
            raise self._damaged(damaged, "No other is whole; train without resume to start anew.")
        return None

    def _damaged(self, damaged: Mapping[Path, StoreError], hint: str) -> StoreError:
        path, error = next(iter(damaged.items()))
        return StoreError(f"{self.op}: the checkpoint in {path} cannot be used ({error}). {hint}")

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Write a checkpoint under a temporary name, move it into place, and remove all but the newest two."""
        place, beside = self.folder / f"checkpoint-{step}", self.folder / f".checkpoint-{step}"
        said = f"{self.op}: a checkpoint cannot be written to {self.folder}"
        hint = "those before are whole. Make room there and resume."
        with convert_errors(lambda reason: StoreError(f"{said} ({reason}); {hint}")):
            try:
                _remove(place)
                _remove(beside)
                beside.mkdir(parents=True)
                save_file(tensors, beside / TENSORS, metadata={"format": "pt"})
                text = seal(self.run, {"tensors": _checksum(beside / TENSORS), "progress": progress})
                (beside / PROGRESS).write_text(text, encoding="utf-8")
                beside.replace(place)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
        for old in self._own()[:-_KEPT]:
            _remove(old)

    def needed_bytes(self, each: int) -> int:
        """How much more is written at most, with so many bytes in each checkpoint: those kept, and the next."""
        there = [path / TENSORS for path in self._own()]
        return max(0, (_KEPT + 1) * each - sum(file.stat().st_size for file in there if file.is_file()))

    def clear(self) -> None:
        """Remove all of them, and the folder if nothing else is in it."""
        for path in [*self._own("."), *self._own()]:
            _remove(path)
        with suppress(OSError):
            self.folder.rmdir()


def _read(path: Path) -> tuple[dict[str, Facts], dict[str, Tensor], dict[str, Any]]:
    """The run that a checkpoint is of, its tensors and progress; a StoreError, in short, unless they are as saved."""
    if (path / _OLD).is_file():
        raise StoreError(f"{_OLD} was written by version 0.1 of lamina, in another format")
    run, state = unseal(path / PROGRESS)
    try:
        checksum = _checksum(path / TENSORS)
    except OSError as error:
        raise StoreError(f"{TENSORS} cannot be read: {error.strerror or error}") from error
    if checksum != state["tensors"]:
        raise StoreError(f"{TENSORS} holds something else than was saved; its checksum differs")
    return run, load_file(path / TENSORS), state["progress"]


def _remove(path: Path) -> None:
    """Remove a checkpoint of ours, under a name from which nobody resumes."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f".{path.name.removeprefix('.')}")))


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
