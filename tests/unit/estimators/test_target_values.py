from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import DataConversionWarning

from lamina.errors import DataError
from lamina.estimators.examples import any_targets, class_targets, number_targets
from lamina.estimators.predictors import LaminaClassifier

TEXTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "requires y to be passed, but the target y is None"),
        (["x", "y"], "inconsistent numbers of samples"),
        (["x", None, "y"], "row 1 of y is missing"),
        ([0.5, 1.5, 2.0], "Unknown label type"),
        ([["x"], ["y", "z"], []], "lists or sets of classes; .* MultiLabelBinarizer"),
        ([{"x"}, {"y", "x"}, {"y"}], "lists or sets of classes"),
        (pd.Series([["x"], ["y", "x"], ["y"]]), "lists or sets of classes"),
        ([["x", "y"]] * 3, "multioutput|2 columns of classes"),
        (np.array([1, "a", 1], dtype=object), "op: y mixes int and str; all labels have one type"),
        (pd.Series(["a", 2.5, "a"]), "op: y mixes float and str"),
        (pd.Series([True, 1, 0], dtype=object), "op: y mixes bool and int"),
        (["x"] * 3, "y has one class, 'x'; a classifier needs"),
        ([1] * 3, "y has one class, 1; a classifier needs"),
        ([True] * 3, "y has one class, True; a classifier needs"),
        ([1.0] * 3, "y has one class, 1.0; a classifier needs"),
        (["x", float("nan"), "y"], "row 1 of y is missing"),
        (pd.Series([1, None, 0], dtype="Int64"), "row 1 of y is missing"),
        ([[-1, 1], [1, 1], [1, -1]], "op: y is a table with the number -1; it has zeros and ones"),
        (
            pd.to_datetime(["2020-01-01", "2021-01-01", "2021-01-01"]),
            "op: y has .* of type datetime; a class is a text",
        ),
        ([date(2020, 1, 1), date(2021, 1, 1), date(2021, 1, 1)], "op: y has .* of type date; a class is a text"),
        (
            [Decimal("1.5"), Decimal("2.5"), Decimal("1.5")],
            "op: Unknown label type",
        ),
    ],
)
def test_what_are_no_classes(y: object, message: str):
    with pytest.raises(DataError, match=message):
        class_targets(y, TEXTS, "op")


def test_a_column_is_taken_with_the_warning_that_is_known():
    with pytest.warns(DataConversionWarning, match="column-vector"):
        assert class_targets([["x"], ["y"], ["x"]], TEXTS, "op").values == [0, 1, 0]


@pytest.mark.parametrize(
    "y",
    [
        pd.Series(pd.to_datetime(["2020-01-01", "2021-01-01", "2021-01-01"], utc=True)),
        np.array([1, np.timedelta64(1, "D"), np.timedelta64(2, "h")], dtype=object),
        np.array([[np.datetime64("2020-01-01")], [np.datetime64("2021-01-01")], [2]], dtype=object),
        [date(2020, 1, 1), date(2021, 1, 1), date(2021, 1, 1)],
    ],
    ids=["time zone", "timedelta64", "datetime64", "date"],
)
def test_dates_and_durations_are_no_numbers(y: object):
    with pytest.raises(DataError, match="op: y has dates or durations, whose unit is not known later"):
        number_targets(y, TEXTS, "op")
    assert number_targets(np.array([Decimal("1.5"), "2", 4.0], dtype=object), TEXTS, "op").mean == 2.5


def test_numbers_are_brought_to_one_scale():
    targets = number_targets([10, 20, 30], TEXTS, "op")
    np.testing.assert_allclose(np.array(targets.values) * targets.scale + targets.mean, [10, 20, 30])
    assert np.std(targets.values) == pytest.approx(1)
    assert number_targets([5, 5, 5], TEXTS, "op").values == [0, 0, 0]


@pytest.mark.parametrize(
    ("y", "problem"),
    [
        ([1.5, 2.0, 3.0], "regression"),
        ([1, 2, 3], "classification"),
        (["x", "y", "y"], "classification"),
        ([[0, 1], [1, 1], [0, 0]], "multi_label"),
    ],
)
def test_what_y_holds(y: object, problem: str):
    targets = any_targets(np.array(y), TEXTS, "op")
    assert targets.problem_type == problem
    assert (targets.stratify is not None) == (problem == "classification")


def test_labels_have_the_names_of_a_data_frame():
    frame = pd.DataFrame([[0, 1], [1, 1], [0, 0]], columns=["late", "rude"])
    assert class_targets(frame, TEXTS, "op").labels == ("late", "rude")
    assert class_targets(frame.astype(bool), TEXTS, "op").labels == ("late", "rude")
    frame.columns = [3, 4]
    assert class_targets(frame, TEXTS, "op").labels == ("0", "1")


@pytest.mark.parametrize(
    ("y", "labels", "values"),
    [
        ([True, False, True], ("False", "True"), [1, 0, 1]),
        ([2.0, 1.0, 2.0], ("1", "2"), [1, 0, 1]),
        (["Zoe\u0308", "Zo\u00eb", "Ana"], ("Ana", "Zo\u00eb"), [1, 1, 0]),
    ],
)
def test_classes_have_the_names_that_files_give_them(y: list[object], labels: tuple[str, ...], values: list[int]):
    targets = class_targets(y, TEXTS, "op")
    assert (targets.labels, targets.values) == (labels, values)
    assert targets.classes is not None
    assert len(targets.classes) == len(labels)


@pytest.mark.parametrize(
    ("dtype", "y", "labels"),
    [
        ("Int64", [3, 10, 3], ("3", "10")),
        ("boolean", [False, True, False], ("False", "True")),
        ("bool[pyarrow]", [False, True, False], ("False", "True")),
        ("category", [3, 10, 3], ("3", "10")),
        (object, [3, 10, 3], ("3", "10")),
        ("str", ["a", "b", "a"], ("a", "b")),
    ],
)
def test_classes_of_pandas_columns_keep_their_type(dtype: Any, y: list[object], labels: tuple[str, ...]):
    targets = class_targets(pd.Series(y, dtype=dtype, index=[5, 5, 2]), TEXTS, "op")
    assert (targets.labels, targets.values) == (labels, [0, 1, 0])
    assert targets.classes is not None
    assert [(type(one), one) for one in targets.classes.tolist()] == [(type(one), one) for one in y[:2]]


@pytest.mark.parametrize(("y", "positive"), [([3.0, 1.0], 3.0), (pd.Series([3, 1], dtype=object), 3)])
def test_the_values_of_y_score_and_name_the_positive_class(base: str, texts: list[str], y: Any, positive: object):
    how: dict[str, Any] = {"positive": positive, "epochs": 1, "options": {"cache": "off"}}
    fitted = LaminaClassifier(base, **how).fit(texts[:2], y)
    assert fitted.bank_["reader"].info["positive"] == "3"
    assert fitted.score(texts[:2], y) == np.mean(fitted.predict(texts[:2]) == np.array([3, 1]))


def test_a_missing_label_is_no_number(caplog):
    with pytest.raises(DataError, match="row 1 of y is missing"):
        class_targets(["x", float("nan"), "y"], TEXTS, "op")
    assert not caplog.messages


@pytest.mark.parametrize(("y", "is_told"), [([1, "a", 1], True), ([True, "a", "a"], True), ([1, 2.0, True], False)])
def test_texts_and_numbers_in_a_list_become_texts_with_a_warning(y: list[Any], is_told: bool, caplog):
    targets = class_targets(y, TEXTS, "op")
    assert (targets.classes is not None and targets.classes.dtype.kind == "U") == is_told
    assert [message.split(",")[0] for message in caplog.messages] == ["op: y has texts and numbers"] * is_told
