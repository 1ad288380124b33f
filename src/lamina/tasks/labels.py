"""Read the columns of a table: texts, class ids, numbers, and 0 and 1 per class.

A cell that has another form is a DataError, which names the file, the row and the column.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from lamina.data.arrow import Column, encodable
from lamina.data.read import Table
from lamina.errors import ConfigError, DataError
from lamina.tasks.base import ColumnSpec

if TYPE_CHECKING:
    import datasets

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")
_MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none"})
_SHOWN = 10  # rows that a warning names
logger = logging.getLogger(__name__)


# Rows without a label


def labelled(tables: Mapping[str, Table], spec: ColumnSpec, *, texts: bool = False) -> dict[str, Table]:
    """Return the tables without the rows that have no label, if `spec.missing_labels` is "drop"; log how many.

    A label is missing if the cell is None, NaN or blank, or a text such as "NA" or "null" that is not among
    `spec.labels`. A list without one of its labels counts as missing too. A blank cell of a multi-label column has a
    label: that no class is set.

    Args:
        tables: Split name -> table.
        spec: Which column has the labels, and what to do without one.
        texts: Whether labels are texts to generate, which may well be "null".

    Raises:
        DataError: If a label is missing and rows are not to be dropped, or if no row of a table has a label.
    """
    return {part: _labelled(table, spec, texts=texts) for part, table in tables.items()}


def _labelled(table: Table, spec: ColumnSpec, *, texts: bool) -> Table:
    """Return one table without the rows that have no label; see `labelled`."""
    column, is_multi_label = spec.label, spec.problem_type == "multi_label"
    labels = () if texts else spec.labels or ()
    present: list[int] = []
    dropped: list[int] = []
    for at, (row, cell) in enumerate(zip(table.rows, table.cells(column), strict=True)):
        parts = _parts(cell, several=True) if is_multi_label and isinstance(cell, str) else [cell]
        if not any(_is_missing(part, labels, texts=texts) for part in parts):
            present.append(at)
        elif spec.missing_labels == "drop":
            dropped.append(row)
        else:
            raise _no_label(table, row, column, cell)
    if not dropped:
        return table
    if not present:
        raise DataError(f"task: {table.path} has no row with a label in column '{column}'.", path=table.path)
    what = "%s: %d of %d rows have no label in column '%s' and are left out (%s)"
    logger.warning(f"task: {what}", table.path, len(dropped), len(table), column, listed(dropped))
    return table.select_rows(present)


def listed(rows: Sequence[int]) -> str:
    """Return the first ten row numbers as text for a warning, with "..." if there are more."""
    return ", ".join(map(str, rows[:_SHOWN])) + ", ..." * (len(rows) > _SHOWN)


def _is_missing(cell: object, labels: Sequence[str], *, texts: bool) -> bool:
    """Return whether a cell (or one part of a list) is a missing label.

    Args:
        cell: The cell.
        labels: Class names, which are never missing even if one of them is "none".
        texts: Whether labels are texts to generate, of which only blank ones are missing.
    """
    if isinstance(cell, list | tuple):
        return any(_is_missing(part, labels, texts=texts) for part in cell)
    name = str(cell).strip()  # also "None", "nan", "<NA>" and "NaT", for cells that are not texts
    if isinstance(cell, str):
        return name.lower() in _MISSING and name not in labels and not (texts and name)
    return name.lower() in _MISSING


def _no_label(table: Table, row: int, column: str | int, cell: object) -> DataError:
    """Return the error that a row has no label; a text such as "NA" is shown, since it may be a class name."""
    got, hint = f"has no label in column '{column}'", "Give missing_labels='drop' to leave such rows out"
    if isinstance(cell, str) and (name := cell.strip()):
        got, hint = f"{got} ({name})", f"{hint}, or labels=['{name}', ...] if that is a class"
    return bad_cell(table, row, column, f"{got}; every row needs one. {hint}.")


# The problem type


def infer_problem_type(table: Table, spec: ColumnSpec) -> str:
    """Return the problem type that the labels of a table suggest.

    Lists are "multi_label". Numbers are "regression" if one of them has a decimal point. All else is
    "classification".

    Raises:
        DataError: If labels are of different forms: lists among others, or numbers with a decimal point among names. Or
            if rows without a label are dropped and all numbers are like 1.0, which may be classes: pandas writes whole
            numbers beside empty cells like that.
    """
    first: dict[str, tuple[int, object]] = {}  # form of a label -> the first row with it, and the cell
    are_whole = True
    for row, cell in _cells(table, spec.label):
        first.setdefault(_form(cell), (row, cell))
        are_whole = are_whole and _number(cell).is_integer()
    has_classes = len(spec.labels or ()) > 1
    if ("list" in first and len(first) > 1) or (first.keys() >= {"number", "name"} and not has_classes):
        (first_row, first_cell), (row, cell) = sorted(first.values(), key=_row_of)[:2]
        got = f"has {cell!r} in column '{spec.label}' and row {first_row} has {first_cell!r}"
        raise bad_cell(
            table, row, spec.label, f"{got}; all labels must have one form. Correct the file, or set problem_type."
        )
    if "list" in first:
        return "multi_label"
    if "number" not in first or has_classes:
        return "classification"
    if are_whole and spec.missing_labels == "drop":
        got = f"the labels in column '{spec.label}' are whole numbers with a decimal point"
        rule = "class ids are often written like that beside empty cells. Set problem_type"
        raise DataError(f"task: {got}; {rule} 'classification' or 'regression'.", path=table.path)
    return "regression"


def _row_of(row_and_cell: tuple[int, object]) -> int:
    """Return the row number of a pair of row number and cell."""
    return row_and_cell[0]


def _form(cell: object) -> str:
    """Return the form of a label: "list", "whole" (number), "number" or "name"."""
    if isinstance(cell, list | tuple):
        return "list"
    return "whole" if _is_whole(cell) else "number" if _is_number(cell) else "name"


def _is_number(cell: object) -> bool:
    """Return whether a cell is a number, or a text that is one; bool is not a number."""
    if isinstance(cell, str):
        return _NUMBER.fullmatch(cell.strip()) is not None
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _is_whole(cell: object) -> bool:
    """Return whether a cell is an int, or a text that is a whole number without a decimal point."""
    return isinstance(cell, int) or (isinstance(cell, str) and _WHOLE.fullmatch(cell.strip()) is not None)


def _number(cell: object) -> float:
    """Return a cell as a float: NaN if it is not a number, infinity if it is too large, such as 10**400."""
    return float(str(cell)) if _is_number(cell) else math.nan


# Class names


def label_name(cell: object) -> str:
    """Return the class name in a cell; 2 and 2.0 are the same class "2"."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return encodable(str(cell).strip())


def infer_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct class names in order: sorted as numbers if all are whole numbers, otherwise as texts."""
    names = sorted(set(names))
    return tuple(sorted(names, key=Decimal if all(_WHOLE.fullmatch(name) for name in names) else None))


def class_labels(tables: Mapping[str, Table], column: str | int, *, several: bool = False) -> tuple[str, ...]:
    """Return the class names that occur in a column of the train split, in the order of `infer_labels`.

    `several` says that a cell may have any number of classes.

    Raises:
        DataError: If there is no train split.
    """
    cells = label_source(tables).column(column)
    return infer_labels(label_name(part) for cell in cells for part in _parts(cell, several=several))


def label_source(tables: Mapping[str, Table]) -> Table:
    """Return the table of the train split, from which class names are read; raise DataError if there is none."""
    if "train" not in tables:
        raise DataError("task: neither a train split nor labels were given; class names come from one of them.")
    return tables["train"]


def check_names(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the class names that a user passed, without blanks around them; None stays None.

    Raises:
        ConfigError: If `labels` is a single text, or one of the names is not a text.
    """
    if labels is None:
        return None
    if isinstance(labels, str) or not all(isinstance(name, str) for name in labels):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"task: labels are {labels!r}; a list of class names is needed.")
    return tuple(name.strip() for name in labels)


# Columns


def texts(table: Table, column: str | int) -> Sequence[str]:
    """Return a column of texts; raise DataError for the first cell that is not a text."""
    for row, cell in _cells(table, column):
        if not isinstance(cell, str):
            got = type(cell).__name__
            raise bad_cell(table, row, column, f"has no text in column '{column}' but {got}; this kind reads text.")
    return table.column(column)


def numbers(table: Table, column: str | int) -> Iterator[float]:
    """Yield a column of numbers as floats; raise DataError for the first cell that is not a finite number."""
    for row, cell in _cells(table, column):
        value = _number(cell)
        if not math.isfinite(value):
            raise bad_cell(table, row, column, f"has '{cell}' in column '{column}'; a regression task needs a number.")
        yield value


def class_ids(table: Table, column: str | int, labels: Sequence[str]) -> Iterator[int]:
    """Yield a column of class names as ids, which are positions in `labels`.

    Cells may be ids themselves, unless a class name is a whole number. A name that is not in `labels` is a DataError.
    """
    return (number for (number,) in _ids(table, column, labels, several=False))


def multi_hot(table: Table, column: str | int, labels: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield a column of lists of class names, or of names with commas between them, as 0 and 1 per class.

    Cells may have ids in place of names, as in `class_ids`; the errors are the same.
    """
    rows = _ids(table, column, labels, several=True)
    return (tuple(int(number in ids) for number in range(len(labels))) for ids in rows)


def _ids(table: Table, column: str | int, labels: Sequence[str], *, several: bool) -> Iterator[list[int]]:
    """Yield the ids of the classes in each cell of a column; DataError for a class that is not in `labels`.

    `several` says that a cell may have any number of classes; otherwise it has one.
    """
    index = {name: number for number, name in enumerate(labels)}
    if not any(_WHOLE.fullmatch(name) for name in labels):
        index |= {str(number): number for number in range(len(labels))}
    for row, cell in _cells(table, column):
        names = {label_name(part): part for part in _parts(cell, several=several)}
        for name, part in names.items():
            if name not in index:
                raise unknown_label(table, row, column, part, labels)
        yield [index[name] for name in names]


def _parts(cell: object, *, several: bool) -> list[object]:
    """Return the labels in a cell: the cell itself, or with `several` the items of a list or of a text with commas."""
    if several:
        return list(cell) if isinstance(cell, list | tuple) else [name for name in str(cell).split(",") if name.strip()]
    return [cell]


def _cells(table: Table, column: str | int) -> Iterator[tuple[int, object]]:
    """Yield the number of each row in its file with its cell in a column; raise DataError if a cell is missing."""
    return zip(table.rows, table.column(column), strict=True)


def usual_column(column: str | int, default: str, usual: str, tables: Mapping[str, Table]) -> str | int:
    """Return the column to read where the user may have named none.

    Args:
        column: The column of the task's arguments, which is `default` if the user named none.
        default: Default value of the argument, such as "sentence".
        usual: Another column name, which is returned if no table has a column `default` and one has this one.
        tables: Split name -> table.
    """
    absent = column == default and not any(default in table.columns for table in tables.values())
    return usual if absent and any(usual in table.columns for table in tables.values()) else column


def without_classes(spec: ColumnSpec, labels: tuple[str, ...], problem_type: str, instead: str) -> ColumnSpec:
    """Return `spec` with the fixed labels and problem type of a kind whose classes users cannot choose.

    Raises:
        ConfigError: If the user passed other labels; `instead` says in the message what the kind has in their place.
    """
    if spec.labels not in (None, labels):
        got = f"labels are {', '.join(spec.labels or ())}"
        raise ConfigError(f"task: {got}; a task of kind {spec.kind} has {instead} in their place.")
    return replace(spec, labels=labels, problem_type=problem_type)


# Errors


def bad_cell(table: Table, row: int, column: str | int, problem: str) -> DataError:
    """Return an error that names file, row and column; `problem` is its text from the verb on."""
    return DataError(f"task: {table.path} row {row} {problem}", path=table.path, row=row, column=str(column))


def unknown_label(table: Table, row: int, column: str | int, cell: object, labels: Sequence[str]) -> DataError:
    """Return the error that a cell has a label which is not one of `labels`."""
    return bad_cell(table, row, column, f"has label '{cell}'; the labels are: {', '.join(labels)}.")


# Columns of a dataset


def cells_of(rows: datasets.Dataset, column: str, spec: ColumnSpec) -> Column:
    """Return a column of a dataset; class ids become names if the dataset has names and all are in `spec.labels`."""
    names = class_names(rows, column)
    named = partial(_to_name, names) if names and set(names) <= set(spec.labels or ()) else None
    return Column(rows, [column], named)


def class_names(rows: datasets.Dataset, column: str | int) -> tuple[str, ...] | None:
    """Return the class names that a dataset has for a column, in the order of their ids; None if it has none."""
    feature = rows.features.get(str(column))
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else tuple(str(name).strip() for name in names)


def _to_name(names: tuple[str, ...], cell: Any) -> Any:
    """Return a cell with each class id (also those in a list) replaced by its name; -1 is a missing label, None."""
    if isinstance(cell, list):
        return [_to_name(names, part) for part in cell]
    if cell == -1:
        return None
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell
