"""What training did at a bank's contexts: gain by quadrant and by C, regressions with and without C, matching."""

from __future__ import annotations

import argparse
import sys

from slime_tandem.cli import main
from slime_tandem.diagnostics.arguments import analysis_parser


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.gain import analyze, load_contexts
    from slime_tandem.diagnostics.output import show, write_report

    contexts, _, setup = load_contexts(args.bank, args.evaluations, args.before, args.after)
    report = analyze(contexts, setup, resamples=args.resamples, seed=args.seed, floor=args.min_kl, caliper=args.caliper)
    write_report(report, args.output)
    show(report)
    return 0


def parser() -> argparse.ArgumentParser:
    p = analysis_parser("analyze_fixed_context_gain.py", __doc__)
    p.add_argument("--min-kl", type=float, default=1e-3, help="least KL before, nats, of a relative gain")
    p.add_argument("--caliper", type=float, default=0.25, help="furthest match, in standard deviations")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
