"""The tables and figures of a paper: the recipe keys `table` and `figure`, and how runs fill them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from lamina.errors import ConfigError, check_known
from lamina.layers.selectors import select
from lamina.recipes.report_file import Cell, Curves, PivotTable, Point, Report
from lamina.recipes.strict_yaml import Strict, at, read_yaml
from lamina.train.grid import METHOD, expand, full_key
from lamina.train.results import sort_key, summarise

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from lamina.recipes.schema import Recipe
    from lamina.recipes.strict_yaml import YamlFile

ABSENT, LEFT_OUT = object(), object()  # a method has no such setting; the recipe leaves the value out
PUBLISHED = "published.yaml"  # beside the recipe: what its paper prints
PARAMETERS = "parameters"  # beside a task's own metrics
Coordinates = dict[str, Any]  # "task", "method" and the settings of a grid
_MANY = 10_000  # layers: a selector that names so many goes up to the top, wherever that is


def _axis(given: Any) -> Any:
    """Return an axis from "insert.layers", {"count": "insert.layers"} or {"task": {"sst2-10": "10 %"}}."""
    if isinstance(given, str):
        return {"key": given}
    if isinstance(given, dict) and len(given) == 1 and "key" not in given:
        ((key, value),) = given.items()
        if key == "count":
            return {"key": value, "count": True}
        if isinstance(value, dict):
            return {"key": key, "names": {str(name): label for name, label in value.items()}}
    return given


def _listed(given: Any) -> Any:
    return given if isinstance(given, list) else [given]


class _Axis(Strict):
    key: str  # "task", "method", "model", "train_base", "epoch" (of a figure's x), or a key of a grid
    count: bool = False  # how many layers a selector names, 0 where no edit is made
    names: dict[str, str | int | float | None] = Field(default_factory=dict)  # value -> what is shown; null: left out

    def find(self, place: Coordinates) -> Any:
        """Return the value of this axis for a run, as it is shown; ABSENT or LEFT_OUT if it is not shown."""
        value = place.get(self.key, ABSENT)
        if value is ABSENT:
            return ABSENT
        if self.count:
            return _count(value)
        label = self.names.get(text(value), value)
        return LEFT_OUT if label is None and text(value) in self.names else label


AS_LIST = BeforeValidator(_listed)
Axis = Annotated[_Axis, BeforeValidator(_axis)]
Axes = Annotated[list[Axis], AS_LIST]
Grid = dict[str, list[Any]]
Numbers = dict[str, dict[str, float]]  # row -> column -> as printed


def _count(selector: Any) -> int:
    layers = 0 if selector is None else len(select(selector, _MANY, op="layers"))
    if layers > _MANY // 2:
        raise ConfigError(f"{selector!r} names layers up to the top, whose number is not known. Write '1-24' or so")
    return layers


def text(value: Any) -> str:
    """Return a value of an axis as the text of a row or column."""
    return "none" if value is None else str(value)


class Published(Strict):
    """What a paper prints, from `published.yaml` beside the recipe."""

    source: str  # paper and table
    values: Numbers = Field(default_factory=dict)
    others: Numbers = Field(default_factory=dict)  # rows that the paper quotes of other work
    notes: Annotated[list[str], AS_LIST] = Field(default_factory=list)  # say misprints


def with_published(file: YamlFile, path: Path) -> dict[str, Any]:
    """A recipe's fields, with what its tables and figures name of the `published.yaml` beside it in place of the names.

    Raises:
        DataError: If that file is not there or is no YAML.
        UnknownNameError: If it has no such entry.
    """
    fields, entries = dict(file.fields), None
    for key in ("table", "figure"):
        items = [dict(item) if isinstance(item, dict) else item for item in _listed(fields.get(key, []))]
        for number, item in enumerate(items):
            if isinstance(item, dict) and isinstance(name := item.get("published"), str):
                entries = read_yaml(path.parent / PUBLISHED).fields if entries is None else entries
                line, _ = file.find((key, number, "published"))
                check_known(f"recipe {path}, line {line}, {key}.published", [name], entries, "table or figure")
                item["published"] = entries[name]
        if key in fields:
            fields[key] = items
    return fields


class TableRecipe(Strict):
    """A table: every cell has the best of all settings that are neither rows nor columns, by validation score."""

    title: str | None = None
    rows: Axes = Field(default_factory=lambda: [_Axis(key="method")], min_length=1)
    columns: Axes = Field(default_factory=lambda: [_Axis(key="task")], min_length=1)
    metrics: list[str] = Field(default_factory=list)  # each a column; by default that of each task
    part: Literal["validation", "test"] | None = None  # by default the test part where it is scored
    scale: PositiveFloat = 1.0  # 100: per cent
    digits: Annotated[int, Field(ge=0, le=6)] = 3
    published: Published | None = None


class FigureRecipe(Strict):
    """Curves: every point has the best of all settings that are no axis; a method that has no x is a line across."""

    title: str | None = None
    x: Axis
    series: Axis = Field(default_factory=lambda: _Axis(key="method"))
    facet: Axis | None = None
    x_title: str | None = None
    log_x: bool = False
    metric: str | None = None  # by default that of each task
    part: Literal["validation", "test"] | None = None
    scale: PositiveFloat = 1.0
    published: Published | None = None  # its source and notes stand below

    @property
    def axes(self) -> list[_Axis]:
        """All axes; without a facet, x and series."""
        return [self.x, self.series, *([] if self.facet is None else [self.facet])]


def place_of_x(axis: _Axis, place: Coordinates) -> Any:
    """What `find` gives, but ABSENT too for a value that the names of an x axis do not have."""
    is_named = not axis.names or text(place.get(axis.key)) in axis.names
    return axis.find(place) if is_named else ABSENT


def label(axes: Sequence[_Axis], place: Coordinates) -> str | None:
    """Return the name of a row or column; None if it is left out."""
    parts = [axis.find(place) for axis in axes]
    return None if LEFT_OUT in parts else ", ".join(text(part) for part in parts if part is not ABSENT)


def grid_keys(recipe: Recipe, task: str, method: str) -> Grid:
    """The grid of a method on a task, by full keys, without its seeds."""
    if recipe.methods:
        body, known = recipe.methods[method], recipe.methods[method].keys()
    else:
        body = recipe.tasks[task].readers[method]
        known = body.keys(recipe.tasks[task].outline())
    grid = {full_key(key, known, "grid"): values for key, values in body.grid.items()}
    return {key: values for key, values in grid.items() if key != "seed"}


def of_run(recipe: Recipe) -> Coordinates:
    """What is the same for all of a run, and tells it from another that is drawn beside it."""
    return {"model": recipe.model, "train_base": recipe.train_base}


def places(recipe: Recipe, keys: Collection[str]) -> Iterator[Coordinates]:
    """Every task, method and value of these keys, in the order of the recipe's runs; some may come several times."""
    for name, task in recipe.tasks.items():
        for method in recipe.methods or task.readers:
            grid = {key: own for key, own in grid_keys(recipe, name, method).items() if key in (*keys, METHOD)}
            if recipe.methods:
                settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
            else:
                settings = [spec.settings for spec in expand(task.readers[method].template(task.outline()), grid)]
            for chosen in settings:
                yield {**of_run(recipe), "task": name, "method": method, **chosen}


def cells_of(recipe: Recipe, table: TableRecipe) -> tuple[list[str], list[str]]:
    """Return the names of a table's rows and columns that the recipe's runs will fill."""
    found = list(places(recipe, {axis.key for axis in (*table.rows, *table.columns)}))
    names = ([label(axes, place) for place in found] for axes in (table.rows, table.columns))
    rows, columns = ([name for name in dict.fromkeys(side) if name is not None] for side in names)
    return rows, [column_of(column, metric, table) for column in columns for metric in table.metrics or [""]]


def column_of(column: str, metric: str, table: TableRecipe) -> str:
    """Return the name of a column, with the metric if there are several."""
    return ", ".join(part for part in (column, metric) if part) if len(table.metrics) > 1 else column


def check_layout(recipe: Recipe, *, whole: bool = True) -> None:
    """Raise a ValidationError, with its place, if a table or figure names what the recipe does not have.

    Unless the recipe is `whole`, values, rows and columns may be missing.
    """
    for number, table in enumerate(recipe.table):
        with at("table", number):
            _check_axes(recipe, {"rows": table.rows, "columns": table.columns}, whole)
            _check_scores(recipe, table.metrics, "metrics", table.part)
            if whole and table.published is not None:
                _check_published(recipe, table, table.published)
    for number, figure in enumerate(recipe.figure):
        with at("figure", number):
            axes = {"x": [figure.x], "series": [figure.series], "facet": [figure.facet] if figure.facet else []}
            _check_axes(recipe, axes, whole)
            _check_scores(recipe, [figure.metric] if figure.metric else [], "metric", figure.part)
            if figure.x.key == "epoch" and figure.metric == PARAMETERS:
                raise ConfigError("metric is parameters, which are the same in every epoch")


def _check_axes(recipe: Recipe, axes: dict[str, list[_Axis]], whole: bool) -> None:
    keys = {axis.key for side in axes.values() for axis in side}
    if len(recipe.tasks) > 1 and "task" not in keys:
        raise ConfigError(f"scores of {len(recipe.tasks)} tasks would be mixed; {' or '.join(axes)} must name 'task'")
    found = list(places(recipe, keys))
    pairs = [(task, method) for task, body in recipe.tasks.items() for method in recipe.methods or body.readers]
    known = dict.fromkeys(
        ["task", "method", *of_run(recipe), *(key for pair in pairs for key in grid_keys(recipe, *pair))]
    )
    for side, axis in ((side, axis) for side, own in axes.items() for axis in own):
        with at(side):
            check_known("recipe", [axis.key], [*known, *(["epoch"] if side == "x" else [])], "axis")
            values = dict.fromkeys(text(place[axis.key]) for place in found if axis.key in place)
            check_known("recipe", axis.names if whole else (), values, axis.key)
            for place in found:
                axis.find(place)


def _check_scores(recipe: Recipe, metrics: Sequence[str], key: str, part: str | None) -> None:
    for task in recipe.tasks.values():
        with at(key):
            check_known("recipe", metrics, [*task.metrics, PARAMETERS], "metric")
    if part == "test" and recipe.evaluate != "test":
        with at("part"):
            raise ConfigError("part is test, but test parts are scored only with 'evaluate: test'")


def check_metrics(recipe: Recipe, task: str, known: Sequence[str]) -> None:
    """Raise UnknownNameError if a table or figure shows a metric that a task does not have, once its data is read."""
    shown = [*(metric for table in recipe.table for metric in table.metrics), *(own.metric for own in recipe.figure)]
    check_known(f"recipe, task {task}", filter(None, shown), [*known, PARAMETERS], "metric")


def check_one_metric(recipe: Recipe, metrics: Mapping[str, str]) -> None:
    """Raise ConfigError if one cell or point has the scores of tasks whose metrics (task -> metric) differ."""
    shown = [(table.metrics, [table.rows, table.columns]) for table in recipe.table]
    shown += [([own.metric] if own.metric else [], [[axis] for axis in own.axes]) for own in recipe.figure]
    for own, sides in shown:
        met: dict[tuple[str | None, ...], str] = {}
        keys = {axis.key for side in sides for axis in side}
        for place in () if own else places(recipe, keys):
            names = tuple(label(side, place) for side in sides)
            metric = metrics[place["task"]]
            if None not in names and met.setdefault(names, metric) != metric:
                came = f"'{', '.join(filter(None, names))}' mixes tasks whose metrics are {met[names]} and {metric}"
                raise ConfigError(f"recipe: {came}. Give it 'metrics', or each task a name of its own.")


def _check_published(recipe: Recipe, table: TableRecipe, published: Published) -> None:
    rows, columns = cells_of(recipe, table)
    with at("published"):
        check_known("recipe, published", published.values, rows, "row")
        for values in (*published.values.values(), *published.others.values()):
            check_known("recipe, published", values, columns, "column")


Rows = list[dict[str, Any]]


def pivot(recipe: Recipe, table: Rows, history: Rows, order: Sequence[str]) -> Report:
    """Return the tables and figures of a recipe, filled from its runs.

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
    """Return the scores of a row's runs."""
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
