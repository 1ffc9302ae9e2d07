"""The paper's measure of trained toy seniors: eight chains of each prompt, alone and handed over by words, the senior first.

    python scripts/experiments/eight_chains.py run --work runs/questions --out docs/results/data/eight_chains.jsonl
    python scripts/experiments/eight_chains.py table docs/results/data/eight_chains.jsonl

`run` adds a line for each finished run of `two_notations.py` (junior 0 %) and of question a of `questions.py`, by
`slime-tandem eval`'s own defaults: temperature 0.7, top_p 0.8, top_k 20. docs/results/protocol.md plans it; nothing is tested.
`--jobs` evaluates so many at once, each on about a core. Needs the extra `diagnostics` (scipy).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import measure
import questions
import two_notations

from slime_tandem.evaluation.run import run_evaluation
from slime_tandem.report.summary import load_config

SHOWN = ("solo/pass@1", "handoff/pass@1", "handoff/retention@1", "solo/pass@8", "handoff/pass@8", "transfer/gain")
BASE = "prob_senior 0.5"
NAMES = {"tandem alone": BASE}
"""Names of two notations' arms in question a."""


def evaluated(run: Path, chains: int, prompts: int) -> dict[str, float | None]:
    """What `slime-tandem eval` finds for a finished run's senior, by its names; None where it has no value."""
    trained = load_config(run)
    how = {"start": trained.models.senior, "handoff_strategy": "word", "chains": chains, "prompts": prompts}
    config = measure.config_of(run, trained, "chains", eval=how)
    found = run_evaluation(config, lambda _: None).to_json()["results"]
    return {name: result["value"] for name, result in found.items()}


def run(args: argparse.Namespace) -> None:
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {(row["arm"], row["seed"]) for row in map(json.loads, lines)}
    todo = {}
    for names, name in measure.cases(args.seeds, ()):
        arm, folder = NAMES.get(names["arm"], names["arm"]), args.work / "runs" / name
        if names["dose"] == 0 and (folder / "summary.json").exists() and (arm, names["seed"]) not in done:
            todo[folder] = {"arm": arm, "seed": names["seed"], "chains": args.chains, "prompts": args.prompts}
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(evaluated, folder, args.chains, args.prompts): folder for folder in todo}
        for future in as_completed(futures):
            line = todo[futures[future]] | {"results": future.result()}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print("evaluated:", futures[future].name, flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds by arm, and each arm less prob_senior 0.5, paired by seed, with Student's interval. Markdown."""
    arms: dict[str, dict[int, Mapping[str, float]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        arms.setdefault(row["arm"], {})[row["seed"]] = row["results"]
    order = [arm for arm in (*questions.arms_of("a"), "tandem + teacher") if arm in arms]
    lines = [f"| arm | seeds | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 2) + "|"]
    for arm in order:
        cells = [f"{statistics.fmean(r[name] for r in arms[arm].values()):.3f}" for name in SHOWN]
        lines.append(f"| {arm} | {', '.join(map(str, arms[arm]))} | {' | '.join(cells)} |")
    lines += ["", f"| less {BASE} | {' | '.join(SHOWN[:3])} |", "|---" * 4 + "|"]
    for arm in order:
        shared = sorted(arms[arm].keys() & arms.get(BASE, {}).keys())
        if arm != BASE and len(shared) > 1:
            cells = [
                two_notations.interval([arms[arm][s][name] - arms[BASE][s][name] for s in shared]) for name in SHOWN[:3]
            ]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    doing = commands.add_parser("run")
    doing.add_argument(
        "--work", type=Path, default=Path("runs/questions"), help="where the runs are (default: %(default)s)"
    )
    doing.add_argument("--out", type=Path, required=True, help="file of lines, added to")
    doing.add_argument("--seeds", type=int, nargs="*", default=list(questions.SEEDS))
    doing.add_argument("--chains", type=int, default=8)
    doing.add_argument("--prompts", type=int, default=256)
    doing.add_argument("--jobs", type=int, default=1)
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        print(table([json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
