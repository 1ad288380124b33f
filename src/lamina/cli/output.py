"""Tables on a terminal, JSON for programs; both on standard output alone."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDE = 160  # columns where the output is no terminal


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value, which may be a dataclass, as JSON; NaN and infinities, which JSON does not have, become null."""
    from pydantic_core import to_jsonable_python

    print(json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=indent, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns that hold numbers are set to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(columns):
        numeric = all(isinstance(row[number], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(text, row))
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False).print(table)


def text(cell: object) -> str:
    """A cell as text: numbers with separators or four decimals, None empty."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
