"""Charts of layer importances as files: at the best epoch, and over training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from lamina.report.chart_files import (
    INK,
    INTERVAL_SEEDS,
    Mark,
    chart_package,
    checked_path,
    importance,
    in_order,
    panel_header,
    save_chart,
    styled,
)
from lamina.train.results import summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from lamina.report.chart_files import Chart, Rows


FINAL, TRAINING = "importance", "importance-over-training"
TRAINING_WIDTH, TRAINING_HEIGHT = 380, 210  # size of a panel, in pixels
TRAINING_COLUMNS = 2  # panels side by side
FEW_POINTS = 12  # up to this many points on a line, each point is drawn
NAMED = 3  # number of lines with the highest ends, which have the number of the layer at their end
LEGEND_ROWS = 13  # with more layers than this, the legend has two columns
RAMP = ("#54398f", "#2f6db3", "#1f9aa8", "#3a9d4e", "#c2a01e", "#e0702f", "#b5263c")  # lowest layer to highest layer


class DrawnRun(TypedDict):
    """A run whose importances are drawn: the title of its panel, and its best epoch (None: unknown)."""

    reader: str
    kept: int | None


def draw_importances(
    importances: Rows, table: Rows, folder: Path | str, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Draw the importances of the layers in a recipe's run as two charts.

    `importance.png` has a bar per layer, at the best epoch. `importance-over-training.png` has a line per layer, over
    steps if the option `importance_steps` was set, otherwise over epochs. Runs that differ only in their seed are
    averaged, and the mean is drawn with its 95 % t interval. If a grid of settings was searched, only the best setting
    of each task and method is drawn. Raises MissingExtraError if there is something to draw and the packages of
    `lamina[report]` are not installed, and StoreError if a file cannot be written.

    Args:
        importances: `RecipeResult.importances`, or the rows of `importances.parquet`.
        table: `RecipeResult.table`, or the rows of `table.json`.
        folder: Folder to write to.
        formats: Formats of the files: "png", "svg" and "html".

    Returns:
        The paths of the files; [] if no reader mixes layers.

    Source:
        Dremov 2024, figures 8 and 9, 12 and 13, 16 and 17.
    """
    drawn_rows, best = _drawn_rows(importances, table)
    if not best:
        return []
    drawn: list[Path] = []
    for kind in dict.fromkeys(formats):
        drawn.append(importance(_means(best, ("reader", "layer")), Path(folder) / f"{FINAL}.{kind}"))
        drawn.append(importance_over_training(drawn_rows, Path(folder) / f"{TRAINING}.{kind}"))
    return drawn


def averaged_importances(importances: Rows, table: Rows) -> tuple[list[Mark], list[Mark], str]:
    """Return the data of the two charts of `draw_importances`, averaged over seeds.

    Args:
        importances: `RecipeResult.importances`, or the rows of `importances.parquet`.
        table: `RecipeResult.table`, or the rows of `table.json`.

    Returns:
        The rows of the chart at the best epoch; the rows of the chart over training; and the key of the x axis of
        the chart over training, "step" or "epoch". Rows have "reader", "layer" and "importance", and with enough seeds
        for an interval its ends "low" and "high".
    """
    drawn_rows, best = _drawn_rows(importances, table)
    over, x = _over_training(drawn_rows)
    return _means(best, ("reader", "layer")), _means(over, ("reader", "layer", x)), x


def _drawn_rows(importances: Rows, table: Rows) -> tuple[list[Mark], list[Mark]]:
    """Return the rows of importances to draw over training, and the rows of each run's best epoch.

    Runs whose setting is not the best of a grid are left out. In the returned rows, "reader" is the title of the run's
    panel, and "run" is the name of the reader.
    """
    known = {row["reader"] for row in importances}
    runs = {reader: run for reader, run in _runs(table).items() if reader in known}
    rows = [{**row, "run": row["reader"], **runs[row["reader"]]} for row in importances if row["reader"] in runs]
    rows.sort(key=lambda row: list(runs).index(row["run"]))
    last: dict[str, int] = {}  # run -> its best epoch, or the last one before it for which there are importances
    for row in rows:
        if row["epoch"] is not None and row["epoch"] <= (row["kept"] or row["epoch"]):
            last[row["run"]] = row["epoch"]
    return rows, [row for row in rows if row["epoch"] == last.get(row["run"], -1)]


def _over_training(rows: Rows) -> tuple[Rows, str]:
    """Return the rows to draw over training, and the key of their x axis: "step" or "epoch".

    Rows that were recorded at a step have no epoch. If there are such rows, only they are returned.
    """
    by_step = any(row["epoch"] is None for row in rows)
    return [row for row in rows if (row["epoch"] is None) == by_step], "step" if by_step else "epoch"


def _runs(table: Rows) -> dict[str, DrawnRun]:
    """Return reader -> title of its panel and its best epoch, from the table of a recipe's run.

    For each task and method, only the first setting in the table is included, which is the best one of a grid.
    """
    runs: dict[str, DrawnRun] = {}
    several, seen = len(in_order(table, "task")) > 1, set[tuple[str, str]]()
    for row in table:
        if (key := (row["task"], row["method"])) not in seen:
            seen.add(key)
            settings = "".join(f", {name}={value}" for name, value in row["settings"].items())
            title = (f"{row['task']}: " if several else "") + row["method"] + settings
            for run in row["runs"]:
                runs[run["reader"]] = DrawnRun(reader=title, kept=run.get("best_epoch"))
    return runs


def importance_over_training(
    rows: Rows, path: Path | str, *, title: str = "Importance of each layer over training"
) -> Path:
    """Draw the importance of each layer over training, with a panel per reader, and return the path of the file.

    The x axis shows steps if importances were recorded between epochs, otherwise epochs.

    Args:
        rows: Rows of `FitResult.importances`, with "reader", "epoch", "step", "layer" and "importance". Rows that
            differ only in "importance" come from several runs: they are averaged, and a band shows the 95 % t interval.
        path: File to write; ends in `.png`, `.svg` or `.html`.
        title: Title of the chart.

    Raises:
        ConfigError: If the path has another suffix.
        DataError: If there are no rows, or one lacks a key.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
    """
    path = checked_path("importance figure", path, rows, ("reader", "epoch", "layer", "importance"))
    altair = chart_package("importance figure")
    over, x = _over_training(rows)
    checked_path("importance figure", path, over, (x,))
    return save_chart(styled(_lines(altair, _means(over, ("reader", "layer", x)), x), title), path)


def _means(rows: Rows, keys: tuple[str, ...]) -> list[Mark]:
    """Return the mean "importance" of each group of rows that have equal values of `keys`, one row per group.

    A group of at least `INTERVAL_SEEDS` rows also gets "low" and "high": the ends of the 95 % t interval within 0 to 1.
    """
    groups: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(float(row["importance"]))
    means: list[Mark] = []
    for values_of_keys, importances in groups.items():
        summary = summarise(importances)
        half = summary.interval if len(importances) >= INTERVAL_SEEDS else None
        ends = {} if half is None else {"low": max(0.0, summary.mean - half), "high": min(1.0, summary.mean + half)}
        means.append({**dict(zip(keys, values_of_keys, strict=True)), "importance": summary.mean, **ends})
    return means


def _lines(altair: ModuleType, rows: Rows, x: str) -> Chart:
    """Return the chart of `importance_over_training` from rows averaged over seeds. `x` is "step" or "epoch"."""
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
    header = panel_header(altair)
    facet = altair.Facet("reader:N", sort=readers, header=header)
    return chart.facet(facet=facet, columns=TRAINING_COLUMNS, spacing=22).resolve_scale(x="independent")


def _named(rows: Rows, x: str) -> list[Mark]:
    """Return the rows with a new key "name": 1 if the layer's number is written beside the point, else 0.

    Numbers stand at the last points of each reader's highest lines, unless these points are too close together.
    """
    top = max(row["importance"] for row in rows)
    labelled: list[Mapping[str, Any]] = []
    for reader in in_order(rows, "reader"):
        of_reader = [row for row in rows if row["reader"] == reader]
        end = max(row[x] for row in of_reader)
        for row in sorted((row for row in of_reader if row[x] == end), key=lambda row: -row["importance"])[:NAMED]:
            apart = [abs(row["importance"] - other["importance"]) for other in labelled if other["reader"] == reader]
            labelled += [row] if min(apart, default=top) > 0.06 * top else []
    return [{**row, "name": int(any(row is other for other in labelled))} for row in rows]


def ramp(count: int) -> list[str]:
    """Return `count` colours as hexadecimal codes, evenly spaced over the colour ramp `RAMP`."""
    anchors = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in RAMP]
    colours = []
    for number in range(count):
        at, part = divmod(number / max(1, count - 1) * (len(RAMP) - 1), 1)
        low, high = anchors[int(at)], anchors[min(int(at) + 1, len(RAMP) - 1)]
        colours.append("#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(low, high, strict=True)))
    return colours
