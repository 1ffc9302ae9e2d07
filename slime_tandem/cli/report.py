"""`slime-tandem report`: the page and the table of a run or a suite, once or followed live."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.errors import ConfigError, RunDirError


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands, "report", "Write report.html of a run and print its table; of a suite, compare its methods."
    )
    parser.add_argument("run", metavar="RUN", help="run folder, runs/<name>, or a suite's folder")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the page on this machine instead, and change it while the run writes; Ctrl-C ends it",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=argparse.SUPPRESS,
        help="with --watch: the port on 127.0.0.1, 0 for any that is free (default: 6070, or any)",
    )
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and print the table; a folder with a suite's mapping is a suite."""
    folder, port = Path(args.run), getattr(args, "port", None)
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError("--port", port, "a number from 0 to 65535", "choose another one")
    if args.watch:
        return _watch(folder, port)
    if port is not None:
        raise ConfigError("--port", port, "--watch with it", "add --watch, or leave it out")
    from rich.console import Console

    from slime_tandem.report.comparison import MAPPING, suite_table, write_suite
    from slime_tandem.report.console import final_table
    from slime_tandem.report.html import write_report
    from slime_tandem.report.summary import write_summary

    if (folder / MAPPING).exists():
        Console().print(suite_table(write_suite(folder)))
        print(f"report: {folder / 'suite.html'}")
        return 0
    summary = write_summary(folder)
    page = write_report(folder)
    Console().print(final_table(summary))
    print(f"report: {page}")
    return 0


def _watch(folder: Path, port: int | None) -> int:
    import asyncio

    from slime_tandem.live.page import LivePage
    from slime_tandem.live.server import watch

    if not folder.is_dir():
        expected = "the folder of a run or a suite, perhaps one that is only starting"
        raise RunDirError("run folder", str(folder), expected, "start the run first, or check the path")
    asyncio.run(watch(LivePage(folder), port, partial(print, flush=True)))
    return 0
