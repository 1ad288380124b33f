"""The parts of the page: the section of one run, its tables, and its examples of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from lamina.report.run_report import escaped, markdown_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lamina.report.page_charts import Drawing


@final
@dataclass(frozen=True)
class Example:
    """A row that was answered wrongly, in parts: (text, label, what is wrong with it); the last two "" if not marked.

    Where spans are marked, `true` and `predicted` hold the whole text each, else `text` does and they are labels.
    """

    where: str  # task, layer and row
    sure: str  # how sure the probe was, or how large the error is
    text: list[tuple[str, str, str]]
    true: list[tuple[str, str, str]]
    predicted: list[tuple[str, str, str]]


@final
@dataclass(frozen=True)
class Section:
    """One run on the page.

    Attributes:
        label: What it is called, unlike all others on the page.
        kind: "training run", or the name of the study.
        conclusions: Sentences, most important first.
        drawings: Name -> chart; those of one kind and name stand side by side.
        tables: In the order in which they are shown.
        settings: As they were used.
        seeds: Of its runs.
        examples: Of errors, some of each task and layer.
        errors: How many wrong answers the table lists.
    """

    label: str
    kind: str
    conclusions: Sequence[str] = ()
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    tables: Sequence[DataTable] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    examples: Sequence[Example] = ()
    errors: int = 0


@final
@dataclass(frozen=True)
class DataTable:
    """A table that is shown.

    Attributes:
        title: Written above.
        columns: Their names.
        rows: Cells: texts, numbers, truth values, or None where there is nothing.
        note: Written below.
    """

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""

    def compact(self) -> dict[str, Any]:
        """The table as JSON, column by column; texts that come again and again are written once."""
        cells = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        return {
            "title": self.title,
            "note": self.note,
            "columns": [{"name": name, **_packed(list(own))} for name, own in zip(self.columns, cells, strict=True)],
        }

    def markdown(self) -> str:
        """As Markdown."""
        head, *body = (f"| {' | '.join(map(markdown_text, line))} |" for line in self._lines())
        ruled = "|" + "".join("---:|" if self._is_numeric(at) else "---|" for at in range(len(self.columns)))
        note = ["", markdown_text(self.note)] if self.note else []
        return "\n".join([f"## {markdown_text(self.title)}", "", head, ruled, *body, *note, ""])

    def latex(self) -> str:
        """As LaTeX, for the packages booktabs and longtable, which goes on over pages."""
        head, *body = (" & ".join(map(escaped, line)) + r" \\" for line in self._lines())
        aligned = "".join("r" if self._is_numeric(at) else "l" for at in range(len(self.columns)))
        caption = rf"\caption{{{escaped(' '.join(filter(None, (f'{self.title}.', self.note))))}}} \\"
        begin = [rf"\begin{{longtable}}{{{aligned}}}", caption, r"\toprule", head, r"\midrule", r"\endhead"]
        return "\n".join([*begin, *body, r"\bottomrule", r"\end{longtable}", ""])

    def _lines(self) -> Iterable[list[str]]:
        return [self.columns, *([_text(cell) for cell in row] for row in self.rows)]

    def _is_numeric(self, at: int) -> bool:
        return all(isinstance(row[at], int | float | None) for row in self.rows)


def _packed(cells: Sequence[Any]) -> dict[str, Any]:
    if any(isinstance(cell, str) for cell in cells):
        levels = list(dict.fromkeys(cells))
        if len(levels) < len(cells):
            numbers = {level: number for number, level in enumerate(levels)}
            return {"levels": levels, "codes": [numbers[cell] for cell in cells]}
    return {"cells": list(cells)}


def _text(cell: Any) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else " ".join(str(cell).split())
