"""What training did at a bank's contexts: gain by quadrant and by C, regressions with and without C, matching."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import main


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.gain import analyze, load_contexts
    from slime_tandem.diagnostics.output import show, write_report

    contexts, _, setup = load_contexts(args.bank, args.evaluations, args.before, args.after)
    report = analyze(contexts, setup, resamples=args.resamples, seed=args.seed, floor=args.min_kl, caliper=args.caliper)
    write_report(report, args.output)
    show(report)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="analyze_fixed_context_gain.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("bank", type=Path, metavar="BANK.parquet")
    p.add_argument("evaluations", type=Path, nargs="+", metavar="EVALUATION.parquet", help="one or more files")
    p.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="PREFIX.csv, .json and .svg are written"
    )
    p.add_argument("--before", default="before", help="label of the evaluation before training")
    p.add_argument("--after", default="after", help="label of the one after")
    p.add_argument("--min-kl", type=float, default=1e-3, help="least KL before, nats, of a relative gain")
    p.add_argument("--caliper", type=float, default=0.25, help="furthest match, in standard deviations")
    p.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over responses")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
