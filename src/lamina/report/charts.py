"""Charts of the HTML page and of files: their contents, Vega-Lite specifications, and the light and dark themes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from lamina.errors import MissingExtraError
from lamina.tasks.metrics import BOUNDS
from lamina.train.results import INTERVAL_SEEDS
from lamina.utils import JSONObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

    import altair as alt

    Chart = alt.Chart | alt.LayerChart | alt.FacetChart
    Channels = dict[str, Any]  # keyword arguments of altair's methods
    Rows: TypeAlias = Sequence[Mapping[str, Any]]  # rows of a table of results: column -> cell

Mark: TypeAlias = JSONObject  # one row of a chart's data, as Vega-Lite reads it
Spec: TypeAlias = JSONObject  # a Vega-Lite specification or config
Domain: TypeAlias = tuple[float, float]  # lowest and highest value of an axis

LAYER = "layer (0 = embeddings)"
FEW_TICKS = 26  # up to this many whole numbers on the x axis, each has a tick
FEW_SERIES = 8  # number of the theme's colours; more named series get those of another palette
MOST_NAMED = 20  # number of that palette's colours; more series get shades of one colour
FEW_LABELS = 6  # up to this many lines, each line has its name at its end instead of a legend
MOST_LABELS = 3  # with more lines, those with the highest ends are named there, beside the legend
UNBOUNDED = (float("-inf"), float("inf"))
NUMBERED = 13  # up to this many columns, a heat map shows its numbers
HEIGHT = 260  # height of all charts but heat maps, in pixels
LABEL_HEIGHT = 15  # height of a line's name, in pixels
DOT, RULE = "dot", "rule"  # values of "mark" in the rows of a `Drawing`
_TEXT, _NUMBER, _CELL = 62, 30, 12  # least width in pixels of a heat map's cell with a text, a number, nothing in it


@final
@dataclass(frozen=True)
class Drawing:
    """The contents of a chart, before it becomes a Vega-Lite specification by `spec_of`.

    Attributes:
        kind: "line", "heat" (a heat map), "bar" or "scatter".
        rows: The data, one row per point, bar or cell. Every row has "x" and "value". Optional keys are "y" (row of a
            heat map), "colour" (name of the series), "facet" (name of the panel), "label" (text of a cell or point),
            "x_label" (name of the x), "low" and "high" (ends of an interval), "seeds" (how many are averaged),
            "across": True (a value that holds for every x), and "mark": "dot" (a row with the value of a single seed)
            or "rule" (a row with a reference value).
        title: Title of the chart.
        titles: "x", "y", "value", "colour" or "facet" -> its title, with the unit.
        note: How to read the chart, shown below the title.
        remark: What a point averages (seeds, rows) and which interval it has; shown below the chart.
        log_x: Whether the x axis is logarithmic.
        apart: Whether each panel has its own value scale, as panels of different metrics need.
        from_zero: Whether the colours of a heat map begin at 0.
    """

    kind: Literal["line", "heat", "bar", "scatter"]
    rows: list[Mark]
    title: str
    titles: dict[str, str] = field(default_factory=dict)
    note: str = ""
    remark: str = ""
    log_x: bool = False
    apart: bool = False
    from_zero: bool = False

    @property
    def panels(self) -> list[str]:
        """Names of the panels in the order in which they are shown; [] for a chart without panels."""
        return list(dict.fromkeys(row["facet"] for row in self.rows if "facet" in row))

    @property
    def series(self) -> list[str | float]:
        """Names of the series that colours distinguish, in order (numbers are sorted); [] without colours."""
        names = list(dict.fromkeys(row["colour"] for row in self.rows if "colour" in row))
        return sorted(names) if _numeric(self.rows, "colour") else names

    @property
    def has_line_labels(self) -> bool:
        """Whether lines have their names at their ends: all of them if they are few, otherwise the highest ones.

        False for other kinds of charts, for a single line, or if x is not a number.
        """
        return self.kind == "line" and len(self.series) > 1 and _numeric(self.rows, "x")

    @property
    def has_legend(self) -> bool:
        """Whether the chart has a legend.

        Several series have one, unless they are up to six lines that have their names (not numbers) at their ends.
        """
        is_few = len(self.series) <= FEW_LABELS and not _numeric(self.rows, "colour")
        return len(self.series) > 1 and not (is_few and self.has_line_labels)


def chart_package(op: str) -> ModuleType:
    """Return the module altair, after checking that charts can be saved; `op` begins the error message.

    Raises MissingExtraError if altair or vl-convert is not installed.
    """
    try:
        import altair
        import vl_convert  # noqa: F401  charts are saved through it
    except ImportError as error:
        raise MissingExtraError.of(error, op=op, extra="report") from error
    return altair


def in_order(rows: Rows, key: str) -> list[Any]:
    """Return the distinct values that rows have under `key`, in the order of their first rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def drawn_ends(mean: float, half: float, metrics: Iterable[str], scale: float = 1.0) -> tuple[float, float]:
    """Return the two ends of the interval mean ± half, cut off at the lowest and highest possible value of the metric.

    Nothing is cut off if the metric's range is not known, or if the mean is outside the range (because it is a
    difference of scores, for example).

    Args:
        mean: Middle of the interval.
        half: Half the width of the interval.
        metrics: Names of the metrics whose scores are averaged. With several, the widest range counts.
        scale: Factor by which the scores were multiplied, such as 100 for per cent.
    """
    ranges = [BOUNDS.get(metric, UNBOUNDED) for metric in metrics] or [UNBOUNDED]
    low, high = (scale * end for end in (min(low for low, _ in ranges), max(high for _, high in ranges)))
    if not low <= mean <= high:
        return mean - half, mean + half
    return max(mean - half, low), min(mean + half, high)


def count_range(counts: Sequence[int]) -> str:
    """Return the lowest and highest of sorted counts as text, such as "1 to 3"; "3" if they are equal, "" if empty."""
    return " to ".join(f"{count:,}" for count in dict.fromkeys([*counts[:1], *counts[-1:]]))


def interval_remark(counts: Collection[int], noun: str, *, has_dots: bool) -> str:
    """Return the remark below a chart: what its points average, and which of them have an interval; "" if no points.

    `counts` has for each point the number of runs, seeds or subsamples that it averages. `noun` is "run", "seed" or
    "subsample". With `has_dots`, each run of a point without an interval is drawn as a dot.
    """
    if not counts:
        return ""
    if max(counts) == 1:
        return f"one {noun} per point, so there is no interval"
    interval = ", with its 95 % confidence interval" if max(counts) >= INTERVAL_SEEDS else ""
    dots = f"each dot is a {noun}, and " if has_dots else ""
    few = f"; {dots}fewer than {INTERVAL_SEEDS} give no interval" if min(counts) < INTERVAL_SEEDS else ""
    return f"mean of {count_range(sorted(counts))} {noun}s{interval}{few}"


def spec_of(drawing: Drawing, domain: Domain | None = None) -> Spec:
    """Return a chart as a Vega-Lite specification that contains its data.

    Raises MissingExtraError if the packages of `lamina[report]` are not installed.

    Args:
        drawing: The contents of the chart.
        domain: Lowest and highest value of the value axis, or of a heat map's colour scale. Charts that stand side by
            side get equal values. None: chosen from the data. Not used for the value axes of a drawing that is `apart`.
    """
    altair = chart_package("report")
    draw = {"line": _line_chart, "heat": _heat_map, "bar": _bar_chart, "scatter": _scatter_chart}[drawing.kind]
    base = altair.Chart(altair.Data(values=[]))
    chart = draw(altair, base, drawing, domain).properties(height=_height(drawing))
    if drawing.panels:
        panel = altair.Facet("facet:N", title=None, sort=drawing.panels)
        columns = min(3, len(drawing.panels))
        chart = chart.properties(width=280).facet(facet=panel, columns=columns, spacing=24)
        if drawing.apart:
            independent: Channels = {"x" if _is_sideways(drawing) else "y": "independent"}
            chart = chart.resolve_scale(**independent)
    description = " ".join(filter(None, (f"{drawing.title}.", drawing.note, drawing.remark)))
    # Altair would validate the specification and visit every cell of the data, which takes longer than everything else.
    spec = chart.properties(description=description).to_dict(validate=False)
    rows = _with_line_labels(drawing, domain) if drawing.has_line_labels else drawing.rows
    return {**spec, "data": {"values": rows}}


def layout_of(drawing: Drawing) -> dict[str, int]:
    """Return the numbers by which the page's script fits a chart into the page.

    "panels" and "marks" are the numbers of panels and of data rows. A heat map also has the number of its "columns",
    the width of a cell ("step") and the width of the labels at its left ("margin"), both in pixels.
    """
    layout = {"panels": len(drawing.panels), "marks": len(drawing.rows)}
    if drawing.kind == "heat":
        columns = len(in_order(drawing.rows, "x"))
        has_texts = bool(drawing.rows) and "label" in drawing.rows[0]
        step = _TEXT if has_texts else _NUMBER if columns <= NUMBERED else _CELL
        longest = max((len(str(row["y"])) for row in drawing.rows), default=1)
        layout |= {"columns": columns, "step": step, "margin": 36 + min(150, 7 * longest)}
    return layout


def _height(drawing: Drawing) -> int:
    """Return the height of a chart, or of each of its panels, in pixels."""
    if drawing.kind == "heat":
        rows = len(in_order(drawing.rows, "y"))
        return rows * max(16, min(34, 460 // max(1, rows)))
    if _is_sideways(drawing):
        return max(60, 26 * len({(row["x"], row.get("colour")) for row in drawing.rows}))
    return HEIGHT


def _numeric(rows: Sequence[Mark], key: str) -> bool:
    return all(isinstance(row.get(key, 0), int | float) for row in rows)


def _tooltip(altair: ModuleType, drawing: Drawing) -> list[alt.Tooltip]:
    """Return the lines of the tooltip that appears when the pointer is over a mark, from top to bottom."""
    keys = {key for row in drawing.rows for key in row}
    titles = {"label": "", "seeds": "seeds", "low": "95 % from", "high": "95 % to", **drawing.titles}
    lines = []
    for key in ("facet", "colour", "label", "x_label", "x", "y", "value", "low", "high", "seeds"):
        if key in keys:
            is_number = key in ("low", "high") or (key in ("value", "x", "y") and _numeric(drawing.rows, key))
            number_format = {"format": ".4~g"} if is_number else {}
            kind = "Q" if is_number else "N"
            lines.append(altair.Tooltip(f"{key}:{kind}", title=titles.get(key) or key, **number_format))
    return lines


def _is_sideways(drawing: Drawing) -> bool:
    return drawing.kind == "bar" and not _numeric(drawing.rows, "x")


def values_of(rows: Iterable[Mark]) -> list[float]:
    """Return all values in rows of charts, and the ends of their intervals."""
    return [row[key] for row in rows for key in ("low", "value", "high") if key in row]


def _value_ends(drawing: Drawing, domain: Domain | None) -> Domain:
    """Return the lowest and highest value of the value axis: `domain`, or the data's if `domain` is None.

    Without data they are 0 and 1.
    """
    values = values_of(drawing.rows)
    return domain or (min(values, default=0.0), max(values, default=1.0))


def _value_scale(altair: ModuleType, drawing: Drawing, domain: Domain | None, *, zero: bool = False) -> alt.Scale:
    """Return the scale of the value axis, from the lowest to the highest value in `domain` (None: in the data).

    With `zero` the scale contains 0. If each panel has its own scale, `domain` is not used.
    """
    if drawing.apart:
        return altair.Scale(zero=zero)
    low, high = _value_ends(drawing, domain)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    return altair.Scale(domain=[low, high], zero=zero, nice=True)


def _colour(altair: ModuleType, drawing: Drawing, *, shape: bool = False) -> Channels:
    """Return the channels that tell series apart: "color", and with `shape` also "shape"; {} for a single series.

    Series that are numbers, or more than 20, get shades of one colour and no shapes. There is no legend if all lines
    have their names at their ends.
    """
    names = drawing.series
    if len(names) < 2:
        return {}
    shades = _numeric(drawing.rows, "colour") or len(names) > MOST_NAMED
    palette = {"scheme": "tableau20"} if len(names) > FEW_SERIES and not shades else {}
    legend = altair.Legend(symbolOpacity=1) if drawing.has_legend else None
    options = {"title": drawing.titles.get("colour"), "legend": legend}
    scale = altair.Scale(domain=names, **palette)
    channels = {"color": altair.Color(f"colour:{'O' if shades else 'N'}", scale=scale, **options)}
    if shape and not shades:
        channels["shape"] = altair.Shape("colour:N", scale=altair.Scale(domain=names), **options)
    return channels


def _highlight(altair: ModuleType, drawing: Drawing) -> tuple[Callable[[Chart], Chart], Callable[[float], Any]]:
    """Return two functions, by which a click on a chart's legend selects series.

    The first returns a chart with the selection. The second returns the opacity channel for an opacity: marks of the
    selected series have it, and all others are faint. Without a legend, the first returns its chart unchanged, and the
    opacity is constant.
    """
    if not drawing.has_legend:
        return lambda chart: chart, altair.value
    picked = altair.selection_point(name="picked", fields=["colour"], bind="legend")
    return (
        lambda chart: chart.add_params(picked),
        lambda opacity: altair.condition(picked, altair.value(opacity), altair.value(0.08)),
    )


def _x_axis(altair: ModuleType, drawing: Drawing) -> alt.X:
    """Return the x channel of a line chart or a scatter plot.

    Values that are not all numbers are put side by side in the order of the rows. Numbers get a logarithmic axis if the
    drawing asks for it and all are positive.
    """
    title = drawing.titles.get("x")
    if not _numeric(drawing.rows, "x"):
        axis = altair.Axis(labelAngle=0, labelLimit=90)
        return altair.X("x:N", sort=in_order(drawing.rows, "x"), title=title, axis=axis)
    values = sorted({row["x"] for row in drawing.rows if not row.get("across")})
    each = len(values) <= FEW_TICKS and all(float(value).is_integer() for value in values)
    ticks = {"values": values} if each else {}
    axis = altair.Axis(grid=False, format="~r", labelOverlap=True, **ticks)
    log = {"type": "log", "base": 2} if drawing.log_x and all(value > 0 for value in values) else {}
    return altair.X("x:Q", title=title, axis=axis, scale=altair.Scale(zero=False, nice=False, padding=14, **log))


def _only(base: Chart, drawing: Drawing, mark: str) -> Chart | None:
    has_rows = any(row.get("mark") == mark for row in drawing.rows)
    return base.transform_filter(f"datum.mark == '{mark}'") if has_rows else None


def _plain_rows(base: Chart, drawing: Drawing) -> Chart:
    return base.transform_filter("!datum.mark") if any("mark" in row for row in drawing.rows) else base


def _extra_marks(altair: ModuleType, base: Chart, drawing: Drawing, value: Channels, colour: Channels) -> list[Chart]:
    """Return the chart layers for single seeds (small rings) and for reference values (thin dashed lines).

    `base` is a chart that already encodes the other axis. `value` maps "x" or "y" to the channel of the values, and
    `colour` holds the colour channels of `_colour`.
    """
    layers = []
    if (dots := _only(base, drawing, DOT)) is not None:
        # A ring in the colour of its bar would not be visible on the bar.
        look: Channels = {"stroke": "white", "color": "#8a929b"} if drawing.kind == "bar" else {"filled": False}
        rings = dots.mark_point(size=34, strokeWidth=1.4, opacity=1, shape="circle", **look)
        layers.append(rings.encode(**value, **colour, tooltip=_tooltip(altair, drawing)))
    if (rules := _only(base, drawing, RULE)) is not None:
        line = rules.mark_line(strokeDash=[3, 3], strokeWidth=1.4, color="gray")
        layers.append(line.encode(**value))
        text = rules.transform_filter("isValid(datum.label)").mark_text(
            baseline="bottom", dy=-4, fontSize=11, color="gray"
        )
        layers.append(text.encode(**value, text="label:N"))
    return layers


def _line_chart(altair: ModuleType, base: Chart, drawing: Drawing, domain: Domain | None) -> Chart:
    """Return a line chart: lines with points, intervals as bands, and dashed lines for values that hold for every x.

    If x is a name, no line connects the points, intervals are vertical rules, and the points of several series stand
    side by side. `base` is an empty chart; for `domain` see `spec_of`.
    """
    selectable, opacity = _highlight(altair, drawing)
    scale = _value_scale(altair, drawing, domain)
    y, low = (altair.Y(f"{key}:Q", title=drawing.titles.get("value"), scale=scale) for key in ("value", "low"))
    base = base.encode(x=_x_axis(altair, drawing))
    colour, marked = _colour(altair, drawing), _colour(altair, drawing, shape=True)
    means = _plain_rows(base, drawing)
    has_across = any(row.get("across") for row in drawing.rows)
    across = means.transform_filter("datum.across")
    is_number = _numeric(drawing.rows, "x")
    if not is_number and colour:
        base = base.encode(xOffset=altair.XOffset("colour:N", sort=drawing.series))
    curve = _plain_rows(base, drawing).transform_filter("!datum.across") if has_across else _plain_rows(base, drawing)
    layers = []
    if any("low" in row for row in drawing.rows):
        rules = [(curve.mark_rule(strokeWidth=2), 1), (across.mark_area(), 0.16)]
        bands = [(means.mark_area(), 0.16)] if is_number else rules
        layers += [band.encode(y=low, y2="high:Q", opacity=opacity(shade), **colour) for band, shade in bands]
    if is_number:
        layers.append(curve.mark_line(strokeWidth=2).encode(y=y, opacity=opacity(1), **colour))
    if has_across:
        line = across.mark_line(strokeWidth=2, strokeDash=[6, 4])
        layers.append(line.encode(y=y, opacity=opacity(1), tooltip=_tooltip(altair, drawing), **colour))
    layers += _extra_marks(altair, base, drawing, {"y": y}, colour)
    if drawing.has_line_labels:
        named = means.transform_filter("isValid(datum.label_y)").mark_text(align="left", dx=9, fontSize=12)
        height = altair.Y("label_y:Q", title=drawing.titles.get("value"), scale=scale)
        layers.append(named.encode(y=height, text="colour:N", **colour))
    points = curve.mark_point(filled=True, size=54)
    layers.append(points.encode(y=y, opacity=opacity(1), tooltip=_tooltip(altair, drawing), **marked))
    layers[-1] = selectable(layers[-1])
    return altair.layer(*layers)


def _with_line_labels(drawing: Drawing, domain: Domain | None) -> list[Mark]:
    """Return the rows of a line chart, with the key "label_y" added to the last point of every line that is named.

    "label_y" is the height at which the line's name is written, in units of the value axis. The names are in the order
    of the lines' ends, and moved apart so that they do not overlap. Beside a legend, only the `MOST_LABELS` lines with
    the highest ends are named. For `domain` see `spec_of`.
    """
    rows = [dict(row) for row in drawing.rows]
    panels: dict[str, dict[str, Mark]] = {}  # name of a panel -> name of a line -> its last point
    for row in rows:
        if "mark" not in row and "colour" in row:
            ends = panels.setdefault(row.get("facet", ""), {})
            if row["colour"] not in ends or row["x"] >= ends[row["colour"]]["x"]:
                ends[row["colour"]] = row
    for panel, ends in panels.items():
        values = values_of(row for row in rows if row.get("facet", "") == panel)
        low, high = (min(values), max(values)) if drawing.apart else _value_ends(drawing, domain)
        gap = (high - low) * LABEL_HEIGHT / HEIGHT
        ordered = sorted(ends.values(), key=lambda row: row["value"])[-MOST_LABELS if drawing.has_legend else 0 :]
        places = _spaced([row["value"] for row in ordered], gap, low, high)
        for row, place in zip(ordered, places, strict=True):
            row["label_y"] = place
    return rows


def _spaced(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return ascending values, moved apart until neighbours differ by at least `gap`.

    The values stay between `low` and `high` if there is room for all of them; otherwise some exceed `high`.
    """
    places = [low - gap]
    for value in values:
        places.append(max(value, places[-1] + gap))
    places = places[1:]
    limit = max(high, low + gap * (len(places) - 1))
    for at in range(len(places) - 1, -1, -1):
        places[at] = min(places[at], limit)
        limit = places[at] - gap
    return places


def _bar_chart(altair: ModuleType, base: Chart, drawing: Drawing, domain: Domain | None) -> Chart:
    """Return a bar chart: vertical bars if x is a number such as a layer, horizontal bars if x is a name.

    Numbers are sorted; names go from top to bottom in the order of the rows. `base` is an empty chart; for `domain` see
    `spec_of`.
    """
    selectable, opacity = _highlight(altair, drawing)
    scale = _value_scale(altair, drawing, domain, zero=True)
    title, names = drawing.titles.get("value"), in_order(drawing.rows, "x")
    upright = not _is_sideways(drawing)
    place, value = ("x", "y") if upright else ("y", "x")
    Place, Offset, Value = (altair.X, altair.XOffset, altair.Y) if upright else (altair.Y, altair.YOffset, altair.X)
    axis = altair.Axis(labelAngle=0, labelOverlap=True) if upright else altair.Axis(labelLimit=150)
    order, title_x = (sorted(names), drawing.titles.get("x")) if upright else (names, None)
    channels: Channels = {place: Place("x:O", sort=order, title=title_x, axis=axis)}
    if len(drawing.series) > 1:
        channels[f"{place}Offset"] = Offset("colour:N", sort=in_order(drawing.rows, "colour"))
    base = base.encode(**channels, opacity=opacity(1))
    length = {value: Value("value:Q", title=title, scale=scale, axis=altair.Axis(tickCount=5))}
    colour = _colour(altair, drawing)
    bars = _plain_rows(base, drawing)
    drawn = bars.mark_bar(cornerRadiusEnd=2).encode(**length, tooltip=_tooltip(altair, drawing), **colour)
    layers = [selectable(drawn)]
    if any("low" in row for row in drawing.rows):
        ends = {value: Value("low:Q", title=title, scale=scale), f"{value}2": "high:Q"}
        layers.append(bars.mark_rule(strokeWidth=1.6).encode(**ends))
    layers += _extra_marks(altair, base, drawing, length, {})
    return altair.layer(*layers) if len(layers) > 1 else layers[0]


def _scatter_chart(altair: ModuleType, base: Chart, drawing: Drawing, domain: Domain | None) -> Chart:
    """Return a scatter plot with one point per row.

    `base` is an empty chart; for `domain` see `spec_of`.
    """
    selectable, opacity = _highlight(altair, drawing)
    y = altair.Y("value:Q", title=drawing.titles.get("value"), scale=_value_scale(altair, drawing, domain))
    points = base.mark_point(filled=True, size=46).encode(
        x=_x_axis(altair, drawing),
        y=y,
        opacity=opacity(0.75),
        tooltip=_tooltip(altair, drawing),
        **_colour(altair, drawing, shape=True),
    )
    return selectable(points)


def _heat_scale(altair: ModuleType, low: float, high: float) -> tuple[alt.Scale, str]:
    """Return a heat map's colour scale from `low` to `high`, and a Vega expression for the cells that need dark text.

    If values lie on both sides of 0 (and not just slightly below), the scale has two colours with white at 0.
    """
    largest = max(high, -low)
    if low < 0 < high and -low > 0.05 * (high - low):
        scale = altair.Scale(scheme="purpleorange", domain=[-largest, largest], domainMid=0)
        return scale, f"abs(datum.value) < {0.6 * largest}"
    return altair.Scale(domain=[low, high]), f"datum.value > {low + 0.55 * (high - low)}"


def _heat_map(altair: ModuleType, base: Chart, drawing: Drawing, domain: Domain | None) -> Chart:
    """Return a heat map: a rectangle per row, coloured by its value, with its label or (if there is room) number.

    If "y" is a number such as a layer, it increases upwards. Names go from top to bottom.
    `base` is an empty chart; for `domain` see `spec_of`.
    """
    rows, titles = drawing.rows, drawing.titles
    values = [row["value"] for row in rows] or [0.0]
    low, high = domain or (0.0 if drawing.from_zero else min(values), max(values))
    scale, needs_dark_text = _heat_scale(altair, low, high)
    columns = in_order(rows, "x")
    names = {str(row["x"]): str(row["x_label"]) for row in rows if "x_label" in row}
    # The names come from data. In a JSON object Vega reads them as texts, so that no name can act as an expression.
    label = {"labelExpr": f"({json.dumps(names)})[datum.value]"} if names else {}
    x_axis = altair.Axis(labelAngle=-45 if names else 0, labelOverlap=not names, domain=False, ticks=False, **label)
    y_axis = altair.Axis(domain=False, ticks=False, labelLimit=150)
    order = sorted(in_order(rows, "y"), reverse=True) if _numeric(rows, "y") else in_order(rows, "y")
    base = base.encode(
        x=altair.X("x:O", sort=columns, title=titles.get("x"), axis=x_axis),
        y=altair.Y("y:O", sort=order, title=titles.get("y"), axis=y_axis),
    )
    colour = altair.Color("value:Q", title=titles.get("value"), scale=scale)
    cells = base.mark_rect().encode(color=colour, tooltip=_tooltip(altair, drawing))
    labelled = any("label" in row for row in rows)
    if not labelled and len(columns) > NUMBERED:
        return cells
    text = altair.Text("label:N") if labelled else altair.Text("value:Q", format=".2f" if high < 100 else ".3~s")
    ink = altair.condition(needs_dark_text, altair.value("#14171a"), altair.value("#ffffff"))
    return cells + base.mark_text(fontSize=11, limit=_TEXT if labelled else 0).encode(text=text, color=ink)


# Okabe and Ito 2008, "Color Universal Design": colours that people with any colour vision can tell apart. The colours
# that stand out most against the background come first.
ON_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4a4f55", "#b3a500")
ON_DARK = ("#56B4E9", "#E69F00", "#1fc294", "#CC79A7", "#F0E442", "#ff7f3f", "#c9d1d9", "#3f9bdc")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def theme(*, dark: bool) -> Spec:
    """Return the Vega-Lite config of the dark or the light theme; charts in files use the light one."""
    ink, quiet, rule, surface = (
        ("#e6e9ed", "#a3adb8", "#2d353e", "#171b20") if dark else ("#1b1f24", "#59636e", "#e2e6ea", "#ffffff")
    )
    series, shades = (ON_DARK, [0.12, 1]) if dark else (ON_LIGHT, [0, 0.88])
    viridis = {"scheme": "viridis", "extent": shades}
    return {
        "background": surface,
        "font": FONT,
        "padding": 4,
        "range": {
            "category": list(series),
            "ordinal": viridis,
            "ramp": {"scheme": "viridis"},
            "heatmap": {"scheme": "viridis"},
            "symbol": list(SYMBOLS),
        },
        "mark": {"color": series[0]},
        "rule": {"color": ink},
        "view": {"stroke": None},
        "axis": {
            "labelColor": quiet,
            "titleColor": ink,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "titlePadding": 9,
            "domainColor": rule,
            "tickColor": rule,
            "gridColor": rule,
            "labelFlush": False,
        },
        "axisYQuantitative": {"tickCount": 5},
        "axisX": {"domainColor": quiet, "tickColor": quiet},
        "header": {
            "labelLimit": 260,
            "labelColor": ink,
            "labelFontSize": 13,
            "labelFontWeight": 600,
            "labelAnchor": "start",
        },
        "legend": {
            "labelColor": ink,
            "titleColor": quiet,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 400,
            "labelLimit": 240,
            "titleLimit": 400,
            "orient": "top",
            "gradientLength": 160,
            "gradientThickness": 10,
            "symbolSize": 90,
            "rowPadding": 5,
        },
        "title": {"color": ink, "subtitleColor": quiet, "anchor": "start", "fontSize": 15, "subtitleFontSize": 12},
    }
