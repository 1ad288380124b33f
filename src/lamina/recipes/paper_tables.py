"""The table of a recipe's results, over seeds and repeats, and the tables and figures that show its runs.

A run's coordinates are its properties by which tables and figures arrange it: model, task, method, settings and others.
"""

from __future__ import annotations

import json
import math
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict

from lamina.errors import ConfigError, error_context
from lamina.recipes.expand import grid_of
from lamina.recipes.report_file import Cell, Curves, PivotTable, Point, Report, TableRow
from lamina.recipes.schema import Recipe, all_coordinates, recipe_coordinates, row_and_column_names
from lamina.recipes.table_layouts import ABSENT, LEFT_OUT, PARAMETERS, axes_label, column_name, to_text, x_value
from lamina.train.results import independent, sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.recipes.table_layouts import AxisLayout, Coordinates, FigureRecipe, Published, TableRecipe
    from lamina.train.grid import RunSpec
    from lamina.utils import JSONObject

_RunScores: TypeAlias = "list[tuple[object, float]]"  # for each run: its repeat (None without one) and its score


class MeanScore(TypedDict):
    """The mean of several runs' scores.

    With several seeds and several subsamples, the runs of each subsample are averaged first, since they share their
    training rows. Mean, spread and interval are then over the subsamples.

    Attributes:
        spread: Sample standard deviation; 0 for a single value.
        interval: Half the width of the 95 % t interval; None for a single value.
    """

    mean: float
    spread: float
    interval: float | None


class PooledScore(MeanScore):
    """The score fields of a `Cell` or `Point`."""

    runs: int
    values: int


class SummaryRow(MeanScore):
    """One row of `table.json`: all runs of one task, method and setting.

    The fields of `MeanScore` describe the best validation scores.

    Attributes:
        method: Name of a reader, or of a way to fine-tune the whole model.
        trains: Which of these: "reader" or "method"; files of earlier versions lack it.
        settings: Values of the grid, by full key.
        metric: The metric that chose the best epoch.
        parameters: Number of trained parameters.
        scores: Every other metric -> validation scores at the best epoch.
        runs: One dict per run: "reader" (its name), "seed", "score", "best_epoch" and the other scores.
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
        One row per task, method and setting, in the recipe's order. If there is a grid, the rows of each task are
        sorted by mean score, the best first.

    Raises:
        ConfigError: If one of several runs of a row has a score that is NaN or infinite.
        MissingExtraError: If SciPy, which several runs of a row need, is not installed.
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
    """Return one row that summarises `rows`, the results of all runs with one task, method and setting.

    `spec` is one of these runs. `metrics` are all metrics of the task; metrics without a column in `rows` are left out.
    """
    first = rows[0]
    others = [metric for metric in metrics if metric in first and metric != first["metric"]]
    tests = ("test", *(f"test_{metric}" for metric in others))
    columns = ("reader", "seed", "repeat", "score", *others, *tests, "best_epoch")
    summary: SummaryRow = {
        "task": first["task"],
        "method": first["method"],
        "trains": "method" if spec.reader is None else "reader",
        "metric": first["metric"],
        "parameters": first["parameters"],
        "settings": grid_of(spec),
        **_mean_score(rows, "score"),
        "scores": {metric: _mean_score(rows, metric) for metric in others},
        "runs": [{key: row[key] for key in columns if key in row} for row in rows],
        "best_epoch": fmean(row["best_epoch"] for row in rows),
    }
    if "test" in first:
        summary["test"] = _mean_score(rows, "test")
        summary["test_scores"] = {metric: _mean_score(rows, f"test_{metric}") for metric in others}
    return summary


def _mean_score(rows: Sequence[TableRow], column: str) -> MeanScore:
    bad = ", ".join(row["reader"] for row in rows if not math.isfinite(row[column]))
    with error_context(f"{column} of {bad}"):  # which runs the error asks to leave out
        return _mean(independent([row[column] for row in rows], [row.get("repeat") for row in rows]))


def _mean(scores: Sequence[float]) -> MeanScore:
    summary = summarise(scores)
    return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval}


def _cells(row: SummaryRow) -> dict[str, str]:
    """Return a row of results as text, column -> cell. Means are printed by `plus_minus`."""
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

    It is "method" for an empty table, and for one of an earlier version, too.
    """
    return table[0].get("trains", "method") if table else "method"


def notes(table: Sequence[SummaryRow]) -> list[str]:
    """Return sentences that explain a table of results; [] if none are needed.

    One is about F1, which is empty for tasks with two classes if neither is known to be positive. Another names the
    tasks whose means and intervals are over subsamples rather than runs.
    """
    sentences: list[str] = []
    columns = {row["task"]: {row["metric"], *row["scores"]} for row in table}
    unclear = [task for task, names in columns.items() if "mcc" in names and "f1" not in names]
    if unclear and any("f1" in names for names in columns.values()):
        what = f"f1 is empty for {', '.join(unclear)}: F1 is about one of two classes, and none is named"
        sentences.append(f"{what}. Set `positive` in the task, or read macro_f1.")
    if sampled := ", ".join(dict.fromkeys(row["task"] for row in table if subsample_count(row))):
        why = "the runs of a subsample, one per seed, are averaged first"
        sentences.append(f"The mean, spread and ± of {sampled} are over subsamples: {why}.")
    return sentences


def subsample_count(row: SummaryRow) -> int:
    """Return how many subsamples the mean and interval of a row are over; 0 if they are over its runs."""
    repeats = {run.get("repeat") for run in row["runs"]}
    return len(repeats) if 1 < len(repeats) < len(row["runs"]) else 0


def printed(table: Sequence[SummaryRow]) -> tuple[list[str], list[list[str]]]:
    """Return the column names of a table of results, and its cells as text row by row, for printing on a terminal.

    The columns are task, reader or method, settings, metric, validation scores, test scores, number of runs and
    parameters. Columns without any value are left out. A cell without a value is "".
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
    """Return a table of results as Markdown, with the columns and cells of `printed`, and `notes` below them."""
    columns, rows = printed(table)
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (columns, *rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body, *(f"\n{note}" for note in notes(table))]) + "\n"


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


def tasks_share_places(recipe: Recipe) -> bool:
    """Return whether several tasks share a cell of one of the recipe's tables, or a point of one of its figures."""
    places = [(partial(_cell_names, table), [*table.rows, *table.columns]) for table in recipe.table]
    places += [(partial(_point_place, figure), figure.axes) for figure in recipe.figure]
    for place_of, axes in places:
        task_at: dict[object, object] = {}
        for run in all_coordinates(recipe, {axis.key for axis in axes}):
            place = place_of(run)
            if place is not None and task_at.setdefault(place, run["task"]) != run["task"]:
                return True
    return False


def pivot(recipe: Recipe, table: Sequence[SummaryRow], history: Sequence[TableRow], order: Sequence[str]) -> Report:
    """Return the tables and figures of a recipe, filled with the scores of its runs.

    `table` has one row per task, method and setting (see `summaries`). `history` has one row per run ("reader") and
    epoch with all validation scores, for curves over epochs. `order` has the runs' names in the recipe's order. Raises
    ConfigError if one of several scores of a cell or point is NaN or infinite.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    rows = sorted(table, key=lambda row: ranks[row["runs"][0]["reader"]])
    figures = [_fill_figure(recipe, figure, rows, history) for figure in recipe.figure]
    return Report([_fill_table(recipe, layout, rows) for layout in recipe.table], figures)


def _coordinates(recipe: Recipe, row: SummaryRow) -> Coordinates:
    return {**recipe_coordinates(recipe), "task": row["task"], "method": row["method"], **row["settings"]}


def _cell_names(layout: TableRecipe, coordinates: Coordinates) -> tuple[str, str] | None:
    """Return the names of the row and column that show a run with these coordinates; None if the table omits it."""
    name, column = axes_label(layout.rows, coordinates), axes_label(layout.columns, coordinates)
    return None if name is None or column is None else (name, column)


def _point_place(layout: FigureRecipe, coordinates: Coordinates) -> tuple[str, str, float | str | None] | None:
    """Return facet, series and x of the point that shows a run with these coordinates; None if the figure omits it.

    Without a facet or a value of the series, these are "". x is None for a run without the setting on the x axis, and
    for all runs if the x axis shows epochs.
    """
    facet = ABSENT if layout.facet is None else layout.facet.shown_value(coordinates)
    series, x = layout.series.shown_value(coordinates), x_value(layout.x, coordinates)
    if LEFT_OUT in (facet, series, x):
        return None
    facet, series = ("" if value is ABSENT else to_text(value) for value in (facet, series))
    return facet, series, None if x is ABSENT else x if isinstance(x, int | float) else to_text(x)


def _fill_table(recipe: Recipe, layout: TableRecipe, rows: Sequence[SummaryRow]) -> PivotTable:
    """Return a table of a recipe, laid out by `layout` and filled from `rows` of results in the recipe's order.

    A cell has the mean over all runs of its tasks, or over the subsamples of tasks that have several, each with several
    seeds. For each task, the setting with the best validation score counts. Cells without a finished run are left out.
    The split is that of the layout, else the one on which the recipe evaluates, else "validation".
    """
    names, columns = row_and_column_names(recipe, layout)
    part = layout.part or recipe.evaluate or "validation"
    groups: dict[tuple[str, str], list[SummaryRow]] = {}
    for row in rows:
        cell = _cell_names(layout, _coordinates(recipe, row))
        if cell is not None:
            groups.setdefault(cell, []).append(row)
    cells = []
    for (name, column), group in groups.items():
        best, settings = _best(recipe, group, [*layout.rows, *layout.columns])
        for metric in layout.metrics or [best[0]["metric"]]:
            with error_context(f"{metric} of {', '.join(filter(None, (name, column)))}"):
                score = _pooled([_scores(row, metric, part) for row in best], layout.scale)
            cells.append(Cell(name, column_name(column, metric, layout), metric, settings=settings, **score))
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

    A point has the mean over all runs of its tasks, or over subsamples, as a cell of `_fill_table` has. For each task,
    the setting with the best validation score counts. Runs that an axis leaves out are skipped; a run without the
    setting on the x axis gets a point without x. The split is that of the layout, else the one on which the recipe
    evaluates, else "validation". With epochs on the x axis, it is always "validation".
    """
    by_epoch = layout.x.key == "epoch"
    part = "validation" if by_epoch else layout.part or recipe.evaluate or "validation"
    groups: dict[tuple[str, str, float | str | None], list[SummaryRow]] = {}
    for row in rows:
        place = _point_place(layout, _coordinates(recipe, row))
        if place is not None:
            groups.setdefault(place, []).append(row)
    points = []
    name = f"blocks of {layout.x.key}" if layout.x.count else layout.x.key
    for (facet, series, x), group in groups.items():
        best, settings = _best(recipe, group, layout.axes)
        metric = layout.metric or best[0]["metric"]
        by_x = _epoch_scores(best, metric, history) if by_epoch else {x: [_scores(row, metric, part) for row in best]}
        for at, scores in by_x.items():
            with error_context(f"{metric} by {name}"):
                score = _pooled(scores, layout.scale)
            points.append(Point(facet, series, at, metric, settings=settings, **score))
    about = {} if layout.published is None else layout.published.model_dump(include={"source", "notes"})
    x_title = name if layout.x_title is None else layout.x_title
    return Curves(layout.title or f"Scores by {name}", part, x_title, points, layout.log_x, layout.scale, **about)


def _best(
    recipe: Recipe, rows: Sequence[SummaryRow], axes: Sequence[AxisLayout]
) -> tuple[list[SummaryRow], dict[str, object]]:
    """Choose the best setting per task among the rows of results that belong to one cell or point.

    Returns:
        First, for each task, the row with the best mean validation score. Second, for a single task, those coordinates
        of its best row that differ among `rows` and that no axis without `names` displays; {} for several tasks.
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


def _scores(row: SummaryRow, metric: str, part: str) -> _RunScores:
    """Return the scores of a row's runs in a metric, on the split `part`.

    For the metric "parameters", return the number of trained parameters once.
    """
    if metric == PARAMETERS:
        return [(None, float(row["parameters"]))]
    key = "score" if part == "validation" else "test"
    if metric != row["metric"]:
        key = metric if part == "validation" else f"test_{metric}"
    return [(run.get("repeat"), run[key]) for run in row["runs"]]


def _epoch_scores(best: Sequence[SummaryRow], metric: str, history: Sequence[TableRow]) -> dict[int, list[_RunScores]]:
    """Return epoch, in ascending order -> validation scores in a metric, for each of the `best` rows of results.

    The scores come from the rows of `history` (see `pivot`).
    """
    runs = {run["reader"]: (number, run.get("repeat")) for number, row in enumerate(best) for run in row["runs"]}
    scores: dict[int, dict[int, _RunScores]] = {}  # epoch -> number of the row of results -> scores
    for row in history:
        if row["reader"] in runs:
            number, repeat = runs[row["reader"]]
            scores.setdefault(int(row["epoch"]), {}).setdefault(number, []).append((repeat, row[metric]))
    return {epoch: list(groups.values()) for epoch, groups in sorted(scores.items())}


def _pooled(groups: Sequence[_RunScores], scale: float) -> PooledScore:
    """Return the mean score, times `scale`, of a cell or point with these `groups` of runs, one group per task.

    Raises ConfigError if one of several scores is NaN or infinite.
    """
    values: list[float] = []
    for group in groups:
        values += independent([score * scale for _, score in group], [repeat for repeat, _ in group])
    return {**_mean(values), "runs": sum(map(len, groups)), "values": len(values)}
