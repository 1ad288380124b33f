"""Charts of a training run, for the HTML page and as files: its curves, and the importances of layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lamina.errors import error_context
from lamina.recipes.report_file import averaged
from lamina.report.chart_files import checked_path, save_drawing
from lamina.report.charts import DOT, INTERVAL_SEEDS, LAYER, RULE, Drawing, Mark, drawn_ends, in_order, interval_remark
from lamina.tasks.label_cells import plain
from lamina.train.results import independent, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.recipes.report_file import Cell, Curves, Point
    from lamina.report.charts import Rows

FINAL, TRAINING = "importance", "importance-over-training"
MOST_BARS = 4  # with more readers than this, their importances are drawn as a heat map instead of bars
SHARE = "share of the layer"  # title of the axis of importances


def importance(rows: Rows, path: Path | str, *, title: str = "Which layers each reader uses") -> Path:
    """Draw the importance of each layer for each reader, and return the path of the file.

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
        StoreError: If the file cannot be written.
    """
    path = checked_path("importance figure", path, rows, ("reader", "layer", "importance"))
    return save_drawing(_shares(rows, title), path)


def _shares(rows: Rows, title: str) -> Drawing:
    """Return the chart of `importance`: bars for up to four readers (`MOST_BARS`), or else a heat map."""
    readers, titles = in_order(rows, "reader"), {"x": LAYER, "value": SHARE}
    shares = "The shares of a reader sum to 1."
    if len(readers) > MOST_BARS:
        cells = [_mark(row, x="layer", y="reader") for row in rows]
        return Drawing("heat", cells, title, titles, shares, _remark(rows), from_zero=True)
    bars = [_mark(row, facet="reader", x="layer") for row in rows]
    counts = Counter(bar["facet"] for bar in bars)
    lowest = {bar["facet"]: bar for bar in sorted(bars, key=lambda bar: -bar["value"])}  # the line's name fits above it
    equal: list[Mark] = []
    for bar in bars:
        count = counts[bar["facet"]]
        name = {"label": f"1/{count}"} if bar is lowest[bar["facet"]] else {}
        equal.append({"facet": bar["facet"], "x": bar["x"], "value": 1 / count, "mark": RULE, **name})
    note = f"{shares} The dashed line (1/n) is the share if all n layers counted the same."
    return Drawing("bar", [*bars, *equal], title, titles, note, _remark(rows))


def _mark(row: Mapping[str, object], **keys: str) -> Mark:
    keys = {**keys, "value": "importance", **{key: key for key in ("low", "high") if key in row}}
    return {new: plain(row[old]) for new, old in keys.items()}


def _remark(rows: Rows) -> str:
    if all("seeds" in row for row in rows):
        return runs_remark(rows)
    has_intervals = any("low" in row for row in rows)
    return "Mean of all seeds, with its 95 % confidence interval" if has_intervals else "Mean of all seeds"


def importance_drawings(importances: Rows, table: Rows) -> dict[str, Drawing]:
    """Return name -> chart of the importances of the layers in a recipe's run; {} if no reader mixes layers.

    "importance" has a bar per layer, at the best epoch, or with more than four readers a heat map.
    "importance-over-training" has a line per layer, over steps if the option `importance_steps` was set, otherwise over
    epochs. Runs that differ only in their seed are averaged; from three runs on, the 95 % t interval is drawn too. If a
    grid of settings was searched, only the best setting of each task and method is drawn.

    Args:
        importances: `RecipeResult.importances`, or the rows of `importances.parquet`.
        table: `RecipeResult.table`, or the rows of `table.json`.

    Source:
        Dremov 2024, figures 8 and 9, 12 and 13, 16 and 17.
    """
    drawn_rows, best = _drawn_rows(importances, table)
    if not best:
        return {}
    final = _shares(_means(best, ("reader", "layer")), "Which layers each reader uses")
    return {FINAL: final, TRAINING: _over_training(drawn_rows, "Importance of each layer over training")}


def draw_importances(
    importances: Rows, table: Rows, folder: Path | str, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Draw the charts of `importance_drawings` into a folder, and return the paths of the files; [] if there are none.

    `formats` are "png", "svg" and "html". Raises MissingExtraError if there is something to draw and the packages of
    `lamina[report]` are not installed, and StoreError if a file cannot be written.
    """
    drawings = importance_drawings(importances, table)
    return [
        save_drawing(drawing, Path(folder) / f"{name}.{kind}")
        for kind in dict.fromkeys(formats)
        for name, drawing in drawings.items()
    ]


def _drawn_rows(importances: Rows, table: Rows) -> tuple[list[Mark], list[Mark]]:
    """Return the rows of importances to draw over training, and the rows of each run's best epoch among them.

    If the best epoch has no rows, the last epoch before it counts; if a run has no best epoch, its last one. For the
    arguments see `importance_drawings`. Runs whose setting is not the best of a grid are left out. In the returned
    rows, "reader" is the title of the run's panel, and "run" is the name of the reader.
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


def _over_training(rows: Rows, title: str) -> Drawing:
    """Return the chart of importances over training, with a panel per reader and a line per layer.

    Rows that were recorded at a step have no epoch. If there are such rows, only they are drawn, over steps.
    """
    by_step = [row for row in rows if row["epoch"] is None]
    x = "step" if by_step else "epoch"
    means = _means(by_step or rows, ("reader", "layer", x))
    lines = [_mark(row, facet="reader", x=x, colour="layer") for row in means]
    note = "If a line still rises or falls at the end, the reader was not trained to the end."
    return Drawing("line", lines, title, {"x": x, "value": SHARE, "colour": LAYER}, note, _remark(means))


def _runs(table: Rows) -> dict[str, Mark]:
    """Return reader name -> the title of its panel ("reader"), its best epoch ("kept") and its "repeat".

    `table` has the rows of results of a recipe's run. Only readers of the first setting of each task and
    method, which is the best of a grid, are included.
    """
    runs: dict[str, Mark] = {}
    several, seen = len(in_order(table, "task")) > 1, set[tuple[str, str]]()
    for row in table:
        if (key := (row["task"], row["method"])) not in seen:
            seen.add(key)
            settings = "".join(f", {name}={value}" for name, value in row["settings"].items())
            title = (f"{row['task']}: " if several else "") + row["method"] + settings
            for run in row["runs"]:
                runs[run["reader"]] = {"reader": title, "kept": run.get("best_epoch"), "repeat": run.get("repeat")}
    return runs


def importance_over_training(
    rows: Rows, path: Path | str, *, title: str = "Importance of each layer over training"
) -> Path:
    """Draw the importance of each layer over training, with a panel per reader, and return the path of the file.

    The x axis shows steps if importances were recorded between epochs, otherwise epochs.

    Args:
        rows: Rows of `FitResult.importances`, with "reader", "epoch" (None between epochs), "layer", "importance" and,
            between epochs, "step". Rows that differ only in "importance" come from several runs. They are averaged;
            from three runs on a band shows the 95 % t interval.
        path: File to write; ends in `.png`, `.svg` or `.html`.
        title: Title of the chart.

    Raises:
        ConfigError: If the path has another suffix, or one of several importances to average is not finite.
        DataError: If there are no rows, or one lacks a key.
        MissingExtraError: If the packages of `lamina[report]` are not installed.
        StoreError: If the file cannot be written.
    """
    path = checked_path("importance figure", path, rows, ("reader", "epoch", "layer", "importance"))
    if by_step := [row for row in rows if row["epoch"] is None]:
        checked_path("importance figure", path, by_step, ("step",))
    return save_drawing(_over_training(rows, title), path)


def _means(rows: Rows, keys: tuple[str, ...]) -> list[Mark]:
    """Return one row per group of rows with equal values of `keys`: these, "seeds" (the count), and mean "importance".

    With several subsamples and several seeds, the rows of each subsample ("repeat") are averaged first, the count is
    that of the subsamples, and "over" is "subsample". From a count of `INTERVAL_SEEDS` on, a group also gets "low" and
    "high": the ends of the 95 % t interval within 0 to 1. Raises ConfigError, naming the group, if one of several
    importances is not finite.
    """
    groups: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    means: list[Mark] = []
    for values_of_keys, group in groups.items():
        importances = [float(row["importance"]) for row in group]
        with error_context(", ".join(f"{key} {value}" for key, value in zip(keys, values_of_keys, strict=True))):
            summary = summarise(independent(importances, [row.get("repeat") for row in group]))
        half = summary.shown_interval
        ends = {} if half is None else {"low": max(0.0, summary.mean - half), "high": min(1.0, summary.mean + half)}
        counted: Mark = {"seeds": summary.count, "importance": summary.mean}
        counted |= {"over": "subsample"} if summary.count < len(group) else {}
        means.append({**dict(zip(keys, values_of_keys, strict=True)), **counted, **ends})
    return means


LETTERS = 84  # characters of a line below the title


def curve_rows(figure: Curves) -> list[Mark]:
    """Return the data of a figure's chart: one row per point, with its interval if it averages three runs or more.

    A point without an x becomes a line across its panel: one row with "across" for each end of the x axis, or for each
    x if these are names. A point that averages two runs also gets two rows with the scores of the runs.
    """
    several = len({point.metric for point in figure.points}) > 1
    places: dict[str, list[float | str]] = {}  # panel -> the x of its points
    for point in figure.points:
        places.setdefault(point.facet, []).extend([] if point.x is None else [point.x])
    rows: list[Mark] = []
    for point in figure.points:
        facet = f"{point.facet} ({point.metric})" if several else point.facet
        panel: Mark = {"facet": facet} if facet else {}
        marks = run_marks({**panel, "colour": point.series}, point, figure.scale)
        if point.x is None:
            rows += [{**marks[0], "x": x, "across": True} for x in _ends(places[point.facet])]
        else:
            rows += [{**mark, "x": point.x} for mark in marks]
    return rows


def run_marks(mark: Mark, cell: Cell | Point, scale: float) -> list[Mark]:
    """Return `mark`, a row of a chart, with the mean of a cell's runs and, from three values on, its 95 % interval.

    If the mean is of two values, a row with each of them follows, the lower first. A value is the score of a run or,
    with several seeds and several subsamples, the mean of a subsample's runs ("over" is then "subsample"). `scale` is
    the factor by which the scores were multiplied.
    """
    count, noun = averaged(cell)
    mark = {**mark, "value": cell.mean, "seeds": count, **({} if noun == "run" else {"over": noun})}
    if cell.interval is not None and count >= INTERVAL_SEEDS:
        mark["low"], mark["high"] = drawn_ends(cell.mean, cell.interval, [cell.metric], scale)
    half = cell.spread / 2**0.5  # two values a and b have the sample standard deviation |a - b| / sqrt(2)
    values = (cell.mean - half, cell.mean + half) if count == 2 else ()
    return [mark, *({**mark, "value": value, "mark": DOT} for value in values)]


def _ends(along: Sequence[float | str]) -> list[float | str]:
    """Return the ends of an x axis: the lowest and highest number in `along`, or all names in it; [0] if empty."""
    numbers = [x for x in along if isinstance(x, int | float)]
    if len(numbers) < len(along):
        return list(dict.fromkeys(along))
    return [min(numbers), max(numbers)] if numbers else [0]


def curves_drawing(figure: Curves, word: str = "method") -> Drawing:
    """Return the chart of a figure; `word` names what a line stands for, such as "reader".

    The figure's source and notes are in the chart's note. Panels of different metrics have their own scales.
    """
    rows = curve_rows(figure)
    metrics = list(dict.fromkeys(point.metric for point in figure.points))
    metric = metrics[0] if len(metrics) == 1 else "score"
    has_across = any("across" in row for row in rows)
    across = f"A dashed line is a {word} without a value for the horizontal axis: its score, drawn across."
    sources = (f"{text.rstrip('.')}." for text in (figure.source, *figure.notes) if text)
    note = " ".join([*([across] if has_across else []), *sources])
    titles = {"x": figure.x_title, "value": f"{metric} ({figure.part}){times(figure.scale)}", "colour": word}
    remark, several = runs_remark(rows), len(metrics) > 1
    return Drawing("line", rows, figure.title, titles, note, remark, log_x=figure.log_x, apart=several)


def times(scale: float) -> str:
    """Return the factor that scores were multiplied by, as part of an axis title, such as " x 100"; "" for 1."""
    return "" if scale == 1 else f" x {scale:g}"


def runs_remark(rows: Rows) -> str:
    """Return the remark below a chart: how many runs its points average, and which have intervals; "" if no `rows`.

    "seeds" of each row of the chart is the number of runs of its point; or of subsamples, if "over" says so.
    """
    remarks: list[str] = []
    for noun in ("run", "subsample"):
        group = [row for row in rows if row.get("over", "run") == noun]
        has_dots = any(row.get("mark") == DOT for row in group)
        remarks.append(interval_remark({row["seeds"] for row in group}, noun, has_dots=has_dots))
    remark = "; ".join(filter(None, remarks))
    return remark[:1].upper() + remark[1:]


def draw_curves(figure: Curves, path: Path | str) -> Path:
    """Draw a figure of a run's report as a chart of curves in a `.png`, `.svg` or `.html` file, and return its path.

    See `curve_rows` for what is drawn. Raises ConfigError if the path has another suffix; DataError if there are no
    points; MissingExtraError if the packages of `lamina[report]` are not installed; StoreError if writing fails.
    """
    path = checked_path("figure", path, curve_rows(figure), ("x", "value"))
    drawing = curves_drawing(figure)
    below = [line for text in (drawing.note, drawing.remark) for line in wrap(text, LETTERS)]
    return save_drawing(drawing, path, below)
