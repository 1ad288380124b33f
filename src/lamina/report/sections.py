"""What the page says of one run: its conclusions, charts, tables, settings and examples of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from lamina.report.data_tables import tables_of
from lamina.report.points import drawing_of

if TYPE_CHECKING:
    from lamina.report.data_tables import DataTable
    from lamina.report.points import Drawing
    from lamina.studies.study import Study

MOST_EXAMPLES = 40  # of errors that are shown; the table has them all
EXAMPLE = ("text", "true", "predicted")  # columns of a table whose rows are examples


@final
@dataclass(frozen=True)
class Example:
    """A row that was answered wrongly, in parts: (text, label, what is wrong with it); the last two "" if not marked.

    Where spans are marked, `true` and `predicted` hold the whole text each, else `text` does and they are labels.
    """

    row: str
    text: list[tuple[str, str, str]]
    true: list[tuple[str, str, str]]
    predicted: list[tuple[str, str, str]]
    confidence: str


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
        examples: Name -> examples of errors.
    """

    label: str
    kind: str
    conclusions: Sequence[str] = ()
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    tables: Sequence[DataTable] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    examples: Sequence[Example] = ()


def study_section(study: Study, label: str) -> Section:
    """What the page says of a study.

    Raises:
        UnknownNameError: If a figure is drawn from a column that the table does not have.
    """
    drawings = {name: drawing for name in study.figures if (drawing := drawing_of(study, name)).rows}
    tables = tables_of(study.table, study.name.replace("_", " ").capitalize())
    return Section(
        label, study.name, study.conclusions, drawings, tables, study.settings, _seeds(study), _examples(study)
    )


def _seeds(study: Study) -> list[int]:
    if "seed" in study.table:
        return sorted({int(seed) for seed in study.table["seed"].dropna()})
    seed = study.settings.get("seed")
    return [seed] if isinstance(seed, int) else []


def _examples(study: Study) -> list[Example]:
    if not set(EXAMPLE) <= set(study.table.columns):
        return []
    rows = study.table.dropna(subset=["text"]).head(MOST_EXAMPLES).to_dict("records")
    return [_example(row, at) for at, row in enumerate(rows)]


def _example(row: Mapping[Any, Any], at: int) -> Example:
    sides = [_value(row["true"]), _value(row["predicted"])]
    text = _value(row["text"])
    text = " | ".join(map(str, text)) if isinstance(text, list) else str(text)
    surest = next((row[key] for key in ("confidence", "error") if key in row), None)
    sure = "" if surest is None else f"{surest:.3f}"
    number = str(row.get("row", at))
    if any(isinstance(span, dict) for side in sides if isinstance(side, list) for span in side):
        true, predicted = (marked_parts(text, side if isinstance(side, list) else []) for side in sides)
        return Example(number, [], true, predicted, sure)
    said = [", ".join(map(str, side)) if isinstance(side, list) else str(side) for side in sides]
    true, predicted = ([(label, "", "")] for label in said)
    return Example(number, [(text, "", "")], true, predicted, sure)


def _value(cell: Any) -> Any:
    """A cell that may hold a list, as Parquet gives it back or as JSON."""
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if isinstance(cell, str) and cell[:1] == "[":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cell


def marked_parts(text: str, spans: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """A text in parts, cut at its spans ("start", "end", "label", "error"); of overlapping ones the first is marked."""
    parts, at = [], 0
    for span in sorted(spans, key=lambda span: span["start"]):
        if at <= span["start"] < span["end"]:
            parts += [(text[at : span["start"]], "", "")] if span["start"] > at else []
            inside = text[span["start"] : span["end"]]
            parts.append((inside, str(span.get("label") or ""), str(span.get("error") or "wrong")))
            at = span["end"]
    return [*parts, *([(text[at:], "", "")] if at < len(text) else [])]
