"""The table of a run: means over seeds and repeats, with their spread and 95 % interval."""

from __future__ import annotations

import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lamina.recipes.expand import grid_of
from lamina.train.results import sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.train.grid import RunSpec

Rows = list[dict[str, Any]]


def summaries(rows: Rows, specs: Mapping[str, RunSpec], metrics: Mapping[str, Sequence[str]]) -> Rows:
    """Return a row per task, method and setting from a row per run, in the recipe's order; of a grid the best first.

    A row has "task", "method", "settings", "metric", "parameters"; "mean", "spread" (sample standard deviation) and
    "interval" (half the width of the 95 % t interval, None for a single run) of the best validation scores; the same
    three of every other metric (of `metrics`, by task) in "scores"; of test scores in "test" and "test_scores"; all
    "runs"; and the mean "best_epoch".
    """
    by_name = {row["reader"]: row for row in rows}
    groups: dict[str, list[RunSpec]] = {}
    for spec in specs.values():
        groups.setdefault(json.dumps([spec.task, spec.settings["method"], grid_of(spec)]), []).append(spec)
    table = [
        _summary([by_name[spec.name] for spec in group], grid_of(group[0]), metrics[group[0].task])
        for group in groups.values()
    ]
    if any(row["settings"] for row in table):
        order = list(dict.fromkeys(row["task"] for row in table))
        table.sort(key=lambda row: (order.index(row["task"]), sort_key(row["metric"], row["mean"])))
    return table


def _summary(rows: Rows, settings: dict[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    first = rows[0]
    others = [metric for metric in metrics if metric in first and metric != first["metric"]]
    tests = ("test", *(f"test_{metric}" for metric in others))
    shown = ("reader", "seed", "repeat", "score", *others, *tests, "best_epoch")
    summary = {
        **{key: first[key] for key in ("task", "method", "metric", "parameters")},
        "settings": settings,
        **_figures(rows, "score"),
        "scores": {metric: _figures(rows, metric) for metric in others},
        "runs": [{key: row[key] for key in shown if key in row} for row in rows],
        "best_epoch": fmean(row["best_epoch"] for row in rows),
    }
    if "test" in first:
        summary["test"] = _figures(rows, "test")
        summary["test_scores"] = {metric: _figures(rows, f"test_{metric}") for metric in others}
    return summary


def _figures(rows: Rows, key: str) -> dict[str, Any]:
    summary = summarise([row[key] for row in rows])
    return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval}


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Return a row as the texts of a printed table, by column; means have half the width of their 95 % interval."""
    given = {"task": row["task"], "method": row["method"], **{key: str(v) for key, v in row["settings"].items()}}
    given |= {"metric": row["metric"], "mean": plus_minus(row)}
    given["spread"] = "" if row["interval"] is None else f"{row['spread']:.3f}"
    given |= {metric: plus_minus(figures) for metric, figures in row["scores"].items()}
    if "test" in row:
        given["test"] = plus_minus(row["test"])
        given |= {f"test {metric}": plus_minus(figures) for metric, figures in row["test_scores"].items()}
    return given | {"runs": str(len(row["runs"])), "parameters": f"{row['parameters']:,}"}


def printed(table: Rows) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the cells of a printed table; columns that no row needs are left out."""
    rows, last = [_cells(row) for row in table], ("runs", "parameters")
    settings = [key for row in table for key in row["settings"]]
    others = [name for row in rows for name in row if name not in last]
    others.sort(key=lambda name: name.partition(" ")[0] == "test")
    columns = list(dict.fromkeys(["task", "method", *settings, *others, *last]))
    return columns, [[row.get(column, "") for column in columns] for row in rows]


def plus_minus(figures: Mapping[str, Any]) -> str:
    """Return a mean as text, with half the width of its interval if it has one."""
    mean, interval = figures["mean"], figures["interval"]
    return f"{mean:.3f}" if interval is None else f"{mean:.3f} ± {interval:.3f}"


def markdown(table: Rows) -> str:
    """Return the table as Markdown."""
    columns, rows = printed(table)
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (columns, *rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body]) + "\n"
