"""Results of training runs: scores and tables, Parquet files of tables, and means over repeated runs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from lamina.errors import ConfigError, require_packages
from lamina.tasks.metrics import LOWER
from lamina.utils import JSONObject, atomic_write, check_inside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from lamina.tasks.outputs import Results

INTERVAL_SEEDS = 3  # fewest runs whose interval is shown: that of two is far too wide, or has no width if they agree
IMPORTANCES = ("reader", "epoch", "step", "layer", "importance")  # columns of `FitResult.importances`
Scores: TypeAlias = dict[str, JSONObject]  # learner name -> metric -> score, and entries such as tables of classes
Interval: TypeAlias = dict[str, tuple[float, float]]  # metric -> ends of the interval of its score
TableRow: TypeAlias = JSONObject  # column -> value; which columns there are depends on metrics and grids
Number = TypeVar("Number", float, "pd.Series")
Key = TypeVar("Key")


@dataclass(frozen=True)
class FitResult:
    """The results of a training run, as `lamina.fit` and `lamina.finetune` return them.

    "Name" means the name of a reader, or for a whole model the name of its task.

    Attributes:
        best: Name -> number of the best epoch ("epoch", from 1) and every validation score at that epoch. With
            `keep="last"` it is the last epoch. Without a validation part there are no scores.
        history: One row per name and epoch, with every validation score.
        importances: One row per name, epoch and layer, with the layer's importance, for fusions that mix layers. With
            `importance_steps` there are also rows between epochs, whose "epoch" is None. "step" counts the steps of
            the reader itself.
        truncated: Name -> number of training examples that were truncated.
        baselines: Name -> "always", the best constant answer (as in `lamina.evaluate`), and metric -> score on the
            validation split of the constant answer that is best by this metric. Kinds of task without one are left out.
        unlabelled: Name -> number of training examples without a label, which gave no loss, for names with such
            examples.
        table: One row per name, by task, the best validation score first: "task", "reader", its settings in the grid,
            "metric", "score" (None without a validation part), the other metrics at that epoch, "best_epoch",
            "epochs_run", "stopped" (whether it stopped early), "parameters" and "trained" (their numbers), and
            "importances" (layer -> importance, empty unless layers are mixed).
        test: Name -> scores on the test part; empty unless `test=True`.
        steps: Number of optimizer steps in all; learners over the same rows share a step.
        seconds: Wall-clock seconds of training and scoring in this call, without the encoding before the first step.
        folder: Folder where the bank or model was saved; None if it was not.
        results: Name -> (validation results of the final weights, names of the metrics); `intervals` reads them.
    """

    best: dict[str, dict[str, float]]
    history: list[TableRow] = field(repr=False)
    importances: list[TableRow] = field(repr=False)
    truncated: dict[str, int] = field(default_factory=dict)
    baselines: Scores = field(default_factory=dict)
    unlabelled: dict[str, int] = field(default_factory=dict)
    table: list[TableRow] = field(default_factory=list, repr=False)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    folder: Path | None = None
    results: Mapping[str, tuple[Results, Sequence[str]]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Name -> metric -> ends of the 95 % interval of the validation score of the final weights.

        It is the bootstrap over rows that `lamina.evaluate` reports with `compare=True`, computed on first use. Tasks
        of kinds for which `compare=True` gives no interval are left out.
        """
        compared = {name: result.compare(metrics) for name, (result, metrics) in self.results.items()}
        return {name: cast("Interval", facts["interval"]) for name, facts in compared.items() if "interval" in facts}

    def __getstate__(self) -> dict[str, object]:
        """Return the fields for pickling, with the computed intervals instead of the results, which hold all texts."""
        return {**vars(self), "intervals": self.intervals, "results": {}}


def sorted_rows(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return the rows of a table sorted by their task and, within a task, by their score, best first.

    Tasks keep the order of their first rows. Rows without a score (None) come last in their task. Each row has "task",
    "metric" and "score".
    """
    order = list(dict.fromkeys(row["task"] for row in rows))
    return sorted(rows, key=lambda row: (order.index(row["task"]), sort_key(row["metric"], row["score"])))


def sort_key(metric: str, score: float | None) -> float:
    """Return a sort key that is smaller for better scores of a metric, and infinity for None (no score)."""
    if score is None:
        return math.inf
    return score if metric in LOWER else -score


def write_parquet(rows: Sequence[Mapping[str, object]], path: Path, columns: Sequence[str] = ()) -> None:
    """Write rows as a Parquet file, atomically.

    A dict in a row becomes one column per key ("importances.3"). A column of mixed types, or of lists, becomes strings;
    integers beside floats become floats.

    Args:
        rows: Column -> value. Rows may have different columns; missing values become null.
        path: The file, which is replaced.
        columns: Columns that come first, and are written even if no row has them.

    Raises:
        StoreError: If the file cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys([*columns, *(name for row in flat for name in row)]))
    with atomic_write(path.absolute()) as beside:  # pyarrow expands a "~" in front of a path
        parquet.write_table(pa.table({name: _one_type([row.get(name) for row in flat]) for name in names}), beside)


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row with each dict in it replaced by one entry per key (for {} none), named "<column>.<key>"."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _one_type(cells: list[Any]) -> list[Any]:
    """Return a column's cells as one type: floats if it mixes integers and floats, strings for other mixes and lists.

    None stays None.
    """
    types = {type(cell) for cell in cells if cell is not None}
    if types <= {int, float}:
        return [cell if cell is None or float not in types else float(cell) for cell in cells]
    if len(types) > 1 or list in types:
        return [None if cell is None else str(cell) for cell in cells]
    return cells


@dataclass(frozen=True)
class Summary:
    """Summary of the values of repeated runs, as `summarise` returns it.

    Attributes:
        count: Number of values.
        mean: Mean of the values.
        spread: Sample standard deviation; 0 for a single value.
        interval: Half the width of Student's t interval around the mean (95 % by default); None for a single value.
    """

    count: int
    mean: float
    spread: float
    interval: float | None

    @property
    def shown_interval(self) -> float | None:
        """The interval that sentences and charts use: `interval`, but None for fewer than three values."""
        return self.interval if self.count >= INTERVAL_SEEDS else None


def tied(values: Mapping[Key, float], value: float, spec: str) -> list[Key]:
    """Return the keys whose value looks the same as `value` when it is shown; `spec` formats it, such as ".3f".

    A sentence that names the best of several layers names all of them, so that chance does not pick the winner.
    """
    return [key for key, other in values.items() if f"{other:z{spec}}" == f"{value:z{spec}}"]  # z: no "-0.000"


def half_interval(count: Number, spread: Number, confidence: float = 0.95) -> Number:
    """Return half the width of Student's t interval around a mean.

    Args:
        count: Number of values, at least 2; or a column of such numbers.
        spread: Sample standard deviation of the values; or a column of standard deviations.
        confidence: Probability that such an interval contains the true mean.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    require_packages("summarise", "metrics", "scipy")
    from scipy.special import stdtrit

    return stdtrit(count - 1, (1 + confidence) / 2) * spread / count**0.5


def independent(values: Sequence[float], repeats: Sequence[object]) -> list[float]:
    """Return the values of runs as `summarise` needs them: none of them shares its subsample with another.

    If there are several repeats, and some have several runs (one per seed), the runs of each repeat are averaged.
    Otherwise the values are returned as they are.

    Args:
        values: One value per run of one task, method and setting.
        repeats: For each run, the repeat whose subsample it was trained on; None for a run on all rows.
    """
    groups: dict[object, list[float]] = {}
    for value, repeat in zip(values, repeats, strict=True):
        groups.setdefault(repeat, []).append(value)
    if 1 < len(groups) < len(values):
        return [sum(group) / len(group) for group in groups.values()]
    return list(values)


def summarise(values: Sequence[float], *, confidence: float = 0.95) -> Summary:
    """Summarise the values of independent runs by their mean, spread and confidence interval.

    Args:
        values: One value per run, at least one. Two or more must all be finite.
        confidence: Probability, between 0 and 1, that such an interval contains the true mean, for normally distributed
            values.

    Raises:
        ConfigError: If there is no value, one of several is NaN or infinite, or `confidence` is out of range.
        MissingExtraError: If there are two values or more, and SciPy is not installed.

    Source:
        Student 1908, "The probable error of a mean".
    """
    if not values:
        raise ConfigError("summarise: there are no values; at least one is needed.")
    check_inside("summarise", "confidence", confidence, usual=0.95)
    count = len(values)
    if count > 1 and (bad := [value for value in values if not math.isfinite(value)]):
        got = f"{len(bad)} of {count} values are not finite, the first is {bad[0]}"
        raise ConfigError(f"summarise: {got}; a spread needs finite values. Leave these runs out.")
    mean = statistics.fmean(values)
    if count == 1:
        return Summary(1, mean, 0.0, None)
    spread = statistics.stdev(values)
    return Summary(count, mean, spread, float(half_interval(float(count), spread, confidence)))
