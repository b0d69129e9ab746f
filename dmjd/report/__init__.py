"""Pages about runs, composed from their folders. Knows no torch, so it works wherever a folder was copied to."""

from dmjd.report.comparison import write_comparison
from dmjd.report.page import write_report

__all__ = ["write_comparison", "write_report"]
