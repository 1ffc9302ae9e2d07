"""Arguments that the analyses of a bank share (`tools/`)."""

from __future__ import annotations

import argparse
from pathlib import Path


def analysis_parser(prog: str, text: str, *, optional_evaluations: bool = False) -> argparse.ArgumentParser:
    """A parser of `bank`, `evaluations`, `--output`, `--before`, `--after`, `--resamples` and `--seed`.

    >>> args = analysis_parser("p", "").parse_args(["b.parquet", "e.parquet", "--output", "out/x"])
    >>> args.before, args.evaluations[0].name, args.resamples
    ('before', 'e.parquet', 1000)
    """
    p = argparse.ArgumentParser(prog=prog, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("bank", type=Path, metavar="BANK.parquet")
    p.add_argument(
        "evaluations",
        type=Path,
        nargs="*" if optional_evaluations else "+",
        metavar="EVALUATION.parquet",
        help="for the findings on the gain" if optional_evaluations else "one or more files",
    )
    p.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="PREFIX.csv, .json and .svg are written"
    )
    p.add_argument("--before", default="before", help="label of the evaluation before training")
    p.add_argument("--after", default="after", help="label of the one after")
    p.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over responses")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap and of ties")
    return p
