"""Fill the tables and figures of a recipe with the scores of its runs.

A run's coordinates are its properties by which tables and figures arrange it: task, method and settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from lamina.errors import ConfigError, check_known
from lamina.recipes.report_file import Cell, Curves, PivotTable, Point, Report
from lamina.recipes.schema import all_coordinates, recipe_coordinates, row_and_column_names
from lamina.recipes.table_layouts import ABSENT, LEFT_OUT, PARAMETERS, axes_label, column_name, to_text, x_value
from lamina.train.results import sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.recipes.report_file import TableRow
    from lamina.recipes.schema import Recipe
    from lamina.recipes.summary_table import SummaryRow
    from lamina.recipes.table_layouts import AxisLayout, Coordinates, FigureRecipe, Published, TableRecipe
    from lamina.utils import JSONObject


def check_metrics(recipe: Recipe, task: str, known: Sequence[str]) -> None:
    """Raise UnknownNameError if a table or figure of a recipe shows a metric that a task does not have.

    `known` are the task's metrics. They depend on the task's data, so call this after the data is read.
    """
    shown = [metric for table in recipe.table for metric in table.metrics]
    shown += [figure.metric for figure in recipe.figure if figure.metric]
    check_known(f"recipe, task {task}", shown, [*known, PARAMETERS], "metric")


def check_one_metric(recipe: Recipe, metrics: Mapping[str, str]) -> None:
    """Raise ConfigError if a cell or point of the recipe's tables and figures would mix scores of different metrics.

    Scores are mixed if a cell or point shows several tasks with different metrics, and its table or figure names no
    metric. `metrics` is task name -> metric.
    """
    shown = [(table.metrics, [table.rows, table.columns]) for table in recipe.table]
    shown += [([figure.metric] if figure.metric else [], [[axis] for axis in figure.axes]) for figure in recipe.figure]
    for chosen, sides in shown:
        metric_of: dict[tuple[str | None, ...], str] = {}  # names of row and column, or of a point -> metric
        keys = {axis.key for side in sides for axis in side}
        for run in () if chosen else all_coordinates(recipe, keys):
            names = tuple(axes_label(side, run) for side in sides)
            metric = metrics[str(run["task"])]
            if None not in names and metric_of.setdefault(names, metric) != metric:
                cell = f"'{', '.join(filter(None, names))}'"
                problem = f"{cell} mixes tasks whose metrics are {metric_of[names]} and {metric}"
                raise ConfigError(f"recipe: {problem}. Give it 'metrics', or each task a name of its own.")


class _ScoreSummary(TypedDict):
    """A summary of scores: `mean`, `spread`, `interval` and `runs`, explained at `Cell`."""

    mean: float
    spread: float
    interval: float | None
    runs: int


def pivot(recipe: Recipe, table: Sequence[SummaryRow], history: Sequence[TableRow], order: Sequence[str]) -> Report:
    """Return the tables and figures of a recipe, filled with the scores of its runs.

    `table` has one row per task, method and setting (see `summaries`). `history` has one row per run ("reader") and
    epoch with all validation scores, for curves over epochs. `order` has the runs' names in the recipe's order.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    rows = sorted(table, key=lambda row: ranks[row["runs"][0]["reader"]])
    figures = [_fill_figure(recipe, figure, rows, history) for figure in recipe.figure]
    return Report([_fill_table(recipe, layout, rows) for layout in recipe.table], figures)


def _coordinates(recipe: Recipe, row: SummaryRow) -> Coordinates:
    return {**recipe_coordinates(recipe), "task": row["task"], "method": row["method"], **row["settings"]}


def _fill_table(recipe: Recipe, layout: TableRecipe, rows: Sequence[SummaryRow]) -> PivotTable:
    """Return a table of a recipe, laid out by `layout` and filled from `rows` of results in the recipe's order.

    Each cell has the setting with the best validation score; cells without a finished run are left out. The split is
    that of the layout, else the one on which the recipe evaluates, else "validation".
    """
    names, columns = row_and_column_names(recipe, layout)
    part = layout.part or recipe.evaluate or "validation"
    groups: dict[tuple[str, str], list[SummaryRow]] = {}
    for row in rows:
        name, column = (axes_label(axes, _coordinates(recipe, row)) for axes in (layout.rows, layout.columns))
        if name is not None and column is not None:
            groups.setdefault((name, column), []).append(row)
    cells = []
    for (name, column), group in groups.items():
        best, settings = _best(recipe, group, [*layout.rows, *layout.columns])
        for metric in layout.metrics or [best[0]["metric"]]:
            summary = _score_summary(best, metric, part, layout.scale)
            cells.append(Cell(name, column_name(column, metric, layout), metric, **summary, settings=settings))
    paper = layout.published
    about = {} if paper is None else _printed(paper, names, columns)
    title = layout.title or "Best of every method"
    return PivotTable(title, part, names, columns, cells, layout.digits, layout.scale, **about)


def _printed(paper: Published, rows: Sequence[str], columns: Sequence[str]) -> JSONObject:
    """Return the numbers that a paper prints for these rows and columns of a table, as fields of `PivotTable`.

    Rows that the paper quotes from other papers are added, as far as they have numbers in these columns.
    """
    values, others = (
        {row: {column: line[column] for column in columns if column in line} for row, line in numbers.items()}
        for numbers in ({row: line for row, line in paper.values.items() if row in rows}, paper.others)
    )
    numbers = {"published": values, "others": {row: line for row, line in others.items() if line}}
    return {**paper.model_dump(exclude={"values", "others"}), **numbers}


def _fill_figure(
    recipe: Recipe, layout: FigureRecipe, rows: Sequence[SummaryRow], history: Sequence[TableRow]
) -> Curves:
    """Return a figure laid out by `layout`, filled from `rows` of results; from `history` if its x axis is epochs.

    Each point has the setting with the best validation score. Runs that an axis leaves out are skipped; a run without
    the setting on the x axis gets a point without x. The split is that of the layout, else the one on which the recipe
    evaluates, else "validation".
    """
    by_epoch = layout.x.key == "epoch"
    part = "validation" if by_epoch else layout.part or recipe.evaluate or "validation"
    groups: dict[tuple[str, str, float | str | None], list[SummaryRow]] = {}
    for row in rows:
        coordinates = _coordinates(recipe, row)
        facet = ABSENT if layout.facet is None else layout.facet.shown_value(coordinates)
        series, x = layout.series.shown_value(coordinates), x_value(layout.x, coordinates)
        if LEFT_OUT not in (facet, series, x):
            facet, series = ("" if value is ABSENT else to_text(value) for value in (facet, series))
            x = None if x is ABSENT else x if isinstance(x, int | float) else to_text(x)
            groups.setdefault((facet, series, x), []).append(row)
    points = []
    for (facet, series, x), group in groups.items():
        best, settings = _best(recipe, group, layout.axes)
        metric = layout.metric or best[0]["metric"]
        if by_epoch:
            by_x = _epoch_summaries(best, metric, history, layout.scale)
        else:
            by_x = {x: _score_summary(best, metric, part, layout.scale)}
        points += [Point(facet, series, at, metric, **summary, settings=settings) for at, summary in by_x.items()]
    about = {} if layout.published is None else layout.published.model_dump(include={"source", "notes"})
    name = f"blocks of {layout.x.key}" if layout.x.count else layout.x.key
    x_title = name if layout.x_title is None else layout.x_title
    return Curves(layout.title or f"Scores by {name}", part, x_title, points, layout.log_x, layout.scale, **about)


def _best(
    recipe: Recipe, rows: Sequence[SummaryRow], axes: Sequence[AxisLayout]
) -> tuple[list[SummaryRow], dict[str, object]]:
    """Choose the best setting per task among the rows of results that belong to one cell or point.

    Returns:
        Per task, the row with the best mean validation score. And, if there is a single task, the settings of that row
        that differ among `rows` and that none of `axes` displays; else {}.
    """
    tasks: dict[str, list[SummaryRow]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    best = [min(task, key=lambda row: sort_key(row["metric"], row["mean"])) for task in tasks.values()]
    if len(best) > 1:
        return best, {}
    shown = {axis.key for axis in axes if not axis.names}
    runs = [_coordinates(recipe, row) for row in rows]
    searched = {key for run in runs for key in run if any(run[key] != other.get(key) for other in runs)}
    return best, {key: value for key, value in _coordinates(recipe, best[0]).items() if key in searched - shown}


def _scores(row: SummaryRow, metric: str, part: str) -> list[float]:
    """Return the scores of a row's runs in a metric, on the split `part`.

    For the metric "parameters", return a list with the number of trained parameters alone.
    """
    if metric == PARAMETERS:
        return [float(row["parameters"])]
    key = "score" if part == "validation" else "test"
    if metric != row["metric"]:
        key = metric if part == "validation" else f"test_{metric}"
    return [run[key] for run in row["runs"]]


def _epoch_summaries(
    best: Sequence[SummaryRow], metric: str, history: Sequence[TableRow], scale: float
) -> dict[int, _ScoreSummary]:
    """Return epoch -> summary of the validation scores in a metric, over all runs of the `best` rows of results.

    The scores come from the rows of `history` (see `pivot`), times `scale`.
    """
    names = {run["reader"] for row in best for run in row["runs"]}
    scores: dict[int, list[float]] = {}
    for row in history:
        if row["reader"] in names:
            scores.setdefault(int(row["epoch"]), []).append(row[metric] * scale)
    return {epoch: _summarise(values) for epoch, values in sorted(scores.items())}


def _score_summary(best: Sequence[SummaryRow], metric: str, part: str, scale: float) -> _ScoreSummary:
    return _summarise([value * scale for row in best for value in _scores(row, metric, part)])


def _summarise(values: Sequence[float]) -> _ScoreSummary:
    """Return mean, sample standard deviation, half-width of the 95 % interval, and count of one or more scores.

    For a single score, the standard deviation is 0 and the half-width None.
    """
    summary = summarise(values)
    return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval, "runs": summary.count}
