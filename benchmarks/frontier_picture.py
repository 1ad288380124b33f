"""Draw the picture of `frontier.py`: score against cost, a point per method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import altair as alt

from lamina.report.chart_files import save_chart
from lamina.report.charts import ON_LIGHT

# Size of a name in the picture: width in units of the logarithm of passes, height in units of the share
NAME_WIDTH, NAME_HEIGHT = 0.5, 0.05


def draw(rows: Any, path: Path) -> None:
    """Draw the share of the gap to fine-tuning that each method closes, against the time to answer eight tasks.

    Args:
        rows: The rows that `frontier.py --json` prints, as a pandas table.
        path: File to write.

    Raises:
        SystemExit: If there are no means over several tasks, or no times.
    """
    means = rows[rows["task"].str.startswith("mean") & (rows["answer"] != "")]
    if means.empty:
        raise SystemExit("nothing to draw: the picture is of the mean over several tasks, with timing")
    colour = alt.Color("kind:N", scale=alt.Scale(domain=["other", "default"], range=list(ON_LIGHT[:2])), legend=None)
    kinds = means["method"].str.split(",").str[0].where(lambda name: name == "default", "other")
    title = "share of the way from last layer to fine-tuning"
    heights = _name_heights(means["answer"], means["closed"])
    shape = alt.Chart(means.assign(kind=kinds, height=heights)).encode(
        x=alt.X(
            "answer:Q",
            scale=alt.Scale(type="log", domain=[0.95, 12]),
            axis=alt.Axis(values=[1, 1.5, 2, 3, 5, 8]),
            title="time to answer eight tasks, in passes of the model",
        ),
        color=colour,
    )
    names = shape.mark_text(align="left", dx=9, fontSize=12).encode(text="method:N", y=alt.Y("height:Q", title=title))
    points = shape.mark_point(size=70, filled=True).encode(
        y=alt.Y("closed:Q", title=title, axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1.1]))
    )
    chart = (points + names).properties(width=560, height=320)
    save_chart(chart.to_dict(), path, "Score against cost, MiniLM")


def _name_heights(passes: Any, shares: Any) -> list[float]:
    """Return the height at which the name of each point stands.

    A name stands at the height of its point. If it would overlap another name or a point to its right, it is moved up.

    Args:
        passes: The x of each point, as a pandas column.
        shares: The y of each point.
    """
    points = [(math.log(passes[row]), float(shares[row])) for row in shares.index]
    names: list[tuple[float, float]] = []
    heights: dict[tuple[float, float], float] = {}
    for x, y in sorted(points, key=lambda point: point[1]):
        to_the_right = [point for point in points if point[0] > x]
        height = y
        for other_x, other_height in sorted([*names, *to_the_right], key=lambda point: point[1]):
            if abs(x - other_x) < NAME_WIDTH and abs(height - other_height) < NAME_HEIGHT:
                height = other_height + NAME_HEIGHT
        names.append((x, height))
        heights[x, y] = height
    return [heights[point] for point in points]
