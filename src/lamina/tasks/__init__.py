"""Tasks: labelled examples, what is asked about them, and how the answers are scored."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lamina.registry import KINDS

if TYPE_CHECKING:
    from lamina.tasks.kind import Kind

__all__ = ["KINDS", "kind_of"]


@cache
def kind_of(name: str) -> Kind:
    """What a kind of task says of itself; an UnknownNameError names those that exist."""
    return KINDS.get(name)()
