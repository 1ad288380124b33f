"""A study as a list of independent cells, whose rows are joined into one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lamina.cells import run_cells as runner
from lamina.cells.run_cells import Cell, Failure, Shelf, note_failures
from lamina.errors import ConfigError
from lamina.store.files import claimed
from lamina.studies.study import library_versions

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Cell", "Failure", "run_cells"]

CELLS = "cells"


def run_cells(
    cells: Iterable[Cell],
    *,
    settings: Mapping[str, Any] | None = None,
    output: Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> tuple[DataFrame, list[Failure]]:
    """Run all cells as `lamina.cells.run_cells.run_cells` does, and join their rows into a table in the cells' order.

    Args:
        cells: Each with a key of its own; their work gives rows: columns, "score" among them, of texts, numbers and
            None. The entries of the key become columns too.
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
    listed = [replace(cell, work=partial(_keyed, cell)) for cell in cells]
    if resume and output is None:
        raise ConfigError("study: resume is True, but there is no output to resume from. Give its folder.")
    run = {"settings": {"": {"versions": library_versions(), **(settings or {})}}}
    shelf = None if output is None else Shelf(output / CELLS, lambda _: run, op="study", what="study")
    how: dict[str, Any] = {"op": "study", "progress": progress, "ray": ray}
    with nullcontext() if output is None else claimed(output):
        done = shelf.read(listed) if resume and shelf else {}
        keep = shelf.write if shelf else lambda _cell, _state: None
        states, failures = runner.run_cells(listed, done=done, on_end=keep, **how)
        if output is not None:
            note_failures(output, failures)
    return pd.DataFrame([row for state in states for row in state["rows"]]), failures


def _keyed(cell: Cell) -> dict[str, Any]:
    """The rows of a cell, with its key."""
    return {"key": dict(cell.key), "rows": [{**cell.key, **row} for row in cell.work()]}
