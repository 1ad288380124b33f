"""Check the `y` of an estimator, and turn it into the targets of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

import numpy as np
import pandas as pd
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from lamina.errors import DataError
from lamina.estimators.examples import as_array, check_given, data_errors
from lamina.tasks.label_cells import class_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.estimators.examples import TargetsLike, Texts
    from lamina.tasks.outputs import Label


@final
@dataclass(frozen=True)
class Targets:
    """The targets of all texts in the form that a task needs, and the problem type."""

    problem_type: str
    labels: tuple[str, ...]
    values: Sequence[Label]  # per text: index of its class, number, tuple of zeros and ones, or tuple of tag indices
    classes: np.ndarray | None = None  # sorted; the indices in `values` point into it
    mean: float = 0.0  # subtracted from the numbers of y
    scale: float = 1.0  # the numbers of y are divided by it, after the subtraction

    @property
    def stratify(self) -> list[int] | None:
        """The classes by which a validation split is stratified; None if a text does not have exactly one class."""
        several = self.classes is None or self.problem_type == "multi_label"
        return None if several else cast("list[int]", self.values)


def class_targets(y: TargetsLike, texts: Texts, op: str) -> Targets:
    """Return the targets of a classifier.

    Args:
        y: One class per text, or zeros and ones `[texts, labels]`, dense or sparse.
        texts: The texts; y must have as many rows.
        op: Name of the calling method, which begins the error messages.

    Raises:
        DataError: If y is None, has another length, a missing label or only one class, or has another form.
    """
    check_given(y, op)
    with data_errors(op):
        checked = as_array(y, "y", accept_sparse="csr", dtype=None)
        check_consistent_length(texts, checked)
        if checked.dtype == object and (missing := np.flatnonzero(pd.isna(checked))).size:
            raise DataError(f"{op}: row {missing[0]} of y is missing; every text has a label.", row=int(missing[0]))
        check_classification_targets(checked)
        kind = type_of_target(checked, input_name="y")
        if kind == "multilabel-indicator":
            table = np.asarray(checked.toarray() if hasattr(checked, "toarray") else checked).astype(int)
            labels = tuple(map(str, range(table.shape[1])))
            return Targets("multi_label", labels, list(map(tuple, table.tolist())), np.arange(table.shape[1]))
        if kind == "multiclass-multioutput":
            raise ValueError(
                f"y has {checked.shape[1]} columns of classes; one is needed, or a table of zeros and ones."
            )
        classes, numbers = np.unique(column_or_1d(checked, warn=True), return_inverse=True)
    labels, classes, numbers = _named(classes, numbers)
    if len(classes) < 2:
        raise DataError(f"{op}: y has one class, {classes[0]!r}; a classifier needs at least two classes.")
    return Targets("classification", labels, numbers.tolist(), classes)


def _named(classes: np.ndarray, numbers: np.ndarray) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Return the class names, one class value for each name, and the index of each row's class among the names.

    Two values can have one name, such as the two Unicode forms of one text. `numbers` are the indices of rows in
    `classes`.
    """
    names = [class_name(value, (str(value),)) for value in classes]
    labels = tuple(dict.fromkeys(names))
    kept = np.array([names.index(name) for name in labels])
    return labels, classes[kept], np.array([labels.index(name) for name in names])[numbers]


def number_targets(y: TargetsLike, texts: Texts, op: str) -> Targets:
    """Return the targets of a regressor, scaled to mean 0 and standard deviation 1; equal numbers all become 0.

    Args:
        y: One finite number per text.
        texts: The texts; y must have as many rows.
        op: Name of the calling method, which begins the error messages.

    Raises:
        DataError: If y is None, has another length, or holds anything but finite numbers.
    """
    check_given(y, op)
    with data_errors(op):
        checked = as_array(y, "y", dtype=np.float64)
        check_consistent_length(texts, checked)
        numbers = column_or_1d(checked, warn=True)
    mean, scale = float(numbers.mean()), float(numbers.std()) or 1.0
    return Targets("regression", ("value",), ((numbers - mean) / scale).tolist(), mean=mean, scale=scale)


def any_targets(y: TargetsLike, texts: Texts, op: str) -> Targets:
    """Return a regressor's targets if y has numbers with a fractional part, otherwise a classifier's targets.

    Args:
        y: One target per text, as `number_targets` or `class_targets` accepts them.
        texts: The texts; y must have as many rows.
        op: Name of the calling method, which begins the error messages.

    Raises:
        DataError: If `number_targets` or `class_targets` refuses y.
    """
    check_given(y, op)
    with data_errors(op):
        kind = type_of_target(y, input_name="y")
    return (number_targets if kind == "continuous" else class_targets)(y, texts, op)
