"""Reports: the tables and curves of a run, figures of what readers use and how well they do, and one page of it all."""

from lamina.report.figures import importance, scores
from lamina.report.folder import write_report
from lamina.report.page import Page, write_page

__all__ = ["Page", "importance", "scores", "write_page", "write_report"]
