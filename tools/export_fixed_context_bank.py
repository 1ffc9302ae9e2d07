"""Makes a bank of fixed contexts: a student's responses, scored by it and a teacher, and positions drawn from them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from slime_tandem.cli import flags, main
from slime_tandem.config import RunConfig
from slime_tandem.distill.teachability import Compatibility, MissingMass, Normalisation


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.export import BankPlan, export_bank
    from slime_tandem.diagnostics.output import show

    config = RunConfig.load(args.config, args.overrides)
    plan = BankPlan(
        sequences=args.sequences,
        per_sequence=args.positions,
        sampling=args.sampling,
        top_k=args.top_k,
        missing_mass=args.missing_mass,
        compatibility=args.compatibility,
        normalisation=args.normalisation,
        seed=args.seed,
        responses=args.responses,
    )
    show(export_bank(config, plan, args.output, lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="export_fixed_context_bank.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument(
        "--output", type=Path, required=True, metavar="FILE.parquet", help="the bank; a report goes beside it"
    )
    flags.add_config(p, "YAML settings: models, tasks, servers (slime-tandem train --help)")
    flags.add_set(p, "e.g. models.senior=FOLDER models.teacher=FOLDER engine.senior_url=http://host:30000")
    p.add_argument("--sequences", type=int, default=300, help="held-out prompts, one response each")
    p.add_argument("--responses", type=Path, metavar="FILE.jsonl", help="take these responses instead of writing some")
    p.add_argument("--positions", type=int, default=16, help="positions per response, on average")
    p.add_argument("--sampling", choices=["quadrant", "uniform"], default="quadrant", help="equally many per quadrant")
    p.add_argument("--top-k", type=int, default=16, help="entries of student's and teacher's lists")
    p.add_argument(
        "--missing-mass",
        choices=get_args(MissingMass),
        help="what lists lack (none: exact with one vocabulary, rest with two)",
    )
    p.add_argument("--compatibility", choices=get_args(Compatibility), default="mass", help="which C")
    p.add_argument("--normalisation", choices=get_args(Normalisation), default="batch_quantile", help="of H, D and C")
    p.add_argument("--seed", type=int, default=0, help="of the drawn positions; that of the responses is a setting")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
