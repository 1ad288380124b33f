"""Tables of the page: small enough to be carried along, and as Markdown and LaTeX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from lamina.report.points import plain, with_interval
from lamina.report.tables import escaped, markdown_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from lamina.report.points import Frame


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


def tables_of(frame: Frame, title: str, axes: Collection[str] = ()) -> list[DataTable]:
    """A study's table; before it the means over seeds, if there are several.

    Numbers with a point are measured, and left out of the means, unless they are among the `axes` of its figures.
    """
    whole = _of_frame(frame, title)
    if "seed" not in frame or "score" not in frame or frame["seed"].nunique() < 2:
        return [whole]
    names = [str(name) for name in frame.columns if name not in ("seed", "score")]
    keys = [name for name in names if name in axes or frame[name].dtype.kind != "f"]
    if not keys:
        return [whole]
    means = with_interval(frame, keys, "score").rename(columns={"value": "mean"})
    note = "low and high are the ends of the 95 % t interval over seeds; they are empty where there is one seed."
    return [_of_frame(means[[*keys, "mean", "low", "high", "seeds"]], f"{title}: means over seeds", note), whole]


def _of_frame(frame: Frame, title: str, note: str = "") -> DataTable:
    cells = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return DataTable(
        title, [str(name) for name in frame.columns], [[plain(cell) for cell in row] for row in cells], note
    )


def _packed(cells: Sequence[Any]) -> dict[str, Any]:
    if any(isinstance(cell, str) for cell in cells):
        levels = list(dict.fromkeys(cells))
        if len(levels) < len(cells):
            numbers = {level: number for number, level in enumerate(levels)}
            return {"levels": levels, "codes": [numbers[cell] for cell in cells]}
    return {"cells": list(cells)}


def _text(cell: Any) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else " ".join(str(cell).split())
