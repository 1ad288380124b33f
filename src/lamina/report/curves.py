"""Curves: scores over a number, a line per series with its 95 % interval, perhaps in several panels."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lamina.report.figures import COLOURS, INK, chart_package, checked_path, drawn_ends, in_order, save_chart, styled

if TYPE_CHECKING:
    from types import ModuleType

    from lamina.recipes.report_file import Curves

WIDE, HIGH, PANEL = 440, 260, 250  # of a single panel, and of one of several
LETTERS = 84  # of a line below the title
MARKS = ("circle", "diamond", "triangle-up", "square")  # of points, one after the other as colours begin anew


def rows_of(figure: Curves) -> list[dict[str, Any]]:
    """What is drawn: a row per point, with the ends of its interval; a line across has one at each end of its panel.

    Rows have "facet", "series", "x", "mean", "low" and "high" (the mean itself for a single run; see `drawn_ends`),
    "runs" and "across".
    """
    rows, places = [], dict[str, list[Any]]()
    several = len({point.metric for point in figure.points}) > 1
    for point in figure.points:
        places.setdefault(point.facet, []).extend([] if point.x is None else [point.x])
    for point in figure.points:
        half, own = point.interval or 0.0, list(dict.fromkeys(places[point.facet])) or [0]
        ends = [min(own), max(own)] if all(isinstance(x, int | float) for x in own) else own
        low, high = drawn_ends(point.mean, half, [point.metric], figure.scale)
        row = {**asdict(point), "low": low, "high": high, "across": point.x is None}
        row["facet"] = f"{point.facet} ({point.metric})" if several else point.facet
        rows += [{**row, "x": x} for x in (ends if point.x is None else [point.x])]
    return rows


def draw(figure: Curves, path: Path | str) -> Path:
    """Draw curves with their bands and points; a method without an x is a dashed line across.

    Args:
        figure: From a run's report.
        path: Where to; `.png`, `.svg` or `.html`.

    Returns:
        `path`.

    Raises:
        ConfigError: If the suffix is none of the three.
        DataError: If there are no points.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    rows = rows_of(figure)
    path = checked_path("figure", path, rows, ("facet", "series", "x", "mean"))
    altair = chart_package("figure")
    below = [line for text in (figure.source, *figure.notes) for line in wrap(text, LETTERS)]
    return save_chart(styled(_chart(altair, rows, figure), figure.title, below), path)


def _chart(altair: ModuleType, rows: list[dict[str, Any]], figure: Curves) -> Any:
    series, metrics, panels = (in_order(rows, key) for key in ("series", "metric", "facet"))
    numbers = all(isinstance(row["x"], int | float) for row in rows)
    colours = altair.Scale(domain=series, range=[COLOURS[n % len(COLOURS)] for n in range(len(series))])
    marks = [MARKS[n // len(COLOURS) % len(MARKS)] for n in range(len(series))]
    look: dict[str, Any] = {"labelLimit": 260, "symbolOpacity": 1, "labelFontSize": 12, "labelColor": INK}
    if len(set(marks)) == 1:  # else the marks themselves are shown
        look |= {"symbolType": "stroke", "symbolStrokeWidth": 3}
    legend = altair.Legend(orient="bottom", columns=3, **look) if len(series) > 1 else None
    colour = altair.Color("series:N", title=None, scale=colours, legend=legend)
    shape = altair.Shape("series:N", title=None, scale=altair.Scale(domain=series, range=marks), legend=legend)
    x = _numbers_axis(altair, rows, figure) if numbers else _names_axis(altair, rows, figure)
    base = altair.Chart(altair.Data(values=rows)).encode(x=x, color=colour)
    times = "" if figure.scale == 1 else f" x {figure.scale:g}"
    name, scale = (
        (metrics[0] if len(metrics) == 1 else "score") + " (test)" * (figure.part == "test"),
        altair.Scale(zero=False),
    )
    y, low = (altair.Y(key, title=name + times, scale=scale) for key in ("mean:Q", "low:Q"))
    tooltip = ["series:N", "x:N", altair.Tooltip("mean:Q", format=".4~f"), "runs:Q"]
    curve, across = (base.transform_filter(altair.datum.across == flag) for flag in (False, True))
    curve = curve if numbers else curve.encode(xOffset=altair.XOffset("series:N", sort=series))
    drawn = altair.layer(
        (base if numbers else across).mark_area(opacity=0.14).encode(y=low, y2="high:Q"),
        curve.mark_line(strokeWidth=2).encode(y=y)
        if numbers
        else curve.mark_rule(strokeWidth=1.5).encode(y=low, y2="high:Q"),
        across.mark_line(strokeWidth=2, strokeDash=[6, 4]).encode(y=y),
        curve.mark_point(filled=True, size=42, opacity=1).encode(
            y=y, tooltip=tooltip, **({"shape": shape} if len(set(marks)) > 1 else {})
        ),
    )
    if len(panels) == 1:
        return drawn.properties(width=WIDE, height=HIGH)
    header = altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    facet = altair.Facet("facet:N", sort=panels, header=header)
    charts = drawn.properties(width=PANEL, height=int(0.8 * PANEL)).facet(
        facet=facet, columns=2 if len(panels) in (2, 4) else 3, spacing=26
    )
    return charts.resolve_scale(y="independent") if len(metrics) > 1 else charts


def _numbers_axis(altair: ModuleType, rows: list[dict[str, Any]], figure: Curves) -> Any:
    """An axis of numbers, with a tick at each one that has a point; the labels of crowded ones are left out."""
    values = sorted({row["x"] for row in rows if not row["across"]})
    scale = (
        altair.Scale(type="log", base=2, nice=False, padding=12)
        if figure.log_x and all(value > 0 for value in values)  # 0 has no place on an axis of logarithms
        else altair.Scale(zero=False, nice=False, padding=12)
    )
    ticks: dict[str, Any] = {"values": values, "format": "~r"} if values else {}
    return altair.X("x:Q", title=figure.x_title, scale=scale, axis=altair.Axis(grid=False, labelOverlap=True, **ticks))


def _names_axis(altair: ModuleType, rows: list[dict[str, Any]], figure: Curves) -> Any:
    names = in_order([row for row in rows if not row["across"]], "x")
    return altair.X("x:O", title=figure.x_title, sort=names, axis=altair.Axis(labelAngle=0, labelOverlap=True))
