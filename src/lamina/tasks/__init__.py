"""Tasks: labelled examples, the kinds of questions about them, and the metrics that score the answers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lamina.registry import KINDS

if TYPE_CHECKING:
    from lamina.tasks.kind import Kind

__all__ = ["KINDS", "kind_of"]


@cache
def kind_of(name: str) -> Kind:
    """Return the kind of task that is registered under a name; raise UnknownNameError if there is none."""
    return KINDS.get(name)()
