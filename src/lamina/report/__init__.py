"""Reports: the tables and curves of a run, charts of what readers use, and one page of it all."""

from lamina.report.html_page import Page, write_page
from lamina.report.importance_charts import importance
from lamina.report.run_report import write_report

__all__ = ["Page", "importance", "write_page", "write_report"]
