"""Reports: the tables and curves of a run, and figures of what readers use and how well they do."""

from lamina.report.figures import importance, scores
from lamina.report.folder import write_report

__all__ = ["importance", "scores", "write_report"]
