"""The tables and figures of a paper: the recipe keys `table` and `figure`, and how scores of runs fill them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypedDict

from pydantic import BeforeValidator, Field, PositiveFloat

from lamina.errors import ConfigError, check_known
from lamina.layers.selectors import select
from lamina.recipes.report_file import Cell, Curves, PivotTable, Point, Report
from lamina.recipes.strict_yaml import Fields, Strict, error_at, read_yaml
from lamina.train.grid import METHOD, expand, full_key
from lamina.train.results import sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from lamina.recipes.report_file import TableRow
    from lamina.recipes.schema import Recipe
    from lamina.recipes.strict_yaml import YamlFile
    from lamina.recipes.summary_table import SummaryRow

ABSENT = object()  # what an axis shows for a run whose method does not have the axis's setting
LEFT_OUT = object()  # what an axis shows for a run whose value the recipe leaves out, by the name null
PUBLISHED = "published.yaml"  # a file beside the recipe with the numbers that its paper prints
PARAMETERS = "parameters"  # can be shown in place of a metric: the number of trained parameters
_MANY = 10_000  # layers of an imaginary model; a selector that names more than half of them names all up to the top

# Where the score of a run stands: "task", "method", "model", "train_base" and each key of its grid -> the run's value.
Coordinates: TypeAlias = dict[str, object]
Grid: TypeAlias = dict[str, list[object]]  # key of a grid -> its values
Numbers: TypeAlias = dict[str, dict[str, float]]  # row -> column -> number, as a paper prints it


def _expand_axis(value: object) -> object:
    """Return an axis in the form {"key": ...} for the short forms that a recipe may use; any other value unchanged.

    The short forms are "insert.layers", {"count": "insert.layers"} and {"task": {"sst2-10": "10 %"}}.
    """
    if isinstance(value, str):
        return {"key": value}
    if isinstance(value, dict) and len(value) == 1 and "key" not in value:
        ((key, content),) = value.items()
        if key == "count":
            return {"key": content, "count": True}
        if isinstance(content, dict):
            return {"key": key, "names": {str(name): shown for name, shown in content.items()}}
    return value


def _to_list(value: object) -> list[object]:
    """Return a list unchanged, and any other value as a list that holds only this value."""
    return value if isinstance(value, list) else [value]


class _Axis(Strict):
    """A property of runs that rows, columns, points or curves are formed by, and how its values are displayed."""

    key: str  # "task", "method", "model", "train_base", a key of a grid, or ("x" of a figure only) "epoch"
    count: bool = False  # show the number of layers that a selector names; 0 where no edit is made
    names: dict[str, str | int | float | None] = Field(default_factory=dict)  # value -> shown instead; null: left out

    def shown_value(self, coordinates: Coordinates) -> object:
        """Return what this axis displays for a run with the given coordinates.

        Returns:
            The run's value, the number of layers that the value selects (with `count`), or the name under `names` for
            the value. ABSENT if the run does not have the property, LEFT_OUT if the recipe leaves the value out.

        Raises:
            ConfigError: If layers are counted, and the value is not a layer selector or selects all layers up to the
                top.
        """
        value = coordinates.get(self.key, ABSENT)
        if value is ABSENT:
            return ABSENT
        if self.count:
            return _count_layers(value)
        shown = self.names.get(to_text(value), value)
        return LEFT_OUT if shown is None and to_text(value) in self.names else shown


AS_LIST = BeforeValidator(_to_list)
Axis = Annotated[_Axis, BeforeValidator(_expand_axis)]
Axes = Annotated[list[Axis], AS_LIST]


def _count_layers(selector: object) -> int:
    """Return how many layers a selector names (None: 0); raise ConfigError if that depends on the model's depth."""
    layers = 0 if selector is None else len(select(selector, _MANY, op="layers"))
    if layers > _MANY // 2:
        raise ConfigError(f"{selector!r} names layers up to the top, whose number is not known. Write '1-24' or so")
    return layers


def to_text(value: object) -> str:
    """Return a value as text for the name of a row or column; None becomes "none"."""
    return "none" if value is None else str(value)


class Published(Strict):
    """The numbers that a paper prints for a table or figure: one entry of `published.yaml` beside the recipe."""

    source: str  # the paper, and the number of its table or figure
    values: Numbers = Field(default_factory=dict)
    others: Numbers = Field(default_factory=dict)  # rows that the paper quotes from other papers
    notes: Annotated[list[str], AS_LIST] = Field(default_factory=list)  # remarks, for example on misprints


def with_published(file: YamlFile, path: Path) -> Fields:
    """Return the fields of a recipe, with each name under `published` replaced by the paper's numbers.

    Tables and figures refer by name to entries of `published.yaml`, a file in the recipe's folder. The file is read
    only if there is such a name.

    Args:
        file: The recipe's file; its fields are not changed.
        path: The path of the recipe.

    Raises:
        DataError: If `published.yaml` is needed, and is missing or not valid.
        UnknownNameError: If `published.yaml` has no entry of that name.
    """
    fields, entries = dict(file.fields), None
    for key in ("table", "figure"):
        items = [dict(item) if isinstance(item, dict) else item for item in _to_list(fields.get(key, []))]
        for number, item in enumerate(items):
            if isinstance(item, dict) and isinstance(name := item.get("published"), str):
                entries = read_yaml(path.parent / PUBLISHED).fields if entries is None else entries
                line, _ = file.locate((key, number, "published"))
                check_known(f"recipe {path}, line {line}, {key}.published", [name], entries, "table or figure")
                item["published"] = entries[name]
        if key in fields:
            fields[key] = items
    return fields


class TableRecipe(Strict):
    """The layout of a table, under `table` in a recipe.

    If several settings belong to one cell, the cell shows the setting with the best validation score.
    """

    title: str | None = None
    rows: Axes = Field(default_factory=lambda: [_Axis(key="method")], min_length=1)
    columns: Axes = Field(default_factory=lambda: [_Axis(key="task")], min_length=1)
    metrics: list[str] = Field(default_factory=list)  # one column for each; empty: the metric of each task
    part: Literal["validation", "test"] | None = None  # split; None: the test split if it is scored, else validation
    scale: PositiveFloat = 1.0  # scores are multiplied by this; 100 shows per cent
    digits: Annotated[int, Field(ge=0, le=6)] = 3  # after the decimal point
    published: Published | None = None


class FigureRecipe(Strict):
    """The layout of a figure with curves, under `figure` in a recipe.

    If several settings belong to one point, the point shows the setting with the best validation score. A method
    without the setting on the x axis is drawn as a horizontal line.
    """

    title: str | None = None
    x: Axis
    series: Axis = Field(default_factory=lambda: _Axis(key="method"))  # one curve for each value
    facet: Axis | None = None  # one panel for each value
    x_title: str | None = None
    log_x: bool = False
    metric: str | None = None  # None: the metric of each task
    part: Literal["validation", "test"] | None = None  # split; None: the test split if it is scored, else validation
    scale: PositiveFloat = 1.0  # scores are multiplied by this; 100 shows per cent
    published: Published | None = None  # its source and notes are printed below the figure

    @property
    def axes(self) -> list[_Axis]:
        """All axes of the figure: x, series, and facet unless it is None."""
        return [self.x, self.series, *([] if self.facet is None else [self.facet])]


def x_value(axis: _Axis, coordinates: Coordinates) -> object:
    """Return what the x axis of a figure displays for a run, as `_Axis.shown_value` does.

    The only difference: if the axis has names, a value without a name becomes ABSENT and is drawn as a horizontal line.
    """
    has_name = not axis.names or to_text(coordinates.get(axis.key)) in axis.names
    return axis.shown_value(coordinates) if has_name else ABSENT


def axes_label(axes: Sequence[_Axis], coordinates: Coordinates) -> str | None:
    """Return the name of a run's row or column: what each axis displays, joined; None if the run is left out."""
    parts = [axis.shown_value(coordinates) for axis in axes]
    return None if LEFT_OUT in parts else ", ".join(to_text(part) for part in parts if part is not ABSENT)


def method_grid(recipe: Recipe, task: str, method: str) -> Grid:
    """Return the grid of a method on a task, with full keys and without "seed"."""
    if recipe.methods:
        body, known = recipe.methods[method], recipe.methods[method].keys()
    else:
        body = recipe.tasks[task].readers[method]
        known = body.keys(recipe.tasks[task].outline())
    grid = {full_key(key, known, "grid"): values for key, values in body.grid.items()}
    return {key: values for key, values in grid.items() if key != "seed"}


def recipe_coordinates(recipe: Recipe) -> Coordinates:
    """Return the coordinates that all runs of a recipe share, and that may differ between recipes."""
    return {"model": recipe.model, "train_base": recipe.train_base}


def all_coordinates(recipe: Recipe, keys: Collection[str]) -> Iterator[Coordinates]:
    """Yield the coordinates of every task and method of a recipe, with every value that grids have for `keys`.

    Other keys of grids are left out, so that equal coordinates may be yielded several times. The order is that of the
    runs.
    """
    for name, task in recipe.tasks.items():
        for method in recipe.methods or task.readers:
            full = method_grid(recipe, name, method)
            grid = {key: values for key, values in full.items() if key in (*keys, METHOD)}
            if recipe.methods:
                settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
            else:
                settings = [spec.settings for spec in expand(task.readers[method].template(task.outline()), grid)]
            for chosen in settings:
                yield {**recipe_coordinates(recipe), "task": name, "method": method, **chosen}


def row_and_column_names(recipe: Recipe, table: TableRecipe) -> tuple[list[str], list[str]]:
    """Return the names of a table's rows, and those of its columns, that the runs of a recipe will fill."""
    runs = list(all_coordinates(recipe, {axis.key for axis in (*table.rows, *table.columns)}))
    labels = ([axes_label(axes, run) for run in runs] for axes in (table.rows, table.columns))
    rows, columns = ([name for name in dict.fromkeys(side) if name is not None] for side in labels)
    return rows, [column_name(column, metric, table) for column in columns for metric in table.metrics or [""]]


def column_name(column: str, metric: str, table: TableRecipe) -> str:
    """Return the name of a column; if the table has several metrics, the metric is added."""
    return ", ".join(part for part in (column, metric) if part) if len(table.metrics) > 1 else column


def check_layout(recipe: Recipe, *, whole: bool = True) -> None:
    """Check that everything that a recipe's tables and figures refer to exists in the recipe.

    Args:
        recipe: The recipe.
        whole: True: also check the values that axes rename, and the rows and columns of published numbers. False for a
            recipe in which a sweep has replaced values.

    Raises:
        ValidationError: If something does not exist, or scores of several tasks would be mixed; it says where.
    """
    for number, table in enumerate(recipe.table):
        with error_at("table", number):
            _check_axes(recipe, {"rows": table.rows, "columns": table.columns}, whole)
            _check_scores(recipe, table.metrics, "metrics", table.part)
            if whole and table.published is not None:
                _check_published(recipe, table, table.published)
    for number, figure in enumerate(recipe.figure):
        with error_at("figure", number):
            axes = {"x": [figure.x], "series": [figure.series], "facet": [figure.facet] if figure.facet else []}
            _check_axes(recipe, axes, whole)
            _check_scores(recipe, [figure.metric] if figure.metric else [], "metric", figure.part)
            if figure.x.key == "epoch" and figure.metric == PARAMETERS:
                raise ConfigError("metric is parameters, which are the same in every epoch")


def _check_axes(recipe: Recipe, axes: Mapping[str, list[_Axis]], whole: bool) -> None:
    """Check the axes of one table or figure; `axes` maps a key such as "rows" or "x" to the axes under this key.

    With `whole`, the values that an axis renames must exist.

    Raises:
        ConfigError: If the recipe has several tasks and no axis is "task".
        ValidationError: If an axis or a value that it renames does not exist, or layers cannot be counted.
    """
    keys = {axis.key for side in axes.values() for axis in side}
    if len(recipe.tasks) > 1 and "task" not in keys:
        raise ConfigError(f"scores of {len(recipe.tasks)} tasks would be mixed; {' or '.join(axes)} must name 'task'")
    runs = list(all_coordinates(recipe, keys))
    pairs = [(task, method) for task, body in recipe.tasks.items() for method in recipe.methods or body.readers]
    grid_keys = [key for pair in pairs for key in method_grid(recipe, *pair)]
    known = dict.fromkeys(["task", "method", *recipe_coordinates(recipe), *grid_keys])
    for side, axis in ((side, axis) for side, side_axes in axes.items() for axis in side_axes):
        with error_at(side):
            check_known("recipe", [axis.key], [*known, *(["epoch"] if side == "x" else [])], "axis")
            values = dict.fromkeys(to_text(run[axis.key]) for run in runs if axis.key in run)
            check_known("recipe", axis.names if whole else (), values, axis.key)
            for run in runs:
                axis.shown_value(run)


def _check_scores(recipe: Recipe, metrics: Sequence[str], key: str, part: str | None) -> None:
    """Raise ValidationError unless every task has the metrics and the split of a table or figure.

    `key` is the key of the metrics in the recipe, for the error. Test scores exist only if the recipe evaluates on
    test.
    """
    for task in recipe.tasks.values():
        with error_at(key):
            check_known("recipe", metrics, [*task.metrics, PARAMETERS], "metric")
    if part == "test" and recipe.evaluate != "test":
        with error_at("part"):
            raise ConfigError("part is test, but test parts are scored only with 'evaluate: test'")


def check_metrics(recipe: Recipe, task: str, known: Sequence[str]) -> None:
    """Raise UnknownNameError if a table or figure of a recipe shows a metric that a task does not have.

    `known` are the task's metrics. They depend on its data, so that this is checked after the data is read.
    """
    shown = [metric for table in recipe.table for metric in table.metrics]
    shown += [figure.metric for figure in recipe.figure if figure.metric]
    check_known(f"recipe, task {task}", shown, [*known, PARAMETERS], "metric")


def check_one_metric(recipe: Recipe, metrics: Mapping[str, str]) -> None:
    """Raise ConfigError if a cell or point would mix scores of different metrics.

    That happens if it shows several tasks whose metrics differ, and the table or figure does not name a metric.
    `metrics` is task name -> metric.
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


def _check_published(recipe: Recipe, table: TableRecipe, published: Published) -> None:
    """Raise ValidationError if published numbers have a row or column that the recipe's table does not have."""
    rows, columns = row_and_column_names(recipe, table)
    with error_at("published"):
        check_known("recipe, published", published.values, rows, "row")
        for values in (*published.values.values(), *published.others.values()):
            check_known("recipe, published", values, columns, "column")


class _ScoreSummary(TypedDict):
    """The mean, standard deviation, interval and number of several runs' scores, with the field names of `Cell`."""

    mean: float
    spread: float
    interval: float | None
    runs: int


def pivot(recipe: Recipe, table: Sequence[SummaryRow], history: Sequence[TableRow], order: Sequence[str]) -> Report:
    """Return the tables and figures of a recipe, filled with the scores of its runs.

    Args:
        recipe: The recipe.
        table: One row per task, method and setting; see `summaries`.
        history: One row per run ("reader") and epoch with all validation scores, for curves over epochs.
        order: Names of the runs in the recipe's order.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    rows = sorted(table, key=lambda row: ranks[row["runs"][0]["reader"]])
    figures = [_fill_figure(recipe, figure, rows, history) for figure in recipe.figure]
    return Report([_fill_table(recipe, layout, rows) for layout in recipe.table], figures)


def _coordinates(recipe: Recipe, row: SummaryRow) -> Coordinates:
    """Return the coordinates of the runs that one row of results summarises."""
    return {**recipe_coordinates(recipe), "task": row["task"], "method": row["method"], **row["settings"]}


def _fill_table(recipe: Recipe, layout: TableRecipe, rows: Sequence[SummaryRow]) -> PivotTable:
    """Return a table of a recipe, filled from `rows` of results, which are in the recipe's order."""
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
    about = {} if paper is None else {**paper.model_dump(exclude={"values"}), "published": paper.values}
    title = layout.title or "Best of every method"
    return PivotTable(title, part, names, columns, cells, layout.digits, layout.scale, **about)


def _fill_figure(
    recipe: Recipe, layout: FigureRecipe, rows: Sequence[SummaryRow], history: Sequence[TableRow]
) -> Curves:
    """Return a figure of a recipe, filled from `rows` of results or, if its x axis is epochs, from `history`."""
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
    recipe: Recipe, rows: Sequence[SummaryRow], axes: Sequence[_Axis]
) -> tuple[list[SummaryRow], dict[str, object]]:
    """Choose the best setting per task among the rows of results that belong to one cell or point.

    Returns:
        The row with the best mean validation score of each task. And, if there is a single task, the settings of its
        best row that differ among `rows` and that no axis displays.
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
    """Return the score of each run of a row on a split; for the metric "parameters", [the number of parameters]."""
    if metric == PARAMETERS:
        return [float(row["parameters"])]
    key = "score" if part == "validation" else "test"
    if metric != row["metric"]:
        key = metric if part == "validation" else f"test_{metric}"
    return [run[key] for run in row["runs"]]


def _epoch_summaries(
    best: Sequence[SummaryRow], metric: str, history: Sequence[TableRow], scale: float
) -> dict[int, _ScoreSummary]:
    """Return epoch -> summary of the validation scores, times `scale`, of all runs of the `best` rows."""
    names = {run["reader"] for row in best for run in row["runs"]}
    scores: dict[int, list[float]] = {}
    for row in history:
        if row["reader"] in names:
            scores.setdefault(int(row["epoch"]), []).append(row[metric] * scale)
    return {epoch: _summarise(values) for epoch, values in sorted(scores.items())}


def _score_summary(best: Sequence[SummaryRow], metric: str, part: str, scale: float) -> _ScoreSummary:
    """Return the summary of the scores on a split, times `scale`, of all runs of the `best` rows."""
    return _summarise([value * scale for row in best for value in _scores(row, metric, part)])


def _summarise(values: Sequence[float]) -> _ScoreSummary:
    """Return the mean, sample standard deviation, half of the 95 % interval, and count of one or more scores."""
    summary = summarise(values)
    return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval, "runs": summary.count}
