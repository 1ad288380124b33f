"""`lamina report FOLDER`: the tables and figures of a run, as its recipe names them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table
from lamina.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.report_file import PivotTable, Report

_FORMAT = 'Of the figures: "png", "svg" or "html"; may be given several times.'
_BESIDE = "Output folder of another run, to draw its figures into those of this one; may be given several times."


def report(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Output folder of `lamina train`.")],
    image_format: Annotated[list[str] | None, Option("--format", help=_FORMAT)] = None,
    beside: Annotated[list[Path] | None, Option(metavar="FOLDER", help=_BESIDE)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the tables of a run in the rows and columns of its recipe, the paper's numbers beside; draw its figures.

    The folder gets report.md, report.tex (for the package booktabs) and the figures.
    """
    written = write(folder, image_format or ["png"], beside or [])
    if as_json:
        print_json(written)
        return
    for table in written.tables:
        _show(table)
    print(f"{folder}: {', '.join(written.files)}")


def write(folder: Path, formats: list[str], beside: Sequence[Path] = ()) -> Report:
    """Write the report of a folder; without the packages that draw, all but the figures, and say so."""
    from lamina.report.folder import write_report

    try:
        return write_report(folder, formats, beside=beside)
    except MissingExtraError as error:
        print(f"warning: no figure was drawn; {error}", file=sys.stderr)
        return write_report(folder, [])


def _show(table: PivotTable) -> None:
    from lamina.report.tables import PAPER, chosen, grid, heads, remarks

    columns = ["", *(PAPER if paper else name for name, paper in heads(table))]
    print_table(table.title, columns, grid(table))
    print(" ".join(remarks(table)))
    for line in chosen(table):
        print(f"- {line}")
    print()
