"""Heat maps of inserted weights: the start, what training made of it, and the change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.report.figures import INK, chart_package, checked_path, in_order, save_chart, styled
from lamina.report.weights import STATES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lamina.report.weights import InsertedWeight

DIVERGING = ("#c05a1c", "#ffffff", "#0b4a8f")  # below 0, 0, above
SHOWN = 7  # rows and columns of a weight


def weight_maps(
    weights: Mapping[str, InsertedWeight],
    path: Path | str,
    *,
    head: int = 0,
    most: int = SHOWN,
    title: str = "Weights of an inserted layer",
) -> Path:
    """Draw inserted weights as heat maps: a row per model; its start, what training made of it, and the change.

    Start and trained share a scale in each row; the changes of all rows share one, to be compared.

    Args:
        weights: What the row is called -> the weight of one inserted layer; see `inserted_weights`.
        path: Where to; `.png`, `.svg` or `.html`.
        head: Which head of a layer in attention, from 0.
        most: Rows and columns that are drawn, from the first.
        title: Written above.

    Returns:
        `path`.

    Raises:
        ConfigError: If the suffix is none of the three, or a weight has no such head.
        DataError: If there are no weights.
        MissingExtraError: If the packages of `lamina[report]` are not installed.

    Source:
        "How to insert additional layers between the middle layers of the pre-trained model", Figure 5, which shows
        7 x 7 weights of layers that start by Xavier and as the unit matrix.
    """
    rows = [cell for name, weight in weights.items() for cell in _cells(name, weight, head, most)]
    path = checked_path("weight figure", path, rows, ("model", "state", "row", "column", "weight"))
    altair = chart_package("weight figure")
    change = max(abs(row["weight"]) for row in rows if row["state"] == "change")
    bands = []
    for name in in_order(rows, "model"):
        own = [row for row in rows if row["model"] == name]
        size = max(abs(row["weight"]) for row in own if row["state"] != "change")
        limits = {state: change if state == "change" else size for state in STATES}
        panels = [_panel(altair, [row for row in own if row["state"] == state], limits[state]) for state in STATES]
        heading = altair.TitleParams(name, anchor="start", fontSize=13)
        bands.append(altair.hconcat(*panels, spacing=26, title=heading).resolve_scale(color="independent"))
    chart = altair.vconcat(*bands, spacing=22).resolve_scale(color="independent")
    places = (f"{weight.projection} of {weight.stack} block {weight.layer}" for weight in weights.values())
    below = "; ".join(dict.fromkeys(places))
    heads = f", head {head}" if any(len(weight.trained) > 1 for weight in weights.values()) else ""
    return save_chart(styled(chart, title, [f"after {below}{heads}; the first {most} rows and columns"]), path)


def _cells(name: str, weight: InsertedWeight, head: int, most: int) -> list[dict[str, Any]]:
    """The entries of a weight that are drawn."""
    if not 0 <= head < len(weight.trained):
        came = f"head is {head}; the layer after {weight.projection} has {len(weight.trained)}"
        raise ConfigError(f"weight figure: {came}. Use 0..{len(weight.trained) - 1}.")
    return [
        {"model": name, "state": state, "row": row, "column": column, "weight": entry}
        for state, matrix in weight.states().items()
        for row, entries in enumerate(matrix[head, :most, :most].tolist(), 1)
        for column, entry in enumerate(entries, 1)
    ]


def _panel(altair: Any, cells: list[dict[str, Any]], limit: float) -> Any:
    """One heat map, from -limit to limit, with its numbers where there are few."""
    side = 34 if len(cells) <= SHOWN**2 else max(4, 34 * SHOWN // max(cell["row"] for cell in cells))
    limit = limit or 1.0
    base = altair.Chart(altair.Data(values=cells)).encode(
        x=altair.X("column:O", axis=None), y=altair.Y("row:O", axis=None)
    )
    scale = altair.Scale(domain=[-limit, 0, limit], range=list(DIVERGING), interpolate="rgb")  # else 0 is tinted
    legend = altair.Legend(title=None, tickCount=3, format=".2~g", gradientLength=120)
    tooltip = ["row:O", "column:O", altair.Tooltip("weight:Q", format=".4f")]
    drawn = base.mark_rect().encode(color=altair.Color("weight:Q", scale=scale, legend=legend), tooltip=tooltip)
    if len(cells) <= SHOWN**2:
        form = ".2f" if limit >= 0.1 else ".1e" if limit < 0.001 else ".3f"
        ink = altair.condition(f"abs(datum.weight) > {0.6 * limit}", altair.value("white"), altair.value(INK))
        drawn += base.mark_text(fontSize=9).encode(text=altair.Text("weight:Q", format=form), color=ink)
    heading = altair.TitleParams(cells[0]["state"], anchor="start", fontSize=12, fontWeight="normal")
    columns = max(cell["column"] for cell in cells)
    return drawn.properties(width=side * columns, height=side * max(cell["row"] for cell in cells), title=heading)
