"""Check the X of an estimator (texts, pairs of texts, or lists of words) and its y (classes, numbers, or tags)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import numpy as np
import pandas as pd
from scipy.sparse import issparse
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import validate_data

from lamina.errors import DataError, LaminaError
from lamina.tasks.label_cells import LabelCellError, class_name

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

    from lamina.tasks.outputs import Label


Texts = list[str] | list[tuple[str, str]]
# X and y come in every form that scikit-learn accepts: list, array, Series, DataFrame, sparse array.
TextsLike: TypeAlias = Any
TargetsLike: TypeAlias = Any
logger = logging.getLogger(__name__)
_LARGEST = 1e37  # of a regressor's numbers: its head's weights are scaled to them in float32, which ends at 3.4e38
_COARSEST = 0.01  # of a regressor's numbers: step between neighbours in float32, per standard deviation


@contextmanager
def data_errors(op: str) -> Iterator[None]:
    """Convert a TypeError, ValueError or OverflowError in the `with` block to a DataError with `op` and its message.

    Errors of Lamina pass unchanged.
    """
    try:
        yield
    except LaminaError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{op}: {'y has ' * isinstance(error, LabelCellError)}{error}") from error


def as_array(values: TextsLike | TargetsLike, name: str, **how: Any) -> Any:
    """Return values as an array of any number of dimensions, as scikit-learn's `check_array(**how)` checks them.

    A sparse array stays sparse if `how` accepts it. `name` ("X" or "y") stands in the messages of the ValueError or
    TypeError that scikit-learn raises.
    """
    return check_array(values, ensure_2d=False, input_name=name, **how)


def as_texts(estimator: BaseEstimator, X: TextsLike, op: str, *, reset: bool) -> Texts:
    """Return X as a list of texts, or as a list of pairs of texts.

    Raises DataError if X is a single text, is empty, has cells that are no texts or more than two columns, or has other
    columns than at `fit`; or if it has pairs and X of `fit` had texts, or the other way round.

    Args:
        estimator: Estimator of which `n_features_in_`, `feature_names_in_` and `pairs_` are set or compared.
        X: Texts as a list, an array or one column; pairs as tuples or as two columns.
        op: Name of the calling method, which begins the error messages.
        reset: True in `fit`: set these attributes. False: compare X with them.
    """
    if isinstance(X, str | bytes):
        raise DataError(f"{op}: X is one text; a list, array or column of texts is needed.")
    _check_dense(X, op)
    with data_errors(op):
        # sets the names of the columns, or compares them
        validate_data(estimator, X, reset=reset, skip_check_array=True, ensure_2d=False)
        table = as_array(X, "X", dtype=object, ensure_all_finite=False)
    _check_columns(estimator, table, op, reset=reset)
    rows = table[:, 0] if table.ndim == 2 and table.shape[1] == 1 else table
    single = isinstance(rows[0], str)
    for row, text in enumerate(rows):
        parts = list(text) if not single and isinstance(text, tuple | list | np.ndarray) else [text]
        others = [part for part in parts if not isinstance(part, str)]
        if others or len(parts) != (1 if single else 2):
            wrong = others[0] if others else parts
            came = f"row {row} of X holds {wrong!r:.40} of type {type(wrong).__name__}"
            raise DataError(f"{op}: {came}; every row is a text, or every row a pair of texts.", row=row)
    if reset:
        vars(estimator)["pairs_"] = not single
    elif getattr(estimator, "pairs_", not single) == single:  # an older file does not say which `fit` had
        came, had = ("single texts", "pairs of texts") if single else ("pairs of texts", "single texts")
        hint = f"Give {had}, or fit on {came}"
        raise DataError(f"{op}: X has {came}, but {type(estimator).__name__} was fitted on {had}. {hint}.")
    return [str(text) for text in rows] if single else [(str(first), str(second)) for first, second in rows]


def _check_dense(X: TextsLike, op: str) -> None:
    """Raise DataError, whose message begins with `op`, if X is a sparse array, which holds numbers."""
    if issparse(X):
        hint = "Give the texts that the numbers were made from"
        raise DataError(f"{op}: X is a sparse array of numbers; an estimator of Lamina reads texts. {hint}.")


def _check_columns(estimator: BaseEstimator, table: np.ndarray, op: str, *, reset: bool) -> None:
    """Check that `table`, the array X, has as many columns as at `fit`; with `reset` (in `fit`), record their number.

    The number is the estimator's attribute `n_features_in_`. A one-dimensional `table` has no columns and passes; with
    `reset`, the attribute is then deleted. Raises DataError, whose message begins with `op`, if the table has three or
    more columns, or a different number than at `fit`.
    """
    columns = table.shape[1] if table.ndim == 2 else None
    if columns is not None and columns not in (1, 2):
        raise DataError(f"{op}: X has {columns} columns; one of texts is needed, or two of pairs. Choose among them.")
    before = getattr(estimator, "n_features_in_", None)
    if reset:
        if columns is not None:
            vars(estimator)["n_features_in_"] = columns
        elif before is not None:
            del vars(estimator)["n_features_in_"]
    elif None not in (before, columns) and columns != before:
        expects = f"{type(estimator).__name__} is expecting {before} features as input"
        raise DataError(f"{op}: X has {columns} features, but {expects}.")


def as_words(X: TextsLike, op: str) -> list[list[str]]:
    """Return X as one list of words per row.

    Raises DataError if X is not a collection or is empty, or a row is not a list of strings. The message begins with
    `op`, and names the first wrong row.
    """
    _check_dense(X, op)
    if isinstance(X, str | bytes) or not hasattr(X, "__len__"):
        raise DataError(f"{op}: X is one {type(X).__name__}; a list of lists of words is needed.")
    if not len(X):
        raise DataError(f"{op}: X has 0 sample(s); a minimum of 1 is required.")
    rows: list[list[str]] = []
    for row, words in enumerate(np.asarray(X, dtype=object) if hasattr(X, "dtype") else X):
        if isinstance(words, str) or not isinstance(words, Sequence | np.ndarray):
            came = f"row {row} of X is {words!r:.40} of type {type(words).__name__}"
            raise DataError(f"{op}: {came}; every row is a list of words.", row=row)
        if other := [word for word in words if not isinstance(word, str)]:
            came = f"row {row} of X holds {other[0]!r:.40} of type {type(other[0]).__name__}"
            raise DataError(f"{op}: {came}; every word is a text.", row=row)
        rows.append([str(word) for word in words])
    return rows


def as_tags(y: TargetsLike, words: Sequence[Sequence[object]], op: str) -> list[list[object]]:
    """Return y as one list of tags per row, with NumPy scalars as Python values.

    Raises DataError if y is None, has another number of rows than `words` (the words of each row), or a row does not
    have one tag per word. The message begins with `op`.
    """
    check_given(y, op)
    with data_errors(op):
        check_consistent_length(words, y)
    rows = [list(tags) if isinstance(tags, Sequence | np.ndarray) and not isinstance(tags, str) else [] for tags in y]
    for row, (sentence, tags, given) in enumerate(zip(words, rows, y, strict=True)):
        if isinstance(given, str):
            raise DataError(f"{op}: row {row} of y is a text; it must be a list with a tag for each word.", row=row)
        if len(sentence) != len(tags):
            came = f"row {row} has {len(sentence)} words and {len(tags)} tags"
            raise DataError(f"{op}: {came}; every word has one tag.", row=row)
    return [[tag.item() if isinstance(tag, np.generic) else tag for tag in tags] for tags in rows]


def check_given(y: TargetsLike, op: str) -> None:
    """Raise DataError, whose message begins with `op`, if y is None."""
    if y is None:
        raise DataError(f"{op}: this estimator requires y to be passed, but the target y is None.")


@final
@dataclass(frozen=True)
class Targets:
    """The targets of all texts in the form that a task needs.

    `class_targets`, `number_targets` and `LaminaTagger.fit` make them.

    Attributes:
        problem_type: One of the task's problem types.
        labels: Class names.
        values: Per text: index of its class, number, tuple of zeros and ones, or tuple of tag indices.
        classes: The classes of y, sorted, which the indices in `values` refer to; for zeros and ones, the numbers of
            the labels, from 0. None for numbers and tags.
        mean: Subtracted from the numbers of y, which are then divided by `scale`.
    """

    problem_type: str
    labels: tuple[str, ...]
    values: Sequence[Label]
    classes: np.ndarray | None = None
    mean: float = 0.0
    scale: float = 1.0

    @property
    def stratify(self) -> list[int] | None:
        """Index of each text's class, to stratify a validation split by; None unless each text has exactly one."""
        several = self.classes is None or self.problem_type == "multi_label"
        return None if several else cast("list[int]", self.values)


def class_targets(y: TargetsLike, texts: Texts, op: str) -> Targets:
    """Return the targets of a classifier; log a warning if y has texts and numbers, which all become texts.

    Raises DataError if y is None, is not as long as `texts`, lacks a label, has only one class, or has another form.

    Args:
        y: One class per text, or zeros and ones `[texts, labels]`, dense or sparse. Columns of a data frame name the
            labels if their names are texts.
        texts: The texts; y must have as many rows.
        op: Name of the calling method, which begins the error messages.
    """
    check_given(y, op)
    with data_errors(op):
        kinds = set(map(type, y)) if isinstance(y, list | tuple | pd.Series) else set[type]()
        if kinds & {set, frozenset} or (kinds and kinds <= {list, tuple} and len(set(map(len, y))) > 1):
            rule = "give a table of zeros and ones, as scikit-learn's MultiLabelBinarizer makes it"
            raise ValueError(f"y has lists or sets of classes; {rule}.")
        checked = as_array(plain_column(y, op), "y", accept_sparse="csr", dtype=None)
        if any(issubclass(kind, str) for kind in kinds) and any(issubclass(kind, Number) for kind in kinds):
            logger.warning("%s: y has texts and numbers, which all become texts. Give labels of one type", op)
        check_consistent_length(texts, checked)
        for value in checked if checked.dtype == object and checked.ndim == 1 else ():
            if not isinstance(value, Number):  # scikit-learn's own message about dates speaks of a regression
                class_name(value, (str(value),))
        check_classification_targets(checked)
        kind = type_of_target(checked, input_name="y")
        if kind == "multilabel-indicator":
            table = np.asarray(checked.toarray() if hasattr(checked, "toarray") else checked).astype(int)
            if other := set(table.flat) - {0, 1}:
                raise ValueError(f"y is a table with the number {other.pop()}; it has zeros and ones, one per label.")
            columns = [*getattr(y, "columns", ())]  # of a data frame
            is_named = bool(columns) and all(isinstance(name, str) for name in columns)
            labels = tuple(columns if is_named else map(str, range(table.shape[1])))
            return Targets("multi_label", labels, list(map(tuple, table.tolist())), np.arange(table.shape[1]))
        if kind == "multiclass-multioutput":
            raise ValueError(
                f"y has {checked.shape[1]} columns of classes; one is needed, or a table of zeros and ones."
            )
        classes, numbers = np.unique(column_or_1d(checked, warn=True), return_inverse=True)
        labels, classes, numbers = _named(classes, numbers, op)
    if len(classes) < 2:
        raise DataError(f"{op}: y has one class, {classes.tolist()[0]!r}; a classifier needs at least two classes.")
    return Targets("classification", labels, numbers.tolist(), classes)


def plain_column(y: TargetsLike, op: str) -> Any:
    """Return y as an array of its entries' type if it is a column of a pandas type or of objects; else y itself.

    scikit-learn would turn nullable integers and bools into floats, and in a list of texts NaN into "nan". Raises
    DataError, whose message begins with `op`, if an entry is missing, or a column mixes types such as int and str.
    """
    dtype, is_list = getattr(y, "dtype", None), isinstance(y, list | tuple)
    has_gap = is_list and any(pd.api.types.is_scalar(entry) and pd.isna(entry) for entry in y)
    is_column = isinstance(dtype, pd.api.extensions.ExtensionDtype) or getattr(dtype, "kind", "") == "O"
    if not has_gap and not (is_column and getattr(y, "ndim", 0) == 1):
        return y
    column = pd.Series(y, dtype=object)
    if (missing := np.flatnonzero(column.isna())).size:
        raise DataError(f"{op}: row {missing[0]} of y is missing; every text has a label.", row=int(missing[0]))
    array = column.infer_objects().to_numpy()
    kinds = set(map(type, array)) if array.dtype == object else set[type]()
    if len(kinds) > 1 and not all(issubclass(kind, str) for kind in kinds):
        mixed = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"{op}: y mixes {mixed}; all labels have one type. Convert them, for example to texts.")
    return array


def _named(classes: np.ndarray, numbers: np.ndarray, op: str) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Return (class names, one class value per name, index of each row's class among the names).

    `numbers` are the rows' indices in `classes`, the distinct values of y. Two values can have one name, such as the
    two Unicode forms of a text, or "yes" and "yes ", and then become one class; a warning, which begins with `op`, says
    so.
    """
    names = [class_name(value, (str(value),)) for value in classes]
    labels = tuple(dict.fromkeys(names))
    kept = np.array([names.index(name) for name in labels])
    for name in labels if len(labels) < len(names) else ():
        alike = [ascii(str(value)) for value, own in zip(classes, names, strict=True) if own == name]
        if len(alike) > 1:
            problem = f"y has {', '.join(alike)}, which look the same and become one class"
            logger.warning("%s: %s. Clean y: scorers of scikit-learn count them as different.", op, problem)
    return labels, classes[kept], np.array([labels.index(name) for name in names])[numbers]


def as_classes(y: TargetsLike, classes: np.ndarray) -> TargetsLike:
    """Return y with each text that has the name of one of `classes` replaced by this class; y itself without texts."""
    column = np.asarray(y, object)
    column = column[:, 0] if column.shape[1:] == (1,) else column
    if column.ndim != 1 or not all(isinstance(value, str) for value in (*classes, *column)):
        return y
    by_name = {class_name(value, (value,)): value for value in classes}
    return np.array([by_name.get(class_name(value, (value,)), value) for value in column])


def number_targets(y: TargetsLike, texts: Texts, op: str) -> Targets:
    """Return the targets of a regressor, scaled to mean 0 and standard deviation 1; equal numbers all become 0.

    Raises DataError, whose message begins with `op`, if y is None, is not as long as `texts`, or holds anything but
    numbers from -1e37 to 1e37; or if its numbers differ too little for predictions of 32 bits.
    """
    check_given(y, op)
    with data_errors(op):
        types = {np.asarray(y).dtype.type, *map(type, np.asarray(y, dtype=object).flat)}
        if any(issubclass(kind, (date, timedelta, np.datetime64, np.timedelta64)) for kind in types):
            raise ValueError("y has dates or durations, whose unit is not known later. Convert them to numbers.")
        checked = as_array(y, "y", dtype=np.float64)
        check_consistent_length(texts, checked)
        numbers = column_or_1d(checked, warn=True)
        if (most := np.abs(numbers).max()) > _LARGEST:
            raise ValueError(f"y has the size {most:g}; at most {_LARGEST:g} is possible. Divide y by a constant.")
        mean, scale = float(numbers.mean()), float(numbers.std()) or 1.0
        step = float(np.spacing(np.float32(most)))
        if len(set(numbers.tolist())) > 1 and step > _COARSEST * scale:
            raise ValueError(
                f"y has a standard deviation of {scale:.3g} around {mean:.10g}. Predictions have 32 bits, and are "
                f"multiples of {step:.3g} there. Subtract a constant, such as the mean, and add it to the predictions."
            )
    return Targets("regression", ("value",), ((numbers - mean) / scale).tolist(), mean=mean, scale=scale)


def any_targets(y: TargetsLike, texts: Texts, op: str) -> Targets:
    """Return a regressor's targets if y has numbers with a fractional part, otherwise a classifier's targets.

    Raises DataError if `number_targets` or `class_targets` refuses y.

    Args:
        y: One target per text, as `number_targets` or `class_targets` accepts them.
        texts: The texts; y must have as many rows.
        op: Name of the calling method, which begins the error messages.
    """
    check_given(y, op)
    with data_errors(op):
        kind = type_of_target(plain_column(y, op), input_name="y")
    return (number_targets if kind == "continuous" else class_targets)(y, texts, op)
