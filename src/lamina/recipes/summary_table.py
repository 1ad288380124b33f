"""The table of a recipe's results: means over seeds and repeats, with their spread and 95 % interval."""

from __future__ import annotations

import json
from statistics import fmean
from typing import TYPE_CHECKING, NotRequired, TypedDict

from lamina.recipes.expand import grid_of
from lamina.train.results import sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.recipes.report_file import TableRow
    from lamina.train.grid import RunSpec


class MeanScore(TypedDict):
    """The mean of several runs' scores. `_mean_score` returns it.

    Attributes:
        mean: The mean.
        spread: Sample standard deviation; 0 for a single run.
        interval: Half the width of the 95 % t interval; None for a single run.
    """

    mean: float
    spread: float
    interval: float | None


class SummaryRow(MeanScore):
    """One row of `table.json`: all runs of one task, method and setting.

    The fields of `MeanScore` describe the best validation scores.

    Attributes:
        task: Name of the task.
        method: Name of a reader, or of a way to fine-tune the whole model.
        trains: Which of these: "reader" or "method"; files of earlier versions lack it.
        settings: Values of the grid, by full key.
        metric: The metric that chose the best epoch.
        parameters: Number of trained parameters.
        scores: Every other metric -> validation scores at the best epoch.
        runs: Each with "reader" (its name), "seed", "score", "best_epoch" and the other scores.
        best_epoch: Mean over the runs.
        test: Scores on the test split by the task's metric, with `evaluate: test`.
        test_scores: The same for every other metric.
    """

    task: str
    method: str
    trains: NotRequired[str]
    settings: dict[str, object]
    metric: str
    parameters: int
    scores: dict[str, MeanScore]
    runs: list[TableRow]
    best_epoch: float
    test: NotRequired[MeanScore]
    test_scores: NotRequired[dict[str, MeanScore]]


def summaries(
    rows: Sequence[TableRow], specs: Mapping[str, RunSpec], metrics: Mapping[str, Sequence[str]]
) -> list[SummaryRow]:
    """Group the results of runs by task, method and setting.

    Args:
        rows: One row of results per run; its name is in "reader".
        specs: Run name -> run, in the recipe's order. Each must have a row.
        metrics: Task name -> all metrics of the task.

    Returns:
        One row per task, method and setting. Without grids the rows are in the recipe's order; with a grid they are
        sorted by task, and then by mean score, the best first.
    """
    by_name = {row["reader"]: row for row in rows}
    groups: dict[str, list[RunSpec]] = {}
    for spec in specs.values():
        groups.setdefault(json.dumps([spec.task, spec.settings["method"], grid_of(spec)]), []).append(spec)
    table = [
        _summary([by_name[spec.name] for spec in group], group[0], metrics[group[0].task]) for group in groups.values()
    ]
    if any(row["settings"] for row in table):
        order = list(dict.fromkeys(row["task"] for row in table))
        table.sort(key=lambda row: (order.index(row["task"]), sort_key(row["metric"], row["mean"])))
    return table


def _summary(rows: Sequence[TableRow], spec: RunSpec, metrics: Sequence[str]) -> SummaryRow:
    """Return the row of results for all runs with the same task, method and setting; `spec` is one of the runs.

    `metrics` are all metrics of the task; metrics without a column in `rows` are left out.
    """
    first = rows[0]
    others = [metric for metric in metrics if metric in first and metric != first["metric"]]
    tests = ("test", *(f"test_{metric}" for metric in others))
    columns = ("reader", "seed", "repeat", "score", *others, *tests, "best_epoch")
    score = _mean_score(rows, "score")
    summary: SummaryRow = {
        "task": first["task"],
        "method": first["method"],
        "trains": "method" if spec.reader is None else "reader",
        "metric": first["metric"],
        "parameters": first["parameters"],
        "settings": grid_of(spec),
        "mean": score["mean"],
        "spread": score["spread"],
        "interval": score["interval"],
        "scores": {metric: _mean_score(rows, metric) for metric in others},
        "runs": [{key: row[key] for key in columns if key in row} for row in rows],
        "best_epoch": fmean(row["best_epoch"] for row in rows),
    }
    if "test" in first:
        summary["test"] = _mean_score(rows, "test")
        summary["test_scores"] = {metric: _mean_score(rows, f"test_{metric}") for metric in others}
    return summary


def _mean_score(rows: Sequence[TableRow], column: str) -> MeanScore:
    summary = summarise([row[column] for row in rows])
    return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval}


def _cells(row: SummaryRow) -> dict[str, str]:
    """Return a row of results as text, column -> cell. A mean is followed by "±" and half its interval."""
    cells = {"task": row["task"], word_of([row]): row["method"]}
    cells |= {key: str(value) for key, value in row["settings"].items()}
    cells |= {"metric": row["metric"], "mean": plus_minus(row)}
    cells |= {} if row["interval"] is None else {"spread": f"{row['spread']:.3f}"}
    cells |= {metric: plus_minus(score) for metric, score in row["scores"].items()}
    if "test" in row:
        cells["test"] = plus_minus(row["test"])
        cells |= {f"test {metric}": plus_minus(score) for metric, score in row.get("test_scores", {}).items()}
    return cells | {"runs": str(len(row["runs"])), "parameters": f"{row['parameters']:,}"}


def word_of(table: Sequence[SummaryRow]) -> str:
    """Return the word for the rows of a recipe's results: "reader", or "method" if whole models are fine-tuned.

    It is "method" for an empty table too.
    """
    return table[0].get("trains", "method") if table else "method"


def notes(table: Sequence[SummaryRow]) -> list[str]:
    """Return sentences that explain why cells of a table of results are empty; [] if none need it.

    They are about F1, which is empty for tasks with two classes if neither is known to be positive.
    """
    columns = {row["task"]: {row["metric"], *row["scores"]} for row in table}
    unclear = [task for task, names in columns.items() if "mcc" in names and "f1" not in names]
    if not unclear or not any("f1" in names for names in columns.values()):
        return []
    what = f"f1 is empty for {', '.join(unclear)}: F1 is about one of two classes, and none is named"
    return [f"{what}. Set `positive` in the task, or read macro_f1."]


def printed(table: Sequence[SummaryRow]) -> tuple[list[str], list[list[str]]]:
    """Return the column names of a table of results, and its cells as text row by row, for printing on a terminal.

    Columns without any value are left out. A cell without a value is "".
    """
    rows, last = [_cells(row) for row in table], ("runs", "parameters")
    settings = [key for row in table for key in row["settings"]]
    others = [name for row in rows for name in row if name not in last]
    others.sort(key=lambda name: name.partition(" ")[0] == "test")
    columns = list(dict.fromkeys(["task", word_of(table), *settings, *others, *last]))
    return columns, [[row.get(column, "") for column in columns] for row in rows]


def plus_minus(score: MeanScore) -> str:
    """Return the mean as text: "0.853 ± 0.012", where 0.012 is half the interval; "0.853" for a single run."""
    mean, interval = score["mean"], score["interval"]
    return f"{mean:.3f}" if interval is None else f"{mean:.3f} ± {interval:.3f}"


def markdown(table: Sequence[SummaryRow]) -> str:
    """Return a table of results as Markdown, with the columns and cells of `printed`."""
    columns, rows = printed(table)
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (columns, *rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body, *(f"\n{note}" for note in notes(table))]) + "\n"
