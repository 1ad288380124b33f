"""Charts of the page: what is drawn, as Vega-Lite, and the light and dark themes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from lamina.report.chart_files import chart_package, in_order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    Domain = tuple[float, float]

LAYER = "layer (0 = embeddings)"


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


FEW_TICKS = 26  # values of x up to which each has its tick
FEW_SERIES = 8  # colours that can be told apart; more are shades
NUMBERED = 13  # columns of a heat map up to which its numbers are written into it
HIGH = 260  # of a chart that is no heat map
_TEXT, _NUMBER, _CELL = 62, 30, 12  # the narrowest cells of a heat map: with a text, a number, nothing


def spec_of(drawing: Drawing, domain: Domain | None = None) -> dict[str, Any]:
    """A chart as Vega-Lite.

    Args:
        drawing: What is drawn.
        domain: Lowest and highest value of the axis or the colours, as charts side by side share them.

    Raises:
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    altair = chart_package("report")
    draw = {"line": _line, "heat": _heat, "bar": _bar, "scatter": _scatter}[drawing.kind]
    base = altair.Chart(altair.Data(values=[]))
    chart = draw(altair, base, drawing, domain).properties(height=_height(drawing))
    if any("facet" in row for row in drawing.rows):
        panels = in_order(drawing.rows, "facet")
        panel = altair.Facet("facet:N", title=None, sort=panels)
        chart = chart.properties(width=280).facet(facet=panel, columns=min(3, len(panels)), spacing=24)
        if drawing.apart:
            chart = chart.resolve_scale(**{"x" if _down(drawing) else "y": "independent"})
    said = " ".join(filter(None, (f"{drawing.title}.", drawing.note, drawing.remark)))
    spec = chart.properties(description=said).to_dict(validate=False)  # which would take longer than all else
    return {**spec, "data": {"values": drawing.rows}}  # Altair would walk through every cell


def layout_of(drawing: Drawing) -> dict[str, int]:
    """What the page has to know to fit a chart in: its panels, and the cells of a heat map with what stands beside."""
    panels = len(in_order(drawing.rows, "facet")) if any("facet" in row for row in drawing.rows) else 0
    layout = {"panels": panels, "marks": len(drawing.rows)}
    if drawing.kind == "heat":
        columns = len(in_order(drawing.rows, "x"))
        written = "label" in drawing.rows[0] if drawing.rows else False
        step = _TEXT if written else _NUMBER if columns <= NUMBERED else _CELL
        beside = max((len(str(row["y"])) for row in drawing.rows), default=1)
        layout |= {"columns": columns, "step": step, "margin": 36 + min(150, 7 * beside)}
    return layout


def _height(drawing: Drawing) -> int:
    if drawing.kind == "heat":
        rows = len(in_order(drawing.rows, "y"))
        return rows * max(16, min(34, 460 // max(1, rows)))
    if _down(drawing):
        return max(60, 26 * len({(row["x"], row.get("colour")) for row in drawing.rows}))
    return HIGH


def _series(drawing: Drawing) -> bool:
    """Whether there are several series to be told apart."""
    return len({row.get("colour") for row in drawing.rows}) > 1


def _numeric(rows: Sequence[Any], key: str) -> bool:
    return all(isinstance(row.get(key, 0), int | float) for row in rows)


def _tooltip(altair: ModuleType, drawing: Drawing) -> list[Any]:
    """What is said of a point, in the order in which it is read."""
    there = {key for row in drawing.rows for key in row}
    titles = {"label": "", "seeds": "seeds", "low": "95 % from", "high": "95 % to", **drawing.titles}
    found = []
    for key in ("facet", "colour", "label", "x_label", "x", "y", "value", "low", "high", "seeds"):
        if key in there:
            number = key in ("low", "high") or (key in ("value", "x", "y") and _numeric(drawing.rows, key))
            form = {"format": ".4~g"} if number else {}
            found.append(altair.Tooltip(f"{key}:{'Q' if number else 'N'}", title=titles.get(key) or key, **form))
    return found


def _down(drawing: Drawing) -> bool:
    """Whether names stand down the side, and values run along the bottom."""
    return drawing.kind == "bar" and not _numeric(drawing.rows, "x")


def _value_scale(altair: ModuleType, drawing: Drawing, domain: Domain | None, *, zero: bool = False) -> Any:
    if drawing.apart:
        return altair.Scale(zero=zero)
    ends = [row[key] for row in drawing.rows for key in ("low", "value", "high") if key in row]
    low, high = domain or (min(ends, default=0.0), max(ends, default=1.0))
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    return altair.Scale(domain=[low, high], zero=zero, nice=True)


def _colour(altair: ModuleType, drawing: Drawing, *, shape: bool = False) -> dict[str, Any]:
    """Colour (and shape, which needs no colours to be seen) by series; clicking the legend picks one."""
    if not _series(drawing):
        return {}
    names = in_order(drawing.rows, "colour")
    shades = _numeric(drawing.rows, "colour") or len(names) > FEW_SERIES
    kind = "O" if shades else "N"
    title, names = drawing.titles.get("colour"), sorted(names) if _numeric(drawing.rows, "colour") else names
    about = {"title": title, "scale": altair.Scale(domain=names), "legend": altair.Legend(symbolOpacity=1)}
    found = {"color": altair.Color(f"colour:{kind}", **about)}
    if shape and not shades:
        found["shape"] = altair.Shape(f"colour:{kind}", **about)
    return found


def _picked(altair: ModuleType, drawing: Drawing) -> tuple[Any, Any]:
    """The series that was clicked in the legend, and how visible a series is."""
    picked = altair.selection_point(name="picked", fields=["colour"], bind="legend")
    return (picked if _series(drawing) else None), (
        lambda seen: altair.condition(picked, altair.value(seen), altair.value(0.08))
    )


def _x_axis(altair: ModuleType, drawing: Drawing) -> Any:
    title = drawing.titles.get("x")
    if not _numeric(drawing.rows, "x"):
        axis = altair.Axis(labelAngle=0, labelLimit=90)
        return altair.X("x:N", sort=in_order(drawing.rows, "x"), title=title, axis=axis)
    values = sorted({row["x"] for row in drawing.rows if not row.get("across")})
    ticks: dict[str, Any] = {"values": values} if len(values) <= FEW_TICKS else {}
    axis = altair.Axis(grid=False, format="~r", labelOverlap=True, **ticks)
    log = {"type": "log", "base": 2} if drawing.log_x and all(value > 0 for value in values) else {}
    return altair.X("x:Q", title=title, axis=axis, scale=altair.Scale(zero=False, nice=False, padding=14, **log))


def _line(altair: ModuleType, base: Any, drawing: Drawing, domain: Domain | None) -> Any:
    picked, seen = _picked(altair, drawing)
    scale = _value_scale(altair, drawing, domain)
    y, low = (altair.Y(f"{key}:Q", title=drawing.titles.get("value"), scale=scale) for key in ("value", "low"))
    base = base.encode(x=_x_axis(altair, drawing))
    shade = (lambda opacity: seen(opacity)) if picked is not None else altair.value
    colour, marked = _colour(altair, drawing), _colour(altair, drawing, shape=True)
    curve = base.transform_filter("!datum.across") if any(row.get("across") for row in drawing.rows) else base
    layers = []
    if any("low" in row for row in drawing.rows):
        numbers = _numeric(drawing.rows, "x")
        band = base.mark_area() if numbers else base.mark_rule(strokeWidth=2)
        layers.append(band.encode(y=low, y2="high:Q", opacity=shade(0.16 if numbers else 1), **colour))
    layers.append(curve.mark_line(strokeWidth=2).encode(y=y, opacity=shade(1), **colour))
    if curve is not base:
        across = base.transform_filter("datum.across").mark_line(strokeWidth=2, strokeDash=[6, 4])
        layers.append(across.encode(y=y, opacity=shade(1), tooltip=_tooltip(altair, drawing), **colour))
    points = curve.mark_point(filled=True, size=54)
    layers.append(points.encode(y=y, opacity=shade(1), tooltip=_tooltip(altair, drawing), **marked))
    if picked is not None:
        layers[-1] = layers[-1].add_params(picked)
    return altair.layer(*layers)


def _bar(altair: ModuleType, base: Any, drawing: Drawing, domain: Domain | None) -> Any:
    """Bars, along the bottom for numbers such as layers, down the side for names, which need the room."""
    picked, seen = _picked(altair, drawing)
    scale = _value_scale(altair, drawing, domain, zero=True)
    opacity = seen(1) if picked is not None else altair.value(1)
    title, names = drawing.titles.get("value"), in_order(drawing.rows, "x")
    upright = not _down(drawing)
    (place, offset, value, low, high), (Place, Offset, Value) = (
        (("x", "xOffset", "y", "y", "y2"), (altair.X, altair.XOffset, altair.Y))
        if upright
        else (("y", "yOffset", "x", "x", "x2"), (altair.Y, altair.YOffset, altair.X))
    )
    axis = altair.Axis(labelAngle=0, labelOverlap=True) if upright else altair.Axis(labelLimit=150)
    title_x = drawing.titles.get("x") if upright else None
    along: dict[str, Any] = {place: Place("x:O", sort=sorted(names) if upright else names, title=title_x, axis=axis)}
    if _series(drawing):
        along[offset] = Offset("colour:N", sort=in_order(drawing.rows, "colour"))
    base = base.encode(**along, opacity=opacity)
    bars = base.mark_bar(cornerRadiusEnd=2).encode(
        **{value: Value("value:Q", title=title, scale=scale, axis=altair.Axis(tickCount=5))},
        tooltip=_tooltip(altair, drawing),
        **_colour(altair, drawing),
    )
    if any("low" in row for row in drawing.rows):
        ends = {low: Value("low:Q", title=title, scale=scale), high: "high:Q"}
        bars += base.mark_rule(strokeWidth=1.6).encode(**ends)
    return bars.add_params(picked) if picked is not None else bars


def _scatter(altair: ModuleType, base: Any, drawing: Drawing, domain: Domain | None) -> Any:
    picked, seen = _picked(altair, drawing)
    y = altair.Y("value:Q", title=drawing.titles.get("value"), scale=_value_scale(altair, drawing, domain))
    points = base.mark_point(filled=True, size=46).encode(
        x=_x_axis(altair, drawing),
        y=y,
        opacity=seen(0.75) if picked is not None else altair.value(0.75),
        tooltip=_tooltip(altair, drawing),
        **_colour(altair, drawing, shape=True),
    )
    return points.add_params(picked) if picked is not None else points


def _heat(altair: ModuleType, base: Any, drawing: Drawing, domain: Domain | None) -> Any:
    """Cells; layers go up, as they do in a model, and names go down, as they are read."""
    rows, titles = drawing.rows, drawing.titles
    values = [row["value"] for row in rows] or [0.0]
    low, high = domain or (min(values), max(values))
    both = low < 0 < high
    if both and -low > 0.05 * (high - low):
        high = max(high, -low)
        scale = altair.Scale(scheme="purpleorange", domain=[-high, high], domainMid=0)
    else:
        scale, both = altair.Scale(domain=[low, high]), False
    columns = in_order(rows, "x")
    names = {row["x"]: row["x_label"] for row in rows if "x_label" in row}
    axis: dict[str, Any] = {
        "labelAngle": -45 if names else 0,
        "labelOverlap": not names,
        "domain": False,
        "ticks": False,
    }
    if names:
        axis["labelExpr"] = _named(names)
    order = sorted(in_order(rows, "y"), reverse=True) if _numeric(rows, "y") else in_order(rows, "y")
    base = base.encode(
        x=altair.X("x:O", sort=columns, title=titles.get("x"), axis=altair.Axis(**axis)),
        y=altair.Y(
            "y:O", sort=order, title=titles.get("y"), axis=altair.Axis(domain=False, ticks=False, labelLimit=150)
        ),
    )
    colour = altair.Color("value:Q", title=titles.get("value"), scale=scale)
    cells = base.mark_rect().encode(color=colour, tooltip=_tooltip(altair, drawing))
    labelled = any("label" in row for row in rows)
    if not labelled and len(columns) > NUMBERED:
        return cells
    text = altair.Text("label:N") if labelled else altair.Text("value:Q", format=".2f" if high < 100 else ".3~s")
    light = f"abs(datum.value) < {0.6 * high}" if both else f"datum.value > {low + 0.55 * (high - low)}"
    ink = altair.condition(light, altair.value("#14171a"), altair.value("#ffffff"))
    return cells + base.mark_text(fontSize=11, limit=_TEXT if labelled else 0).encode(text=text, color=ink)


def _named(names: dict[Any, str]) -> str:
    """An expression for the names of x, as texts that hold nothing but themselves."""
    import json

    return f"({json.dumps({str(x): str(name) for x, name in names.items()})})[datum.value]"


# Okabe and Ito 2008, "Color Universal Design"; those that stand out most against the background come first.
ON_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4a4f55", "#b3a500")
ON_DARK = ("#56B4E9", "#E69F00", "#1fc294", "#CC79A7", "#F0E442", "#ff7f3f", "#c9d1d9", "#3f9bdc")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def theme(*, dark: bool) -> dict[str, Any]:
    """A Vega-Lite config; without a page around them charts are drawn in the light one."""
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
            "symbol": [
                "circle",
                "square",
                "triangle-up",
                "diamond",
                "cross",
                "triangle-down",
                "triangle-right",
                "wedge",
            ],
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
