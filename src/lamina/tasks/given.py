"""What a task is made of, as a user gives it: checked, and brought to one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lamina.errors import ConfigError, DataError, check_known
from lamina.tasks.base import ColumnSpec


def rows_of(part: str, given: Any, label: str | int) -> Any:
    """One part as a data set, or (of dicts) as columns."""
    import datasets

    is_dataset = isinstance(given, datasets.Dataset)
    rows: Any = given if is_dataset else [None]
    if isinstance(given, Iterable) and not isinstance(given, datasets.Dataset | str | bytes | Mapping):
        rows = list(given)
    if not is_dataset and not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"task: part '{part}' is {type(given).__name__}; it must be a Dataset or a list of dicts.")
    if len(rows) == 0:
        raise DataError(f"task: part '{part}' is empty; it needs at least one row.")
    if is_dataset:
        return rows.with_format(None)
    names = dict.fromkeys(key for row in rows for key in row)
    return {key: [_plain(row.get(key), whole=key == label) for row in rows] for key in names}


def _plain(cell: Any, *, whole: bool) -> Any:
    """A number of NumPy or torch as one of Python; a `whole` array too, which else is an image or sound."""
    is_array = hasattr(cell, "dtype") and hasattr(cell, "tolist")
    return cell.tolist() if is_array and (whole or not getattr(cell, "ndim", 0)) else cell


def check_spec(spec: ColumnSpec) -> None:
    """Raise an error if a kind does not do what is asked of it, as far as that shows without the data."""
    kind, labels = spec.kind, spec.labels
    check_known("task", [spec.missing_labels], kind.missing, "missing_labels")
    if spec.problem_type is not None:
        check_known("task", [spec.problem_type], kind.problem_types, "problem type")
    if labels is not None and (not labels or len(set(labels)) < len(labels)):
        raise ConfigError(f"task: labels are {', '.join(labels) or 'none'}; every class has a name of its own.")
    if spec.by_row and not kind.sequential:
        raise ConfigError(f"task: by_row is set for a task of kind {spec.kind}; it is for running text.")
    if spec.text_pair is not None and not kind.reads_pairs:
        raise ConfigError(f"task: text_pair is '{spec.text_pair}'; a task of kind {spec.kind} reads one text a row.")
