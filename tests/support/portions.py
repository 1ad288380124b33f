"""A part of a matrix for every run; the rest of it has the marker `full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any], start: int = 0, always: Collection[Any] = ()) -> list[Any]:
    """Return all `cases` as parameters of a test; `-m full` alone runs those that are not one in `count`.

    Args:
        count: Number of cases of which one runs every time.
        cases: Values of the parameter, or tuples with one value per parameter.
        start: Index of the first that runs every time, so that several tests can try different cases.
        always: Cases that run every time.
    """
    return [_parameters(case, number % count == start % count or case in always) for number, case in enumerate(cases)]


def set_apart(cases: Iterable[Any], *rare: Any) -> list[Any]:
    """Return all `cases` as parameters of a test; `-m full` alone runs those that are among `rare`."""
    cases = [*cases]
    assert set(rare) <= set(cases), rare
    return [_parameters(case, case not in rare) for case in cases]


def _parameters(case: Any, always: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=() if always else pytest.mark.full)
