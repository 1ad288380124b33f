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
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if number % count == start % count or case in always else pytest.mark.full,
        )
        for number, case in enumerate(cases)
    ]
