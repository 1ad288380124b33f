"""What the page says of one run: its conclusions, charts, tables, settings and examples of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from lamina.report.data_tables import tables_of
from lamina.report.points import drawing_of

if TYPE_CHECKING:
    import pandas as pd

    from lamina.report.data_tables import DataTable
    from lamina.report.points import Drawing
    from lamina.studies.study import Study

MOST_EXAMPLES = 40  # of errors that are shown; the table has them all
EXAMPLE = (
    "task",
    "layer",
    "row",
    "metric",
    "score",
    "text",
    "true",
    "predicted",
)  # columns of a table whose rows are examples


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


def study_section(study: Study, label: str) -> Section:
    """What the page says of a study.

    Raises:
        UnknownNameError: If a figure is drawn from a column that the table does not have.
    """
    drawings = {name: drawing for name in study.figures if (drawing := drawing_of(study, name)).rows}
    figures = study.figures.values()
    axes = {name for own in figures for name in (own.x, own.y, own.colour, own.facet, *own.where) if name is not None}
    tables = tables_of(study.table, study.name.replace("_", " ").capitalize(), axes)
    wrong = _wrong(study)
    return Section(
        label,
        study.name,
        study.conclusions,
        drawings,
        tables,
        study.settings,
        _seeds(study),
        _examples(wrong),
        len(wrong),
    )


def _seeds(study: Study) -> list[int]:
    if "seed" in study.table:
        return sorted({int(seed) for seed in study.table["seed"].dropna()})
    seed = study.settings.get("seed")
    return [seed] if isinstance(seed, int) else []


def _wrong(study: Study) -> pd.DataFrame:
    """The rows of a study's table that are wrong answers."""
    return study.table.dropna(subset=["text"]) if set(EXAMPLE) <= set(study.table.columns) else study.table.head(0)


def _examples(wrong: pd.DataFrame) -> list[Example]:
    """As many of each task and layer, of each those that come first; in the order of the table."""
    rank = wrong.groupby(["task", "layer"], sort=False).cumcount().to_numpy() if len(wrong) else np.zeros(0, int)
    places, groups = np.argsort(rank, kind="stable"), int((rank == 0).sum())
    if groups > MOST_EXAMPLES:
        places = places[np.linspace(0, groups - 1, MOST_EXAMPLES).astype(int)]
    shown = wrong.iloc[np.sort(places[:MOST_EXAMPLES])]
    return [_example(row) for row in shown.to_dict("records")]


def _example(row: Mapping[Any, Any]) -> Example:
    sides = [_value(row["true"]), _value(row["predicted"])]
    text = _value(row["text"])
    text = " | ".join(map(str, text)) if isinstance(text, list) else str(text)
    about = f"{row['task']} · layer {row['layer']} · row {row['row']}", f"{row['metric']} {row['score']:.3f}"
    if any(isinstance(span, dict) for side in sides if isinstance(side, list) for span in side):
        true, predicted = (marked_parts(text, side if isinstance(side, list) else []) for side in sides)
        return Example(*about, [], true, predicted)
    said = [", ".join(map(str, side)) if isinstance(side, list) else str(side) for side in sides]
    true, predicted = ([(label, "", "")] for label in said)
    return Example(*about, [(text, "", "")], true, predicted)


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
