"""From the rows of a run to the tables and curves of a paper: everywhere the best of what was searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.recipes.layout import (
    ABSENT,
    LEFT_OUT,
    PARAMETERS,
    cells_of,
    column_of,
    label,
    of_run,
    place_of_x,
    text,
)
from lamina.recipes.report_file import Cell, Curves, PivotTable, Point, Report
from lamina.train.results import sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.recipes.layout import Axis, Coordinates, FigureRecipe, TableRecipe
    from lamina.recipes.schema import Recipe

Rows = list[dict[str, Any]]


def pivot(recipe: Recipe, table: Rows, history: Rows, order: Sequence[str]) -> Report:
    """What the recipe's `table` and `figure` show of its runs.

    Args:
        recipe: The recipe.
        table: A row per task, method and setting; see `summaries`.
        history: A row per run ("reader") and epoch with all validation scores, for curves over epochs.
        order: Names of the runs in the recipe's order.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    rows = sorted(table, key=lambda row: ranks[row["runs"][0]["reader"]])
    figures = [_curves(recipe, figure, rows, history) for figure in recipe.figure]
    return Report([_table(recipe, given, rows) for given in recipe.table], figures)


def _place(recipe: Recipe, row: Mapping[str, Any]) -> Coordinates:
    return {**of_run(recipe), "task": row["task"], "method": row["method"], **row["settings"]}


def _table(recipe: Recipe, given: TableRecipe, rows: Rows) -> PivotTable:
    names, columns = cells_of(recipe, given)
    part = given.part or recipe.evaluate or "validation"
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        name, column = (label(axes, _place(recipe, row)) for axes in (given.rows, given.columns))
        if name is not None and column is not None:
            groups.setdefault((name, column), []).append(row)
    cells = []
    for (name, column), group in groups.items():
        best, settings = _best(recipe, group, [*given.rows, *given.columns])
        for metric in given.metrics or [best[0]["metric"]]:
            figures = _figures(best, metric, part, given.scale)
            cells.append(Cell(name, column_of(column, metric, given), metric, **figures, settings=settings))
    paper = given.published
    about = {} if paper is None else {**paper.model_dump(exclude={"values"}), "published": paper.values}
    title = given.title or "Best of every method"
    return PivotTable(title, part, names, columns, cells, given.digits, given.scale, **about)


def _curves(recipe: Recipe, given: FigureRecipe, rows: Rows, history: Rows) -> Curves:
    by_epoch = given.x.key == "epoch"
    part = "validation" if by_epoch else given.part or recipe.evaluate or "validation"
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        found = [axis.find(_place(recipe, row)) for axis in (given.facet, given.series) if axis is not None]
        x = place_of_x(given.x, _place(recipe, row))
        if LEFT_OUT not in (*found, x):
            names = ["" if name is ABSENT else text(name) for name in found]
            at = None if x is ABSENT else x if isinstance(x, int | float) else text(x)
            groups.setdefault((*([] if given.facet else [""]), *names, at), []).append(row)
    points = []
    for (facet, series, x), group in groups.items():
        best, settings = _best(recipe, group, given.axes)
        metric = given.metric or best[0]["metric"]
        if by_epoch:
            found = _over_epochs(best, metric, history, given.scale)
        else:
            found = {x: _figures(best, metric, part, given.scale)}
        points += [Point(facet, series, at, metric, **figures, settings=settings) for at, figures in found.items()]
    about = {} if given.published is None else given.published.model_dump(include={"source", "notes"})
    name = f"blocks of {given.x.key}" if given.x.count else given.x.key
    x_title = name if given.x_title is None else given.x_title
    return Curves(given.title or f"Scores by {name}", part, x_title, points, given.log_x, given.scale, **about)


def _best(recipe: Recipe, rows: Rows, axes: Sequence[Axis]) -> tuple[Rows, dict[str, Any]]:
    """The row with the best validation score of each task; and, of a single task, the settings that were searched."""
    tasks: dict[str, Rows] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    best = [min(own, key=lambda row: sort_key(row["metric"], row["mean"])) for own in tasks.values()]
    if len(best) > 1:
        return best, {}
    named = {axis.key for axis in axes if not axis.names}
    found = [_place(recipe, row) for row in rows]
    differ = {key for place in found for key in place if any(place[key] != other.get(key) for other in found)}
    return best, {key: value for key, value in _place(recipe, best[0]).items() if key in differ - named}


def _values(row: Mapping[str, Any], metric: str, part: str) -> list[float]:
    """The scores of a row's runs."""
    if metric == PARAMETERS:
        return [float(row[PARAMETERS])]
    key = "score" if part == "validation" else "test"
    if metric != row["metric"]:
        key = metric if part == "validation" else f"test_{metric}"
    return [run[key] for run in row["runs"]]


def _over_epochs(best: Rows, metric: str, history: Rows, scale: float) -> dict[int, dict[str, Any]]:
    names = {run["reader"] for row in best for run in row["runs"]}
    found: dict[int, list[float]] = {}
    for row in history:
        if row["reader"] in names:
            found.setdefault(int(row["epoch"]), []).append(row[metric] * scale)
    return {epoch: _summed_up(values) for epoch, values in sorted(found.items())}


def _figures(best: Rows, metric: str, part: str, scale: float) -> dict[str, Any]:
    return _summed_up([value * scale for row in best for value in _values(row, metric, part)])


def _summed_up(values: Sequence[float]) -> dict[str, Any]:
    found = summarise(values)
    return {"mean": found.mean, "spread": found.spread, "interval": found.interval, "runs": found.count}
