"""Runs and a browser, as for the report."""

from ..report.conftest import browser, make_run

__all__ = ["browser", "make_run"]
