"""From rows of a study to what a chart draws: means over seeds with their intervals, and a line that says of what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from lamina.errors import DataError
from lamina.report.figures import drawn_ends
from lamina.train.results import half_interval
from lamina.utils import pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.studies.study import Figure, Study

Frame = Any  # of pandas, whose types say less than they ask for
LAYER = "layer (0 = embeddings)"
COUNTS = {"rows": "row", "tokens": "token", "texts": "text", "n": "row"}  # column or setting -> what it counts
MOST_SCATTERED = 4000  # points of a scatter; a sample of more is drawn


@final
@dataclass(frozen=True)
class Drawing:
    """A chart before it is drawn.

    Attributes:
        kind: As that of a figure.
        rows: What is drawn: "x", "value" and, where there are any, "y", "colour", "facet", "label", "x_label", the ends
            of the interval "low" and "high" (see `drawn_ends`), and "across" for a value that holds for all x.
        title: Written above.
        titles: Of "x", "y", "value", "colour" and "facet", with their units.
        note: What to see in it.
        remark: What a point is: of how many seeds and rows, and what the interval is.
        log_x: Whether the axis of x is logarithmic.
        apart: Whether each panel has a scale of its own, as those of different metrics.
    """

    kind: Literal["line", "heat", "bar", "scatter"]
    rows: list[dict[str, Any]]
    title: str
    titles: dict[str, str] = field(default_factory=dict)
    note: str = ""
    remark: str = ""
    log_x: bool = False
    apart: bool = False


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
