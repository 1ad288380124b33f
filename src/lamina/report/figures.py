"""Figures: which layers each reader uses, and scores side by side.

A figure is drawn from plain rows and saved as PNG, SVG or HTML, by the suffix of its path. None of
the three needs a browser or a network, and the HTML carries its own scripts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.tasks.metrics import BOUNDS
from lamina.utils import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

    Rows = Sequence[Mapping[str, Any]]

FORMATS = (".png", ".svg", ".html")
MOST_BARS = 4  # readers; more are drawn as a heat map
FEW_LAYERS = 9  # up to so many, the readers' bars stand side by side
UNBOUNDED = (float("-inf"), float("inf"))
PIXELS = 2  # PNG pixels for each unit of the drawing, so that it stays sharp on fine screens
INK, QUIET, RULE = "#1f2933", "#616e7c", "#e4e7eb"
HEAT = ("#f4f8fc", "#a9cbe6", "#4c8fc7", "#0b4a8f")
COLOURS = ("#2f6db3", "#e07b39", "#3a9d6e", "#9b5fb5", "#c9a227", "#5bb5c9", "#c94f6d", "#7b8794")


def importance(rows: Rows, path: Path | str, *, title: str = "Which layers each reader uses") -> Path:
    """Draw the importance of each layer for each reader.

    Up to four readers get a small bar chart each, on one scale; more become a heat map.

    Args:
        rows: One for each reader and layer, with `reader` (name), `layer` (0 the embeddings) and `importance`
            (a share; those of a reader sum to 1); `low` and `high` (the ends of an interval) are drawn over bars.
        path: Where to; `.png`, `.svg` or `.html`.
        title: Written above.

    Returns:
        `path`.

    Raises:
        ConfigError: If the suffix is none of the three.
        DataError: If there are no rows, or one lacks a key.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    path = checked_path("importance figure", path, rows, ("reader", "layer", "importance"))
    altair = chart_package("importance figure")
    readers = in_order(rows, "reader")
    draw = _importance_bars if len(readers) <= MOST_BARS else _importance_heat_map
    return save_chart(styled(draw(altair, rows, readers), title), path)


def scores(
    rows: Rows, path: Path | str, *, title: str = "Scores by method", axis: str = "score (higher is better)"
) -> Path:
    """Draw the scores of several methods, one group of bars for each reader.

    Args:
        rows: One for each reader and method, with `reader` (or task), `method` and `score`; `metric` (name, shown
            with the reader) and `spread` (same unit as the score, drawn as a line of twice its length) may be given.
        path: Where to; `.png`, `.svg` or `.html`.
        title: Written above.
        axis: Name of the score axis.

    Returns:
        `path`.

    Raises:
        ConfigError: If the suffix is none of the three.
        DataError: If there are no rows, or one lacks a key.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    path = checked_path("score figure", path, rows, ("reader", "method", "score"))
    altair = chart_package("score figure")
    return save_chart(styled(_score_bars(altair, rows, axis), title), path)


def checked_path(op: str, path: Path | str, rows: Rows, keys: tuple[str, ...]) -> Path:
    """The path of a figure, if its suffix is known and the rows have the keys that are drawn."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{op}: the path ends in '{path.suffix}'; known: {', '.join(FORMATS)}.")
    if not rows:
        raise DataError(f"{op}: there are no rows to draw.")
    for i, row in enumerate(rows):
        for key in keys:
            if key not in row:
                has = ", ".join(map(str, row)) or "nothing"
                raise DataError(f"{op}: row {i} has no '{key}'; it has {has}.", row=i, column=key)
    return path


def chart_package(op: str) -> ModuleType:
    """Altair, which draws; a MissingExtraError without it."""
    try:
        import altair
        import vl_convert  # noqa: F401  altair saves through it
    except ImportError as error:
        raise MissingExtraError.of(error, op=op, extra="report") from error
    return altair


def in_order(rows: Rows, key: str) -> list[Any]:
    """The different values of a key, in the order in which they come."""
    return list(dict.fromkeys(row[key] for row in rows))


def drawn_ends(mean: float, half: float, metrics: Iterable[str], scale: float = 1.0) -> tuple[float, float]:
    """The ends of mean ± half as they are drawn: cut off where no score of these metrics (times `scale`) can be.

    A t interval over few seeds knows nothing of the range of a metric. Tables give its half as it is. Of a metric whose
    range is not known, and of a number that is outside it (a difference, say), nothing is cut off.
    """
    ranges = [BOUNDS.get(metric, UNBOUNDED) for metric in metrics] or [UNBOUNDED]
    low, high = (scale * end for end in (min(low for low, _ in ranges), max(high for _, high in ranges)))
    if not low <= mean <= high:
        return mean - half, mean + half
    return max(mean - half, low), min(mean + half, high)


def _layer_axis(altair: ModuleType) -> Any:
    return altair.X("layer:O", title="layer (0 = embeddings)", axis=altair.Axis(labelAngle=0, labelOverlap=True))


def _importance_bars(altair: ModuleType, rows: Rows, readers: list[Any]) -> Any:
    layers = len(in_order(rows, "layer"))
    base = altair.Chart(altair.Data(values=[dict(row) for row in rows]))
    share = altair.Y("importance:Q", title="importance", axis=altair.Axis(format="%", tickCount=4))
    tooltip = ["reader:N", "layer:O", altair.Tooltip("importance:Q", format=".1%")]
    colour = altair.Color("reader:N", sort=readers, scale=altair.Scale(range=list(COLOURS)), legend=None)
    bars = base.mark_bar().encode(x=_layer_axis(altair), y=share, color=colour, tooltip=tooltip)
    if any("low" in row for row in rows):
        ends = {"y": altair.Y("low:Q", title="importance"), "y2": "high:Q"}
        bars += base.mark_rule(color=INK, strokeWidth=1.2).encode(x=_layer_axis(altair), **ends)
    header = altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    beside = layers <= FEW_LAYERS
    return bars.properties(width=max(180 if beside else 220, 26 * layers), height=110).facet(
        facet=altair.Facet("reader:N", sort=readers, header=header), columns=len(readers) if beside else 1, spacing=18
    )


def _importance_heat_map(altair: ModuleType, rows: Rows, readers: list[Any]) -> Any:
    layers = len(in_order(rows, "layer"))
    top = max(float(row["importance"]) for row in rows)
    base = altair.Chart(altair.Data(values=[dict(row) for row in rows])).encode(
        x=_layer_axis(altair),
        y=altair.Y("reader:N", sort=readers, title=None, axis=altair.Axis(labelFontSize=12, labelColor=INK)),
    )
    scale = altair.Scale(range=list(HEAT), domain=[0, top])
    legend = altair.Legend(title="importance", format="%", tickCount=4)
    cells = base.mark_rect(stroke="white", strokeWidth=1).encode(
        color=altair.Color("importance:Q", scale=scale, legend=legend),
        tooltip=["reader:N", "layer:O", altair.Tooltip("importance:Q", format=".1%")],
    )
    on_dark = altair.condition(altair.datum.importance > 0.6 * top, altair.value("white"), altair.value(INK))
    numbers = base.mark_text(fontSize=10).encode(text=altair.Text("importance:Q", format=".0%"), color=on_dark)
    drawn = altair.layer(cells, numbers) if layers <= 26 else cells
    return drawn.properties(width=max(220, 36 * layers if layers <= 26 else 20 * layers), height=28 * len(readers))


def _score_bars(altair: ModuleType, rows: Rows, axis: str) -> Any:
    values = [{**row, **_labels(row)} for row in rows]
    methods = in_order(rows, "method")
    base = altair.Chart(altair.Data(values=values)).encode(
        y=altair.Y("method:N", sort=methods, title=None, axis=altair.Axis(labelFontSize=12, labelColor=INK))
    )
    colour = altair.Color("method:N", sort=methods, scale=altair.Scale(range=list(COLOURS)), legend=None)
    score = altair.X("score:Q", title=axis, axis=altair.Axis(tickCount=5, format=".2~f", grid=False))
    bars = base.mark_bar(height={"band": 0.72}).encode(
        x=score, color=colour, tooltip=["group:N", "method:N", "score:Q", "spread:Q"]
    )
    spread = base.mark_rule(color=INK, strokeWidth=1.5).encode(x="low:Q", x2="high:Q")
    numbers = base.mark_text(align="left", dx=5, fontSize=11, color=INK).encode(x="high:Q", text="label:N")
    drawn = altair.layer(bars, spread, numbers) if any(row.get("spread") for row in rows) else bars + numbers
    header = altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    groups = altair.Facet("group:N", sort=in_order(values, "group"), header=header)
    return drawn.properties(width=230, height=max(60, 26 * len(methods))).facet(facet=groups, columns=3, spacing=26)


def _labels(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a bar is drawn from, beyond its row: its group, the ends of its spread, the number beside it."""
    score, spread = float(row["score"]), float(row.get("spread") or 0)
    group = f"{row['reader']} ({row['metric']})" if row.get("metric") else str(row["reader"])
    label = f"{score:.3f} ± {spread:.3f}" if spread else f"{score:.3f}"
    low, high = drawn_ends(score, spread, [str(row["metric"])] if row.get("metric") else [])
    return {"group": group, "low": low, "high": high, "label": label}


def styled(chart: Any, title: str, below: Sequence[str] = ()) -> Any:
    """A chart with its title, in the one style of all figures; `below` are small lines under the title."""
    font = "Helvetica, Arial, sans-serif"
    axis = {
        "labelColor": QUIET,
        "titleColor": QUIET,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "domainColor": RULE,
    }
    heading = {"text": title, **({"subtitle": list(below)} if below else {})}
    return (
        chart.properties(title=heading, padding=16, background="white")
        .configure(font=font)
        .configure_title(fontSize=16, anchor="start", color=INK, offset=14, subtitleColor=QUIET, subtitlePadding=6)
        .configure_axis(**axis, grid=False, ticks=False, labelPadding=6, labelFontSize=11, titleFontSize=12)
        .configure_axisQuantitative(grid=True, gridColor=RULE)
        .configure_view(stroke=None)
    )


def save_chart(chart: Any, path: Path) -> Path:
    """Write the whole file or none."""
    kind = path.suffix.lower()[1:]
    options = {"png": {"scale_factor": PIXELS}, "html": {"inline": True}}.get(kind, {})
    with atomic_write(path) as beside:
        chart.save(beside, format=kind, **options)
    return path
