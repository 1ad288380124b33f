"""Checkpoints of a training run: one folder per saved step, with a safetensors file and a JSON file.

A checkpoint is written under a temporary name and then renamed, so a folder "checkpoint-<step>" is always complete.
`seal` joins saved state with the run's identity: its settings, weights and data. Only a run with the same
identity resumes from the state.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import xxhash
from safetensors.torch import load_file, save_file

from lamina.editing.record import edits, names_now
from lamina.errors import ConfigError, StoreError, UnsupportedModelError, convert_errors, first_line
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import stacks
from lamina.layers.base_facts import hash_settings
from lamina.layers.fingerprints import fingerprint_of_tensors
from lamina.utils import JSON, JSONObject, barrier, derive_seed, no_pipe, run_in_first, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.bank import Reader
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task
    from lamina.train.base import Runner
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Group, Plan

    Facts = dict[str, dict[str, JSON]]
    """Where a fact belongs ("in 'cola'" for a learner, "" for the whole run) -> name of the fact -> value."""

# Options that may change when a run resumes. Epochs and learning rates are compared learner by learner instead.
_FREE = {"epochs", "learning_rate", "resume", "progress", "tensorboard", "trackers", "save_steps", "eval_batch_size"}
_FREE |= {"cache_dir", "num_workers", "test"}
_SHOWN = 200  # characters of a value in a message


def identity(
    runner: Runner,
    learners: Sequence[Learner],
    plan: Plan,
    validation: Sequence[Group],
    rates: Mapping[str, float],
    options: FitOptions,
) -> dict[str, Facts]:
    """Return the identity of a run of `fit` or `finetune`, JSON-ready.

    It has "settings", whose values messages quote, and "digests" of the weights and the data. Both are place ("in
    'cola'" for a learner, "" for the whole run) -> name -> value. Options that may change when a run resumes, such as
    `num_workers`, are left out. `validation` are the groups that are scored after each epoch, and `rates` is learner
    name -> highest learning rate.
    """
    model = runner.base
    edit_facts = [[edit.kind, edit.stack, edit.layers, dict(edit.settings)] for edit in edits(model)]
    settings: Facts = {"": {"model": type(model).__name__, "edits": edit_facts, "trains": list(plan.tasks)}}
    settings[""] |= {"processes": world_size(), **options.model_dump(exclude=_FREE)}
    shapes = [(name, *weight.shape) for module in runner.modules for name, weight in module.named_parameters()]
    weights = runner.starting_weights([parameter for learner in learners for parameter in learner.parameters])
    digests: Facts = {"": {"weights of the model": weights, "shapes of the weights": derive_seed(shapes)}}
    digests[""]["settings of the model"] = hash_settings(model)
    for name, task in plan.tasks.items():
        facts = {"epochs": plan.epochs[name], "learning_rate": rates[name]}
        settings[f"in '{name}'"] = {**runner.settings(name), **task_settings(task), **facts}
    known: dict[int, dict[str, str]] = {}  # id of a split -> its digests, since tasks may share splits
    for group in (*plan.groups, *validation):
        for name, task in group.tasks.items():
            where, split = f"in the {group.part} part of '{name}'", task.split(group.part)
            if id(split) not in known:
                known[id(split)] = data_digests(split)
            settings[where] = {"rows": len(split)}
            digests[where] = {**known[id(split)], "tokens": group.inputs.digest}
    # Converted to JSON and back, so that it equals an identity that was read from a file (lists in place of tuples).
    return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))


def reader_settings(reader: Reader) -> dict[str, JSON]:
    """Return the settings of a reader as a flat, JSON-ready dict: "fusion.alpha", "head.labels", "stack", "seed" ..."""
    parts = {"fusion": FUSIONS.to_dict(reader.fusion), "head": HEADS.to_dict(reader.head)}
    flat = {f"{part}.{key}": value for part, fields in parts.items() for key, value in fields.items()}
    return {**flat, "stack": reader.stack, "seed": reader.seed}


def task_settings(task: Task) -> dict[str, JSON]:
    """Return what results depend on in a task besides its rows, such as its labels and positive class; JSON-ready."""
    names = ("problem_type", "positive", "metric", "by_row", "label_all_tokens", "image_size")
    return {"kind": task.kind.name, "labels": list(task.labels), **{name: getattr(task, name) for name in names}}


def data_digests(split: Split) -> dict[str, str]:
    """Return digests of a split by name: "texts", "labels", "words" (the places of words), and "files" if it has any.

    Equal digests mean equal examples, except that files on disk count by their paths and sizes, not their contents.
    """
    digests = {"texts": split.key, "labels": _digest(split.labels), "words": _digest(split.words or ())}
    cells, sizes = None if split.written else split.rows.select_columns(["text"]).flatten(), list[int]()
    for path in dict.fromkeys(cells["text.path"] if cells is not None and "text.path" in cells.column_names else ()):
        with suppress(OSError, ValueError, TypeError):  # None, or no name of a file; the bytes are elsewhere
            sizes.append(Path(path).stat().st_size)
    return {**digests, "files": _digest(sizes)} if sizes else digests


def _digest(values: Iterable[object]) -> str:
    """Return a hash of the `repr` of all values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(repr(value).encode() + b"\0")
    return digest.hexdigest()


def starting_weights(model: PreTrainedModel, trained: Iterable[Tensor]) -> str:
    """Return a fingerprint of a model's weights at the start of its training.

    Trained weights that start at random are left out: those outside the layers (a new head), and those that an edit
    initialised.

    Args:
        model: The model.
        trained: The parameters that are trained; checkpoints hold them.
    """
    try:
        inside = [module for stack in stacks(model).values() for module in stack.run]
    except UnsupportedModelError:  # a convolutional network
        inside = list(model.base_model.modules())
    layered = {id(parameter) for module in inside for parameter in module.parameters(recurse=False)}
    made = edits(model)
    drawn = {
        now
        for number, edit in enumerate(made)
        if edit.kind in ("insert", "reinit", "merge")
        for all_now in names_now(made, number).values()
        for now in all_now
    }
    restored = set(map(id, trained))
    return fingerprint_of_tensors(
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in restored or (id(parameter) in layered and name not in drawn)
    )


def difference(before: Mapping[str, Facts], now: Mapping[str, Facts]) -> str | None:
    """Return the first difference between the identities of two runs; None if they are equal.

    `before` is the identity of the run that saved its state, `now` that of this run. The text is a setting with both
    values, such as "batch_size 4 in 'cola', here 8", or "other texts in 'cola'" for a digest.
    """
    old, new = before.get("settings", {}), now.get("settings", {})
    for where in dict.fromkeys([*new, *old]):
        was, values = old.get(where, {}), new.get(where, {})
        for name in dict.fromkeys([*values, *was]):
            if was.get(name) != values.get(name):
                both = [str(place.get(name))[:_SHOWN] for place in (was, values)]
                return f"{name} {both[0]}{where and f' {where}'}, here {both[1]}"
    for where, values in now.get("digests", {}).items():
        was = before.get("digests", {}).get(where, {})
        if changed := [name for name, value in values.items() if was.get(name) != value]:
            return f"other {changed[0]}{where and f' {where}'}"
    return None


FORMAT = 2  # version of the file format; version 0.1 wrote another


def seal(run: Mapping[str, Facts], state: Mapping[str, JSON]) -> str:
    """Return the text of a JSON file with the run's identity `run`, its `state`, and a checksum over both.

    `unseal` reads the file. NaN and infinity are written bare and read back; other values that JSON does not have
    become strings.
    """
    content = json.dumps([run, state], default=str)
    return f'{{"format": {FORMAT}, "checksum": "{xxhash.xxh3_128_hexdigest(content.encode())}", "content": {content}}}'


def unseal(path: Path) -> tuple[dict[str, Facts], JSONObject]:
    """Read a file that holds what `seal` returned, and return the run's identity and its state.

    Raises:
        StoreError: If the file cannot be read, is damaged, or has another format. The short message begins with the
            file's name; callers add the rest.
    """
    try:
        fields = json.loads(no_pipe(path).read_bytes())
        fields = fields if isinstance(fields, dict) else {}
        checksum = xxhash.xxh3_128_hexdigest(json.dumps(fields.get("content")).encode())
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.name} is not JSON: {first_line(error)}") from error
    if (version := fields.get("format")) != FORMAT:
        what = f"format {str(version)[:40]}; this version of lamina reads format {FORMAT}"
        raise StoreError(f"{path.name} is damaged or was written by another version of lamina, in {what}")
    if fields.get("checksum") != checksum:
        raise StoreError(f"{path.name} does not hold what was saved: its checksum differs")
    return tuple(fields["content"])  # pyright: ignore[reportReturnType]


TENSORS, PROGRESS = "tensors.safetensors", "progress.json"
_OLD_PROGRESS = "readers.json"  # in place of `PROGRESS` in the checkpoints of version 0.1, which are refused
_FILES = {TENSORS, PROGRESS, _OLD_PROGRESS}
_KEEP = 2  # number of newest checkpoints that stay on disk: if the last is damaged, the one before can be used


class RunProgress(TypedDict):
    """The JSON part of a checkpoint, beside its tensors.

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
    with no_pipe(path).open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


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
        """Return the newest checkpoint's folder, or None; StoreError if a folder named like one holds other files."""
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

        Without `resume`, all checkpoints in the folder are removed; with it, only incomplete ones. After an error none
        are removed.

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
        run_in_first(lambda: [_remove(path) for path in (leftovers if resume else [*leftovers, *saved])])
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
        """Write the checkpoint of a step, in place of an older one, then remove all checkpoints but the newest two.

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
        checkpoints in the folder already take is subtracted. Raises the StoreError of `newest`.
        """
        present = [path / TENSORS for path in self._paths()]
        present_bytes = sum(file.stat().st_size for file in present if file.is_file())
        return max(0, (_KEEP + 1) * checkpoint_bytes - present_bytes)

    def clear(self) -> None:
        """Remove all checkpoints, incomplete ones too, and the folder, if it is empty then.

        Raises StoreError as `newest` does.
        """
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
