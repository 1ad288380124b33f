"""Charts that are written to files: importances, scores and curves as PNG, SVG or HTML."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.tasks.metrics import BOUNDS
from lamina.train.results import summarise
from lamina.utils import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

    Rows = Sequence[Mapping[str, Any]]
    from lamina.recipes.report_file import Curves

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


CURVE_WIDTH, CURVE_HEIGHT, PANEL_WIDTH = 440, 260, 250  # of a single panel, and of one of several
LETTERS = 84  # of a line below the title
MARKS = ("circle", "diamond", "triangle-up", "square")  # of points, one after the other as colours begin anew


def curve_rows(figure: Curves) -> list[dict[str, Any]]:
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


def draw_curves(figure: Curves, path: Path | str) -> Path:
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
    rows = curve_rows(figure)
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
        return drawn.properties(width=CURVE_WIDTH, height=CURVE_HEIGHT)
    header = altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    facet = altair.Facet("facet:N", sort=panels, header=header)
    charts = drawn.properties(width=PANEL_WIDTH, height=int(0.8 * PANEL_WIDTH)).facet(
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


FINAL, TRAINING = "importance", "importance-over-training"
TRAINING_WIDTH, TRAINING_HEIGHT, TRAINING_COLUMNS = 380, 210, 2  # of a panel, and panels side by side
FEW_POINTS = 12  # up to so many on a line, each is drawn
NAMED = 3  # lines at most whose layer stands at their end
LEGEND_ROWS = 13  # more layers have a legend of two columns
RAMP = ("#54398f", "#2f6db3", "#1f9aa8", "#3a9d4e", "#c2a01e", "#e0702f", "#b5263c")  # of the lowest layer to the top


def draw_importances(
    importances: Rows, table: Rows, folder: Path | str, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Draw the importances of a recipe's run into a folder: `importance.png` and `importance-over-training.png`.

    The first has a bar per layer at the epoch that was kept; the second a line per layer over steps (where
    `importance_steps` was set) or epochs. Runs of several seeds are their mean, with its 95 % t interval; of a grid
    the best setting of each task and method is drawn.

    Args:
        importances: `Run.importances`, or the rows of `importances.parquet`.
        table: `Run.table`, or the rows of `table.json`.
        folder: Where to.
        formats: "png", "svg" and "html".

    Returns:
        The paths; none where nothing mixes layers.

    Raises:
        MissingExtraError: If there is something to draw and the packages of `lamina[report]` are not installed.

    Source:
        Dremov 2024, figures 8 and 9, 12 and 13, 16 and 17.
    """
    own, final = _kept(importances, table)
    if not final:
        return []
    drawn: list[Path] = []
    for kind in dict.fromkeys(formats):
        drawn.append(importance(_means(final, ("reader", "layer")), Path(folder) / f"{FINAL}.{kind}"))
        drawn.append(importance_over_training(own, Path(folder) / f"{TRAINING}.{kind}"))
    return drawn


def averaged_importances(importances: Rows, table: Rows) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """What `draw_importances` draws: the rows of either chart, and what runs along the bottom of the second.

    Rows have "reader", "layer", "importance" and, where there are several seeds, "low" and "high".
    """
    own, final = _kept(importances, table)
    chosen, x = _over(own)
    return _means(final, ("reader", "layer")), _means(chosen, ("reader", "layer", x)), x


def _kept(importances: Rows, table: Rows) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the runs that are drawn, by what they are called, and those at the epoch that was kept."""
    known, runs = {row["reader"] for row in importances}, _runs(table)
    runs = {reader: run for reader, run in runs.items() if reader in known}
    own = [{**row, "run": row["reader"], **runs[row["reader"]]} for row in importances if row["reader"] in runs]
    own.sort(key=lambda row: list(runs).index(row["run"]))
    last: dict[str, int] = {}
    for row in own:
        if row["epoch"] is not None and row["epoch"] <= (row["kept"] or row["epoch"]):
            last[row["run"]] = row["epoch"]
    return own, [row for row in own if row["epoch"] == last.get(row["run"], -1)]


def _over(rows: Rows) -> tuple[list[Mapping[str, Any]], str]:
    """The rows between epochs and "step", where such were taken down; else those of epochs and "epoch"."""
    by_step = any(row["epoch"] is None for row in rows)
    return [row for row in rows if (row["epoch"] is None) == by_step], "step" if by_step else "epoch"


def _runs(table: Rows) -> dict[str, dict[str, Any]]:
    """Reader -> what it is called, and the epoch that was kept; of a grid's settings only the best."""
    runs: dict[str, dict[str, Any]] = {}
    several, seen = len(in_order(table, "task")) > 1, set[tuple[str, str]]()
    for row in table:
        if (key := (row["task"], row["method"])) not in seen:
            seen.add(key)
            settings = "".join(f", {name}={value}" for name, value in row["settings"].items())
            title = (f"{row['task']}: " if several else "") + row["method"] + settings
            runs |= {run["reader"]: {"reader": title, "kept": run.get("best_epoch")} for run in row["runs"]}
    return runs


def importance_over_training(
    rows: Rows, path: Path | str, *, title: str = "Importance of each layer over training"
) -> Path:
    """Draw a line per layer over steps, or over epochs where no steps between them were taken down; a panel per reader.

    Args:
        rows: As `FitResult.importances`: "reader", "epoch", "step", "layer" and "importance". Where several "run"s have
            one "reader", the line is their mean, with a band of its 95 % t interval.
        path: Where to; `.png`, `.svg` or `.html`.
        title: Written above.

    Returns:
        `path`.

    Raises:
        ConfigError: If the suffix is none of the three.
        DataError: If there are no rows, or one lacks a key.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    path = checked_path("importance figure", path, rows, ("reader", "epoch", "layer", "importance"))
    altair = chart_package("importance figure")
    chosen, x = _over(rows)
    checked_path("importance figure", path, chosen, (x,))
    return save_chart(styled(_lines(altair, _means(chosen, ("reader", "layer", x)), x), title), path)


def _means(rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for all that have the same keys: their mean importance, and the ends of its interval if there are several.

    No end lies outside 0 to 1.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(float(row["importance"]))
    means = []
    for place, values in groups.items():
        summary = summarise(values)
        half = summary.interval
        ends = {} if half is None else {"low": max(0.0, summary.mean - half), "high": min(1.0, summary.mean + half)}
        means.append({**dict(zip(keys, place, strict=True)), "importance": summary.mean, **ends})
    return means


def _lines(altair: ModuleType, rows: Rows, x: str) -> Any:
    layers, readers = sorted({row["layer"] for row in rows}), in_order(rows, "reader")
    legend = altair.Legend(
        title=["layer", "(0 = embeddings)"],
        columns=1 if len(layers) <= LEGEND_ROWS else 2,
        symbolType="stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        labelColor=INK,
        titleColor=INK,
    )
    scale = altair.Scale(domain=layers, range=ramp(len(layers)))
    whole = altair.Axis(format="d", tickMinStep=1, grid=False)
    base = altair.Chart(altair.Data(values=_named(rows, x))).encode(
        x=altair.X(f"{x}:Q", title=x, axis=whole, scale=altair.Scale(zero=False, nice=False)),
        color=altair.Color("layer:O", scale=scale, legend=legend),
        tooltip=["reader:N", "layer:O", f"{x}:Q", altair.Tooltip("importance:Q", format=".1%")],
    )
    share = altair.Y("importance:Q", title="importance", axis=altair.Axis(format="%", tickCount=5))
    points = len({row[x] for row in rows}) <= FEW_POINTS
    drawn = [base.mark_line(strokeWidth=1.8, point={"size": 22} if points else False).encode(y=share)]
    if any("low" in row for row in rows):
        drawn.insert(0, base.mark_area(opacity=0.15).encode(y=altair.Y("low:Q", title="importance"), y2="high:Q"))
    named = base.transform_filter(altair.datum.name > 0).mark_text(align="left", dx=5, fontSize=11)
    drawn.append(named.encode(y=share, text="layer:O"))
    chart = altair.layer(*drawn).properties(width=TRAINING_WIDTH, height=TRAINING_HEIGHT)
    header = altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    facet = altair.Facet("reader:N", sort=readers, header=header)
    return chart.facet(facet=facet, columns=TRAINING_COLUMNS, spacing=22).resolve_scale(x="independent")


def _named(rows: Rows, x: str) -> list[dict[str, Any]]:
    """Rows whose "name" is 1 where the layer's number stands: at the end of the lines that end highest, if apart."""
    top, labels = max(row["importance"] for row in rows), list[Any]()
    for reader in in_order(rows, "reader"):
        own = [row for row in rows if row["reader"] == reader]
        end = max(row[x] for row in own)
        for row in sorted((row for row in own if row[x] == end), key=lambda row: -row["importance"])[:NAMED]:
            apart = [abs(row["importance"] - other["importance"]) for other in labels if other["reader"] == reader]
            labels += [row] if min(apart, default=top) > 0.06 * top else []
    return [{**row, "name": int(any(row is label for label in labels))} for row in rows]


def ramp(count: int) -> list[str]:
    """So many colours from the first of `RAMP` to its last, evenly spaced."""
    anchors = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in RAMP]
    colours = []
    for number in range(count):
        at, part = divmod(number / max(1, count - 1) * (len(RAMP) - 1), 1)
        low, high = anchors[int(at)], anchors[min(int(at) + 1, len(RAMP) - 1)]
        colours.append("#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(low, high, strict=True)))
    return colours
