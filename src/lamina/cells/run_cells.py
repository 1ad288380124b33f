"""Run independent pieces of work (cells) here or on Ray's workers. Results are kept as files and not computed again."""

from __future__ import annotations

import hashlib
import json
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from pydantic_core import to_jsonable_python

from lamina.errors import ConfigError, LaminaError, StoreError, first_line, memory_errors
from lamina.prediction.ray_workers import RETRIES, connected, import_ray
from lamina.train.checkpoint import difference, seal, unseal
from lamina.utils import JSONObject, derive_seed, progress_bar, remove_leftovers, seed_torch, world_size, write_text

if TYPE_CHECKING:
    import numpy as np

FAILURES = "failures.json"
Value = str | int | float | bool | None
State = JSONObject  # result of a cell, in JSON types


@final
@dataclass(frozen=True)
class Cell:
    """One independent piece of work of a study or run, such as one seed of one task.

    Attributes:
        key: The values that distinguish this cell from the others.
        work: Function that returns the cell's result: texts, numbers, None, lists and dicts; in a study, the rows of
            its table. For Ray it must be picklable, and should load its model itself: a `functools.partial` of a
            module's function over plain data.
        name: Name of the cell's file, without an extension. "": a hash of the key.
        settings: Facts that only this cell's result depends on, such as the metric. A study saves them with the result,
            and does not resume if they differ.
        digests: Place ("in the train part of 'cola'", or "" for the whole cell) -> name -> digest of data that only
            this cell's result depends on. They count like `settings`.
    """

    key: Mapping[str, Value]
    work: Callable[[], object]
    name: str = ""
    settings: JSONObject = field(default_factory=dict)
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    @property
    def file(self) -> str:
        """The name of the cell's file, without an extension: `name`, or else a hash of the key."""
        text = json.dumps(self.key, sort_keys=True)
        return self.name or hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@final
@dataclass(frozen=True)
class Failure:
    """A failed cell: its key, its error as a sentence, and the traceback ("" if its worker process died)."""

    key: Mapping[str, Value]
    error: str
    traceback: str = ""


def run_cells(
    cells: Iterable[Cell],
    *,
    op: str,
    done: Mapping[str, State],
    on_end: Callable[[Cell, State], None],
    progress: bool = True,
    ray: str | None = None,
) -> tuple[list[State], list[Failure]]:
    """Run all cells (independent pieces of work) except those that are already in `done`.

    A cell that raises an error, or that a Ray worker cannot unpickle, becomes a failure, and the others continue. Torch
    is seeded for each cell by its file name, so results do not depend on the order in which cells end, or on where they
    run. Under `torchrun` the processes cannot continue without each other, so a cell's error is raised.

    Args:
        cells: The cells, each with its own key and file.
        op: The operation, for messages.
        done: File name -> result of a cell that finished earlier; see `Shelf.read`.
        on_end: Called in this process with each cell that has not failed and its result, in the order in which cells
            finish; not for cells in `done`.
        progress: Show how many cells have finished, and the time left.
        ray: Run the cells as Ray tasks: "local" (on this machine), "auto" (the cluster that runs on this machine), or
            an address. A cell whose worker died is tried again. None: run the cells in this process, one by one.

    Returns:
        The results of all cells that did not fail, in the order of `cells`; and the failures.

    Raises:
        ConfigError: If two cells have the same key or name, no cluster answers at `ray`, or a cell cannot be pickled
            for Ray.
        MissingExtraError: If `ray` is set and Ray is not installed.
    """
    listed = list(cells)
    files = [cell.file for cell in listed]
    if len(set(files)) < len(files):
        twice = next(cell.key for number, cell in enumerate(listed) if files.index(files[number]) < number)
        raise ConfigError(f"{op}: two cells have the key {dict(twice)}; keys must differ.")
    outcomes: dict[int, State | Failure] = {n: done[file] for n, file in enumerate(files) if file in done}
    todo = {number: cell for number, cell in enumerate(listed) if number not in outcomes}
    ended: Iterable[tuple[int, State | Failure]] = ((number, _outcome(cell, op)) for number, cell in todo.items())
    ended = ended if ray is None or not todo else _as_ray_tasks(todo, ray, op)
    total, first = len(listed), len(outcomes)
    for number, outcome in progress_bar(ended, show=progress, desc="cells", total=total, initial=first):
        outcomes[number] = outcome
        if not isinstance(outcome, Failure):
            on_end(listed[number], outcome)
    inorder = [outcome for _, outcome in sorted(outcomes.items())]
    states = [outcome for outcome in inorder if not isinstance(outcome, Failure)]
    return states, [outcome for outcome in inorder if isinstance(outcome, Failure)]


def _as_ray_tasks(todo: Mapping[int, Cell], address: str, op: str) -> Iterator[tuple[int, State | Failure]]:
    """Run the cells in `todo` (number of the cell -> cell) as Ray tasks; yield (number, result or failure) as they end.

    `address` is that of the cluster, see `ray` of `run_cells`. A cell whose worker died is tried again, and fails after
    `RETRIES` more deaths; one that a worker cannot unpickle fails at once. If the cluster has GPUs, each cell gets one
    to itself. `op` is the operation, for messages.

    Raises:
        ConfigError: If no cluster answers at the address, or a cell cannot be pickled.
        MissingExtraError: If Ray is not installed.
    """
    ray = import_ray(op)
    with connected(ray, address, op):
        options = {"max_retries": RETRIES, "num_gpus": int(ray.cluster_resources().get("GPU", 0) > 0)}
        task = ray.remote(**options)(_outcome)
        try:
            numbers = {task.remote(cell, op): number for number, cell in todo.items()}
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            hint = "Give its work as functools.partial of a function of a module, over plain data."
            raise ConfigError(f"{op}: a cell cannot be sent to a worker ({first_line(error)}). {hint}") from error
        while numbers:
            (ended, *_), _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(ended)
            try:
                outcome = ray.get(ended)
            except ray.exceptions.RayTaskError as error:  # an error outside the cell's own work, such as in unpickling
                reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
                outcome = Failure(dict(todo[number].key), reason, str(error))  # Ray's text is the remote traceback
            except ray.exceptions.RayError as error:
                reason = f"{type(error).__name__}: its worker died {RETRIES + 1} times"
                outcome = Failure(dict(todo[number].key), reason)
            yield number, outcome


def _outcome(cell: Cell, op: str) -> State | Failure:
    """Run a cell with torch seeded by its file name. Return its result in JSON types, or the failure after an error.

    Torch's generators are restored. In a distributed run, the error is raised. `op` is the operation, for messages.
    """
    try:
        with torch.random.fork_rng(), memory_errors(op):
            seed_torch(derive_seed(cell.file))
            found = cell.work()
        return json.loads(json.dumps(to_jsonable_python(found, fallback=_plain)))
    except Exception as error:
        if world_size() > 1:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        kind = "" if isinstance(error, LaminaError) else f"{type(error).__name__}: "
        return Failure(dict(cell.key), f"{kind}{error}{notes}", traceback.format_exc())


def _plain(value: np.generic | torch.Tensor) -> object:
    return value.item()


@final
class Shelf:
    """A folder with one JSON file per finished cell: its result, and what the result depends on.

    Args:
        folder: Folder of the files.
        run: Called with a cell; returns what its result depends on besides its key, such as settings and data,
            JSON-ready (see `lamina.train.checkpoint.difference`).
        op: The operation, for messages.
        what: Word for all cells together in messages: "study" or "run".
    """

    def __init__(self, folder: Path, run: Callable[[Cell], JSONObject], *, op: str, what: str) -> None:
        self._folder, self._run, self._op, self._what = folder, run, op, what

    def path(self, cell: Cell) -> Path:
        """Return the path of a cell's file; it exists if the cell has finished."""
        return self._folder / f"{cell.file}.json"

    def read(self, cells: Iterable[Cell]) -> dict[str, State]:
        """Return file name -> result, for those of `cells` that have finished.

        Raises:
            StoreError: If a file is damaged.
            ConfigError: If a result depends on other settings or data than this run; the message names the difference.
        """
        states: dict[str, State] = {}
        for cell in cells:
            if (path := self.path(cell)).exists():
                before, state = self._unsealed(path)
                if differs := difference(before, json.loads(json.dumps(self._run(cell), default=str))):
                    rule = "resuming needs the same settings. Give another output folder, or leave resume out"
                    raise ConfigError(f"{self._op}: {path} belongs to a {self._what} with {differs}; {rule}.")
                states[cell.file] = state
        return states

    def state(self, path: Path) -> State:
        """Return the result of a cell from `path`, a file of the folder, without a check of what the result depends on.

        Raises:
            StoreError: If the file is damaged.
        """
        return self._unsealed(path)[1]

    def _unsealed(self, path: Path) -> tuple[JSONObject, State]:
        """Return (what the result depends on, result) from a file; raise StoreError, with a hint, if it is damaged."""
        try:
            return unseal(path)
        except StoreError as error:
            hint = "Remove it to compute it again."
            raise StoreError(f"{self._op}: {path} cannot be used ({error}). {hint}") from error

    def write(self, cell: Cell, state: State) -> None:
        """Write a cell's result `state` to its file, atomically; replace an older file. StoreError on failure."""
        remove_leftovers(self.path(cell))
        write_text(self.path(cell), seal(self._run(cell), state))


def note_failures(folder: Path, failures: Sequence[Failure]) -> None:
    """Write `failures` to failures.json in an output folder, replacing an older file; StoreError if that fails.

    Without failures, an older file gets an empty list, and no new file is made.
    """
    if failures or (folder / FAILURES).exists():
        write_text(folder / FAILURES, json.dumps(list(map(asdict, failures)), indent=1))
