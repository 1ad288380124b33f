from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import BaseEstimator

from lamina.errors import DataError
from lamina.estimators.examples import as_texts, as_words


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ("a text", "op: X is one text; a list, array or column of texts is needed."),
        ([], "op: Found array with 0 sample(s)"),
        (None, "op: Input should have at least 1 dimension"),
        ([1, 2], "op: row 0 of X holds 1 of type int; every row is a text, or every row a pair of texts."),
        (["a", None], "op: row 1 of X holds None of type NoneType"),
        (["a", float("nan")], "op: row 1 of X holds nan of type float"),
        ([b"a"], "op: row 0 of X holds b'a' of type bytes"),
        ([("a", "b"), "c"], "op: row 1 of X holds ['c'] of type list"),
        ([("a", 3)], "op: row 0 of X holds 3 of type int"),
        (np.array([["a", "b", "c"]]), "op: X has 3 columns; one of texts is needed, or two of pairs."),
        (pd.Series(["a", pd.NA]), "op: row 1 of X holds"),
        (csr_array([[1]]), "op: X is a sparse array of numbers; an estimator of Lamina reads texts. Give the texts"),
    ],
)
def test_what_is_no_text(X: object, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        as_texts(BaseEstimator(), X, "op", reset=True)


def test_texts_are_plain_ones_whatever_they_came_in():
    assert as_texts(BaseEstimator(), np.array(["a", "b"]), "op", reset=True) == ["a", "b"]
    assert type(as_texts(BaseEstimator(), np.array(["a"]), "op", reset=True)[0]) is str
    assert as_texts(BaseEstimator(), pd.Series([("a", "b")]), "op", reset=True) == [("a", "b")]
    assert as_texts(BaseEstimator(), [["a"], ["b"]], "op", reset=True) == ["a", "b"]


def test_a_sparse_table_holds_no_words():
    with pytest.raises(DataError, match="op: X is a sparse array of numbers"):
        as_words(csr_array([[1, 0], [0, 2]]), "op")


def test_columns_are_those_of_fit():
    estimator = BaseEstimator()
    as_texts(estimator, pd.DataFrame({"one": ["a"], "two": ["b"]}), "op", reset=True)
    with pytest.raises(DataError, match="The feature names should match"):
        as_texts(estimator, pd.DataFrame({"one": ["a"], "other": ["b"]}), "op", reset=False)
    with (
        pytest.warns(UserWarning, match="valid feature names"),
        pytest.raises(DataError, match="X has 1 features, but BaseEstimator is expecting 2 features as input"),
    ):
        as_texts(estimator, np.array([["a"]]), "op", reset=False)
    as_texts(estimator, ["a"], "op", reset=True)
    assert SimpleNamespace(**vars(estimator)) == SimpleNamespace(pairs_=False)
