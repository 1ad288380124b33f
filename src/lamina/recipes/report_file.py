"""The file `report.json` of a run: its tables and figures, which can be printed and drawn without the recipe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import FiniteFloat, StringConstraints, TypeAdapter

from lamina.errors import StoreError, convert_errors
from lamina.store.files import damaged, read_json
from lamina.utils import is_file, write_text

if TYPE_CHECKING:
    from pathlib import Path

REPORT, MARKDOWN, LATEX = "report.json", "report.md", "report.tex"
FORMAT = 1
_Drawn = Annotated[
    str, StringConstraints(pattern=r"^(report\.(md|tex)|(figure-\d+|importance(-over-training)?)\.(png|svg|html))$")
]
_Number = FiniteFloat | int
_Printed = dict[str, dict[str, _Number]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the mean score of a method over all runs of its best setting, times the table's scale."""

    row: str
    column: str
    metric: str
    mean: FiniteFloat
    spread: FiniteFloat  # sample standard deviation
    interval: FiniteFloat | None  # half the width of the 95 % t interval; None for a single run
    runs: int
    settings: dict[str, Any]  # what was searched, as it was chosen by validation score; empty where nothing was


@dataclass(frozen=True)
class Point:
    """A point of a curve, with the same fields as a cell of a table. `x` is None for a method that is a line across."""

    facet: str
    series: str
    x: _Number | str | None
    metric: str
    mean: FiniteFloat
    spread: FiniteFloat
    interval: FiniteFloat | None
    runs: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class PivotTable:
    """A table with the rows and columns of a paper. Cells without a run are missing from `cells`."""

    title: str
    part: str
    rows: list[str]
    columns: list[str]
    cells: list[Cell]
    digits: int = 3
    scale: FiniteFloat = 1.0  # scores are times this
    source: str = ""
    published: _Printed = field(default_factory=dict)  # row -> column -> as printed
    others: _Printed = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Curves:
    """A figure: points of several series, in one or several panels."""

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
    """All tables and figures of a run; `files` are the files that `lamina report` wrote from them."""

    tables: list[PivotTable]
    figures: list[Curves]
    files: list[_Drawn] = field(default_factory=list)
    format: int = FORMAT


def write_report_file(path: Path, report: Report) -> None:
    """Write a report as JSON; an older file is replaced whole or not at all."""
    write_text(path, json.dumps(asdict(report), indent=1))


def read_report_file(folder: Path) -> Report:
    """Return the report of a folder; raise StoreError if its file is missing, damaged or of another version."""
    if not is_file(path := folder / REPORT):
        what = "lamina train writes one beside its tables"
        raise StoreError(f"report: {folder} holds no {REPORT}; {what}. Give the output folder of a recipe.")
    fields = read_json(path)
    if (version := fields.get("format")) != FORMAT:
        raise damaged(path, f"is in format {str(version)[:40]}; this version of lamina reads format {FORMAT}")
    with convert_errors(lambda reason: damaged(path, f"does not hold a report ({reason})")):
        return _ADAPTER.validate_python(fields)


_ADAPTER: TypeAdapter[Any] = TypeAdapter(Report)
