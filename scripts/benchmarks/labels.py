"""False positives and negatives of our label comparison and of math-verify alone, on tests/tasks/label_pairs.tsv.

`python scripts/benchmarks/labels.py [--all]`: a table by kind (docs/results/scoring.md), and with --all every pair that is
judged wrongly. The judgements in the file are by hand: what a reader who knows some mathematics says. math-verify is asked as
users ask it (`parse` of a box, `verify`), within a time limit, in a worker as ours is; a pair that raises or takes too long is
unequal.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime_tandem.config import RewardConfig, TaskSpec
from slime_tandem.tasks.judging import Judge
from slime_tandem.tasks.pool import Call, Limits, Pool, recipe
from slime_tandem.types import Prompt

PAIRS = Path(__file__).parents[2] / "tests" / "tasks" / "label_pairs.tsv"


def pairs() -> list[tuple[str, str, str, bool]]:
    """(kind, label, answer, whether they are equal) of the file."""
    rows = [line.split("\t") for line in PAIRS.read_text(encoding="utf-8").splitlines()[1:]]
    return [(kind, label, answer, {"equal": True, "different": False}[said]) for kind, label, answer, said in rows]


def ours(asked: Sequence[tuple[str, str]], timeout_s: float = 5.0) -> list[bool]:
    """As a run does it."""
    from slime_tandem.tasks.families import quick_of

    spec = TaskSpec(family="jsonl", path="labels", reward="label")
    judge = Judge(spec, "tasks.0", RewardConfig(timeout_s=timeout_s), quick_of(spec, None))
    prompts = [(Prompt("p", (), label, "t"), f"<answer>{answer}</answer>") for label, answer in asked]
    return [verdict.reward == 1.0 for verdict in judge.verdicts(prompts)]


def math_verify_alone(asked: Sequence[tuple[str, str]], timeout_s: float = 5.0) -> list[bool]:
    """The library with its own settings."""
    pool = Pool(Limits(timeout_s=timeout_s, guarded=False))
    try:
        return [
            reply.value is True
            for reply in pool.ask([Call(recipe(Path(__file__).stem, "_library"), pair) for pair in asked])
        ]
    finally:
        pool.close()


def _library():
    from math_verify import parse, verify

    def same(label: str, answer: str) -> bool:
        gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (label, answer))
        return bool(verify(gold, given, timeout_seconds=None))

    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="list the pairs that are judged wrongly")
    args = parser.parse_args()
    table = pairs()
    asked = [(label, answer) for _, label, answer, _ in table]
    found = {"ours": ours(asked), "math-verify": math_verify_alone(asked)}
    kinds = list(dict.fromkeys(kind for kind, *_ in table))
    print(
        "| kind | pairs equal / different | wrongly equal: ours | math-verify | wrongly different: ours | math-verify |"
    )
    print("|---|---|---|---|---|---|")
    for kind in [*kinds, "all"]:
        rows = [i for i, row in enumerate(table) if kind in (row[0], "all")]
        equal = sum(table[i][3] for i in rows)
        wrong = {
            (name, truth): sum(values[i] != table[i][3] and table[i][3] is truth for i in rows)
            for name, values in found.items()
            for truth in (False, True)
        }
        cells = [wrong[name, truth] for truth in (False, True) for name in ("ours", "math-verify")]
        print(f"| {kind} | {equal} / {len(rows) - equal} | " + " | ".join(map(str, cells)) + " |")
    if args.all:
        for name, values in found.items():
            for (kind, label, answer, truth), value in zip(table, values, strict=True):
                if value != truth:
                    print(f"{name}: {kind}: {label!r} and {answer!r} are {'equal' if truth else 'different'}")


if __name__ == "__main__":
    main()
