"""Checkpoints of a training run: one folder per saved step, with a safetensors file and a JSON file.

A checkpoint is written under a temporary name and then renamed, so a folder "checkpoint-<step>" is always complete.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import xxhash
from safetensors.torch import load_file, save_file

from lamina.errors import ConfigError, StoreError, convert_errors
from lamina.train.identity import difference, seal, unseal
from lamina.utils import barrier, no_pipe, rank

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from lamina.train.identity import Facts
    from lamina.utils import JSON

TENSORS, PROGRESS = "tensors.safetensors", "progress.json"
_OLD_PROGRESS = "readers.json"  # in place of `PROGRESS` in the checkpoints of version 0.1, which are refused
_FILES = {TENSORS, PROGRESS, _OLD_PROGRESS}
_KEEP = 2  # number of newest checkpoints that stay on disk: if the last is damaged, the one before can be used
_CHUNK = 1 << 24  # bytes that are read at a time to compute a checksum


class RunProgress(TypedDict):
    """The JSON part of a checkpoint, beside its tensors. `Engine.save` writes it, and `Engine.run` resumes from it.

    Attributes:
        position: Three numbers: the epoch (from 0), the steps done in this epoch, and the steps done in all.
        learners: Learner name -> its `Progress` as a dict.
        stopped: Learner name -> epoch (from 0) after which it stopped early.
        history: Rows of `FitResult.history` so far.
        importances: Rows of `FitResult.importances` so far.
        scaler: State of the gradient scaler; empty unless the precision is float16.
    """

    position: list[int]
    learners: dict[str, dict[str, JSON]]
    stopped: dict[str, int]
    history: list[dict[str, JSON]]
    importances: list[dict[str, JSON]]
    scaler: dict[str, JSON]


def _checksum(path: Path) -> str:
    """Return the xxHash of a file, read in chunks; raise OSError if it cannot be read."""
    digest = xxhash.xxh3_128()
    with no_pipe(path).open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass
class Checkpoints:
    """The checkpoints of one training run, each in a folder "checkpoint-<step>" of `folder`.

    Attributes:
        folder: Folder of the checkpoints; it need not exist.
        op: The public operation, for messages: "fit" or "finetune".
        run: The run's identity, from `identity`: a run resumes only from a checkpoint with the same identity.
    """

    folder: Path
    op: str
    run: dict[str, Facts] = field(default_factory=dict)

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint; None if there is none. Raises the StoreError of `_paths`."""
        return next(reversed(self._paths()), None)

    def _paths(self, prefix: str = "") -> list[Path]:
        """Return the folders of the checkpoints, oldest first.

        With the prefix ".", return the hidden folders of checkpoints that a process was writing or removing when it
        died. Raises StoreError if a folder with a checkpoint's name holds other files.
        """
        paths = [path for path in self.folder.glob(f"{prefix}checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
        for path in paths:
            if not path.is_dir() or not _FILES.issuperset(file.name for file in path.iterdir()):
                what = f"holds {path.name}, which was made by something else and is not overwritten"
                raise StoreError(f"{self.op}: {self.folder} {what}. Choose another folder.")
        return sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]))

    def begin(self, *, resume: bool) -> tuple[dict[str, Tensor], RunProgress] | None:
        """Prepare the folder for a run; with `resume`, also read the newest checkpoint. Every process must call this.

        Without `resume` all checkpoints in the folder are removed; with `resume` only incomplete ones.

        Returns:
            Tensors and progress of the newest checkpoint; None if there is none, or `resume` is False.

        Raises:
            StoreError: If the newest checkpoint is damaged (the message names an older one that is intact, if any), or
                a folder with a checkpoint's name holds other files.
            ConfigError: If the checkpoint belongs to another run. The message says what differs.
        """
        barrier()
        leftovers, saved = self._paths("."), self._paths()
        state = self._newest_state(saved) if resume else None
        barrier()  # no process may remove a checkpoint that another one is still reading
        if rank() == 0:
            for path in leftovers if resume else [*leftovers, *saved]:
                _remove(path)
        barrier()
        return state

    def _newest_state(self, paths: list[Path]) -> tuple[dict[str, Tensor], RunProgress] | None:
        """Return tensors and progress of the newest of the checkpoints `paths`; None if there are no paths.

        Errors are those of `begin`.
        """
        damaged: dict[Path, StoreError] = {}
        for path in reversed(paths):
            try:
                run, tensors, progress = _read(path)
            except StoreError as error:
                damaged[path] = error
                continue
            if damaged:
                names = " and ".join(str(other) for other in damaged)
                raise self._damaged(damaged, f"Remove {names} to continue from {path.name}, which is intact.")
            if differs := difference(run, self.run):
                what = f"was made with {differs}; a run must resume with the same settings and data"
                hint = "Use the same settings, or train without resume"
                raise ConfigError(f"{self.op}: the checkpoint in {path} {what}. {hint}.")
            return tensors, progress
        if damaged:
            raise self._damaged(damaged, "No other checkpoint is intact; train without resume.")
        return None

    def _damaged(self, damaged: Mapping[Path, StoreError], hint: str) -> StoreError:
        path, error = next(iter(damaged.items()))
        return StoreError(f"{self.op}: the checkpoint in {path} cannot be used ({error}). {hint}")

    def save(self, step: int, tensors: dict[str, Tensor], progress: RunProgress) -> None:
        """Write the checkpoint of a step, then remove all checkpoints but the newest two.

        Args:
            step: Number of optimizer steps so far; the folder is named after it.
            tensors: The tensors of all learners.
            progress: Everything else that resuming needs.

        Raises:
            StoreError: If the checkpoint cannot be written, for example to a full disk. Earlier ones stay as they are.
        """
        place, beside = self.folder / f"checkpoint-{step}", self.folder / f".checkpoint-{step}"
        what = f"{self.op}: a checkpoint cannot be written to {self.folder}"
        hint = "earlier checkpoints are intact. Free some space there and resume."
        with convert_errors(lambda reason: StoreError(f"{what} ({reason}); {hint}")):
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
        for old in self._paths()[:-_KEEP]:
            _remove(old)

    def needed_bytes(self, checkpoint_bytes: int) -> int:
        """Return the additional disk space that a run needs at most, for checkpoints of `checkpoint_bytes` each.

        Up to three checkpoints exist at a time: the newest two, and the one that is being written. Space that
        checkpoints in the folder already take is subtracted. Raises the StoreError of `_paths`.
        """
        present = [path / TENSORS for path in self._paths()]
        present_bytes = sum(file.stat().st_size for file in present if file.is_file())
        return max(0, (_KEEP + 1) * checkpoint_bytes - present_bytes)

    def clear(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it. Raises the StoreError of `_paths`."""
        for path in [*self._paths("."), *self._paths()]:
            _remove(path)
        with suppress(OSError):
            self.folder.rmdir()


def _read(path: Path) -> tuple[dict[str, Facts], dict[str, Tensor], RunProgress]:
    """Return the identity of the run that saved the checkpoint in `path`, its tensors and its progress.

    Raises:
        StoreError: If a file is missing, damaged or of another version. The message begins with the file's name; the
            caller completes it.
    """
    if (path / _OLD_PROGRESS).is_file():
        raise StoreError(f"{_OLD_PROGRESS} was written by version 0.1 of lamina, in another format")
    run, state = unseal(path / PROGRESS)
    try:
        checksum = _checksum(path / TENSORS)
    except OSError as error:
        raise StoreError(f"{TENSORS} cannot be read: {error.strerror or error}") from error
    if checksum != state["tensors"]:
        raise StoreError(f"{TENSORS} does not hold what was saved: its checksum differs")
    return run, load_file(path / TENSORS), state["progress"]


def _remove(path: Path) -> None:
    """Remove the checkpoint in `path`, if it exists.

    The folder is first renamed to a hidden name, so that no run resumes from a half-removed checkpoint after a crash.
    """
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f".{path.name.removeprefix('.')}")))
