"""Tables of what was trained: one row per reader, best first, and the same as Parquet files."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from lamina.tasks.kinds import LOWER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.fit import FitResult
    from lamina.train.grid import Member

IMPORTANCES = ("reader", "epoch", "layer", "importance")


def table(
    members: Mapping[str, Member], result: FitResult, tasks: Mapping[str, Task], bank: ReaderBank
) -> list[dict[str, Any]]:
    """One row per reader; best validation score first, task by task.

    Args:
        members: Reader name -> what was trained, as `expand_into` gives them.
        result: Of the training run.
        tasks: Reader name -> task.
        bank: The readers, at their best epochs.

    Returns:
        Rows with "task" (the template's name), "reader", the member's settings, "metric", "score", "best_epoch",
        "epochs_run", "stopped" (early), "parameters", and "importances": layer -> share, empty where nothing is mixed.
    """
    rows = [_row(one, result, tasks[name].metric, bank) for name, one in members.items()]
    order = list(dict.fromkeys(row["task"] for row in rows))
    return sorted(rows, key=lambda row: (order.index(row["task"]), sort_key(row["metric"], row["score"])))


def sort_key(metric: str, score: float) -> float:
    """What to sort by for the best score to come first; what is no number comes last."""
    if math.isnan(score):
        return math.inf
    return score if metric in LOWER else -score


def _row(member: Member, result: FitResult, metric: str, bank: ReaderBank) -> dict[str, Any]:
    best = result.best[member.name]
    run = max((row["epoch"] for row in result.history if row["reader"] == member.name), default=0)
    return {
        "task": member.template,
        "reader": member.name,
        **member.settings,
        "metric": metric,
        "score": best[metric],
        "best_epoch": best["epoch"],
        "epochs_run": run,
        "stopped": member.epochs is not None and run < member.epochs,
        "parameters": bank[member.name].size(),
        "importances": bank[member.name].importance(),
    }


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path, columns: Sequence[str] = ()) -> None:
    """Write rows as a Parquet file that is whole or not there.

    Nested fields become columns of their own ("importances.3"); a column of several types becomes one of texts, and
    a field that a row lacks is null.

    Args:
        rows: The rows.
        path: Of the file.
        columns: Columns to write even if no row has them.
    """
    import pyarrow as pa
    from pyarrow import parquet

    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys([*columns, *(name for row in flat for name in row)]))
    written = pa.table({name: pa.array(_alike([row.get(name) for row in flat])) for name in names})
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        parquet.write_table(written, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def _alike(cells: list[Any]) -> list[Any]:
    """Cells of one type: whole numbers beside others become floats, any other mix (and lists) texts."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds <= {int, float}:
        return [cell if cell is None or float not in kinds else float(cell) for cell in cells]
    if len(kinds) > 1 or list in kinds:
        return [None if cell is None else str(cell) for cell in cells]
    return cells
