"""Reports of run folders: one run, or a comparison of several. Imports no torch, so it runs on any machine."""

from dmjd.report.comparison import write_comparison
from dmjd.report.page import write_report
from dmjd.report.paper import paper_text

__all__ = ["paper_text", "write_comparison", "write_report"]
