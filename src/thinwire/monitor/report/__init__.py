"""From a run's folder to values, figures and one self-contained page."""

from __future__ import annotations

from thinwire.monitor.report.comparison import Comparison, compare_runs, write_comparison
from thinwire.monitor.report.report import write_report
from thinwire.monitor.runlog.run_folder import RunRecord, Summary, read_run

__all__ = [
    "Comparison",
    "RunRecord",
    "Summary",
    "compare_runs",
    "read_run",
    "write_comparison",
    "write_report",
]
