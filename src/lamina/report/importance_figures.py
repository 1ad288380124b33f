"""Pictures of the importances of layers: how they form over training, and what a run ended with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.report.figures import INK, chart_package, checked_path, importance, in_order, save_chart, styled
from lamina.train.results import summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

    Rows = Sequence[Mapping[str, Any]]

FINAL, TRAINING = "importance", "importance-over-training"
WIDE, HIGH, COLUMNS = 380, 210, 2  # of a panel, and panels side by side
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
    chart = altair.layer(*drawn).properties(width=WIDE, height=HIGH)
    header = altair.Header(title=None, labelFontSize=13, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    facet = altair.Facet("reader:N", sort=readers, header=header)
    return chart.facet(facet=facet, columns=COLUMNS, spacing=22).resolve_scale(x="independent")


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
