"""Write the report of a training run into its folder: tables as Markdown and LaTeX, and charts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import regex
from pydantic import BaseModel, TypeAdapter

from lamina.errors import ConfigError, check_known, convert_errors
from lamina.recipes.monitor_keys import rates_text
from lamina.recipes.report_file import LATEX, MARKDOWN, REPORT, averaged, read_report_file, write_report_file
from lamina.recipes.table_layouts import PARAMETERS
from lamina.report.charts import count_range
from lamina.report.importance_charts import draw_curves, draw_importances, times
from lamina.store.files import damaged, settle, staged
from lamina.utils import is_dir, no_pipe, parse_json, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.paper_tables import SummaryRow
    from lamina.recipes.report_file import Cell, Curves, PivotTable, Report
    from lamina.report.charts import Rows

PAPER = "paper"  # name of the columns that hold the numbers of a paper
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}
_SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
# signs with a meaning anywhere; "&" before an entity such as "&lt;"; and those that make a line a list item or a rule
_MARKDOWN = regex.compile(
    r"(?m)([\\|*_<>\[\]`~#]|&(?=#?\w+;)|(?<=^[ \t]*)[-+=](?=[-=\s]|$)|(?<=^[ \t]*\d+)[.)](?=\s|$))"
)


def heads(table: PivotTable) -> list[tuple[str, bool]]:
    """Return a table's columns except the first, as pairs (name, whether the column holds a paper's numbers).

    A column for which a paper has numbers occurs twice: first for the measured numbers, then for the paper's.
    """
    published = {name for values in (*table.published.values(), *table.others.values()) for name in values}
    return [
        (name, is_paper) for name in table.columns for is_paper in ((False, True) if name in published else (False,))
    ]


def grid(table: PivotTable) -> list[list[str]]:
    """Return the rows of a table as text: the row's name, then a cell per column of `heads`, "" without a number.

    Rows that a paper quotes from other papers come last.
    """
    measured = {(cell.row, cell.column): cell for cell in table.cells}
    rows = []
    for name, published in [*((row, table.published.get(row, {})) for row in table.rows), *table.others.items()]:
        cells = [
            _paper_text(published.get(column), table) if is_paper else _cell_text(measured.get((name, column)), table)
            for column, is_paper in heads(table)
        ]
        rows.append([name, *cells])
    return rows


def _cell_text(cell: Cell | None, table: PivotTable) -> str:
    if cell is None:
        return ""
    mean = f"{cell.mean:.{table.digits}f}"
    return mean if cell.interval is None else f"{mean} ± {cell.interval:.{table.digits}f}"


def _paper_text(number: float | None, table: PivotTable) -> str:
    """Return a paper's number as text; "" for None. A float gets at least the table's decimals: YAML drops zeros."""
    if number is None or isinstance(number, int):
        return "" if number is None else str(number)
    return max(f"{number:.{table.digits}f}", str(number), key=len)


def remarks(table: PivotTable) -> list[str]:
    """Return the sentences below a table: the split, the meaning of ±, the source of the paper's numbers, and notes.

    What the table does not have is left out. A table of parameter counts names no split.
    """
    part = "Test" if table.part == "test" else "Validation"
    has_intervals = any(cell.interval is not None for cell in table.cells)
    by_noun: dict[str, set[int]] = {}
    for count, noun in (averaged(cell) for cell in table.cells if cell.metric != PARAMETERS):
        by_noun.setdefault(noun, set()).add(count)
    counts = [f"{count_range(sorted(by_noun[noun]))} {noun}s" for noun in ("run", "subsample") if noun in by_noun]
    first = " (the runs of each are averaged first)" if "subsample" in by_noun else ""
    intervals = f"; ± is half a 95 % interval over {' or '.join(counts)}{first}" if has_intervals else ""
    counted = bool(table.cells) and all(cell.metric == PARAMETERS for cell in table.cells)
    sentences = [
        f"Trained parameters{times(table.scale)}." if counted else f"{part} scores{times(table.scale)}{intervals}."
    ]
    if table.source:
        sentences.append(f"'{PAPER}': {table.source}.")
    return sentences + [f"{note.rstrip('.')}." for note in table.notes]


def _image(figure: Curves, name: str) -> str:
    about = [f"{text.rstrip('.')}." for text in (figure.source, *figure.notes) if text]
    below = [markdown_text(" ".join(about)), ""] if about else []
    return "\n".join([_shown(markdown_text(figure.title), name), "", *below])


def _shown(title: str, name: str) -> str:
    """Return a chart's file as Markdown: as an image or, because HTML cannot be one, as a link for `.html`."""
    return f"{'' if name.endswith('.html') else '!'}[{title}]({name})"


def chosen(table: PivotTable) -> list[str]:
    """Return the settings that a search over a grid chose, as lines of text, in the order of the table's rows.

    If several columns of a row chose the same settings, they share a line, for example "AdaLayers (CoLA; SST-2):
    alpha=64". The list is empty if nothing was searched.
    """
    columns: dict[tuple[str, str], list[str]] = {}  # (row, settings) -> columns with these settings
    for cell in table.cells:
        settings = ", ".join(f"{key}={value}" for key, value in cell.settings.items())
        columns.setdefault((cell.row, settings), []).append(cell.column)
    lines = {f"{row} ({'; '.join(names)}): {settings}": row for (row, settings), names in columns.items() if settings}
    return sorted(lines, key=lambda line: table.rows.index(lines[line]))


def markdown(table: PivotTable) -> str:
    """Return a table as Markdown, followed by its remarks and the settings that a search chose."""
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


def monitors_markdown(report: Report) -> list[str]:
    """Return the rates of a recipe's monitors as a list of one Markdown section; [] if it has no monitors."""
    if not report.monitors:
        return []
    sentences = [f"- {markdown_text(rates_text(row))}" for row in report.monitors]
    return ["\n".join(["## Monitors", "", *sentences, ""])]


def markdown_text(text: str) -> str:
    """Return a text with Markdown's special characters escaped."""
    return _MARKDOWN.sub(r"\\\1", text)


def latex(table: PivotTable) -> str:
    """Return a table as LaTeX for the package booktabs, with its remarks in the caption."""
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
    """Write the tables and figures that a run's recipe asks for into the run's folder. All files are written, or none.

    The tables are in `report.md` and `report.tex`, the figures in `figure-1.png` and so on. A figure without points is
    left out. If readers mix layers, `importance.png` shows the importance of each layer at the best epoch, and
    `importance-over-training.png` shows it over training. Files of an earlier report are removed or replaced.

    Args:
        folder: The output folder of `lamina train` or `run_recipe`.
        formats: Formats of the figures: "png", "svg" and "html". `report.md` shows the figures in the first format, or
            links to them if it is "html". Empty: no figures.
        beside: Output folders of other runs. The curves of their n-th figure are added to the n-th figure of this run.

    Returns:
        The tables and figures; its `files` are the names of the written files.

    Raises:
        UnknownNameError: If there is no such format.
        ConfigError: If a folder is given twice.
        StoreError: If a folder has no `report.json`, if a file in it is damaged, or if the folder cannot be written.
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
    images = [_image(figure, f"figure-{number}.{formats[0]}") for number, figure in shown.items() if formats]
    importances, table = read_importances(folder)
    with staged(folder, (REPORT, MARKDOWN, LATEX), report.files) as stage:
        for name, figure in drawn:
            draw_curves(figure, stage / name)
        charts = [path.name for path in draw_importances(importances, table, stage, formats)]
        images += [f"{_shown('Importance of layers', name)}\n" for name in charts if name.endswith(f".{formats[0]}")]
        written = replace(report, files=[MARKDOWN, LATEX, *(name for name, _ in drawn), *charts])
        write_text(stage / MARKDOWN, "\n".join([*map(markdown, report.tables), *monitors_markdown(report), *images]))
        write_text(stage / LATEX, "\n".join(map(latex, report.tables)))
        write_report_file(stage / REPORT, written)
    return written


def labelled(folders: Sequence[Path]) -> dict[str, Path]:
    """Return name -> folder. A name is the last part of the path, or as many last parts as make the names different.

    Raises ConfigError if there is no folder, or the same folder twice.
    """
    whole = [folder.resolve() for folder in folders]
    if not whole or len(set(whole)) < len(whole):
        twice = next((str(path) for path in folders if whole.count(path.resolve()) > 1), "")
        raise ConfigError(f"report: {f'{twice} is given twice' if twice else 'no run is given'}.")
    parts, names = 1, [path.name for path in whole]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(path.parts[-parts:]) for path in whole]
    return dict(zip(names, folders, strict=True))


def read_importances(folder: Path) -> tuple[Rows, Rows]:
    """Return the rows of a run's `importances.parquet` and of its `table.json`; both empty if a file is missing.

    Raises StoreError if a file is damaged.
    """
    from pyarrow import parquet

    if not ((rows := folder / "importances.parquet").exists() and (table := read_table(folder))):
        return [], []
    with convert_errors(lambda reason: damaged(rows, f"cannot be read ({reason})")):
        return parquet.read_table(no_pipe(rows)).to_pylist(), table


def read_table(folder: Path) -> list[SummaryRow]:
    """Return the rows of a run's `table.json`; [] if there is none.

    Raises StoreError if the file is damaged, or a row lacks what a report shows.
    """
    if not (path := folder / "table.json").exists():
        return []
    with convert_errors(lambda reason: damaged(path, f"cannot be read ({reason})")):
        rows = parse_json(no_pipe(path).read_text(encoding="utf-8"))
        _ROWS.validate_python(rows)
    return rows


class _Run(BaseModel):
    reader: str
    score: float


class _Row(BaseModel):
    task: str
    method: str
    settings: dict[str, object]
    metric: str
    mean: float
    spread: float
    interval: float | None
    runs: list[_Run]


_ROWS = TypeAdapter(list[_Row])


def _joined(number: int, figure: Curves, name: str, others: dict[str, list[Curves]]) -> Curves:
    """Return a figure with the points of the same figure of other runs added.

    `name` is the name of the figure's run, `number` the number of the figure in each run (from 0), and `others` is name
    of another run -> its figures. If two runs have a series (a line) of one name, every series gets its run's name too.
    """
    by_folder = {name: figure.points}
    by_folder |= {key: figures[number].points for key, figures in others.items() if number < len(figures)}
    series = [{point.series for point in points} for points in by_folder.values()]
    is_shared = len(set().union(*series)) < sum(map(len, series))
    points = [
        replace(point, series=", ".join(filter(None, (point.series, key))) if is_shared else point.series)
        for key, of_folder in by_folder.items()
        for point in of_folder
    ]
    return replace(figure, points=points)
