"""Colours of the page's charts, light and dark: those of Okabe and Ito, and viridis, which all readers tell apart."""

from __future__ import annotations

from typing import Any

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
