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


def pivot(recipe: Recipe, table: Rows, history: Sequence[Mapping[str, Any]], order: Sequence[str]) -> Report:
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


def _place(row: Mapping[str, Any]) -> Coordinates:
    return {"task": row["task"], "method": row["method"], **row["settings"]}


def _table(recipe: Recipe, given: TableRecipe, rows: Rows) -> PivotTable:
    names, columns = cells_of(recipe, given)
    part = given.part or recipe.evaluate or "validation"
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        key = label(given.rows, _place(row)), label(given.columns, _place(row))
        if key[0] is not None and key[1] is not None:
            groups.setdefault((key[0], key[1]), []).append(row)
    cells = []
    for (name, column), group in groups.items():
        best, settings = _best(group, [*given.rows, *given.columns])
        for metric in given.metrics or [""]:
            shown = metric or best[0]["metric"]
            values = [value for row in best for value in _values(row, metric, part)]
            cells.append(
                Cell(name, column_of(column, metric, given), shown, **_figures(values, given.scale), settings=settings)
            )
    about = {} if given.published is None else given.published.model_dump(exclude={"values"})
    about["published"] = {} if given.published is None else given.published.values
    title = given.title or "Best of every method"
    return PivotTable(title, part, names, columns, cells, given.digits, **about)


def _curves(recipe: Recipe, given: FigureRecipe, rows: Rows, history: Sequence[Mapping[str, Any]]) -> Curves:
    by_epoch = given.x.key == "epoch"
    part = "validation" if by_epoch else given.part or recipe.evaluate or "validation"
    groups: dict[str, tuple[tuple[str, str, Any], Rows]] = {}
    for row in rows:
        place = _place(row)
        facet = ABSENT if given.facet is None else given.facet.find(place)
        series, x = given.series.find(place), place_of_x(given.x, place)
        if LEFT_OUT not in (facet, series, x):
            names = ["" if part is ABSENT else text(part) for part in (facet, series)]
            key = (*names, None if x is ABSENT else x if isinstance(x, int | float) else text(x))
            groups.setdefault(repr(key), (key, []))[1].append(row)
    points = []
    for (facet, series, x), group in groups.values():
        best, settings = _best(group, given.axes)
        metric = given.metric or best[0]["metric"]
        found = (
            _over_epochs(best, metric, history)
            if by_epoch
            else {x: [v for row in best for v in _values(row, given.metric, part)]}
        )
        points += [
            Point(facet, series, at, metric, **_figures(values, given.scale), settings=settings)
            for at, values in found.items()
        ]
    about = {} if given.published is None else given.published.model_dump(include={"source", "notes"})
    title = f"blocks of {given.x.key}" if given.x.count else given.x.key
    return Curves(given.title or f"Scores by {title}", part, given.x_title or title, points, given.log_x, **about)


def _best(rows: Rows, axes: Sequence[Axis]) -> tuple[Rows, dict[str, Any]]:
    """The row with the best validation score of each task, and the settings that it has beyond the axes."""
    tasks: dict[str, Rows] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    best = [min(own, key=lambda row: sort_key(row["metric"], row["mean"])) for own in tasks.values()]
    named = {axis.key for axis in axes if not axis.names}
    searched = {
        key
        for row in rows
        for key, value in _place(row).items()
        if any(_place(other).get(key) != value for other in rows)
    }
    chosen = {key: value for key, value in _place(best[0]).items() if key in searched - named}
    return best, chosen if len(best) == 1 else {}


def _values(row: Mapping[str, Any], metric: str | None, part: str) -> list[float]:
    """The scores of a row's runs."""
    if metric == PARAMETERS:
        return [float(row[PARAMETERS])]
    key = "score" if part == "validation" else "test"
    if metric and metric != row["metric"]:
        key = metric if part == "validation" else f"test_{metric}"
    return [run[key] for run in row["runs"]]


def _over_epochs(best: Rows, metric: str, history: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    names = {run["reader"] for row in best for run in row["runs"]}
    found: dict[int, list[float]] = {}
    for row in history:
        if row["reader"] in names:
            found.setdefault(int(row["epoch"]), []).append(row[metric])
    return dict(sorted(found.items()))


def _figures(values: Sequence[float], scale: float) -> dict[str, Any]:
    found = summarise([value * scale for value in values])
    return {"mean": found.mean, "spread": found.spread, "interval": found.interval, "runs": found.count}
