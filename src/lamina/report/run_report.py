"""The report of a run's folder: tables as Markdown and LaTeX, and its charts, written all at once or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, check_known, convert_errors
from lamina.recipes.report_file import LATEX, MARKDOWN, REPORT, read_report_file, write_report_file
from lamina.report.chart_files import draw_curves, draw_importances
from lamina.store.files import damaged, settle, staged
from lamina.utils import is_dir, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.report_file import Cell, Curves, PivotTable, Report

PAPER = "paper"  # heads the columns of printed numbers
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}
_SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
_MARKDOWN = re.compile(r"([\\|*_<>\[\]`])")


def heads(table: PivotTable) -> list[tuple[str, bool]]:
    """Return the names of all columns but the first, each with whether it holds the paper's numbers."""
    printed = {name for values in (*table.published.values(), *table.others.values()) for name in values}
    return [(name, of_paper) for name in table.columns for of_paper in (False, *([True] if name in printed else []))]


def grid(table: PivotTable) -> list[list[str]]:
    """Return the rows of a table as texts: the name, then a cell per column of `heads`, "" where there is no number."""
    found = {(cell.row, cell.column): cell for cell in table.cells}
    rows = []
    for name, printed in [*((row, table.published.get(row, {})) for row in table.rows), *table.others.items()]:
        cells = [
            _of_paper(printed.get(at), table) if paper else _cell(found.get((name, at)), table)
            for at, paper in heads(table)
        ]
        rows.append([name, *cells])
    return rows


def _cell(cell: Cell | None, table: PivotTable) -> str:
    if cell is None:
        return ""
    mean = f"{cell.mean:.{table.digits}f}"
    return mean if cell.interval is None else f"{mean} ± {cell.interval:.{table.digits}f}"


def _of_paper(number: float | None, table: PivotTable) -> str:
    """Return a published number with its digits restored, since YAML drops zeros at the end."""
    if number is None or isinstance(number, int):
        return "" if number is None else str(number)
    return max(f"{number:.{table.digits}f}", str(number), key=len)


def remarks(table: PivotTable) -> list[str]:
    """Return the remarks below a table: the split, what ± means, and the source of the paper's numbers."""
    part = "Test" if table.part == "test" else "Validation"
    counts = sorted({cell.runs for cell in table.cells})
    means = f"; ± is half a 95 % interval over {' to '.join(map(str, counts[:: len(counts) - 1 or 1]))} runs"
    times = "" if table.scale == 1 else f" x {table.scale:g}"
    said = [f"{part} scores{times}{means if any(cell.interval is not None for cell in table.cells) else ''}."]
    if table.source:
        said.append(f"'{PAPER}': {table.source}.")
    said += [note.rstrip(".") + "." for note in table.notes]
    return said


def chosen(table: PivotTable) -> list[str]:
    """Return the best settings of a search, a line per row and its columns that share them."""
    columns: dict[tuple[str, str], list[str]] = {}
    for cell in table.cells:
        settings = ", ".join(f"{key}={value}" for key, value in cell.settings.items())
        columns.setdefault((cell.row, settings), []).append(cell.column)
    lines = {f"{row} ({'; '.join(own)}): {settings}": row for (row, settings), own in columns.items() if settings}
    return sorted(lines, key=lambda line: table.rows.index(lines[line]))


def markdown(table: PivotTable) -> str:
    """Return a table as Markdown, with its remarks and the best settings."""
    names = ["", *(f"{name} ({PAPER})" if paper else name for name, paper in heads(table))]
    head, *body = (f"| {' | '.join(map(markdown_text, line))} |" for line in (names, *grid(table)))
    lines = [
        f"## {markdown_text(table.title)}",
        "",
        head,
        "|---|" + "---:|" * (len(names) - 1),
        *body,
        "",
        markdown_text(" ".join(remarks(table))),
    ]
    if settings := chosen(table):
        lines += ["", "Chosen by validation score:", "", *(f"- {markdown_text(line)}" for line in settings)]
    return "\n".join([*lines, ""])


def markdown_text(text: str) -> str:
    """Return a text with Markdown's special characters escaped."""
    return _MARKDOWN.sub(r"\\\1", text)


def latex(table: PivotTable) -> str:
    """Return a table as LaTeX for the package booktabs."""
    columns = heads(table)
    names = ["", *(f"{name} ({PAPER})" if paper else name for name, paper in columns)]
    head, *lines = (" & ".join(map(escaped, row)) + r" \\" for row in (names, *grid(table)))
    ours, others = lines[: len(table.rows)], lines[len(table.rows) :]
    body = [r"\toprule", head, r"\midrule", *ours, *([r"\midrule", *others] if others else []), r"\bottomrule"]
    begin = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{l{'r' * len(columns)}}}"]
    caption = escaped(f"{table.title}. {' '.join(remarks(table))}")
    return "\n".join([*begin, *body, r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}", ""])


def escaped(text: str) -> str:
    """Return a text with LaTeX's special characters escaped."""
    return "".join(_SPECIAL.get(sign, sign) for sign in text)


FORMATS = ("png", "svg", "html")


def write_report(folder: str | Path, formats: Sequence[str] = ("png",), *, beside: Sequence[str | Path] = ()) -> Report:
    """Write the tables (`report.md`, `report.tex`) and figures (`figure-1.png` and so on) of a run's recipe.

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
            draw_curves(figure, stage / name)
        pictures = [path.name for path in draw_importances(importances, table, stage, formats)]
        images += [f"![Importance of layers]({name})\n" for name in pictures if name.endswith(f".{formats[0]}")]
        written = replace(report, files=[MARKDOWN, LATEX, *(name for name, _ in drawn), *pictures])
        write_text(stage / MARKDOWN, "\n".join([*map(markdown, report.tables), *images]))
        write_text(stage / LATEX, "\n".join(map(latex, report.tables)))
        write_report_file(stage / REPORT, written)
    return written


def labelled(folders: Sequence[Path]) -> dict[str, Path]:
    """Return folders by name: the shortest ends of their paths that differ; ConfigError if a folder is there twice."""
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
    """Return the rows of a run's `importances.parquet` and `table.json`; two empty lists if it wrote none."""
    from pyarrow import parquet

    rows, table = folder / "importances.parquet", folder / "table.json"
    if not (rows.exists() and table.exists()):
        return [], []
    with convert_errors(lambda reason: damaged(rows, f"cannot be read ({reason})")):
        importances = parquet.read_table(rows).to_pylist()
    with convert_errors(lambda reason: damaged(table, f"cannot be read ({reason})")):
        return importances, json.loads(table.read_text(encoding="utf-8"))


def _joined(number: int, figure: Curves, name: str, others: dict[str, list[Curves]]) -> Curves:
    """Return a figure joined with the same figure of other runs.

    If runs have a series of the same name, every series is given the name of its folder.

    Args:
        number: Number of the figure, from 0.
        figure: The figure.
        name: Name of its folder.
        others: The figures of the other runs, by folder.
    """
    parts = {name: figure.points, **{key: own[number].points for key, own in others.items() if number < len(own)}}
    series = [{point.series for point in points} for points in parts.values()]
    shared = len(set().union(*series)) < sum(map(len, series))
    points = [
        replace(point, series=", ".join(filter(None, (point.series, key))) if shared else point.series)
        for key, own in parts.items()
        for point in own
    ]
    return replace(figure, points=points)
