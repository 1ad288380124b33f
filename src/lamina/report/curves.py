"""Curves of a run's report, such as scores by layer: their chart, for the HTML page and as a file."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from lamina.report.chart_files import checked_path, save_drawing
from lamina.report.charts import DOT, INTERVAL_SEEDS, Drawing, Mark, drawn_ends, single_runs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lamina.recipes.report_file import Cell, Curves, Point

LETTERS = 84  # characters of a line below the title


def curve_rows(figure: Curves) -> list[Mark]:
    """Return the data of a figure's chart: one row per point, with its interval if the point averages enough runs.

    A point without an x becomes a line across its panel: a row with "across" at both ends of the x axis, or at each
    name on it. A point that averages two runs also has a row with the score of each run.
    """
    several = len({point.metric for point in figure.points}) > 1
    places: dict[str, list[float | str]] = {}  # panel -> the x of its points
    for point in figure.points:
        places.setdefault(point.facet, []).extend([] if point.x is None else [point.x])
    rows: list[Mark] = []
    for point in figure.points:
        facet = f"{point.facet} ({point.metric})" if several else point.facet
        mark: Mark = {"facet": facet} if facet else {}
        mark |= {"colour": point.series, "value": point.mean, "seeds": point.runs}
        if point.interval is not None and point.runs >= INTERVAL_SEEDS:
            mark["low"], mark["high"] = drawn_ends(point.mean, point.interval, [point.metric], figure.scale)
        if point.x is None:
            rows += [{**mark, "x": x, "across": True} for x in _ends(places[point.facet])]
        else:
            mark["x"] = point.x
            dots = single_runs(point.mean, point.spread, point.runs)
            rows += [mark, *({**mark, "value": value, "mark": DOT} for value in dots)]
    return rows


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
    across = (
        f"A dashed line is a {word} without a value for the horizontal axis: its score, drawn across."
        if any("across" in row for row in rows)
        else ""
    )
    sources = (f"{text.rstrip('.')}." for text in (figure.source, *figure.notes) if text)
    note = " ".join([across, *sources]).strip()
    titles = {"x": figure.x_title, "value": f"{metric} ({figure.part}){times(figure.scale)}", "colour": word}
    remark, several = runs_remark(figure.points), len(metrics) > 1
    return Drawing("line", rows, figure.title, titles, note, remark, log_x=figure.log_x, apart=several)


def times(scale: float) -> str:
    """Return the factor that scores were multiplied by, as part of an axis title, such as " x 100"; "" for 1."""
    return "" if scale == 1 else f" x {scale:g}"


def runs_remark(cells: Sequence[Cell | Point]) -> str:
    """Return the remark below a chart: how many runs its points average, and whether intervals are drawn.

    `cells` must not be empty.
    """
    counts = sorted({cell.runs for cell in cells})
    if counts[-1:] == [1]:
        return "One run per point, so there is no interval"
    span = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    if counts[-1] < INTERVAL_SEEDS:
        return f"Mean of {span} runs. Each dot is a run. An interval needs at least {INTERVAL_SEEDS} runs"
    return f"Mean of {span} runs, with its 95 % confidence interval"


def draw_curves(figure: Curves, path: Path | str) -> Path:
    """Draw a figure of a run's report as a chart of curves in a `.png`, `.svg` or `.html` file, and return its path.

    Each point is drawn with its 95 % interval or, if it averages two runs, with both scores. A method without a value
    on the x axis is a dashed line across the panel. Raises ConfigError if the path has another suffix; DataError if
    there are no points; MissingExtraError if the packages of `lamina[report]` are not installed; StoreError if writing
    fails.
    """
    path = checked_path("figure", path, curve_rows(figure), ("x", "value"))
    drawing = curves_drawing(figure)
    below = [line for text in (drawing.note, drawing.remark) for line in wrap(text, LETTERS)]
    return save_drawing(drawing, path, below)
