"""Whether findings hang on the definition of the student's support: K, a nucleus, mass, overlap, Bhattacharyya."""

from __future__ import annotations

import argparse
import sys

from slime_tandem.cli import main
from slime_tandem.diagnostics.arguments import analysis_parser


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
    p = analysis_parser("support_definition_robustness.py", __doc__, optional_evaluations=True)
    p.add_argument("--k", type=int, nargs="*", default=[1, 4, 8], help="lengths of the student's list")
    p.add_argument("--p", type=float, nargs="*", default=[0.5, 0.8, 0.95], help="masses of the student's nucleus")
    p.add_argument("--ratio", type=float, default=0.1, help="budget of the compared selections")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
