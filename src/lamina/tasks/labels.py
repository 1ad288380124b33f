"""From the cells of a table to texts, class ids, numbers or zeros and ones."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lamina.data.read import Table
    from lamina.tasks.base import ColumnSpec

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")


def infer_problem_type(cells: Iterable[Any]) -> str:
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
            raise bad_cell(table, row, column, f"has '{cell}' in column '{column}'; a regression task needs a number.")
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


def bad_cell(table: Table, row: int, column: str | int, problem: str) -> DataError:
    """An error that names file, row and column."""
    return DataError(f"task: {table.path} row {row} {problem}", path=table.path, row=row, column=str(column))


def _known(number: int | None, table: Table, row: int, *cell_labels_column: Any) -> int:
    return unknown_label(table, row, *cell_labels_column) if number is None else number


def unknown_label(table: Table, row: int, cell: object, labels: Sequence[str], column: str | int) -> NoReturn:
    """Refuse a cell whose label is not in the set.

    Raises:
        DataError: Always; names file, row and label.
    """
    raise bad_cell(table, row, column, f"has label '{cell}'; the labels are: {', '.join(labels)}.")


def class_ids(table: Table, column: str | int, labels: Sequence[str]) -> tuple[int, ...]:
    """A classification column as class ids.

    Raises:
        DataError: If a label is not in the set.
    """
    find = id_of(labels)
    cells = zip(table.rows, table.column(column), strict=True)
    return tuple(_known(find(cell), table, row, cell, labels, column) for row, cell in cells)


def multi_hot(table: Table, column: str | int, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """A multi-label column as zeros and ones, one per label.

    Raises:
        DataError: If a label is not in the set.
    """
    find = id_of(labels)
    out: list[tuple[int, ...]] = []
    for row, cell in zip(table.rows, table.column(column), strict=True):
        ids = {_known(find(part), table, row, part, labels, column) for part in parts(cell)}
        out.append(tuple(int(i in ids) for i in range(len(labels))))
    return tuple(out)


def texts(table: Table, column: str | int) -> Sequence[str]:
    """A column of texts.

    Raises:
        DataError: If a cell is none.
    """
    cells = table.column(column)
    for row, cell in zip(table.rows, cells, strict=True):
        if not isinstance(cell, str):
            came = type(cell).__name__
            raise bad_cell(table, row, column, f"has no text in column '{column}' but {came}; this kind reads text.")
    return cells


def label_source(tables: Mapping[str, Table]) -> Table:
    """The table that labels are read off.

    Raises:
        DataError: If there is no train part.
    """
    if "train" not in tables:
        raise DataError("task: no train file was given, and no labels; one of them says which labels there are.")
    return tables["train"]


def class_labels(tables: Mapping[str, Table], column: str | int) -> tuple[str, ...]:
    """The classes that the train part has, sorted."""
    return infer_labels(label_name(cell) for cell in label_source(tables).column(column))


def usual_column(column: str | int, default: str, usual: str, tables: Mapping[str, Table]) -> str | int:
    """`usual`, where no column was named and there is none of the default name."""
    absent = column == default and not any(default in table.columns for table in tables.values())
    return usual if absent else column


def without_classes(spec: ColumnSpec, labels: tuple[str, ...], problem_type: str, instead: str) -> ColumnSpec:
    """Settle labels and problem type of a kind that has no classes, and so takes no labels.

    Raises:
        ConfigError: If labels were given.
    """
    if spec.labels not in (None, labels):
        raise ConfigError(
            f"task: labels are {', '.join(spec.labels or ())}; a task of kind {spec.kind} has {instead} in their place."
        )
    return replace(spec, labels=labels, problem_type=problem_type)
