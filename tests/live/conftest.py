"""Runs and a browser, as for the report."""

from ..report.conftest import browser, make_run
from ..report.test_comparison import folder

__all__ = ["browser", "folder", "make_run"]
