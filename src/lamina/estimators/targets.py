"""What is handed to an estimator as y, checked, in the form in which a task has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pandas as pd
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from lamina.errors import DataError
from lamina.estimators.examples import check_given, data_errors

if TYPE_CHECKING:
    from lamina.estimators.examples import Texts


@final
@dataclass(frozen=True)
class Targets:
    """One target per text, and what they are."""

    problem_type: str
    labels: tuple[str, ...]
    values: list[Any]  # numbers of classes, numbers, or zeros and ones
    classes: np.ndarray | None = None  # in the order of their numbers
    mean: float = 0.0  # numbers come less this,
    scale: float = 1.0  # and over this

    @property
    def stratify(self) -> list[int] | None:
        """What keeps its shares in a part that is set aside: classes, where every text has one."""
        return None if self.classes is None or self.problem_type == "multi_label" else self.values


def class_targets(y: Any, texts: Texts, op: str) -> Targets:
    """A class per text, or a table of zeros and ones, a column per label.

    Raises:
        DataError: If y is missing, of another length, has missing labels or one class alone, or is neither.
    """
    check_given(y, op)
    with data_errors(op):
        how: dict[str, Any] = {"accept_sparse": "csr", "dtype": None}
        given: Any = check_array(y, ensure_2d=False, input_name="y", **how)
        check_consistent_length(texts, given)
        if given.dtype == object and (missing := np.flatnonzero(pd.isna(given))).size:
            raise DataError(f"{op}: row {missing[0]} of y is missing; every text has a label.", row=int(missing[0]))
        check_classification_targets(given)
        kind = type_of_target(given, input_name="y")
        if kind == "multilabel-indicator":
            table = np.asarray(given.toarray() if hasattr(given, "toarray") else given).astype(int)
            labels = tuple(map(str, range(table.shape[1])))
            return Targets("multi_label", labels, list(map(tuple, table.tolist())), np.arange(table.shape[1]))
        if kind == "multiclass-multioutput":
            raise ValueError(f"y has {given.shape[1]} columns of classes; one is needed, or a table of zeros and ones.")
        classes, numbers = np.unique(column_or_1d(given, warn=True), return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"{op}: y has one class, {classes[0]!r}; a classifier needs at least two classes.")
    return Targets("classification", tuple(map(str, classes)), numbers.tolist(), classes)


def number_targets(y: Any, texts: Texts, op: str) -> Targets:
    """A finite number per text, less their mean and over their standard deviation; else a DataError."""
    check_given(y, op)
    with data_errors(op):
        how: dict[str, Any] = {"dtype": np.float64}
        given: Any = check_array(y, ensure_2d=False, input_name="y", **how)
        check_consistent_length(texts, given)
        numbers = column_or_1d(given, warn=True)
    mean, scale = float(numbers.mean()), float(numbers.std()) or 1.0
    return Targets("regression", ("value",), ((numbers - mean) / scale).tolist(), mean=mean, scale=scale)


def any_targets(y: Any, texts: Texts, op: str) -> Targets:
    """Numbers with a decimal point are numbers, all else classes."""
    check_given(y, op)
    with data_errors(op):
        kind = type_of_target(y, input_name="y")
    return (number_targets if kind == "continuous" else class_targets)(y, texts, op)
