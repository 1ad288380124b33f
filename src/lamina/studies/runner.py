"""Run the cells of a study, and join the table rows that they return into one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import pandas as pd

from lamina.cells import run_cells as runner
from lamina.cells.run_cells import Cell, Failure, Shelf, note_failures
from lamina.errors import ConfigError
from lamina.store.files import claimed
from lamina.studies.study import library_versions
from lamina.utils import JSON, Row

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Cell", "Failure", "run_cells"]

CELLS = "cells"  # the folder with the files of finished cells, inside a study's output folder


class CellResult(TypedDict):
    """The content of a finished cell's file.

    Attributes:
        key: The cell's key, such as `{"task": "cola", "seed": 0}`.
        rows: The table rows of the cell; the entries of the key are their first columns.
    """

    key: Row
    rows: list[Row]


def run_cells(
    cells: Iterable[Cell],
    *,
    settings: Mapping[str, JSON] | None = None,
    output: Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> tuple[DataFrame, list[Failure]]:
    """Run the cells of a study, and return their rows as one table.

    A cell that raises an error is recorded as a failure, and the other cells continue.

    Args:
        cells: The cells, each with a different key. `cell.work()` returns a list of rows: mappings from column to a
            string, a number or None, with a column "score". The entries of the key are added as columns.
        settings: Everything else that the rows depend on, JSON-ready. Finished cells are reused only if the settings
            and the library versions are unchanged.
        output: Folder to write to. Each finished cell becomes one file in its subfolder "cells", and `failures.json`
            lists the failures. None: nothing is written.
        resume: Read the rows of cells that are already finished in `output` instead of running these cells again. Cells
            that failed before are run again.
        progress: Show a bar with the number of finished cells and the remaining time.
        ray: Run the cells as tasks of Ray: "local" starts a cluster on this machine, "auto" uses the cluster that runs
            on this machine, and "HOST:PORT" another cluster. A cell whose worker died is tried again. None: run the
            cells one after the other in this process.

    Returns:
        The table, in the order of the cells, with the columns of the keys first; and the failed cells in the same
        order.

    Raises:
        ConfigError: If two cells have the same key, the finished cells in `output` were run with other settings,
            `resume` is set without `output`, or no Ray cluster answers.
        StoreError: If the folder cannot be written, another process is writing to it, or a finished cell is damaged.
        MissingExtraError: If `ray` is given and Ray is not installed.
    """
    keyed_cells = [replace(cell, work=partial(_run_cell, cell)) for cell in cells]
    if resume and output is None:
        raise ConfigError("study: resume is True, but there is no output to resume from. Pass the output folder.")
    run = {"settings": {"": {"versions": library_versions(), **(settings or {})}}}
    shelf = None if output is None else Shelf(output / CELLS, lambda _: run, op="study", what="study")
    with nullcontext() if output is None else claimed(output):
        done = shelf.read(keyed_cells) if resume and shelf else {}
        on_end = shelf.write if shelf else lambda _cell, _state: None
        states, failures = runner.run_cells(
            keyed_cells, done=done, on_end=on_end, op="study", progress=progress, ray=ray
        )
        if output is not None:
            note_failures(output, failures)
    return pd.DataFrame([row for state in states for row in state["rows"]]), failures


def _run_cell(cell: Cell) -> CellResult:
    """Run the work of a cell, and return its rows with the entries of the cell's key as additional columns."""
    rows = cast("list[Row]", cell.work())
    return {"key": dict(cell.key), "rows": [{**cell.key, **row} for row in rows]}
