"""Whether findings hang on the definition of the student's support: K, a nucleus, mass, overlap, Bhattacharyya."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import main


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.output import show, write_report
    from slime_tandem.diagnostics.support import check_support

    report = check_support(
        args.bank,
        args.evaluations,
        args.before,
        args.after,
        ks=args.k,
        ps=args.p,
        ratio=args.ratio,
        resamples=args.resamples,
        seed=args.seed,
    )
    write_report(report, args.output)
    show(report)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="support_definition_robustness.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("bank", type=Path, metavar="BANK.parquet")
    p.add_argument(
        "evaluations", type=Path, nargs="*", metavar="EVALUATION.parquet", help="for the findings on the gain"
    )
    p.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="PREFIX.csv, .json and .svg are written"
    )
    p.add_argument("--k", type=int, nargs="*", default=[1, 4, 8], help="lengths of the student's list")
    p.add_argument("--p", type=float, nargs="*", default=[0.5, 0.8, 0.95], help="masses of the student's nucleus")
    p.add_argument("--ratio", type=float, default=0.1, help="budget of the compared selections")
    p.add_argument("--before", default="before", help="label of the evaluation before training")
    p.add_argument("--after", default="after", help="label of the one after")
    p.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over responses")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap and of ties")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
