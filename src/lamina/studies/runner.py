"""A study as a list of independent cells: written as they end, resumed without doing one twice, spread over workers."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import pandas as pd
import torch
from pydantic_core import to_jsonable_python

from lamina.errors import ConfigError, LaminaError, StoreError, memory_errors
from lamina.store.files import claimed
from lamina.studies.provenance import library_versions
from lamina.studies.ray_tasks import as_ray_tasks
from lamina.train.identity import difference
from lamina.train.sealed import seal, unseal
from lamina.utils import derive_seed, progress_bar, seed_torch, sweep, write_text

if TYPE_CHECKING:
    from pandas import DataFrame

CELLS, FAILURES = "cells", "failures.json"
Value = str | int | float | bool | None
Rows = list[dict[str, Any]]


@final
@dataclass(frozen=True)
class Cell:
    """One piece of a study that needs no other, such as one seed of one task.

    Attributes:
        key: What tells it from the others; its entries become columns of its rows.
        work: Gives its rows: columns, "score" among them, of texts, numbers and None. For Ray it must pickle, and
            should load its model itself: a `functools.partial` of a function of a module over plain data.
    """

    key: Mapping[str, Value]
    work: Callable[[], Sequence[Mapping[str, object]]]


@final
@dataclass(frozen=True)
class Failure:
    """A cell that gave no rows: its key, its error in a sentence, and where in the code it came from."""

    key: Mapping[str, Value]
    error: str
    traceback: str = ""


def run_cells(
    cells: Iterable[Cell],
    *,
    settings: Mapping[str, Any] | None = None,
    output: Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> tuple[DataFrame, list[Failure]]:
    """Run all cells, and join their rows into one table, whose order is that of the cells.

    A cell that raises is recorded, and the others go on. Each starts from a random state of its own, so that a table
    does not depend on the order in which cells end, nor on where they ran.

    Args:
        cells: Each with a key of its own.
        settings: What the rows depend on besides the keys, JSON-ready; a study resumes under the same ones only.
        output: Folder that holds each ended cell as a file in "cells", written whole, and "failures.json"; None: the
            rows are kept in memory alone.
        resume: Take the rows of cells that ended in that folder before; those that failed run again.
        progress: Show how many cells ended and the time left.
        ray: Run the cells as tasks of Ray: on a cluster of this machine alone ("local"), on the one that runs here
            ("auto"), or at an address; a cell whose worker died is tried again. None: in this process, one by one.

    Returns:
        The table: the columns of the keys, then those of the rows; and the cells that failed, in their order.

    Raises:
        ConfigError: If two cells have the same key, the folder's cells are of other settings, `resume` has no output,
            or no cluster answers.
        StoreError: If the folder cannot be written, is written by another run, or holds a damaged cell.
        MissingExtraError: If `ray` is given and Ray is not installed.
    """
    listed = list(cells)
    names = [_name(cell.key) for cell in listed]
    if twice := next((cell.key for number, cell in enumerate(listed) if names.index(names[number]) < number), None):
        raise ConfigError(f"study: two cells have the key {dict(twice)}; each must have one of its own.")
    if resume and output is None:
        raise ConfigError("study: resume is True, but there is no output to resume from. Give its folder.")
    with nullcontext() if output is None else claimed(output):
        shelf = None if output is None else _Shelf(output / CELLS, dict(settings or {}))
        done: dict[int, Rows | Failure] = {}
        if resume and shelf is not None:
            before = {number: shelf.read(name) for number, name in enumerate(names)}
            done = {number: rows for number, rows in before.items() if rows is not None}
        todo = {number: cell for number, cell in enumerate(listed) if number not in done}
        ended = _in_process(todo) if ray is None or not todo else as_ray_tasks(_outcome, _died, todo, ray)
        total, first = len(listed), len(done)
        for number, outcome in progress_bar(ended, show=progress, desc="cells", total=total, initial=first):
            done[number] = outcome
            if shelf is not None and not isinstance(outcome, Failure):
                shelf.write(names[number], listed[number].key, outcome)
        failures = [outcome for _, outcome in sorted(done.items()) if isinstance(outcome, Failure)]
        if output is not None and (failures or (output / FAILURES).exists()):
            write_text(output / FAILURES, json.dumps(list(map(asdict, failures)), indent=1))
    rows = [row for _, outcome in sorted(done.items()) if not isinstance(outcome, Failure) for row in outcome]
    return pd.DataFrame(rows), failures


def _name(key: Mapping[str, Value]) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()


def _in_process(todo: Mapping[int, Cell]) -> Iterator[tuple[int, Rows | Failure]]:
    for number, cell in todo.items():
        yield number, _outcome(cell)


def _outcome(cell: Cell) -> Rows | Failure:
    """The rows of a cell as JSON gives them back, with its key; or how it failed."""
    try:
        with torch.random.fork_rng(), memory_errors("study"):
            seed_torch(derive_seed(_name(cell.key)))
            rows = [{**cell.key, **row} for row in cell.work()]
        return json.loads(json.dumps(to_jsonable_python(rows, fallback=_plain)))
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        kind = "" if isinstance(error, LaminaError) else f"{type(error).__name__}: "
        return Failure(dict(cell.key), f"{kind}{error}{notes}", traceback.format_exc())


def _died(cell: Cell, reason: str) -> Failure:
    """A cell whose worker died each time."""
    return Failure(dict(cell.key), reason)


def _plain(value: Any) -> Any:
    """A number of NumPy or PyTorch as one of Python."""
    return value.item()


@final
class _Shelf:
    """The folder of ended cells."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._run = {"settings": {"": {"versions": library_versions(), **settings}}}

    def read(self, name: str) -> Rows | None:
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            before, state = unseal(path)
        except StoreError as error:
            raise StoreError(f"study: {path} cannot be used ({error}). Remove it to run that cell again.") from error
        if differs := difference(before, json.loads(json.dumps(self._run, default=str))):
            rule = "a study goes on as it began. Give another output folder, or leave resume out"
            raise ConfigError(f"study: {path} is of a study with {differs}; {rule}.")
        return state["rows"]

    def write(self, name: str, key: Mapping[str, Value], rows: Rows) -> None:
        path = self._folder / f"{name}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        sweep(path)
        write_text(path, seal(self._run, {"key": dict(key), "rows": rows}))
