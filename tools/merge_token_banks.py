"""Puts banks, or evaluations (shards, checkpoints), into one file; a (sample, position) that two of them hold is refused."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import main


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.merge import merge
    from slime_tandem.diagnostics.output import show

    show(merge(args.files, args.output))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="merge_token_banks.py", description=__doc__)
    p.add_argument("files", type=Path, nargs="+", metavar="FILE.parquet", help="all banks, or all evaluations")
    p.add_argument("--output", type=Path, required=True, metavar="FILE.parquet")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
