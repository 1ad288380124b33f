"""Checkpoints: one folder per saved step, safetensors and JSON, there as a whole or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from lamina.errors import ConfigError, StoreError, foreign_errors
from lamina.utils import barrier, rank

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TENSORS, PROGRESS = "tensors.safetensors", "progress.json"
_FILES = {TENSORS, PROGRESS, "readers.json"}  # the last is of version 0.1
_KEPT = 2


@dataclass
class Checkpoints:
    """The checkpoints of one run, each in a folder "checkpoint-<step>"."""

    folder: Path
    op: str  # named in errors
    run: dict[str, Any] = field(default_factory=dict)  # what must be the same for a run to go on from one, JSON-ready

    def newest(self) -> Path | None:
        """The newest, or None."""
        return next(reversed(self._own()), None)

    def _own(self, prefix: str = "") -> list[Path]:
        """The checkpoints, the oldest first; with the prefix ".", those that were not wholly written or removed."""
        paths = [path for path in self.folder.glob(f"{prefix}checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
        for path in paths:
            if not _FILES.issuperset(file.name for file in path.iterdir()):
                what = f"holds {path.name}, which was made by something else and is not overwritten"
                raise StoreError(f"{self.op}: {self.folder} {what}. Give another folder.")
        return sorted(paths, key=_step)

    def begin(self, *, resume: bool) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Clear the folder for a run; with `resume`, give the tensors and progress of the newest checkpoint, if any."""
        barrier()
        leftovers, whole = self._own("."), self._own()
        newest = whole[-1] if whole and resume else None
        state = None if newest is None else self._read(newest)
        barrier()
        if rank() == 0:
            for path in leftovers if resume else [*leftovers, *whole]:
                _remove(path)
        barrier()
        return state

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if not (path / PROGRESS).is_file():
            raise ConfigError(
                f"{self.op}: the checkpoint in {path} was written by an older version in another format. "
                "Train without resume."
            )
        try:
            progress = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
            before = dict(progress.pop("run"))
            tensors = load_file(path / TENSORS)
        except Exception as error:  # safetensors raises a class of its own
            raise StoreError(
                f"{self.op}: the checkpoint in {path} is damaged ({error}). Remove it to go on from the one before."
            ) from error
        for name, now in json.loads(json.dumps(self.run, default=str)).items():
            if before.get(name) != now:
                raise ConfigError(
                    f"{self.op}: the checkpoint in {path} was made with {name} {before.get(name)}, and this run has "
                    f"{now}; a run resumes as it began. Use the same settings, or train without resume."
                )
        return tensors, progress

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Write a checkpoint under a temporary name, move it into place, and remove all but the newest two."""
        place, beside = self.folder / f"checkpoint-{step}", self.folder / f".checkpoint-{step}"
        said = f"{self.op}: a checkpoint cannot be written to {self.folder}"
        hint = "those before are whole. Make room there and resume."
        with foreign_errors(lambda reason: StoreError(f"{said} ({reason}); {hint}")):
            try:
                _remove(place)
                _remove(beside)
                beside.mkdir(parents=True)
                save_file(tensors, beside / TENSORS, metadata={"format": "pt"})
                text = json.dumps({"run": self.run, **progress}, default=str)
                (beside / PROGRESS).write_text(text, encoding="utf-8")
                beside.replace(place)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
        for old in self._own()[:-_KEPT]:
            _remove(old)


def _remove(path: Path) -> None:
    """Remove a checkpoint of ours, under a name from which nobody resumes."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f".{path.name.removeprefix('.')}")))


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
