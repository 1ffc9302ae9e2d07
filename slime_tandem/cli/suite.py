"""`slime-tandem suite`: several methods over several seeds, on this machine or under slime."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from slime_tandem.cli import flags


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands,
        "suite",
        "Run several methods over several seeds (scripts/train/run_method_suite.sh); goes on where it stopped.",
    )
    parser.add_argument("suite", metavar="SUITE", help="folder of the runs and of method_mapping.csv")
    parser.add_argument(
        "--methods",
        required=True,
        metavar="LIST",
        help='"method:ratio:idx ...", e.g. "teachability:0.10:20"; blanks or commas between',
    )
    parser.add_argument("--seeds", default="0 1 2", metavar="LIST", help="seeds of every method")
    flags.add_config(parser, "YAML file with the settings of all runs")
    flags.add_set(parser, "settings of all runs")
    parser.add_argument(
        "--top-k", type=int, default=16, help="length of student's and teacher's lists (opd.selection.top_k)"
    )
    parser.add_argument(
        "--backend", choices=("local", "slime"), default="local", help="slime: each run by submit_slime.sh"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be run")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Run what is not finished yet, or print it."""
    from slime_tandem.local.suite import Suite, parse_methods, parse_seeds, run_suite
    from slime_tandem.slime_launch.suite import run_slime_suite

    flags.at_least("--top-k", args.top_k)
    suite = Suite(
        Path(args.suite),
        parse_methods(args.methods),
        parse_seeds(args.seeds),
        Path(args.config) if args.config else None,
        args.overrides,
        args.top_k,
    )
    run_all = run_slime_suite if args.backend == "slime" else run_suite
    run_all(suite, dry_run=args.dry_run, say=partial(print, flush=True))
    return 0
