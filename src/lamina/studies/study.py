"""The result of a study: a tidy table, its charts and the exact settings; saved and loaded as a folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from lamina.errors import ConfigError, StoreError, check_known, convert_errors
from lamina.layers import stacks
from lamina.layers.base_facts import hash_settings
from lamina.layers.fingerprints import fingerprint_of
from lamina.recipes.report_file import STUDY
from lamina.store.files import damaged, read_steady, staged, write_json
from lamina.store.manifest import FORMAT, SavedFacts
from lamina.utils import JSON, JSONObject, check_fields, check_type, check_types, no_pipe, pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pandas import DataFrame
    from transformers import PreTrainedModel

    Frame: TypeAlias = Any  # a DataFrame of pandas, whose type stubs are narrower than what its methods accept

logger = logging.getLogger(__name__)
PARQUET, CSV = "table.parquet", "table.csv"
FILES = (STUDY, PARQUET, CSV)


@final
@dataclass(frozen=True)
class Figure:
    """The description of a chart: which rows of a study's table to draw, and how.

    In all charts but "scatter", rows that differ only in the column "seed" are drawn as their mean: from three seeds on
    with the 95 % t interval over seeds.

    Attributes:
        kind: "line" (a curve over `x`), "heat" (one rectangle per `x` and `y`, coloured by `value`), "bar", or
            "scatter" (a point per row).
        x: Column of the horizontal axis.
        value: Column with the numbers.
        y: Column on the vertical axis of a "heat" chart, which needs one.
        colour: Column; each of its values gets a colour. None: one colour.
        facet: Column; each of its values gets a panel. None: one panel.
        label: Column whose values are written into the rectangles of a "heat" chart, such as a predicted token. None:
            the numbers, if there is room.
        x_label: Column with the names along the horizontal axis, such as the token at a position. None: `x` itself.
        where: Column -> value that a row must have to be drawn, or a list of such values; {}: all rows.
        title: Title of the chart. "": the chart's name in `Study.figures`.
        x_title: Title of the horizontal axis, with its unit. "": the name of the column.
        value_title: Title of the numbers, with their unit. "": the name of the column, or the measure of its scores.
        note: One sentence that says what to look for. "": none.
        half_interval: Half the length of the interval that a "bar" chart draws around each value, instead of the
            interval over seeds. None: the interval over seeds.
    """

    kind: Literal["line", "heat", "bar", "scatter"]
    x: str
    value: str = "score"
    y: str | None = None
    colour: str | None = None
    facet: str | None = None
    label: str | None = None
    x_label: str | None = None
    where: Mapping[str, JSON] = field(default_factory=dict)
    title: str = ""
    x_title: str = ""
    value_title: str = ""
    note: str = ""
    half_interval: float | None = None


@final
@dataclass(frozen=True)
class Pivot:
    """How a study's table is arranged for printing.

    Attributes:
        index: Columns that name the printed rows. Table rows that have no value in one of them are left out.
        columns: Columns whose values become the printed columns. The values of several are joined by a space.
        where: Column -> value that a table row must have; {}: all rows.
        value: Column with the numbers. Numbers that share a printed cell, for example from several seeds, are averaged
            without NaN.
    """

    index: tuple[str, ...]
    columns: tuple[str, ...]
    where: Mapping[str, JSON] = field(default_factory=dict)
    value: str = "score"

    def __post_init__(self) -> None:
        for name in ("index", "columns"):  # JSON gives lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


class _StudyFacts(SavedFacts):
    """The content of `lamina_study.json`, the file that marks a folder as a saved study.

    It has the fields of `Study`, the file's `format` and the version of `lamina`. `table` is the SHA-256 of the table's
    Parquet file.
    """

    format: int
    lamina: str
    name: str
    settings: JSONObject
    figures: dict[str, JSONObject]
    conclusions: list[str]
    table: str
    pivot: JSONObject | None = None


def _undefined(table: DataFrame) -> str | None:
    """Return two sentences: how many scores of a table are NaN or infinite, by measure, and what finite ones need.

    None if all are finite, or the table has no column "score" of numbers.
    """
    import pandas as pd

    if "score" not in table:
        return None
    try:  # columns of objects, and those with pandas' own type for missing numbers, are read as floats
        numbers: Any = pd.to_numeric(table["score"])
        scores = numbers.astype("Float64").to_numpy(float, na_value=float("nan"))
    except (TypeError, ValueError):
        return None
    bad = table[~(abs(scores) < float("inf"))]
    if not len(bad):
        return None
    names = Counter(bad["measure"]) if "measure" in bad else {}
    which = ", ".join(f"{count} of {name}" for name, count in names.items())
    counted = (
        f"{len(bad)} of {pluralize(len(table), 'score')} are not defined (NaN or infinite){': ' * bool(which)}{which}"
    )
    return f"{counted}. They need states or weights that are not zero and not equal in all rows, and enough values."


@final
@dataclass(frozen=True, eq=False)
class Study:
    """The result of a study; every function of `lamina.studies` returns one.

    Making one logs a warning if scores are NaN or infinite, unless its conclusions already say so.

    Attributes:
        name: Name of the study, such as "similarity".
        table: One row per measured number, in the column "score"; the other columns say what was measured. Rows that
            show examples also have the columns "text", "true" and "predicted".
        settings: All options as they were used, "versions" of the libraries, and under "models" the name, class and
            fingerprints of each model. Stored as a copy that went through JSON.
        figures: Chart name -> how it is drawn; `rows` returns the table rows that it shows.
        conclusions: What may be concluded, one sentence each, the most important first. If scores are NaN or infinite,
            the last sentence says how many there are and which measures they belong to.
        pivot: How `summary` arranges the table. None: the summary is the table itself.

    Raises:
        ConfigError: If a field has a value of the wrong type, or the settings hold something that JSON cannot
            represent.
    """

    name: str
    table: DataFrame
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    conclusions: Sequence[str] = ()
    pivot: Pivot | None = None

    def __post_init__(self) -> None:
        check_fields("study", self)
        for name, figure in self.figures.items():
            check_type("study", f"figures['{name}']", figure, "Figure")
        object.__setattr__(self, "conclusions", tuple(self.conclusions))
        allowed = "settings hold text, numbers, lists and mappings"
        with convert_errors(lambda reason: ConfigError(f"study {self.name}: {reason}; {allowed}.")):
            object.__setattr__(self, "settings", json.loads(json.dumps(self.settings)))
        if (undefined := _undefined(self.table)) and undefined not in self.conclusions:
            logger.warning("%s: %s", self.name, undefined)
            object.__setattr__(self, "conclusions", (*self.conclusions, undefined))

    def __repr__(self) -> str:
        """Return the study's name, the size of its table, its charts and its conclusions."""
        size = f"{pluralize(len(self.table), 'row')}, figures: {', '.join(self.figures) or 'none'}"
        return "\n".join([f"Study('{self.name}', {size})", *(f"- {sentence}" for sentence in self.conclusions)])

    def summary(self) -> DataFrame:
        """Return a short table to print: the table arranged by `pivot` and averaged over seeds, or the table itself.

        Rows without a value in a column of the pivot's `index` are left out. Raises UnknownNameError if the table lacks
        a column of the pivot.
        """
        if self.pivot is None:
            return self.table
        index, columns, value = list(self.pivot.index), list(self.pivot.columns), self.pivot.value
        used = [*index, *columns, value, *self.pivot.where]
        check_known(f"study {self.name}: summary", used, list(self.table.columns), "column")
        rows = rows_where(self.table, self.pivot.where).dropna(subset=index)
        wide = rows.pivot_table(value, index, columns, aggfunc="mean", sort=False)
        if len(columns) > 1:
            wide.columns = [" ".join(map(str, names)) for names in wide.columns]
        return wide.reset_index().rename_axis(columns=None)

    def rows(self, figure: str) -> DataFrame:
        """Return the rows of the table that the chart `figure` shows; the table itself if it shows all.

        Raises UnknownNameError if the chart does not exist, or it needs a column that the table does not have.
        """
        check_known(f"study {self.name}", [figure], self.figures, "figure")
        chart = self.figures[figure]
        columns = (chart.x, chart.y, chart.value, chart.colour, chart.facet, chart.label, chart.x_label, *chart.where)
        needed = [column for column in columns if column is not None]
        check_known(f"study {self.name}: figure '{figure}'", needed, list(self.table.columns), "column")
        return rows_where(self.table, chart.where)

    @check_types("save")
    def save(self, folder: str | Path) -> None:
        """Write `table.parquet`, `table.csv`, and all else as `lamina_study.json`: either all of these files, or none.

        Args:
            folder: Folder to write to; it is created if it does not exist. A study already saved there is replaced;
                other files stay.

        Raises:
            StoreError: If the folder cannot be written, or has files with these names that do not belong to a study.
        """
        with staged(Path(folder).absolute(), FILES) as stage:  # pandas expands a "~" in front of a path
            self.table.to_parquet(stage / PARQUET, index=False)
            self.table.to_csv(stage / CSV, index=False)
            facts = _StudyFacts(
                format=FORMAT,
                lamina=library_versions()["lamina"],
                name=self.name,
                settings=dict(self.settings),
                figures={name: asdict(figure) for name, figure in self.figures.items()},
                conclusions=list(self.conclusions),
                table=hashlib.sha256((stage / PARQUET).read_bytes()).hexdigest(),
                pivot=None if self.pivot is None else asdict(self.pivot),
            )
            write_json(stage / STUDY, facts.model_dump())

    @classmethod
    @check_types("load")
    def load(cls, folder: str | Path) -> Study:
        """Return the study that `save` wrote to a folder.

        Raises:
            StoreError: If the folder holds no study, the study is damaged, another format of lamina wrote it, or other
                processes replace it again and again.
            UnknownNameError: If `lamina_study.json` has an unknown key.
        """
        folder = Path(folder)
        with convert_errors(lambda reason: damaged(folder, f"cannot be loaded ({reason})")):
            return read_steady(folder, STUDY, partial(_load, folder))


def rows_where(table: DataFrame, where: Mapping[str, JSON]) -> DataFrame:
    """Return the table rows that have the values in `where`; the table itself if `where` is empty.

    `where` is column -> value, or column -> list of values; a row needs one of them. Raises KeyError if the table lacks
    a column.
    """
    for column, value in where.items():
        table = table.loc[table[column].isin(value) if isinstance(value, list) else table[column] == value]
    return table


def scores_by_seed(table: DataFrame, where: Mapping[str, JSON]) -> dict[int, float]:
    """Return seed -> score, for the table rows that have a seed and the values in `where` (column -> value).

    If a seed has several rows, the last one counts. Raises KeyError if the table lacks a column.
    """
    rows = rows_where(table, where).dropna(subset=["seed"])
    return {int(seed): float(score) for seed, score in zip(rows["seed"], rows["score"], strict=True)}


def _load(folder: Path) -> Study:
    """Return the study saved in a folder.

    Raises StoreError if a file is missing or damaged, or the table does not belong to the study's JSON file. Raises
    UnknownNameError if the JSON file has an unknown key.
    """
    import pandas as pd

    if not (folder / STUDY).exists():
        raise StoreError(f"load: {folder} holds no study: there is no {STUDY}. Give a folder that Study.save wrote.")
    facts, path = _StudyFacts.read(folder / STUDY), folder / PARQUET
    if not path.exists():
        raise damaged(path, "is not there; the folder is incomplete")
    no_pipe(path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != facts.table:
        raise damaged(path, f"is not the table that {STUDY} was saved with")
    with convert_errors(lambda reason: damaged(folder / STUDY, f"has a figure that cannot be understood ({reason})")):
        figures = {name: Figure(**figure) for name, figure in facts.figures.items()}
        pivot = None if facts.pivot is None else Pivot(**facts.pivot)
    return Study(facts.name, pd.read_parquet(path), facts.settings, figures, tuple(facts.conclusions), pivot)


_LIBRARIES = ("lamina", "torch", "transformers", "numpy", "scipy", "pandas")


def library_versions() -> dict[str, str]:
    """Return name -> version of the libraries that a study's numbers depend on; "unknown" if one is not installed."""
    return {name: _version(name) for name in _LIBRARIES}


def study_settings(models: Mapping[str, PreTrainedModel], **options: JSON) -> dict[str, JSON]:
    """Return a study's settings, JSON-ready: "models" (name -> `model_facts`), its options and library "versions".

    Raises UnsupportedModelError or ConfigError as `model_facts` does.
    """
    facts = {name: model_facts(model) for name, model in models.items()}
    return {"models": facts, **options, "versions": library_versions()}


def model_facts(model: PreTrainedModel) -> dict[str, JSON]:
    """Return what a study records about a model, JSON-ready.

    That is its "name", "class", "family", "dtype", "fingerprints" and "settings". The fingerprints are stack -> hash of
    its weights, and "settings" is a hash of its config and its modules' settings. Together they show whether two
    studies read the same model. The name is None for a model that was not loaded. Raises UnsupportedModelError if the
    model's layers cannot be found, and ConfigError if it has no weights (the meta device).
    """
    return {
        "name": model.name_or_path or None,
        "class": type(model).__name__,
        "family": str(model.config.model_type),
        "dtype": str(model.dtype).removeprefix("torch."),
        "fingerprints": {name: fingerprint_of(stack) for name, stack in stacks(model).items()},
        "settings": hash_settings(model),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
