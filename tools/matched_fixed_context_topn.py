"""The N best contexts of each selector: what training did there, against all contexts and against matched ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import main

METHODS = "teachability teachability_entropy entropy tip divergence compatibility dincompat_high random"


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.gain import load_contexts
    from slime_tandem.diagnostics.output import show, write_report
    from slime_tandem.diagnostics.topn import bank_scores, top_n

    contexts, table, setup = load_contexts(args.bank, args.evaluations, args.before, args.after)
    report = top_n(
        contexts,
        bank_scores(table),
        table.column("position").to_numpy().astype("int64"),
        args.methods,
        max(1, len(contexts) // 10) if args.top_n is None else args.top_n,
        setup,
        resamples=args.resamples,
        seed=args.seed,
        caliper=args.caliper,
    )
    write_report(report, args.output)
    show(report)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="matched_fixed_context_topn.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("bank", type=Path, metavar="BANK.parquet")
    p.add_argument("evaluations", type=Path, nargs="+", metavar="EVALUATION.parquet", help="one or more files")
    p.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="PREFIX.csv, .json and .svg are written"
    )
    p.add_argument("--methods", nargs="+", default=METHODS.split(), help="selectors or their script names")
    p.add_argument("--top-n", type=int, help="contexts per selector (none: a tenth of the bank)")
    p.add_argument("--before", default="before", help="label of the evaluation before training")
    p.add_argument("--after", default="after", help="label of the one after")
    p.add_argument("--caliper", type=float, default=0.25, help="furthest match, in standard deviations")
    p.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over responses")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap and of ties")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
