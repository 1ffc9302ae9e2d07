"""Scores a bank's contexts over the full vocabulary with two models. Killed or interrupted, the same command goes on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import flags, main


def run(args: argparse.Namespace) -> int:
    from slime_tandem.diagnostics.output import show
    from slime_tandem.diagnostics.rescore import EvaluationJob, evaluate_bank
    from slime_tandem.models.builtin import resolve_model

    cache = Path(args.cache_dir)
    job = EvaluationJob(
        bank=args.bank,
        output=args.output,
        label=args.label,
        student=resolve_model(args.student, cache),
        teacher=resolve_model(args.teacher, cache),
        dtype=args.dtype,
        device=args.device,
        logit_mib=args.logit_mib,
        trust_remote_code=args.trust_remote_code,
    )
    show(evaluate_bank(job, lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="eval_fixed_context_bank.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("bank", type=Path, metavar="BANK.parquet")
    p.add_argument("--student", required=True, metavar="FOLDER", help="Hugging Face folder, or builtin:<role>")
    p.add_argument(
        "--teacher", required=True, metavar="FOLDER", help="the same; with the tokenizer of the bank's teacher"
    )
    p.add_argument("--label", required=True, help="name of this checkpoint, e.g. before")
    p.add_argument("--output", type=Path, required=True, metavar="FILE.parquet", help="appears when all is scored")
    flags.add_dtype(p, "of both models")
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    p.add_argument("--logit-mib", type=float, default=256.0, help="MiB of one model's log-probs held at once")
    flags.add_cache_dir(p)
    flags.add_trust_remote_code(p)
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
