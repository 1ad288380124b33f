"""The layouts of a paper's tables and figures: the recipe keys `table` and `figure`.

An axis is a property of runs, such as "task", by which rows, columns, points or curves are formed. A run's coordinates
are the values of its properties.
"""

from __future__ import annotations

import csv
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PositiveFloat

from lamina.errors import ConfigError, check_known
from lamina.layers.selectors import select
from lamina.recipes.strict_yaml import Fields, Strict, YamlFile, read_yaml
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


ABSENT = object()  # what an axis shows for a run whose method does not have the axis's setting
LEFT_OUT = object()  # what an axis shows for a run whose value the recipe leaves out, by the name null
PUBLISHED = "published.yaml"  # a file beside the recipe with the numbers that its paper prints
PAPERS = Path(__file__).parent / "published"  # one file per paper that this package has recipes for
PARAMETERS = "parameters"  # can be shown in place of a metric: the number of trained parameters
_MANY = 10_000  # layers of an imaginary model; a selector that names more than half of them names all up to the top

# Where the score of a run stands: "task", "method", "model", "train_base" and each key of its grid -> the run's value.
Coordinates: TypeAlias = dict[str, object]
Grid: TypeAlias = dict[str, list[object]]  # key of a grid -> its values
Numbers: TypeAlias = dict[str, dict[str, float]]  # row -> column -> number, as a paper prints it


def _expand_axis(value: object) -> object:
    """Return an axis of a recipe in its long form {"key": ...}. Values in any other form stay unchanged.

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
    return value if isinstance(value, list) else [value]


class AxisLayout(Strict):
    """A property of runs by which rows, columns, points or curves are formed, and how its values are displayed.

    Attributes:
        key: "task", "method", "model", "train_base", a key of a grid, or ("x" of a figure only) "epoch".
        count: Show the number of layers that a selector names; 0 where no edit is made.
        names: Value -> what is shown instead; null: runs with this value are left out. Without effect if `count`.
    """

    key: str
    count: bool = False
    names: dict[str, str | int | float | None] = Field(default_factory=dict)

    def shown_value(self, coordinates: Coordinates) -> object:
        """Return what this axis displays for a run with the given coordinates (property -> value).

        Raises ConfigError if layers are counted, and the value is not a layer selector or selects all layers up to the
        top.

        Returns:
            The run's value, the number of layers that the value selects (with `count`), or the name under `names` for
            the value. ABSENT if the run does not have the property, LEFT_OUT if the recipe leaves the value out.
        """
        value = coordinates.get(self.key, ABSENT)
        if value is ABSENT:
            return ABSENT
        if self.count:
            layers = 0 if value is None else len(select(value, _MANY, op="layers"))
            if layers > _MANY // 2:
                problem = f"{value!r} names layers up to the top, whose number is not known"
                raise ConfigError(f"{problem}. Write '1-24' or so")
            return layers
        shown = self.names.get(to_text(value), value)
        return LEFT_OUT if shown is None and to_text(value) in self.names else shown


AS_LIST = BeforeValidator(_to_list)
Axis = Annotated[AxisLayout, BeforeValidator(_expand_axis)]
Axes = Annotated[list[Axis], AS_LIST]


def to_text(value: object) -> str:
    """Return a value as text for the name of a row or column; None becomes "none"."""
    return "none" if value is None else str(value)


class Published(Strict):
    """The numbers that a paper prints for a table or figure: one entry of a file in `PAPERS` or of `published.yaml`.

    Attributes:
        source: The paper, and the number of its table or figure.
        values: Its own numbers: row -> column -> number.
        others: Rows that the paper quotes from other papers.
        notes: Remarks, for example on misprints.
    """

    source: str
    values: Numbers = Field(default_factory=dict)
    others: Numbers = Field(default_factory=dict)
    notes: Annotated[list[str], AS_LIST] = Field(default_factory=list)


def with_published(file: YamlFile, path: Path) -> Fields:
    """Return the fields of a recipe, with each name under `published` replaced by the paper's numbers.

    A name such as "dwatt/table 2" is an entry of a paper whose numbers come with this package. Other names are entries
    of `published.yaml`, a file in the recipe's folder, which is read only if there is such a name. The fields of
    `file`, the recipe's file at `path`, are not changed. Raises DataError if `published.yaml` is needed, and is missing
    or not valid; UnknownNameError if the paper or `published.yaml` has no entry of that name.
    """
    fields, read = dict(file.fields), cache(lambda place: read_yaml(place).fields)
    for key in ("table", "figure"):
        items = [dict(item) if isinstance(item, dict) else item for item in _to_list(fields.get(key, []))]
        for number, item in enumerate(items):
            if isinstance(item, dict) and isinstance(name := item.get("published"), str):
                line, _ = file.locate((key, number, "published"))
                item["published"] = _published(name, path, f"recipe {path}, line {line}, {key}.published", read)
        if key in fields:
            fields[key] = items
    return fields


def _published(name: str, recipe: Path, op: str, read: Callable[[Path], Fields]) -> object:
    """Return the numbers of a paper that `name`, a value of the key `published`, refers to; see `with_published`.

    `recipe` is the recipe's path. Messages begin with `op`, and `read` returns the contents of a YAML file.
    """
    paper, slash, entry = name.partition("/")
    papers = {file.stem: file for file in PAPERS.glob("*.yaml")} if slash else {}
    place, entry = (papers[paper], entry) if paper in papers else (recipe.parent / PUBLISHED, name)
    if slash and paper not in papers and (not is_file(place) or name not in read(place)):
        check_known(op, [paper], papers, "paper")
    check_known(op, [entry], read(place), "table or figure")
    return read(place)[entry]


class _Layout(Strict):
    """The keys that layouts of tables and figures have in common.

    Attributes:
        title: Its title; None: one that says what it shows.
        part: Split; None: the test split if it is scored, else validation.
        scale: Scores are multiplied by this; 100 shows per cent.
        published: The paper's numbers.
    """

    title: str | None = None
    part: Literal["validation", "test"] | None = None
    scale: PositiveFloat = 1.0
    published: Published | None = None


class TableRecipe(_Layout):
    """The layout of a table, under `table` in a recipe. Without a title it is called "Best of every method".

    A cell shows the mean over the runs of its tasks. If several settings of a task belong to the cell, only the runs of
    the setting with the best validation score count.

    Attributes:
        rows: The properties that form rows.
        columns: The properties that form columns.
        metrics: One column for each; empty: the metric of each task.
        digits: Digits after the decimal point.
    """

    rows: Axes = Field(default_factory=lambda: [AxisLayout(key="method")], min_length=1)
    columns: Axes = Field(default_factory=lambda: [AxisLayout(key="task")], min_length=1)
    metrics: list[str] = Field(default_factory=list)
    digits: Annotated[int, Field(ge=0, le=6)] = 3


class FigureRecipe(_Layout):
    """The layout of a figure with curves, under `figure` in a recipe. Its default title names the x axis.

    A point shows the mean over the runs of its tasks. If several settings of a task belong to the point, only the runs
    of the setting with the best validation score count. A method without the setting on the x axis, or without a name
    for its value where the axis has names, is drawn as a horizontal line. The source and the notes of `published` are
    printed below the figure.

    Attributes:
        x: The property on the x axis; `x_title` is its title, and `log_x` makes it logarithmic.
        series: One curve for each value; by default for each method.
        facet: One panel for each value; None: one panel in all.
        metric: None: the metric of each task.
    """

    x: Axis
    series: Axis = Field(default_factory=lambda: AxisLayout(key="method"))
    facet: Axis | None = None
    x_title: str | None = None
    log_x: bool = False
    metric: str | None = None

    @property
    def axes(self) -> list[AxisLayout]:
        """All axes of the figure: x, series, and facet unless it is None."""
        return [self.x, self.series, *([] if self.facet is None else [self.facet])]


def x_value(axis: AxisLayout, coordinates: Coordinates) -> object:
    """Return what the x axis of a figure displays for a run with these coordinates; see `AxisLayout.shown_value`.

    If the axis has names (and no `count`), a value without a name becomes ABSENT, which is drawn as a horizontal line.
    """
    has_name = axis.count or not axis.names or to_text(coordinates.get(axis.key)) in axis.names
    return axis.shown_value(coordinates) if has_name else ABSENT


def axes_label(axes: Sequence[AxisLayout], coordinates: Coordinates) -> str | None:
    """Return the name of a run's row or column: what each axis displays, joined by ", ".

    Axes for which the run has no value are skipped; the name is "" if it has none for any axis. None if the run is left
    out of the table. `coordinates` is property -> the run's value. Raises the errors of `AxisLayout.shown_value`.
    """
    parts = [axis.shown_value(coordinates) for axis in axes]
    return None if LEFT_OUT in parts else ", ".join(to_text(part) for part in parts if part is not ABSENT)


def column_name(column: str, metric: str, table: TableRecipe) -> str:
    """Return a table's column name: with several metrics "<column>, <metric>" (no ", " if one is ""), else `column`."""
    return ", ".join(part for part in (column, metric) if part) if len(table.metrics) > 1 else column


def to_patterns(value: object) -> object:
    """Return a recipe's key `only` with a list of strings for each of its keys; a single value becomes a list of one.

    A value that is not a mapping is returned unchanged.
    """
    if not isinstance(value, dict):
        return value
    return {key: [to_text(item) for item in _to_list(items)] for key, items in value.items()}


def matches(only: Mapping[str, Sequence[str]], run: Mapping[str, object]) -> bool:
    """Return whether, for every key in `only`, the run's value matches one of the key's patterns, such as "ada*".

    Case matters. None has the text "none".

    Args:
        only: Key -> patterns, one of which must match. A key that the run lacks is ignored.
        run: "task", "method" and keys of the grid -> the run's value. Some may be missing.
    """
    return all(
        any(fnmatchcase(to_text(run[key]), pattern) for pattern in patterns)
        for key, patterns in only.items()
        if key in run
    )


def read_only(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return key -> patterns from the option --only of the command line, such as "method=baseline,unit*".

    If a key occurs several times, its patterns are joined. A name with a comma must be in double quotes. Raises
    ConfigError if a text has another form.
    """
    only: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        patterns = [pattern for row in csv.reader([values], skipinitialspace=True) for pattern in row if pattern]
        if not key.strip() or not patterns:
            rule = "the form is key=pattern,pattern, as in task=cola or 'method=unit*'"
            raise ConfigError(f"only: '{text}' names nothing; {rule}.")
        only.setdefault(key.strip(), []).extend(pattern.strip() for pattern in patterns)
    return only
