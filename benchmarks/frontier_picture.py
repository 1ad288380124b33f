"""The picture that `frontier.py` draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import altair as alt

from lamina.report.chart_files import COLOURS, save_chart, styled

NAME_WIDTH, NAME_HEIGHT = 0.5, 0.05  # of the logarithm of passes, of the way


def draw(rows: Any, path: Path) -> None:
    """Share of the way to fine-tuning against the time to answer eight tasks, a point per method."""
    means = rows[rows["task"].str.startswith("mean") & (rows["answer"] != "")]
    if means.empty:
        raise SystemExit("nothing to draw: the picture is of the mean over several tasks, with timing")
    own = alt.Color("own:N", scale=alt.Scale(domain=["other", "default"], range=list(COLOURS[:2])), legend=None)
    kinds = means["method"].str.split(",").str[0].where(lambda name: name == "default", "other")
    title = "share of the way from last layer to fine-tuning"
    shape = alt.Chart(means.assign(own=kinds, height=_apart(means["answer"], means["closed"]))).encode(
        x=alt.X(
            "answer:Q",
            scale=alt.Scale(type="log", domain=[0.95, 12]),
            axis=alt.Axis(values=[1, 1.5, 2, 3, 5, 8]),
            title="time to answer eight tasks, in passes of the model",
        ),
        color=own,
    )
    names = shape.mark_text(align="left", dx=9, fontSize=12).encode(text="method:N", y=alt.Y("height:Q", title=title))
    points = shape.mark_point(size=70, filled=True).encode(
        y=alt.Y("closed:Q", title=title, axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1.1]))
    )
    chart = (points + names).properties(width=560, height=320)
    save_chart(styled(chart, "Score against cost, MiniLM"), path)


def _apart(places: Any, heights: Any) -> list[float]:
    """Where names stand, up and down: one that would touch a name that stands, or another's point, goes above it."""
    points = [(math.log(places[row]), float(heights[row])) for row in heights.index]
    names: list[tuple[float, float]] = []
    found: dict[tuple[float, float], float] = {}
    for place, own in sorted(points, key=lambda point: point[1]):
        right = [(left, height) for left, height in points if left > place]
        height = own
        for left, lower in sorted([*names, *right], key=lambda point: point[1]):
            if abs(place - left) < NAME_WIDTH and abs(height - lower) < NAME_HEIGHT:
                height = lower + NAME_HEIGHT
        names.append((place, height))
        found[place, own] = height
    return [found[point] for point in points]
