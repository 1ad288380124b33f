"""From the cells of a table to texts, class ids, numbers or zeros and ones; a cell that does not fit is a DataError."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from operator import itemgetter
from typing import Any

from lamina.data.arrow import encodable
from lamina.data.read import Table
from lamina.errors import ConfigError, DataError
from lamina.tasks.base import ColumnSpec

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")
_MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none"})
_SHOWN = 10  # rows that a warning names
logger = logging.getLogger(__name__)


def labelled(tables: Mapping[str, Table], spec: ColumnSpec, *, texts: bool = False) -> dict[str, Table]:
    """The tables without their rows that have no label if those are to be dropped; else the first is a DataError.

    No label is None, NaN, a blank cell, or (unless labels are `texts` to write) a text such as "NA" or "null" that is
    none of `spec.labels`; of a list, one such part. In a text of several labels, blank means that none is set.
    """
    return {part: _labelled(table, spec, texts=texts) for part, table in tables.items()}


def _labelled(table: Table, spec: ColumnSpec, *, texts: bool) -> Table:
    column, several = spec.label, spec.problem_type == "multi_label"
    kept, without = [], []
    for at, (row, cell) in enumerate(zip(table.rows, table.cells(column), strict=True)):
        parts = _parts(cell, several=True) if several and isinstance(cell, str) else [cell]
        if not any(_is_missing(part, () if texts else spec.labels or (), texts=texts) for part in parts):
            kept.append(at)
        elif spec.missing_labels == "drop":
            without.append(row)
        else:
            raise _no_label(table, row, column, cell)
    if without:
        if not kept:
            raise DataError(f"task: {table.path} has no row with a label in column '{column}'.", path=table.path)
        rows = ", ".join(map(str, without[:_SHOWN])) + ", ..." * (len(without) > _SHOWN)
        what = "%s: %d of %d rows have no label in column '%s' and are left out (%s)"
        logger.warning(f"task: {what}", table.path, len(without), len(table), column, rows)
    return table.select_rows(kept) if without else table


def _is_missing(cell: object, labels: Sequence[str], *, texts: bool) -> bool:
    if isinstance(cell, list | tuple):
        return any(_is_missing(part, labels, texts=texts) for part in cell)
    name = str(cell).strip()  # "None", "nan", "<NA>" or "NaT" of what is no text
    if isinstance(cell, str):
        return name.lower() in _MISSING and name not in labels and not (texts and name)
    return name.lower() in _MISSING


def _no_label(table: Table, row: int, column: str | int, cell: object) -> DataError:
    came, hint = f"has no label in column '{column}'", "Give missing_labels='drop' to leave such rows out"
    if isinstance(cell, str) and (name := cell.strip()):
        came, hint = f"{came} ({name})", f"{hint}, or labels=['{name}', ...] if that is a class"
    return bad_cell(table, row, column, f"{came}; every row needs one. {hint}.")


def infer_problem_type(table: Table, spec: ColumnSpec) -> str:
    """Lists are "multi_label", numbers that are not all whole (no float is) "regression", all else "classification".

    Raises:
        DataError: If lists stand among others, numbers with a decimal point among names, or if rows without a label
            are dropped and all numbers are as 1.0, which may be classes that were made floats.
    """
    first: dict[str, tuple[int, Any]] = {}  # of each form the first row
    rounded = True
    for row, cell in _cells(table, spec.label):
        first.setdefault(_form(cell), (row, cell))
        rounded = rounded and _number(cell).is_integer()
    classes = len(spec.labels or ()) > 1
    if ("list" in first and len(first) > 1) or (first.keys() >= {"number", "name"} and not classes):
        (before, one), (row, two) = sorted(first.values(), key=itemgetter(0))[:2]
        rule = "labels are of one form. Put it right, or give problem_type"
        came = f"has {two!r} in column '{spec.label}' and row {before} has {one!r}"
        raise bad_cell(table, row, spec.label, f"{came}; {rule}.")
    if "list" in first:
        return "multi_label"
    if "number" not in first or classes:
        return "classification"
    if rounded and spec.missing_labels == "drop":
        came = f"the labels in column '{spec.label}' are whole numbers with a decimal point"
        rule = "classes beside empty cells are often written so. Give problem_type"
        raise DataError(f"task: {came}; {rule} 'classification' or 'regression'.", path=table.path)
    return "regression"


def _form(cell: object) -> str:
    if isinstance(cell, list | tuple):
        return "list"
    return "whole" if _is_whole(cell) else "number" if _is_number(cell) else "name"


def _is_number(cell: object) -> bool:
    if isinstance(cell, str):
        return _NUMBER.fullmatch(cell.strip()) is not None
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _is_whole(cell: object) -> bool:
    return isinstance(cell, int) or (isinstance(cell, str) and _WHOLE.fullmatch(cell.strip()) is not None)


def _number(cell: Any) -> float:
    """The number in a cell; NaN if it is none, infinity if it is too large for a float, as 10**400."""
    return float(str(cell)) if _is_number(cell) else math.nan


def label_name(cell: object) -> str:
    """The name of a class as the file writes it; 2 and 2.0 are the same class."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return encodable(str(cell).strip())


def infer_labels(names: Iterable[str]) -> tuple[str, ...]:
    """The distinct names, sorted; as numbers if all are whole numbers, those that are equal by how they are written."""
    names = sorted(set(names))
    return tuple(sorted(names, key=Decimal if all(_WHOLE.fullmatch(name) for name in names) else None))


def _parts(cell: object, *, several: bool) -> list[object]:
    """The label in one cell; or `several`: a list, or names with commas between them."""
    if several:
        return list(cell) if isinstance(cell, list | tuple) else [name for name in str(cell).split(",") if name.strip()]
    return [cell]


def bad_cell(table: Table, row: int, column: str | int, problem: str) -> DataError:
    """An error that names file, row and column."""
    return DataError(f"task: {table.path} row {row} {problem}", path=table.path, row=row, column=str(column))


def unknown_label(table: Table, row: int, column: str | int, cell: object, labels: Sequence[str]) -> DataError:
    """The error for a label that is not in the set."""
    return bad_cell(table, row, column, f"has label '{cell}'; the labels are: {', '.join(labels)}.")


def _cells(table: Table, column: str | int) -> Iterator[tuple[int, Any]]:
    return zip(table.rows, table.column(column), strict=True)


def texts(table: Table, column: str | int) -> Sequence[str]:
    """A column of texts."""
    for row, cell in _cells(table, column):
        if not isinstance(cell, str):
            came = type(cell).__name__
            raise bad_cell(table, row, column, f"has no text in column '{column}' but {came}; this kind reads text.")
    return table.column(column)


def numbers(table: Table, column: str | int) -> Iterator[float]:
    """A regression column as floats."""
    for row, cell in _cells(table, column):
        value = _number(cell)
        if not math.isfinite(value):
            raise bad_cell(table, row, column, f"has '{cell}' in column '{column}'; a regression task needs a number.")
        yield value


def _ids(table: Table, column: str | int, labels: Sequence[str], *, several: bool) -> Iterator[list[int]]:
    """Per row the ids of its classes; where no class's name is a whole number, cells may hold the ids themselves."""
    index = {name: i for i, name in enumerate(labels)}
    if not any(_WHOLE.fullmatch(name) for name in labels):
        index |= {str(i): i for i in range(len(labels))}
    for row, cell in _cells(table, column):
        names = {label_name(part): part for part in _parts(cell, several=several)}
        for name, part in names.items():
            if name not in index:
                raise unknown_label(table, row, column, part, labels)
        yield [index[name] for name in names]


def class_ids(table: Table, column: str | int, labels: Sequence[str]) -> Iterator[int]:
    """A classification column as class ids."""
    return (number for (number,) in _ids(table, column, labels, several=False))


def multi_hot(table: Table, column: str | int, labels: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """A multi-label column as zeros and ones, one per label."""
    rows = _ids(table, column, labels, several=True)
    return (tuple(int(i in ids) for i in range(len(labels))) for ids in rows)


def label_source(tables: Mapping[str, Table]) -> Table:
    """The train part, which labels are read off; without it a DataError."""
    if "train" not in tables:
        raise DataError("task: no train file was given, and no labels; one of them says which labels there are.")
    return tables["train"]


def class_labels(tables: Mapping[str, Table], column: str | int, *, several: bool = False) -> tuple[str, ...]:
    """The classes that the train part has, sorted; `several`: a cell may hold any number of them."""
    cells = label_source(tables).column(column)
    return infer_labels(label_name(part) for cell in cells for part in _parts(cell, several=several))


def usual_column(column: str | int, default: str, usual: str, tables: Mapping[str, Table]) -> str | int:
    """`usual`, where no column was named, there is none of the default name, and one of the usual name."""
    absent = column == default and not any(default in table.columns for table in tables.values())
    return usual if absent and any(usual in table.columns for table in tables.values()) else column


def without_classes(spec: ColumnSpec, labels: tuple[str, ...], problem_type: str, instead: str) -> ColumnSpec:
    """Settle labels and problem type of a kind that has no classes; labels that were given are a ConfigError."""
    if spec.labels not in (None, labels):
        came = f"labels are {', '.join(spec.labels or ())}"
        raise ConfigError(f"task: {came}; a task of kind {spec.kind} has {instead} in their place.")
    return replace(spec, labels=labels, problem_type=problem_type)


def given_names(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names of classes that a caller gave; ConfigError if they are a text, or one is none."""
    if labels is None:
        return None
    if isinstance(labels, str) or not all(isinstance(name, str) for name in labels):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"task: labels are {labels!r}; a list of the classes' names is needed.")
    return tuple(name.strip() for name in labels)
