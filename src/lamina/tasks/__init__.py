"""Tasks: labelled examples, the kinds of questions about them, and the metrics that score the answers."""

from lamina.registry import KINDS
from lamina.tasks.base import kind_of

__all__ = ["KINDS", "kind_of"]
