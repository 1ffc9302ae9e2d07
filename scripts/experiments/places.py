"""Which places of an answer decide whether senior and junior are right together: what each author's words do, word by word.

    python scripts/experiments/places.py run --work runs/questions --out docs/results/data/places.jsonl
    python scripts/experiments/places.py table docs/results/data/places.jsonl docs/results/data/eight_chains.jsonl

`run` adds a line for each finished run of `ARMS` (two_notations.py, junior 0 %, and question a of questions.py): held-out
prompts, answers with authors drawn by words with 0.5 at temperature 1, counted by who wrote each word. `table` holds what they
say of authors in turns against what eight_chains.py found. docs/results/protocol.md plans it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import eight_chains
import measure
import numpy as np
from scipy.stats import spearmanr

from slime_tandem.report.metrics import RIGHT_REWARD
from slime_tandem.report.summary import load_config
from slime_tandem.rollout import rollout_ids
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import rollout
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.types import TandemSample

ARMS = ("sentence", "solo GRPO")
"""Those whose senior drifts."""

Counts = Mapping[str, Sequence[int]]
"""(right answers, answers) by who wrote each word: `"101"` is senior, junior, senior."""


def authors(sample: TandemSample, rule: HandoffRule) -> str:
    """One digit a word, 1 for the senior's.

    Of `[5 6 1] [5 1] [5]`, where words end after 1, it is one digit for each bracket.
    """
    runs, _, _ = rule.runs_of(sample.response_ids, 0, 0)
    by_run = dict(zip(runs.tolist(), sample.authorship_mask, strict=True))
    return "".join(str(by_run[run]) for run in sorted(by_run))


def counted(run: Path, prompts: int, per_prompt: int) -> dict[str, list[int]]:
    """`Counts` of a finished run's senior beside its junior."""
    config = measure.config_of(run, load_config(run), "places")
    tasks = TaskSet(config.tasks, config.seed)
    right: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    with Team(Roster(config), config.run_dir / "logs") as team:
        asked = tasks.heldout_prompts(prompts)
        written, _ = rollout(
            team, tasks, asked, rollout_ids.EVALUATION, per_prompt, tandem=True, score=False, plain=True
        )
        for one in written:
            who = authors(one.sample, team.roster.tandem_rule)
            seen[who] += 1
            right[who] += one.reward >= RIGHT_REWARD
    return {who: [right[who], seen[who]] for who in sorted(seen)}


def share(counts: Counts, wrote: Mapping[int, str]) -> float:
    """Share of right answers among those in which word k was `wrote[k]`'s; nan where there is none.

    >>> share({"10": (3, 4), "11": (1, 2), "1": (0, 9)}, {0: "1", 1: "0"})
    0.75
    """
    found = [c for who, c in counts.items() if all(k < len(who) and who[k] == by for k, by in wrote.items())]
    answers = sum(n for _, n in found)
    return sum(right for right, _ in found) / answers if answers else float("nan")


def turns(word: int) -> str:
    """Who writes a word where authors take turns, the senior first."""
    return "01"[word % 2 == 0]


def differences(counts: Counts) -> list[float]:
    """For each word that at least half of the answers have: right where the senior wrote it, less where the junior did."""
    most = sum(n for _, n in counts.values())
    words = max(map(len, counts))
    common = [k for k in range(words) if sum(n for who, (_, n) in counts.items() if k < len(who)) >= most / 2]
    return [share(counts, {k: "1"}) - share(counts, {k: "0"}) for k in common]


def deciding(counts: Counts, words: int = 2) -> list[int]:
    """The `words` with the largest difference, in their order."""
    return sorted(np.argsort(-np.abs(differences(counts)), kind="stable")[:words].tolist())


def expected_in_turns(counts: Counts) -> float:
    """Share of right answers among those whose deciding words have the authors that turns would give them."""
    return share(counts, {k: turns(k) for k in deciding(counts)})


def table(rows: Iterable[Mapping[str, Any]], chains: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a line for each senior, and Spearman's correlation for each arm and over all."""
    by_turns = {(c["arm"], c["seed"]): c["results"]["handoff/pass@1"] for c in chains}
    ordered = sorted(rows, key=lambda row: (ARMS.index(row["arm"]), row["seed"]))
    lines = [
        "| arm | seed | right, authors drawn | right by the senior's word less by the junior's, word by word | deciding words "
        "(in turns by) | right where these agree with turns | handoff/pass@1, authors in turns |",
        "|---" * 7 + "|",
    ]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in ordered:
        counts, found = row["counts"], by_turns.get((row["arm"], row["seed"]))
        words = ", ".join(f"{k + 1} ({'senior' if turns(k) == '1' else 'junior'})" for k in deciding(counts))
        by_word = " ".join(f"{d:+.2f}" for d in differences(counts))
        cells = [f"{share(counts, {}):.3f}", by_word, words, f"{expected_in_turns(counts):.3f}"]
        lines.append(
            f"| {row['arm']} | {row['seed']} | {' | '.join(cells)} | {'-' if found is None else f'{found:.3f}'} |"
        )
        if found is not None:
            for group in (row["arm"], "both"):
                pairs.setdefault(group, []).append((expected_in_turns(counts), found))
    lines.append("")
    for group, values in pairs.items():
        if len(values) > 2:
            rho = spearmanr(*zip(*values, strict=True)).statistic
            lines.append(f"- {group}: Spearman's correlation {rho:.2f} over {len(values)} seniors.")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {(row["arm"], row["seed"]) for row in map(json.loads, lines)}
    for names, name in measure.cases(args.seeds, ()):
        arm, folder = eight_chains.NAMES.get(names["arm"], names["arm"]), args.work / "runs" / name
        line = {"arm": arm, "seed": names["seed"], "prompts": args.prompts, "per_prompt": args.per_prompt}
        if (
            arm in ARMS
            and names["dose"] == 0
            and (arm, names["seed"]) not in done
            and (folder / "summary.json").exists()
        ):
            line["counts"] = counted(folder, args.prompts, args.per_prompt)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print("counted:", folder.name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    doing = commands.add_parser("run")
    doing.add_argument(
        "--work", type=Path, default=Path("runs/questions"), help="where the runs are (default: %(default)s)"
    )
    doing.add_argument("--out", type=Path, required=True, help="file of lines, added to")
    doing.add_argument("--seeds", type=int, nargs="*", default=list(range(1, 11)))
    doing.add_argument("--prompts", type=int, default=256)
    doing.add_argument("--per-prompt", type=int, default=16)
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    showing.add_argument("chains", type=Path, nargs="+", help="files of eight_chains.py")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        rows = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]
        chains = [json.loads(line) for file in args.chains for line in file.read_text(encoding="utf-8").splitlines()]
        print(table(rows, chains))


if __name__ == "__main__":
    main()
