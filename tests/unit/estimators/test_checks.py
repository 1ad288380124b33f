"""scikit-learn's own checks of an estimator, on tables of numbers that are written as words."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sklearn.utils import estimator_checks as checks
from tests.support import numbers

import lamina

_folder = TemporaryDirectory()
BASE = numbers.save_base(numbers.Path(_folder.name))
READER = lamina.PooledLayers(layers=0, dim=64, heads=4, dropout=0.0)  # the sum of what each word says, so to speak
ESTIMATORS = [
    numbers.ClassifierOfNumbers(BASE, reader=READER, epochs=4, learning_rate=0.1),
    numbers.RegressorOfNumbers(BASE, reader=READER, epochs=7, learning_rate=0.1),
    numbers.TaggerOfNumbers(BASE, reader=lamina.fusion.LastLayer(), epochs=1, options={"cache": "off"}),
    numbers.TransformerOfNumbers(BASE),
]
ROW_BY_ROW = (
    "check_methods_subset_invariance",
    "check_methods_sample_order_invariance",
)  # they allow a difference of 1e-7; a batch of another size is rounded otherwise, within 1e-5


def name_of(check: Any) -> str:
    while isinstance(check, partial):
        check = check.func
    return check.__name__


def listed() -> list[Any]:
    """Every check, but for those that only give its numbers in another kind of array: they become the same words."""
    every = ((own, check) for one in ESTIMATORS for own, check in checks.estimator_checks_generator(one))
    wanted = [
        (own, check)
        for own, check in every
        if not check.keywords.get("readonly_memmap") and name_of(check) != "check_array_api_input"
    ]
    return [pytest.param(*one, id=f"{type(one[0]).__name__}-{at}-{name_of(one[1])}") for at, one in enumerate(wanted)]


@pytest.mark.parametrize(("estimator", "check"), listed())
def test_scikit_learns_checks(estimator: Any, check: Any):
    if name_of(check) in ROW_BY_ROW:
        estimator.set_params(options={"eval_batch_size": 1})
    check(estimator)


DATA_FREE = [
    checks.check_estimator_cloneable,
    checks.check_estimator_repr,
    checks.check_no_attributes_set_in_init,
    checks.check_parameters_default_constructible,
    checks.check_get_params_invariance,
    checks.check_set_params,
    checks.check_mixin_order,
]


@pytest.mark.parametrize("check", DATA_FREE, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "kind", [lamina.LaminaClassifier, lamina.LaminaRegressor, lamina.LaminaTagger, lamina.LaminaTransformer]
)
def test_checks_that_need_no_data_hold_as_it_is(kind: Any, check: Any):
    check(kind.__name__, kind())
