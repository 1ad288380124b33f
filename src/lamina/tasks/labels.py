"""From the cells of a label column to class ids, numbers or zeros and ones."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NoReturn

from lamina.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lamina.data.read import Table

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")


def infer_problem(cells: Iterable[Any]) -> str:
    """What the cells of a label column ask for.

    Returns:
        "multi_label" if they are lists, "regression" if they are numbers and not all whole (a float is not, whatever
        its value), else "classification".
    """
    cells = list(cells)
    if any(isinstance(cell, list | tuple) for cell in cells):
        return "multi_label"
    numbers = all(_is_number(cell) for cell in cells)
    return "regression" if numbers and not all(_is_whole(cell) for cell in cells) else "classification"


def _is_number(cell: object) -> bool:
    if isinstance(cell, str):
        return _NUMBER.fullmatch(cell.strip()) is not None
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _is_whole(cell: object) -> bool:
    return isinstance(cell, int) or (isinstance(cell, str) and _WHOLE.fullmatch(cell.strip()) is not None)


def label_name(cell: object) -> str:
    """The name of a class as the file writes it; 2 and 2.0 are the same class."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()


def infer_labels(names: Iterable[str]) -> tuple[str, ...]:
    """The distinct names, sorted; as numbers if all are whole numbers."""
    found = set(names)
    if all(_WHOLE.fullmatch(name) for name in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def parts(cell: object) -> list[object]:
    """The labels in one cell of a multi-label column: a list, or names with commas between them."""
    if isinstance(cell, list | tuple):
        return list(cell)
    return [name for name in str(cell).split(",") if name.strip()]


def numbers(table: Table, column: str | int) -> tuple[float, ...]:
    """A regression column as floats.

    Raises:
        DataError: If a cell is no finite number.
    """
    out: list[float] = []
    for row, cell in zip(table.rows, table.column(column), strict=True):
        value = float(cell) if _is_number(cell) else math.nan
        if not math.isfinite(value):
            raise DataError(
                f"labels: {table.path} row {row} has '{cell}' in column '{column}'; "
                "a regression task needs a number. Correct this row.",
                path=table.path,
                row=row,
                column=str(column),
            )
        out.append(value)
    return tuple(out)


def id_of(labels: Sequence[str]) -> Callable[[object], int | None]:
    """A function from a cell to its class id, None if it is not in the set.

    A cell holds a class's name. Where no name is a whole number, a cell that is one counts as the id itself.
    """
    index = {name: i for i, name in enumerate(labels)}
    if not any(_WHOLE.fullmatch(name) for name in labels):
        index |= {str(i): i for i in range(len(labels))}
    return lambda cell: index.get(label_name(cell))


def unknown_label(table: Table, row: int, cell: object, labels: Sequence[str], column: str | int) -> NoReturn:
    """Refuse a cell whose label is not in the set.

    Raises:
        DataError: Always; names file, row and label.
    """
    raise DataError(
        f"labels: {table.path} row {row} has label '{cell}'; the labels are: {', '.join(labels)}. "
        "Correct the row, or name all labels in `labels`.",
        path=table.path,
        row=row,
        column=str(column),
    )


def class_ids(table: Table, column: str | int, labels: Sequence[str]) -> tuple[int, ...]:
    """A classification column as class ids.

    Raises:
        DataError: If a label is not in the set.
    """
    find = id_of(labels)
    out: list[int] = []
    for row, cell in zip(table.rows, table.column(column), strict=True):
        found = find(cell)
        out.append(found if found is not None else unknown_label(table, row, cell, labels, column))
    return tuple(out)


def multi_hot(table: Table, column: str | int, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """A multi-label column as zeros and ones, one per label.

    Raises:
        DataError: If a label is not in the set.
    """
    find = id_of(labels)
    out: list[tuple[int, ...]] = []
    for row, cell in zip(table.rows, table.column(column), strict=True):
        ids = set()
        for part in parts(cell):
            found = find(part)
            ids.add(found if found is not None else unknown_label(table, row, part, labels, column))
        out.append(tuple(int(i in ids) for i in range(len(labels))))
    return tuple(out)
