"""`slime-tandem report`: the page and the table of a run or a suite."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_tandem.cli import flags


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands, "report", "Write report.html of a run and print its table; of a suite, compare its methods."
    )
    parser.add_argument("run", metavar="RUN", help="run folder, runs/<name>, or a suite's folder")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and print the table; a folder with a suite's mapping is a suite."""
    from rich.console import Console

    from slime_tandem.report.comparison import MAPPING, suite_table, write_suite
    from slime_tandem.report.console import final_table
    from slime_tandem.report.html import write_report
    from slime_tandem.report.summary import write_summary

    folder = Path(args.run)
    if (folder / MAPPING).exists():
        Console().print(suite_table(write_suite(folder)))
        print(f"report: {folder / 'suite.html'}")
        return 0
    summary = write_summary(folder)
    page = write_report(folder)
    Console().print(final_table(summary))
    print(f"report: {page}")
    return 0
