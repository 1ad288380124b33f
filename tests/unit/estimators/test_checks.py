"""scikit-learn's own checks of an estimator, on tables of numbers that are written as words."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sklearn.utils import estimator_checks as checks
from tests.support import number_tables

import lamina

_folder = TemporaryDirectory()
BASE = number_tables.save_base(number_tables.Path(_folder.name))
READER = lamina.PooledLayers(layers=0, dim=64, heads=4, dropout=0.0)  # the sum of what each word says, so to speak
ESTIMATORS = [
    number_tables.ClassifierOfNumbers(BASE, reader=READER, epochs=4, learning_rate=0.1),
    number_tables.RegressorOfNumbers(BASE, reader=READER, epochs=7, learning_rate=0.1),
    number_tables.TaggerOfNumbers(BASE, reader=lamina.fusion.LastLayer(), epochs=1, options={"cache": "off"}),
    number_tables.TransformerOfNumbers(BASE),
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
    """Every check of every estimator; those that are not tried on another estimator in its turn run with `-m full`.

    Left out are the checks that only give numbers in another kind of array: they become the same words.
    """
    checked: dict[str, list[int]] = {}  # check -> the estimators that have it
    wanted = []
    for number, one in enumerate(ESTIMATORS):
        for own, check in checks.estimator_checks_generator(one):
            name = name_of(check)
            if check.keywords.get("readonly_memmap") or name == "check_array_api_input":
                continue
            if number not in checked.setdefault(name, []):
                checked[name].append(number)
            wanted.append((number, name, own, check))
    tried = {name: having[turn % len(having)] for turn, (name, having) in enumerate(checked.items())}
    return [
        pytest.param(
            own,
            check,
            id=f"{type(own).__name__}-{at}-{name}",
            marks=() if tried[name] == number else pytest.mark.full,
        )
        for at, (number, name, own, check) in enumerate(wanted)
    ]


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
