"""Reports: the tables and curves of a run, figures of what readers use and how well they do, and one page of it all."""

from lamina.report.chart_files import importance, scores
from lamina.report.html_page import Page, write_page
from lamina.report.run_report import write_report

__all__ = ["Page", "importance", "scores", "write_page", "write_report"]
