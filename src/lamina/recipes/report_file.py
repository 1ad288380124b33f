"""The file `report.json` of a training run: its tables and figures, which can be drawn without the recipe."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import FiniteFloat, StringConstraints, TypeAdapter

from lamina.errors import StoreError, convert_errors
from lamina.store.files import damaged, read_json
from lamina.utils import JSONObject, is_file, write_text

if TYPE_CHECKING:
    from pathlib import Path

REPORT, MARKDOWN, LATEX = "report.json", "report.md", "report.tex"
STUDY = "lamina_study.json"  # marks the folder of a study, as REPORT marks that of a training run
FORMAT = 1
_Drawn = Annotated[
    str, StringConstraints(pattern=r"^(report\.(md|tex)|(figure-\d+|importance(-over-training)?)\.(png|svg|html))$")
]
_Number = FiniteFloat | int
_Printed = dict[str, dict[str, _Number]]  # row -> column -> number, as a paper prints it
# A row of a table of results: column -> value. Its columns depend on the task's metrics and the method's settings.
TableRow: TypeAlias = JSONObject


@dataclass(frozen=True)
class Cell:
    """A cell of a `PivotTable`: the best setting's scores, times the table's scale.

    Attributes:
        row: Name of its row; `column` is the name of its column.
        mean: Mean score of the setting's runs, of all tasks in the cell.
        spread: Sample standard deviation; 0 for a single run.
        interval: Half the width of the 95 % t interval; None for a single value.
        runs: Number of runs.
        settings: The chosen values of searched settings, and of "method" if the cell compares several; {} if the cell
            has several tasks.
        values: Number of values that mean, spread and interval are over. It is smaller than `runs` if there are several
            seeds and several subsamples: then each subsample has one value, the mean of its runs. None, in files of
            earlier versions: each run has a value.
    """

    row: str
    column: str
    metric: str
    mean: FiniteFloat
    spread: FiniteFloat
    interval: FiniteFloat | None
    runs: int
    settings: dict[str, object]
    values: int | None = None


@dataclass(frozen=True)
class Point:
    """A point of a curve in `Curves`; the score fields are those of `Cell`.

    Attributes:
        facet: Name of the panel; "": the figure has only one.
        series: Name of the curve; "": the figure has only one.
        x: Place on the x axis. None: the method lacks the setting there, and is drawn as a horizontal line.
    """

    facet: str
    series: str
    x: _Number | str | None
    metric: str
    mean: FiniteFloat
    spread: FiniteFloat
    interval: FiniteFloat | None
    runs: int
    settings: dict[str, object]
    values: int | None = None


def averaged(cell: Cell | Point) -> tuple[int, str]:
    """Return how many values a cell or point averages, and what each of them stands for: a "run" or "subsample"."""
    values = cell.runs if cell.values is None else cell.values
    return values, "subsample" if values < cell.runs else "run"


@dataclass(frozen=True)
class PivotTable:
    """A table with the rows and columns of a paper. A cell without a finished run is not in `cells`.

    Attributes:
        part: The split that the scores come from: "validation" or "test".
        rows: Names of the rows; `columns`: of the columns.
        digits: Digits after the decimal point.
        scale: The factor that scores were multiplied by.
        source: The paper, and the number of its table.
        published: The paper's own numbers for the same cells.
        others: Rows that the paper quotes from other papers.
        notes: Remarks on the paper's numbers.
    """

    title: str
    part: str
    rows: list[str]
    columns: list[str]
    cells: list[Cell]
    digits: int = 3
    scale: FiniteFloat = 1.0
    source: str = ""
    published: _Printed = field(default_factory=dict)
    others: _Printed = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Curves:
    """A figure: the points of one or several curves, in one or several panels.

    Attributes:
        part: The split that the scores come from: "validation" or "test".
        x_title: Title of the x axis, which is logarithmic if `log_x`.
        scale: The factor that scores were multiplied by.
        source: The paper, and the number of its figure.
        notes: Remarks on the paper's numbers.
    """

    title: str
    part: str
    x_title: str
    points: list[Point]
    log_x: bool = False
    scale: FiniteFloat = 1.0
    source: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """All tables and figures of a recipe, filled with the scores of its runs: the contents of `report.json`.

    Attributes:
        files: Names of the files that `lamina report` wrote beside it.
        format: Version of the file's format.
        monitors: A row of rates for each monitor of the recipe.
    """

    tables: list[PivotTable]
    figures: list[Curves]
    files: list[_Drawn] = field(default_factory=list)
    format: int = FORMAT
    monitors: list[TableRow] = field(default_factory=list)


def write_report_file(path: Path, report: Report) -> None:
    """Write a report to `path` as JSON; an existing file is replaced whole or, if writing fails, not at all.

    Raises StoreError if the file cannot be written.
    """
    write_text(path, json.dumps(asdict(report), indent=1))


def with_drawn_files(report: Report, folder: Path) -> Report:
    """Return the report with the list of drawn files from the report in `folder`; unchanged if that cannot be read.

    The next `lamina report` then replaces or removes these files.
    """
    with suppress(StoreError):  # the folder has no report yet, or a damaged one
        return replace(report, files=read_report_file(folder).files)
    return report


def read_report_file(folder: Path) -> Report:
    """Return the report in the output folder of a recipe, from its file `report.json`.

    Raises StoreError if the file is missing, damaged, or written in the format of another version of Lamina.
    """
    if not is_file(path := folder / REPORT):
        what = "lamina train writes one beside its tables"
        raise StoreError(f"report: {folder} holds no {REPORT}; {what}. Give the output folder of a recipe.")
    fields = read_json(path)
    if (version := fields.get("format")) != FORMAT:
        raise damaged(path, f"is in format {str(version)[:40]}; this version of lamina reads format {FORMAT}")
    with convert_errors(lambda reason: damaged(path, f"does not hold a report ({reason})")):
        return _ADAPTER.validate_python(fields)


_ADAPTER: TypeAdapter[Report] = TypeAdapter(Report)
