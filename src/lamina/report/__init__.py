"""Figures of what readers use and how well they do."""

from lamina.report.figures import importance, scores

__all__ = ["importance", "scores"]
