"""`slime-tandem train`: the loop on one machine."""

from __future__ import annotations

import argparse

from slime_tandem.cli import flags


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands, "train", "Run tandem GRPO with a distilling teacher on this machine.", settings=True
    )
    again = parser.add_argument_group("where a run of this name is already").add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with an existing run (or start it)")
    again.add_argument("--overwrite", action="store_true", help="delete an existing run of this name first")
    parser.add_argument_group("output").add_argument(
        "--quiet", action="store_true", help="show no progress, only warnings and the result"
    )
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Train, then print the run's table and where its report is."""
    from rich.console import Console

    from slime_tandem.report.progress import RunProgress

    config = flags.load_config(args)
    with RunProgress(quiet=args.quiet) as progress:
        progress.phase("loading libraries")  # of which torch and Megatron-core take seconds
        from slime_tandem.local.run import train
        from slime_tandem.report.console import final_table

        summary = train(config, resume=args.resume, overwrite=args.overwrite, progress=progress)
    Console().print(final_table(summary))
    print(f"report: {config.run_dir / 'report.html'}")
    return 0
