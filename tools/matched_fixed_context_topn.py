"""The N best contexts of each selector: what training did there, against all contexts and against matched ones."""

from __future__ import annotations

import argparse
import sys

from slime_tandem.cli import main
from slime_tandem.diagnostics.arguments import analysis_parser

METHODS = "teachability teachability_entropy entropy tip divergence compatibility dincompat_high random"


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.gain import load_contexts
    from slime_tandem.diagnostics.output import show, write_report
    from slime_tandem.diagnostics.topn import top_n

    contexts, table, setup = load_contexts(args.bank, args.evaluations, args.before, args.after)
    report = top_n(
        contexts,
        table,
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
    p = analysis_parser("matched_fixed_context_topn.py", __doc__)
    p.add_argument("--methods", nargs="+", default=METHODS.split(), help="selectors or their script names")
    p.add_argument("--top-n", type=int, help="contexts per selector (none: a tenth of the bank)")
    p.add_argument("--caliper", type=float, default=0.25, help="furthest match, in standard deviations")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
