"""The parts of the HTML page: the section of one study or training run, its tables, and examples of its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, final

from lamina.report.run_report import escaped, markdown_text

if TYPE_CHECKING:
    from lamina.report.charts import Drawing
    from lamina.utils import JSON

Cell: TypeAlias = str | float | bool | None  # a cell of a table; None is empty
# A text in parts: (text, label, error) for a span with a wrong label, (text, "", "") for the text between such spans.
Spans: TypeAlias = list[tuple[str, str, str]]


@final
@dataclass(frozen=True)
class Example:
    """An example that a probe got wrong, as the page shows it.

    If labels are spans of the text, `text` is empty, and `true` and `predicted` each hold the whole text with their
    spans marked. Otherwise `text` holds the text, and `true` and `predicted` one label each.

    Attributes:
        where: Task, layer and row.
        sure: How confident the probe was; for a number, how large its error is.
    """

    where: str
    sure: str
    text: Spans
    true: Spans
    predicted: Spans


@final
@dataclass(frozen=True)
class Section:
    """A section of the page: one study or training run. `study_section` and `run_section` make it.

    Attributes:
        label: Name of the section, unique on the page.
        kind: "training run", or the name of the study.
        conclusions: Sentences, most important first. The first sentence about each task is shown as its verdict.
        drawings: Name -> chart. Charts of equal name from sections of the same kind stand side by side.
        tables: The tables in the order in which they are shown.
        settings: The settings that were used.
        seeds: All seeds of the study or training run.
        examples: Examples of wrong predictions, a few for each task and layer.
        errors: Number of wrong predictions, including those without an example.
        model: Name of the model; "" if it is not known.
        tasks: Names of the tasks; empty if there are none.
    """

    label: str
    kind: str
    conclusions: Sequence[str] = ()
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    tables: Sequence[DataTable] = ()
    settings: Mapping[str, JSON] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    examples: Sequence[Example] = ()
    errors: int = 0
    model: str = ""
    tasks: Sequence[str] = ()

    @property
    def verdicts(self) -> list[tuple[str, str]]:
        """The most important sentence about each task, as pairs (task, sentence).

        The task is "" for a sentence about no task.
        """
        verdicts: dict[str, str] = {}
        for sentence in self.conclusions:
            task, separator, rest = sentence.partition(": ")
            is_of_task = bool(separator) and task in self.tasks
            verdicts.setdefault(*((task, rest) if is_of_task else ("", sentence)))
        return list(verdicts.items())

    @property
    def details(self) -> list[str]:
        """The conclusions that are not among `verdicts`."""
        shown = {f"{task}: {sentence}" if task else sentence for task, sentence in self.verdicts}
        return [sentence for sentence in self.conclusions if sentence not in shown]


@final
@dataclass(frozen=True)
class DataTable:
    """A table of the page.

    Attributes:
        title: Title of the table.
        columns: Names of the columns.
        rows: The cells, row by row; None is an empty cell.
        note: A remark below the table.
    """

    title: str
    columns: list[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def compact(self) -> dict[str, object]:
        """Return the table as JSON for the page's script, column by column; repeated strings are stored once."""
        cells = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        columns = [{"name": name, **_packed(list(column))} for name, column in zip(self.columns, cells, strict=True)]
        return {"title": self.title, "note": self.note, "columns": columns}

    def markdown(self) -> str:
        """Return the table as Markdown, with its title as a heading and its note below."""
        head, *body = (f"| {' | '.join(map(markdown_text, line))} |" for line in self._lines())
        ruled = "|" + "".join("---:|" if self._is_numeric(at) else "---|" for at in range(len(self.columns)))
        note = ["", markdown_text(self.note)] if self.note else []
        return "\n".join([f"## {markdown_text(self.title)}", "", head, ruled, *body, *note, ""])

    def latex(self) -> str:
        """Return the table as LaTeX for booktabs and longtable, with title and note as the caption."""
        head, *body = (" & ".join(map(escaped, line)) + r" \\" for line in self._lines())
        aligned = "".join("r" if self._is_numeric(at) else "l" for at in range(len(self.columns)))
        caption = rf"\caption{{{escaped(' '.join(filter(None, (f'{self.title}.', self.note))))}}} \\"
        begin = [rf"\begin{{longtable}}{{{aligned}}}", caption, r"\toprule", head, r"\midrule", r"\endhead"]
        return "\n".join([*begin, *body, r"\bottomrule", r"\end{longtable}", ""])

    def _lines(self) -> Iterable[list[str]]:
        return [self.columns, *([_cell_text(cell) for cell in row] for row in self.rows)]

    def _is_numeric(self, at: int) -> bool:
        return all(isinstance(row[at], int | float | None) for row in self.rows)


def _packed(cells: Sequence[Cell]) -> dict[str, Sequence[Cell]]:
    """Return the cells of a column in the form that the page's script reads.

    A column with repeated strings becomes {"levels": its distinct values, "codes": for each cell, the index of its
    value}. All other columns become {"cells": the cells}.
    """
    if any(isinstance(cell, str) for cell in cells):
        levels = list(dict.fromkeys(cells))
        if len(levels) < len(cells):
            numbers = {level: number for number, level in enumerate(levels)}
            return {"levels": levels, "codes": [numbers[cell] for cell in cells]}
    return {"cells": list(cells)}


def _cell_text(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else " ".join(str(cell).split())
