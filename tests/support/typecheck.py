"""The checker that stands behind every annotated function of lamina while the tests run.

jaxtyping imports it by the name `typecheck.checked`; see pyproject.toml.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

if TYPE_CHECKING:
    from collections.abc import Callable

_LIKE_PYRIGHT = BeartypeConf(is_pep484_tower=True)  # an int is a float


def checked(function: Callable[..., object]) -> Callable[..., object]:
    """`beartype`, but not for constructors, nor for functions annotated with `Self`.

    A constructor checks by hand what users give it, with a message of its own that the tests want to see.
    `Self` is something beartype takes on whole classes only.
    """
    if function.__name__ == "__init__" or "<locals>" in function.__qualname__:
        return function
    try:
        return beartype(function, conf=_LIKE_PYRIGHT)
    except BeartypeDecorHintPep673Exception:
        return function
