"""What the methods of a suite did to the student, by a measure that none of them was trained on.

    python scripts/benchmarks/method_suite.py runs/methods        # after scripts/train/run_method_suite.sh; minutes

The full-distribution KL(student || teacher) on contexts that are the same for all: the start's own answers to held-out
questions, at the places where both tokenizers cut the text, over the next byte (scripts/benchmarks/distillation.py says how).
The mean over seeds with its 95% interval (Student's t), and the difference to the first method, paired by seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from distillation import Reader, contexts_of, divergences

from slime_tandem.models.builtin import resolve_model
from slime_tandem.report.comparison import Mean, read_mapping
from slime_tandem.report.summary import load_config, summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    args = parser.parse_args()
    rows = [r for r in read_mapping(args.suite) if (args.suite / r["run"] / "config.yaml").exists()]
    rows = [r for r in rows if summarise(args.suite / r["run"])["complete"]]
    config = load_config(args.suite / rows[0]["run"])
    start, teacher = (
        resolve_model(m, Path(config.models.cache_dir)) for m in (config.models.senior, config.models.teacher)
    )
    contexts = contexts_of(config, args.suite / "logs")
    reader = Reader.load(teacher)
    before = divergences(Reader.load(start), reader, contexts)
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        after = divergences(Reader.load(args.suite / row["run"] / "senior"), reader, contexts)
        found.setdefault((row["idx"], row["method"], row["ratio"]), {})[row["seed"]] = after["kl_next_byte"]
    first = next(iter(found.values()))
    print(f"{before['positions']:.0f} positions; start {before['kl_next_byte']:.4f} nats\n")
    print("| method | kept | KL to the teacher (nats) | difference to the first |")
    print("|---|---|---|---|")
    for (_, method, ratio), seeds in found.items():
        after, difference = Mean.of([*seeds.values()]), Mean.of([v - first[s] for s, v in seeds.items() if s in first])
        texts = [_text(after, ""), "" if seeds is first else _text(difference, "+")]
        print(f"| {method} | {float(ratio):.2f} | {texts[0]} | {texts[1]} |")
    (args.suite / "kl_next_byte.json").write_text(
        json.dumps({"start": before, "methods": {f"{m}:{r}:{i}": s for (i, m, r), s in found.items()}}, indent=1) + "\n"
    )


def _text(mean: Mean, sign: str) -> str:
    interval = "" if mean.low is None else f" ({mean.low:{sign}.3f} to {mean.high:{sign}.3f})"
    return f"{mean.value:{sign}.3f}{interval}"


if __name__ == "__main__":
    main()
