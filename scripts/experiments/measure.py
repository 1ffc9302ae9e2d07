"""Reads trained seniors: what they write alone and with the junior, in which notation, how well the junior reads and goes on.

    python scripts/experiments/measure.py --runs runs/two-notations --out docs/results/data/two_notations_measured.jsonl

A line for each finished run of `two_notations.py` (and of question a of `questions.py`, whose runs are measured by the same
rule: prob_senior 0.5, words). Held-out prompts, draws and sampling are those of the runs' own evaluation, so that accuracies
agree with it. docs/results/protocol.md defines the measures. All values by prompt are kept, so that intervals can resample
prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import questions
import two_notations

from slime_tandem.config import RunConfig
from slime_tandem.evaluation.scoring import log_probs_of, own_reading
from slime_tandem.evaluation.transfer import finished, first_half
from slime_tandem.models.worksheet import notation_by_author
from slime_tandem.report.metrics import RIGHT_REWARD
from slime_tandem.report.summary import load_config
from slime_tandem.rollout import rollout_ids
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import rollout
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.types import FloatArray, TandemSample


def measured(run: Path) -> dict[str, Any]:
    """The measures of a finished run's senior."""
    trained = load_config(run)
    # A control that was only evaluated started from another's end (two_notations.py); the main job beside it knows the start.
    beside = run if trained.train.steps else run.with_name(run.name.replace("solo-grpo", "tandem-teacher"))
    start = Path(load_config(beside).models.senior)
    config = RunConfig.from_mapping(
        {
            "name": run.name,
            "runs_dir": str(run.parents[1] / "measured"),
            "seed": trained.seed,
            "models": {"senior": str(run / "senior"), "junior": trained.models.junior},
            "tasks": [t.model_dump(exclude={"environment", "max_turns"}, exclude_none=True) for t in trained.tasks],
            "opd": {"enabled": False},
            "sampling": {"max_new_tokens": trained.sampling.max_new_tokens},
        }
    )
    tasks = TaskSet(config.tasks, config.seed)
    prompts = tasks.heldout_prompts(trained.eval.prompts)
    with Team(Roster(config), config.run_dir / "logs") as team:
        written = {
            who: rollout(
                team, tasks, prompts, rollout_ids.EVALUATION, 1, tandem=who == "tandem", score=False, plain=True
            )[0]
            for who in ("solo", "tandem")
        }
        samples = [s.sample for s in written["solo"]]
        tokens, most = team.roster.student.tokens, config.engine.max_batch
        readings = [own_reading(s, tokens) for s in samples]

        def log_probs(role: str) -> list[FloatArray]:
            client = team.servers.clients[role]  # type: ignore[index]
            return team.servers.run(log_probs_of(client, readings, role=role, max_batch=most))

        def right_from(prefixes: Sequence[Sequence[int]]) -> str:
            client = team.servers.clients["junior"]
            texts = team.servers.run(finished(client, samples, prefixes, tokens, config.sampling, most))
            verdicts = tasks.verdicts([(s.prompt, text) for s, text in zip(samples, texts, strict=True)])
            return bits(v.reward for v in verdicts)

        transfer = {"half": right_from([first_half(s) for s in samples]), "alone": right_from([() for _ in samples])}
        junior, senior = log_probs("junior"), log_probs("senior")
        team.send_weights(start, "start")
        before = log_probs("senior")
        show = team.roster.student.show
        signs = {
            "solo": counted(samples, show)[1],
            **dict(
                zip(
                    ("tandem_junior", "tandem_senior"),
                    counted([s.sample for s in written["tandem"]], show),
                    strict=True,
                )
            ),
        }
    right = {who: bits(s.reward for s in scored) for who, scored in written.items()}
    text = [r.is_text for r in readings]
    return {
        "prompts": len(prompts),
        "right": right,
        "transfer": transfer,
        "notation": {
            who: round(other / n, 4) if (n := other + common) else None for who, (other, common) in signs.items()
        },
        "legibility": rounded(v[t].sum() for v, t in zip(junior, text, strict=True)),
        "text_tokens": [int(t.sum()) for t in text],
        "from_start": rounded((a - b).sum() for a, b in zip(senior, before, strict=True)),
        "from_junior": rounded((a - b).sum() for a, b in zip(senior, junior, strict=True)),
        "tokens": [len(v) for v in senior],
    }


def bits(rewards: Iterable[float]) -> str:
    """One digit a prompt: 1 for a right answer."""
    return "".join("01"[r >= RIGHT_REWARD] for r in rewards)


def counted(samples: Sequence[TandemSample], show: Any) -> list[tuple[int, int]]:
    """(other, common) signs by the junior and by the senior, over all samples."""
    parts = [notation_by_author(zip(map(show, s.response_ids), s.authorship_mask, strict=True)) for s in samples]
    return [(sum(p[author][0] for p in parts), sum(p[author][1] for p in parts)) for author in (0, 1)]


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(v), 3) for v in values]


def cases(seeds: Sequence[int], few: Sequence[int]) -> Iterable[tuple[dict[str, Any], str]]:
    """What identifies a line, and the name of its run."""
    for case in two_notations.cases(seeds, few):
        yield {"question": None, **dataclasses.asdict(case)}, case.name
    for case in questions.cases(["a"], few):
        yield {"question": "a", "seed": case.seed, "arm": case.arm, "dose": 0.0}, case.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", default=[Path("runs/two-notations"), Path("runs/questions")])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--few", type=int, nargs="*", default=[1, 2, 3], help="seeds of all but the main comparison")
    parser.add_argument("--doses", nargs="*", help="these alone, `self` for the start senior (default: all)")
    args = parser.parse_args()
    doses = [None if d == "self" else float(d) for d in args.doses or ()]
    keys = ("question", "seed", "arm", "dose")
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {tuple(row[k] for k in keys) for row in map(json.loads, lines)}
    for names, run in cases(args.seeds, args.few):
        folders = [f for work in args.runs if (f := work / "runs" / run / "summary.json").exists()]
        if tuple(names[k] for k in keys) in done or not folders or (doses and names["dose"] not in doses):
            continue
        line = measured(folders[0].parent)
        own = json.loads((folders[0].parent / "eval.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        solo = np.mean([c == "1" for c in line["right"]["solo"]])
        assert solo == own["eval/solo_accuracy"], f"{run}: {solo} against {own['eval/solo_accuracy']}"
        line |= {"solo_accuracy_after": own["eval/solo_accuracy"]}
        line |= {"tandem_accuracy_after": float(np.mean([c == "1" for c in line["right"]["tandem"]]))}
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(names | line) + "\n")
        print("measured:", run, flush=True)


if __name__ == "__main__":
    main()
