"""Charts as files: importances, scores and curves as PNG, SVG or HTML."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.tasks.metrics import BOUNDS
from lamina.utils import JSONObject, atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

    import altair as alt

    from lamina.recipes.report_file import Curves

    Rows: TypeAlias = Sequence[Mapping[str, Any]]  # rows of a table of results: column -> cell
    Chart = alt.Chart | alt.LayerChart | alt.FacetChart

Mark: TypeAlias = JSONObject  # one row of a chart's data, as Vega-Lite reads it
FORMATS = (".png", ".svg", ".html")
MOST_BARS = 4  # with more readers than this, their importances are drawn as a heat map instead of bars
FEW_LAYERS = 9  # up to this many layers, the bar charts of readers stand side by side
INTERVAL_SEEDS = 3  # smallest number of runs for which an interval is drawn
UNBOUNDED = (float("-inf"), float("inf"))
PIXELS = 2  # PNG pixels for each unit of the drawing, so that it stays sharp on fine screens
INK, QUIET, RULE = "#1f2933", "#616e7c", "#e4e7eb"
HEAT = ("#f4f8fc", "#a9cbe6", "#4c8fc7", "#0b4a8f")
COLOURS = ("#2f6db3", "#e07b39", "#3a9d6e", "#9b5fb5", "#c9a227", "#5bb5c9", "#c94f6d", "#7b8794")


def importance(rows: Rows, path: Path | str, *, title: str = "Which layers each reader uses") -> Path:
    """Draw the importance of each layer for each reader and return the path of the file.

    Up to four readers get a bar chart each, on one scale and with a line at equal shares (1/n for n layers). For more
    readers the chart is a heat map.

    Args:
        rows: One row per reader and layer, with `reader` (name), `layer` (0 is the embeddings) and `importance` (the
            layer's share; the shares of a reader sum to 1). `low` and `high`, the ends of an interval, are optional.
        path: File to write; ends in `.png`, `.svg` or `.html`.
        title: Title of the chart.

    Raises:
        ConfigError: If the path has another suffix.
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
    """Draw the scores of several methods as a group of bars for each reader, and return the path of the file.

    Args:
        rows: One row per reader and method, with `reader` (name of a reader or task), `method` and `score`. Optional
            keys are `metric` (name of the metric, shown beside the reader) and `spread` (half the length of an error
            bar, in the unit of the score).
        path: File to write; ends in `.png`, `.svg` or `.html`.
        title: Title of the chart.
        axis: Title of the score axis.

    Raises:
        ConfigError: If the path has another suffix.
        DataError: If there are no rows, or one lacks a key.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    path = checked_path("score figure", path, rows, ("reader", "method", "score"))
    altair = chart_package("score figure")
    return save_chart(styled(_score_bars(altair, rows, axis), title), path)


def checked_path(op: str, path: Path | str, rows: Rows, keys: tuple[str, ...]) -> Path:
    """Check that a chart of the rows can be drawn into the file, and return `path` as a Path.

    `op` is the operation, for messages. Every row must have the keys `keys`. Raises ConfigError if the path has another
    suffix than `.png`, `.svg` and `.html`; DataError if there are no rows, or one lacks a key.
    """
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
    """Import altair, check that it can save charts, and return it; `op` is the operation, for messages.

    Raises MissingExtraError if altair or vl-convert is not installed.
    """
    try:
        import altair
        import vl_convert  # noqa: F401  altair saves through it
    except ImportError as error:
        raise MissingExtraError.of(error, op=op, extra="report") from error
    return altair


def in_order(rows: Rows, key: str) -> list[Any]:
    """Return the distinct values of a key, in the order of their first rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def drawn_ends(mean: float, half: float, metrics: Iterable[str], scale: float = 1.0) -> tuple[float, float]:
    """Return the two ends of the interval mean ± half, cut off at the lowest and highest possible value of the metric.

    A t interval over few seeds can extend beyond the highest possible score. Nothing is cut off if the metric's range
    is not known, or if the mean is outside the range (because it is a difference of scores, for example).

    Args:
        mean: Middle of the interval.
        half: Half the width of the interval.
        metrics: Names of the metrics whose scores are averaged; the widest of their ranges is used.
        scale: Factor by which the scores were multiplied, such as 100 for per cent.
    """
    ranges = [BOUNDS.get(metric, UNBOUNDED) for metric in metrics] or [UNBOUNDED]
    low, high = (scale * end for end in (min(low for low, _ in ranges), max(high for _, high in ranges)))
    if not low <= mean <= high:
        return mean - half, mean + half
    return max(mean - half, low), min(mean + half, high)


def single_runs(mean: float, spread: float, runs: int) -> list[float]:
    """Return the scores of two runs, computed from their mean and sample standard deviation `spread`.

    Two values a and b have the sample standard deviation |a - b| / sqrt(2). For another number of runs, return [].
    """
    return [mean - spread / 2**0.5, mean + spread / 2**0.5] if runs == 2 and INTERVAL_SEEDS > 2 else []


def panel_header(altair: ModuleType) -> alt.Header:
    """Return altair's settings for the names above the panels of a chart."""
    return altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)


def _layer_axis(altair: ModuleType) -> alt.X:
    """Return altair's x channel for charts with layers along the x axis."""
    return altair.X("layer:O", title="layer (0 = embeddings)", axis=altair.Axis(labelAngle=0, labelOverlap=True))


def _importance_bars(altair: ModuleType, rows: Rows, readers: list[str]) -> Chart:
    """Return a bar chart per reader, with a dashed line at equal shares: 1/n if the reader uses n layers."""
    layers = len(in_order(rows, "layer"))
    counts = Counter(row["reader"] for row in rows)
    values = [{**row, "equal": 1 / counts[row["reader"]]} for row in rows]
    base = altair.Chart(altair.Data(values=values))
    share = altair.Y("importance:Q", title="importance", axis=altair.Axis(format="%", tickCount=4))
    tooltip = ["reader:N", "layer:O", altair.Tooltip("importance:Q", format=".1%")]
    colour = altair.Color("reader:N", sort=readers, scale=altair.Scale(range=list(COLOURS)), legend=None)
    bars = base.mark_bar().encode(x=_layer_axis(altair), y=share, color=colour, tooltip=tooltip)
    equal = altair.Y("mean(equal):Q", title="importance")
    bars += base.mark_rule(color=QUIET, strokeDash=[4, 3]).encode(y=equal, tooltip=altair.Tooltip("mean(equal):Q"))
    if any("low" in row for row in rows):
        ends = {"y": altair.Y("low:Q", title="importance"), "y2": "high:Q"}
        bars += base.mark_rule(color=INK, strokeWidth=1.2).encode(x=_layer_axis(altair), **ends)
    header = panel_header(altair)
    beside = layers <= FEW_LAYERS
    return bars.properties(width=max(180 if beside else 220, 26 * layers), height=110).facet(
        facet=altair.Facet("reader:N", sort=readers, header=header), columns=len(readers) if beside else 1, spacing=18
    )


def _importance_heat_map(altair: ModuleType, rows: Rows, readers: list[str]) -> Chart:
    """Return a heat map with a row per reader and a column per layer; up to 26 layers, each cell shows its number."""
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


def _score_bars(altair: ModuleType, rows: Rows, axis: str) -> Chart:
    """Return a chart with a group of bars per reader and a number beside each bar; `axis` titles the score axis."""
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
    header = panel_header(altair)
    groups = altair.Facet("group:N", sort=in_order(values, "group"), header=header)
    return drawn.properties(width=230, height=max(60, 26 * len(methods))).facet(facet=groups, columns=3, spacing=26)


def _labels(row: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the fields that the chart adds to a row of `scores`.

    They are "group" (title of the panel), "low" and "high" (ends of the error bar), and "label" (the number as text).
    """
    score, spread = float(row["score"]), float(row.get("spread") or 0)
    group = f"{row['reader']} ({row['metric']})" if row.get("metric") else str(row["reader"])
    label = f"{score:.3f} ± {spread:.3f}" if spread else f"{score:.3f}"
    low, high = drawn_ends(score, spread, [str(row["metric"])] if row.get("metric") else [])
    return {"group": group, "low": low, "high": high, "label": label}


def styled(chart: Chart, title: str, below: Sequence[str] = ()) -> Chart:
    """Return a chart with a title, small lines of text `below` it, and the style that all charts in files share."""
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


def save_chart(chart: alt.TopLevelMixin, path: Path) -> Path:
    """Write a chart to a file in the format of its suffix (png, svg or html), and return the path.

    An existing file is replaced completely or, if writing fails, not at all. Raises StoreError if writing fails.
    """
    kind = cast("Literal['png', 'svg', 'html']", path.suffix.lower()[1:])
    options = {"png": {"scale_factor": PIXELS}, "html": {"inline": True}}.get(kind, {})
    with atomic_write(path) as beside:
        chart.save(beside, format=kind, **options)
    return path


CURVE_WIDTH, CURVE_HEIGHT = 440, 260  # size of a chart with a single panel, in pixels
PANEL_WIDTH = 250  # width of each panel of a chart with several panels
LETTERS = 84  # characters of a line below the title
SHAPES = ("circle", "diamond", "triangle-up", "square")  # shapes of points; each time the colours repeat, the next one


def curve_rows(figure: Curves) -> list[Mark]:
    """Return the data of a chart of curves: one row per point of a figure.

    A row has the fields of its point (such as "facet", "series", "x", "mean" and "runs") and these:

    - "across": whether the point has no x. Such a point becomes two rows, one at each end of the x axis, and so a line
      across the panel.
    - "low" and "high": the ends of the interval as the chart shows them (see `drawn_ends`). With fewer than
      `INTERVAL_SEEDS` runs, both are the mean.
    - "values": the score of each run if there are exactly two, otherwise empty.
    """
    rows: list[Mark] = []
    places: dict[str, list[float | str]] = {}
    several = len({point.metric for point in figure.points}) > 1
    for point in figure.points:
        places.setdefault(point.facet, []).extend([] if point.x is None else [point.x])
    for point in figure.points:
        half = (point.interval or 0.0) if point.runs >= INTERVAL_SEEDS else 0.0
        along = list(dict.fromkeys(places[point.facet])) or [0]
        numbers = [x for x in along if isinstance(x, int | float)]
        ends = [min(numbers), max(numbers)] if len(numbers) == len(along) else along
        low, high = drawn_ends(point.mean, half, [point.metric], figure.scale)
        row = {**asdict(point), "low": low, "high": high, "across": point.x is None}
        row["values"] = single_runs(point.mean, point.spread, point.runs)
        row["facet"] = f"{point.facet} ({point.metric})" if several else point.facet
        rows += [{**row, "x": x} for x in (ends if point.x is None else [point.x])]
    return rows


def draw_curves(figure: Curves, path: Path | str) -> Path:
    """Draw a figure of a run's report as a chart of curves in a `.png`, `.svg` or `.html` file, and return its path.

    Each point is drawn with its 95 % interval or, if it averages two runs, with both scores. A method without a value
    on the x axis is a dashed line across the panel. Raises ConfigError if the path has another suffix; DataError if
    there are no points; MissingExtraError if the packages of `lamina[report]` are not installed.
    """
    rows = curve_rows(figure)
    path = checked_path("figure", path, rows, ("facet", "series", "x", "mean"))
    altair = chart_package("figure")
    below = [line for text in (figure.source, *figure.notes) for line in wrap(text, LETTERS)]
    return save_chart(styled(_curve_chart(altair, rows, figure), figure.title, below), path)


def _curve_chart(altair: ModuleType, rows: list[Mark], figure: Curves) -> Chart:
    """Return the chart of a figure, whose `rows` come from `curve_rows`."""
    series, metrics, panels = (in_order(rows, key) for key in ("series", "metric", "facet"))
    numbers = all(isinstance(row["x"], int | float) for row in rows)
    colours = altair.Scale(domain=series, range=[COLOURS[n % len(COLOURS)] for n in range(len(series))])
    shapes = [SHAPES[n // len(COLOURS) % len(SHAPES)] for n in range(len(series))]
    look: dict[str, object] = {"labelLimit": 260, "symbolOpacity": 1, "labelFontSize": 12, "labelColor": INK}
    if len(set(shapes)) == 1:  # with several shapes, the legend shows the shapes instead of lines
        look |= {"symbolType": "stroke", "symbolStrokeWidth": 3}
    legend = altair.Legend(orient="bottom", columns=3, **look) if len(series) > 1 else None
    colour = altair.Color("series:N", title=None, scale=colours, legend=legend)
    shape = altair.Shape("series:N", title=None, scale=altair.Scale(domain=series, range=shapes), legend=legend)
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
    single = curve.transform_flatten(["values"]).mark_point(filled=False, size=22, strokeWidth=1.2)
    layers = (
        [] if not any(row["values"] for row in rows) else [single.encode(y=altair.Y("values:Q", title=name + times))]
    )
    drawn = altair.layer(
        (base if numbers else across).mark_area(opacity=0.14).encode(y=low, y2="high:Q"),
        curve.mark_line(strokeWidth=2).encode(y=y)
        if numbers
        else curve.mark_rule(strokeWidth=1.5).encode(y=low, y2="high:Q"),
        across.mark_line(strokeWidth=2, strokeDash=[6, 4]).encode(y=y),
        curve.mark_point(filled=True, size=42, opacity=1).encode(
            y=y, tooltip=tooltip, **({"shape": shape} if len(set(shapes)) > 1 else {})
        ),
        *layers,
    )
    if len(panels) == 1:
        return drawn.properties(width=CURVE_WIDTH, height=CURVE_HEIGHT)
    header = panel_header(altair)
    facet = altair.Facet("facet:N", sort=panels, header=header)
    charts = drawn.properties(width=PANEL_WIDTH, height=int(0.8 * PANEL_WIDTH)).facet(
        facet=facet, columns=2 if len(panels) in (2, 4) else 3, spacing=26
    )
    return charts.resolve_scale(y="independent") if len(metrics) > 1 else charts


def _numbers_axis(altair: ModuleType, rows: list[Mark], figure: Curves) -> alt.X:
    """Return an x axis of numbers, with a tick at the x of each row. Labels that would overlap are left out."""
    values = sorted({row["x"] for row in rows if not row["across"]})
    scale = (
        altair.Scale(type="log", base=2, nice=False, padding=12)
        if figure.log_x and all(value > 0 for value in values)  # 0 has no place on an axis of logarithms
        else altair.Scale(zero=False, nice=False, padding=12)
    )
    ticks: dict[str, object] = {"values": values, "format": "~r"} if values else {}
    return altair.X("x:Q", title=figure.x_title, scale=scale, axis=altair.Axis(grid=False, labelOverlap=True, **ticks))


def _names_axis(altair: ModuleType, rows: list[Mark], figure: Curves) -> alt.X:
    """Return an x axis of names, in the order of the rows."""
    names = in_order([row for row in rows if not row["across"]], "x")
    return altair.X("x:O", title=figure.x_title, sort=names, axis=altair.Axis(labelAngle=0, labelOverlap=True))
