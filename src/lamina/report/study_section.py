"""How a study is shown on the page: its conclusions, charts, tables, settings and examples of errors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.errors import DataError
from lamina.report.chart_files import drawn_ends
from lamina.report.page_charts import LAYER, Drawing
from lamina.report.sections import DataTable, Example, Section
from lamina.train.results import half_interval
from lamina.utils import pluralize

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import pandas as pd

    from lamina.studies.study import Figure, Study

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


Frame = Any  # of pandas, whose types say less than they ask for
COUNTS = {"rows": "row", "tokens": "token", "texts": "text", "n": "row"}  # column or setting -> what it counts
MOST_SCATTERED = 4000  # points of a scatter; a sample of more is drawn


def drawing_of(study: Study, name: str) -> Drawing:
    """What a study's figure draws; rows that have no place in it are left out, and counted in the remark.

    Raises:
        UnknownNameError: If it is drawn from a column that the table does not have.
        DataError: If its values are no numbers.
    """
    figure, rows = study.figures[name], study.rows(name)
    parts = {"x": figure.x, "y": figure.y, "colour": figure.colour, "facet": figure.facet}
    parts |= {"label": figure.label, "x_label": figure.x_label}
    columns = {part: column for part, column in parts.items() if column is not None}
    drawn, remarks = _drawn(rows, figure, columns, name)
    if figure.kind == "scatter":
        points, said = _scattered(drawn, figure, columns)
    else:
        points, said = _means(drawn, figure.value, columns)
    if figure.kind == "line" and any("x" not in row for row in points):
        points = _across(points)
        said.append(f"a dashed line has no {figure.x}")
    remark = "; ".join([*said, *_counts(drawn, study.settings), *remarks])
    titles = {part: _title(column) for part, column in columns.items()}
    titles |= {"value": figure.value_title or _value_title(rows, figure)}
    titles |= {"x": figure.x_title} if figure.x_title else {}
    return Drawing(figure.kind, points, figure.title or name, titles, figure.note, remark[:1].upper() + remark[1:])


def _drawn(rows: Frame, figure: Figure, columns: dict[str, str], name: str) -> tuple[Frame, list[str]]:
    """The rows that have a value and a place (of a line, not along the bottom), and what is said of the others."""
    try:
        values = rows[figure.value].astype("float64")
    except (TypeError, ValueError):
        what = f"column '{figure.value}' of figure '{name}' holds what is no number"
        raise DataError(f"report: {what}; a figure draws numbers.", column=figure.value) from None
    finite = values.abs().lt(math.inf)
    kept, remarks = rows.loc[finite], _left_out(~finite, "value", "that {are} not finite")
    for part in ("x", "y", "colour", "facet"):
        if part in columns:
            column = kept[columns[part]]
            placed = column.notna() | (part == "x" and figure.kind == "line")
            if part == "x" and figure.kind in ("line", "scatter"):
                placed &= ~column.isin([math.inf, -math.inf])
            remarks += _left_out(~placed, "row", f"without a {'finite ' * (part == 'x')}{columns[part]}")
            kept = kept.loc[placed]
    return kept, remarks


def _left_out(missing: Any, noun: str, reason: str) -> list[str]:
    count, are = int(missing.sum()), "is" if missing.sum() == 1 else "are"
    return [f"{pluralize(count, noun)} {reason.format(are=are)} {are} left out"] if count else []


def with_interval(rows: Frame, keys: Sequence[str], value: str) -> Frame:
    """The mean of `value` over seeds for all rows that share the keys, and its 95 % t interval.

    Returns:
        The keys, "value", "low", "high" (empty for a single seed) and "seeds". Rows of one seed are averaged first.
    """
    by = list(dict.fromkeys(keys))
    seeded = [*by, "seed"] if "seed" in rows and "seed" not in by else by
    each = rows.assign(**{value: rows[value].astype("float64")})
    each = each.groupby(seeded, dropna=False, sort=False, observed=True)[value].mean().reset_index()
    grouped = each.groupby(by, dropna=False, sort=False, observed=True)[value]
    found = grouped.agg(value="mean", spread="std", seeds="size").reset_index()
    half = half_interval(found["seeds"], found["spread"])
    return found.assign(low=found["value"] - half, high=found["value"] + half).drop(columns="spread")


def _means(rows: Frame, value: str, columns: dict[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    keys = list(dict.fromkeys(columns.values()))
    means = with_interval(rows, keys, value)
    metrics = _metrics(rows) if value == "score" else set()
    ends = [drawn_ends(mean, high - mean, metrics) for mean, high in zip(means["value"], means["high"], strict=True)]
    means = means.assign(low=[low for low, _ in ends], high=[high for _, high in ends])
    found = means[["value", "low", "high", "seeds"]].assign(**{part: means[name] for part, name in columns.items()})
    if found["x"].dtype.kind in "iuf":
        found = found.sort_values("x", kind="stable")
    seeds = sorted({int(count) for count in found["seeds"]})
    if "seed" not in rows:
        said = ["one measurement per point, so no interval is drawn"]
    elif seeds == [1]:
        said = ["one seed, so no interval is drawn"]
    else:
        said = [f"mean of {_span(seeds)} seeds with its 95 % t interval"]
    return _records(found), said + _averaged(rows, [*keys, *(["seed"] if "seed" in rows else [])], value)


def _metrics(rows: Frame) -> set[str]:
    """The metrics that scores are of: their measure, or what a measure that is only called "score" is of."""
    measures = set(rows["measure"]) if "measure" in rows else set()
    return set(rows["metric"]) if measures == {"score"} and "metric" in rows else measures


def _across(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points of lines; those without a place along the bottom hold for all, and stand at both ends."""
    along = list(dict.fromkeys(row["x"] for row in points if "x" in row))
    ends = list(dict.fromkeys([*along[:1], *along[-1:]]))
    pairs = [[row] if "x" in row else [{**row, "x": end, "across": True} for end in ends] for row in points]
    return [row for pair in pairs for row in pair]


def _averaged(rows: Frame, keys: list[str], value: str) -> list[str]:
    """The columns over which rows of one seed were averaged."""
    groups = rows.groupby(keys, dropna=False, sort=False, observed=True)
    if not len(rows) or groups.size().max() == 1:
        return []
    others = [name for name in rows.columns if name not in (*keys, value, *COUNTS)]
    over = [name for name in others if groups[name].nunique(dropna=False).max() > 1]
    return [f"averaged over {', '.join(over)}" if over else "averaged over rows that are alike"]


def _scattered(rows: Frame, figure: Figure, columns: dict[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    shown = rows if len(rows) <= MOST_SCATTERED else rows.sample(MOST_SCATTERED, random_state=0)
    found = shown[[]].assign(value=shown[figure.value], **{part: shown[name] for part, name in columns.items()})
    used = {figure.value, *columns.values(), *figure.where}
    told = [name for name in rows.columns if name not in used and rows[name].nunique() > 1]
    if "label" not in columns and told:
        texts = shown[told].astype(str)
        found["label"] = [", ".join(f"{name} {cell}" for name, cell in row.items()) for row in texts.to_dict("records")]
    said = [f"a point is one row of the table ({len(rows):,} in all)"]
    return _records(found), said + ([f"{len(shown):,} drawn at random are shown"] if len(shown) < len(rows) else [])


def _records(found: Frame) -> list[dict[str, Any]]:
    """Rows as JSON holds them, without what is missing."""
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    return [{str(key): plain(cell) for key, cell in row.items() if cell is not None} for row in rows]


def plain(cell: Any) -> Any:
    """A cell as JSON holds it: a number of at most 6 digits that count, a truth value, or a text."""
    cell = cell.tolist() if hasattr(cell, "tolist") else cell
    if isinstance(cell, float):
        return float(f"{cell:.6g}") if math.isfinite(cell) else str(cell)
    return cell if isinstance(cell, bool | int | str | None) else str(cell)


def _counts(rows: Frame, settings: Any) -> list[str]:
    """How many rows, tokens or texts the numbers are of, as far as the table or the settings say so."""
    for name, what in COUNTS.items():
        if name in rows and len(rows):
            counts = _whole(rows[name])
            if not counts:
                continue
            return [f"n = {_span(counts)} {what}{'s' * (counts != [1])}"]
    for name, what in COUNTS.items():
        if isinstance(settings.get(name), int):
            return [f"n = {pluralize(settings[name], what)}"]
    return []


def _whole(column: Any) -> list[int]:
    return sorted({int(count) for count in column.dropna()})


def _span(counts: list[int]) -> str:
    return " to ".join(f"{count:,}" for count in dict.fromkeys([*counts[:1], *counts[-1:]]))


def _title(column: str) -> str:
    return LAYER if column == "layer" else column.replace("_", " ")


def _value_title(rows: Frame, figure: Figure) -> str:
    """What the numbers are: their measure, if it is one only."""
    measures = list(rows["measure"].unique()) if figure.value == "score" and "measure" in rows else []
    return str(measures[0] if len(measures) == 1 else figure.value).replace("_", " ")


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
