"""The report of a run's folder: its tables as Markdown and LaTeX, its figures drawn, all at once or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, check_known, convert_errors
from lamina.recipes.report_file import LATEX, MARKDOWN, REPORT, read_report_file, write_report_file
from lamina.report.curves import draw
from lamina.report.importance_figures import draw_importances
from lamina.report.tables import latex, markdown, markdown_text
from lamina.store.files import damaged, settle, staged
from lamina.utils import is_dir, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.report_file import Curves, Report

FORMATS = ("png", "svg", "html")


def write_report(folder: str | Path, formats: Sequence[str] = ("png",), *, beside: Sequence[str | Path] = ()) -> Report:
    """Write what the recipe of a run named: `report.md`, `report.tex`, and each figure as `figure-1.png` and so on.

    A figure that no run has given a point is left out. Where readers mix layers, `importance.png` has a bar per layer,
    and `importance-over-training.png` a line.

    Args:
        folder: The output folder of `lamina train` or `run_recipe`.
        formats: Of the figures: "png", "svg" and "html"; none: they are not drawn.
        beside: Folders of other runs, whose first figure is drawn into the first one here, and so on.

    Returns:
        The tables and figures, and the names of the `files` that hold them now.

    Raises:
        UnknownNameError: If a format is none of the three.
        ConfigError: If a folder is given twice.
        StoreError: If the folder holds no `report.json`, a damaged one, or cannot be written.
        MissingExtraError: If there are figures, and the packages of `lamina[report]` are not installed.
    """
    folder = Path(folder)
    check_known("report", formats, FORMATS, "format")
    if is_dir(folder):
        settle(folder)
    report = read_report_file(folder)
    name, *names = labelled([folder, *map(Path, beside)])
    others = {key: read_report_file(Path(other)).figures for key, other in zip(names, beside, strict=True)}
    joined = [_joined(number, figure, name, others) for number, figure in enumerate(report.figures)]
    shown = {number: figure for number, figure in enumerate(joined, start=1) if figure.points}
    drawn = [(f"figure-{number}.{kind}", figure) for number, figure in shown.items() for kind in dict.fromkeys(formats)]
    images = [
        f"![{markdown_text(figure.title)}](figure-{number}.{formats[0]})\n"
        for number, figure in shown.items()
        if formats
    ]
    importances, table = read_importances(folder)
    with staged(folder, (REPORT, MARKDOWN, LATEX), report.files) as stage:
        for name, figure in drawn:
            draw(figure, stage / name)
        pictures = [path.name for path in draw_importances(importances, table, stage, formats)]
        images += [f"![Importance of layers]({name})\n" for name in pictures if name.endswith(f".{formats[0]}")]
        written = replace(report, files=[MARKDOWN, LATEX, *(name for name, _ in drawn), *pictures])
        write_text(stage / MARKDOWN, "\n".join([*map(markdown, report.tables), *images]))
        write_text(stage / LATEX, "\n".join(map(latex, report.tables)))
        write_report_file(stage / REPORT, written)
    return written


def labelled(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by name: as much of the end of each path as it takes to tell them apart; ConfigError if one is twice."""
    whole = [folder.resolve() for folder in folders]
    if not whole or len(set(whole)) < len(whole):
        twice = next((str(path) for path in folders if whole.count(path.resolve()) > 1), "")
        raise ConfigError(f"report: {f'{twice} is given twice' if twice else 'no run is given'}.")
    parts, names = 1, [path.name for path in whole]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(path.parts[-parts:]) for path in whole]
    return dict(zip(names, folders, strict=True))


def read_importances(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a run's `importances.parquet` and `table.json`; none where a run wrote none."""
    from pyarrow import parquet

    rows, table = folder / "importances.parquet", folder / "table.json"
    if not (rows.exists() and table.exists()):
        return [], []
    with convert_errors(lambda reason: damaged(rows, f"cannot be read ({reason})")):
        importances = parquet.read_table(rows).to_pylist()
    with convert_errors(lambda reason: damaged(table, f"cannot be read ({reason})")):
        return importances, json.loads(table.read_text(encoding="utf-8"))


def _joined(number: int, figure: Curves, name: str, others: dict[str, list[Curves]]) -> Curves:
    """A figure with the points of others; if they share a series, all bear the names of their folders."""
    parts = {name: figure.points, **{key: own[number].points for key, own in others.items() if number < len(own)}}
    series = [{point.series for point in points} for points in parts.values()]
    shared = len(set().union(*series)) < sum(map(len, series))
    points = [
        replace(point, series=", ".join(filter(None, (point.series, key))) if shared else point.series)
        for key, own in parts.items()
        for point in own
    ]
    return replace(figure, points=points)
