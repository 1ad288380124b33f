"""Tables as in a paper, what it prints beside what was measured: cells, and as Markdown and LaTeX."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.recipes.report_file import Cell, PivotTable

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
    """The columns beside the first, each with whether it is of the paper's numbers."""
    printed = {name for values in (*table.published.values(), *table.others.values()) for name in values}
    return [(name, of_paper) for name in table.columns for of_paper in (False, *([True] if name in printed else []))]


def grid(table: PivotTable) -> list[list[str]]:
    """The rows of a table as texts: its name, then a cell for each of `heads`; empty where there is no number."""
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
    """A printed number, which YAML has robbed of the zeros at its end."""
    if number is None or isinstance(number, int):
        return "" if number is None else str(number)
    return max(f"{number:.{table.digits}f}", str(number), key=len)


def remarks(table: PivotTable) -> list[str]:
    """What stands below a table: which part, what ± is, where the paper's numbers are from, which settings won."""
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
    """The settings that were searched and won, a line for each row and its columns that share them."""
    columns: dict[tuple[str, str], list[str]] = {}
    for cell in table.cells:
        settings = ", ".join(f"{key}={value}" for key, value in cell.settings.items())
        columns.setdefault((cell.row, settings), []).append(cell.column)
    lines = {f"{row} ({'; '.join(own)}): {settings}": row for (row, settings), own in columns.items() if settings}
    return sorted(lines, key=lambda line: table.rows.index(lines[line]))


def markdown(table: PivotTable) -> str:
    """A table as Markdown, with its remarks and the chosen settings."""
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
    """A text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", text)


def latex(table: PivotTable) -> str:
    """A table as LaTeX, for the package booktabs."""
    columns = heads(table)
    names = ["", *(f"{name} ({PAPER})" if paper else name for name, paper in columns)]
    head, *lines = (" & ".join(map(escaped, row)) + r" \\" for row in (names, *grid(table)))
    ours, others = lines[: len(table.rows)], lines[len(table.rows) :]
    body = [r"\toprule", head, r"\midrule", *ours, *([r"\midrule", *others] if others else []), r"\bottomrule"]
    begin = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{l{'r' * len(columns)}}}"]
    caption = escaped(f"{table.title}. {' '.join(remarks(table))}")
    return "\n".join([*begin, *body, r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}", ""])


def escaped(text: str) -> str:
    """A text as LaTeX prints it."""
    return "".join(_SPECIAL.get(sign, sign) for sign in text)
