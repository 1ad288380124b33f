"""What a training run found, as tables: one row per learner, best first; means of repeated runs; Parquet files."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.tasks.metrics import LOWER
from lamina.utils import atomic_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

IMPORTANCES = ("reader", "epoch", "step", "layer", "importance")


@dataclass(frozen=True)
class FitResult:
    """What a training run found.

    Attributes:
        best: Name -> the epoch that was kept and all scores at it. The name is the reader's, or the task's of a whole
            model.
        history: One row per name and epoch, with every score.
        importances: One row per name, epoch and layer, for fusions that mix layers; with `importance_steps` also rows
            without an epoch (None) in between. "step" counts the reader's own steps.
        truncated: Name -> how many training examples lost their end.
        table: One row per name, best validation score first: "task", "reader", its settings in the grid, "metric",
            "score" (None: no validation part), the other metrics at that epoch, "best_epoch", "epochs_run", "stopped"
            (early), "parameters", "trained" (parameters that learnt) and "importances" (layer -> share, empty where
            nothing is mixed).
        test: Name -> scores on the test part, where they were asked for.
        steps: Training steps taken.
        seconds: Wall-clock time.
        folder: Where the bank or model was saved, or None.
    """

    best: dict[str, dict[str, float]]
    history: list[dict[str, Any]] = field(repr=False)
    importances: list[dict[str, Any]] = field(repr=False)
    truncated: dict[str, int] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list, repr=False)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    folder: Path | None = None


def sorted_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table, best score first, task by task in the order they come."""
    order = list(dict.fromkeys(row["task"] for row in rows))
    return sorted(rows, key=lambda row: (order.index(row["task"]), sort_key(row["metric"], row["score"])))


def sort_key(metric: str, score: float | None) -> float:
    """What to sort by for the best score to come first, and what has none last."""
    if score is None:
        return math.inf
    return score if metric in LOWER else -score


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path, columns: Sequence[str] = ()) -> None:
    """Write rows as a Parquet file that is whole or not there; `columns` are written even if no row has them.

    Nested fields become columns of their own ("importances.3"); a column of several types becomes one of texts.
    """
    import pyarrow as pa
    from pyarrow import parquet

    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys([*columns, *(name for row in flat for name in row)]))
    with atomic_write(path) as beside:
        parquet.write_table(pa.table({name: _alike([row.get(name) for row in flat]) for name in names}), beside)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _alike(cells: list[Any]) -> list[Any]:
    """Cells of one type: whole numbers beside others become floats, any other mix (and lists) texts."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds <= {int, float}:
        return [cell if cell is None or float not in kinds else float(cell) for cell in cells]
    if len(kinds) > 1 or list in kinds:
        return [None if cell is None else str(cell) for cell in cells]
    return cells


@dataclass(frozen=True)
class Summary:
    """Values of repeated runs in short."""

    count: int
    mean: float
    spread: float  # sample standard deviation; 0 for a single value
    interval: float | None  # half the width of the t interval around the mean; None for a single value


def half_interval(count: Any, spread: Any, confidence: float = 0.95) -> Any:
    """Half the width of the t interval around the mean of `count` values of so much spread; arrays give arrays."""
    from scipy.special import stdtrit

    return stdtrit(count - 1, (1 + confidence) / 2) * spread / count**0.5


def summarise(values: Sequence[float], *, confidence: float = 0.95) -> Summary:
    """Sum up one value per independent run, by Student 1908, "The probable error of a mean".

    A share `confidence` of such intervals holds the true mean, where the values are normally distributed.
    """
    if not values:
        raise ConfigError("summarise: there is no value; at least one is needed.")
    if not 0 < confidence < 1:
        raise ConfigError(f"summarise: confidence is {confidence}; it must be between 0 and 1.")
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Summary(1, mean, 0.0, None)
    spread = statistics.stdev(values)
    return Summary(count, mean, spread, float(half_interval(count, spread, confidence)))
