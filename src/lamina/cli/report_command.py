"""`lamina report`: print and draw the results of a run, or write one HTML page about several studies and runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lamina.cli.shared_options import JsonOption, names_of, print_json, print_table
from lamina.errors import ConfigError, MissingExtraError
from lamina.utils import is_file, pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.report_file import PivotTable, Report

_RUNS = "Output folders of `lamina train` and `lamina study`. Several folders, or a study, need -o."
_OUTPUT = "Write one HTML page about all runs, which opens without a server. Default: print the tables of one run."
_TITLE = "With -o: title of the page. Default: what was studied, and the model."
_FILES = "With -o: also write each chart (PNG, SVG) and table (Markdown, LaTeX) of the page as a file."
_FORMAT = 'Without -o: format of the figures, "png" (the default), "svg" or "html"; may be repeated.'
_BESIDE = "Without -o: output folder of another run, to draw its curves into the figures of this run; may be repeated."


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help=_RUNS)],
    output: Annotated[Path | None, Option("--output", "-o", metavar="PAGE.html", help=_OUTPUT)] = None,
    title: Annotated[str | None, Option(help=_TITLE)] = None,
    files: Annotated[bool, Option("--files", help=_FILES)] = False,
    image_format: Annotated[list[str] | None, Option("--format", metavar="NAME,...", help=_FORMAT)] = None,
    beside: Annotated[list[Path] | None, Option(metavar="FOLDER", help=_BESIDE)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a training run's tables and draw its figures, or write one HTML page about several studies and runs.

    Without -o, the tables are printed in the layout of the recipe, beside a paper's numbers if the recipe has them. The
    tables (report.md, and report.tex for the LaTeX package booktabs) and figures are saved in the run's folder.

    With -o, the page shows verdicts first, then charts, tables, settings and seeds. Wrong input ends with one sentence
    and exit code 2.
    """
    from lamina.recipes.report_file import STUDY

    if output is not None:
        if image_format or beside:
            what = "--format and --beside are for figures in a run's folder"
            raise ConfigError(f"report: {what}; with -o give more RUNs.")
        _write_page(runs, output, title, files=files, as_json=as_json)
        return
    if len(runs) > 1 or title is not None or files:
        problem = f"{len(runs)} runs are" if len(runs) > 1 else "--files is" if files else "--title is"
        raise ConfigError(f"report: {problem} given without a page. Add -o page.html.")
    if is_file(runs[0] / STUDY):
        raise ConfigError(f"report: {runs[0]} is a study, whose report is a page. Add -o page.html.")
    written = write(runs[0], names_of("--format", image_format) or ["png"], beside or [])
    if as_json:
        print_json(written)
        return
    for table in written.tables:
        _show(table)
    print(f"{runs[0]}: {', '.join(written.files)}")


def _write_page(runs: Sequence[Path], output: Path, title: str | None, *, files: bool, as_json: bool) -> None:
    """Write one HTML page about studies and training runs, and print how many charts it has (or its facts as JSON).

    `runs` are their output folders, `output` is the page, and `title` its title (None: what was studied, and the
    model). With `files`, charts and tables become files too. For errors see `lamina.report.write_page`.
    """
    from lamina.report.html_page import write_page

    page = write_page(runs, output, as_files=files, title=title)
    if as_json:
        print_json(page)
        return
    beside = f"; {pluralize(len(page.files), 'file')} in {page.files[0].parent}" if page.files else ""
    print(f"{page.path}: {pluralize(page.charts, 'chart')} from {pluralize(len(page.runs), 'run')}{beside}")


def write(folder: Path, formats: list[str], beside: Sequence[Path] = ()) -> Report:
    """Write the tables and figures of a training run into its folder, and return them.

    If the packages for drawing are not installed, a warning is printed to stderr and figures are left out. Arguments
    and other errors are those of `lamina.report.write_report`.
    """
    from lamina.report.run_report import write_report

    try:
        return write_report(folder, formats, beside=beside)
    except MissingExtraError as error:
        print(f"warning: no figure was drawn; {error}", file=sys.stderr)
        return write_report(folder, [])


def _show(table: PivotTable) -> None:
    from lamina.report.run_report import PAPER, chosen, grid, heads, remarks

    columns = ["", *(PAPER if paper else name for name, paper in heads(table))]
    print_table(table.title, columns, grid(table))
    print(" ".join(remarks(table)))
    for line in chosen(table):
        print(f"- {line}")
    print()
