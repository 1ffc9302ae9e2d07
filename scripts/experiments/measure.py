"""Reads trained seniors: what they write alone and with the junior, in which notation, how well the junior reads and goes on.

    python scripts/experiments/measure.py run --runs runs/two-notations --out docs/results/data/two_notations_measured.jsonl
    python scripts/experiments/measure.py table docs/results/data/two_notations_measured.jsonl

`run` adds a line for each finished run of `two_notations.py` (and of question a of `questions.py`, whose runs are measured by
the same rule: prob_senior 0.5, words). Held-out prompts, draws and sampling are those of the runs' own evaluation, so that
accuracies agree with it. docs/results/protocol.md defines the measures. All values by prompt are kept, so that intervals can
resample prompts. `table` makes the page's tables. Needs the extra `diagnostics` (scipy).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import questions
import two_notations
from questions import Figure, Line, right, value_of

from slime_tandem.config import RunConfig
from slime_tandem.evaluation.scoring import log_probs_of, own_reading
from slime_tandem.evaluation.transfer import finished, first_half
from slime_tandem.models.worksheet import notation_by_author, notation_counts
from slime_tandem.report.metrics import RIGHT_REWARD
from slime_tandem.report.statistics import Ratio, holm
from slime_tandem.report.summary import load_config
from slime_tandem.rollout import rollout_ids
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import rollout
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.types import FloatArray, TandemSample

SHOWN = 3
"""Answers that a line shows as text."""


def measured(run: Path) -> dict[str, Any]:
    """The measures of a finished run's senior."""
    trained = load_config(run)
    # A control that was only evaluated started from another's end (two_notations.py); the main job beside it knows the start.
    beside = run if trained.train.steps else run.with_name(run.name.replace("solo-grpo", "tandem-teacher"))
    start = Path(load_config(beside).models.senior)
    config = config_of(run, trained, "measured")
    return of_models(config, start, trained.eval.prompts)


def config_of(run: Path, trained: RunConfig, beside: str, **more: Any) -> RunConfig:
    """What reads a finished run's senior, with the junior, tasks and seed of its training; it writes into a folder `beside`."""
    return RunConfig.from_mapping(
        {
            "name": run.name,
            "runs_dir": str(run.parents[1] / beside),
            "seed": trained.seed,
            "models": {"senior": str(run / "senior"), "junior": trained.models.junior},
            "tasks": [t.model_dump(exclude={"environment", "max_turns"}, exclude_none=True) for t in trained.tasks],
            "opd": {"enabled": False},
            "sampling": {"max_new_tokens": trained.sampling.max_new_tokens},
            **more,
        }
    )


def of_models(
    config: RunConfig, start: Path, prompts: int, counts: Callable[[str], tuple[int, int]] = notation_counts
) -> dict[str, Any]:
    """The measures of `config`'s senior beside its junior; `start`: the senior before training.

    `counts`: signs of the style in question, and of the other, in the text of one token.
    """
    tasks = TaskSet(config.tasks, config.seed)
    asked = tasks.heldout_prompts(prompts)
    with Team(Roster(config), config.run_dir / "logs") as team:
        written = {
            who: rollout(
                team, tasks, asked, rollout_ids.EVALUATION, 1, tandem=who == "tandem", score=False, plain=True
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
        by_author = counted([s.sample for s in written["tandem"]], show, counts)
        signs = {
            "solo": counted(samples, show, counts)[1],
            **dict(zip(("tandem_junior", "tandem_senior"), by_author, strict=True)),
        }
        texts = {
            who: ["".join(map(show, s.sample.response_ids)) for s in scored[:SHOWN]] for who, scored in written.items()
        }
    right = {who: bits(s.reward for s in scored) for who, scored in written.items()}
    text = [r.is_text for r in readings]
    return {
        "prompts": len(asked),
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
        "texts": texts,
    }


def bits(rewards: Iterable[float]) -> str:
    """One digit a prompt: 1 for a right answer."""
    return "".join("01"[r >= RIGHT_REWARD] for r in rewards)


def counted(
    samples: Sequence[TandemSample], show: Any, counts: Callable[[str], tuple[int, int]] = notation_counts
) -> list[tuple[int, int]]:
    """(other, common) signs by the junior and by the senior, over all samples."""
    parts = [
        notation_by_author(zip(map(show, s.response_ids), s.authorship_mask, strict=True), counts) for s in samples
    ]
    return [(sum(p[author][0] for p in parts), sum(p[author][1] for p in parts)) for author in (0, 1)]


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(v), 3) for v in values]


def cases(seeds: Sequence[int], few: Sequence[int]) -> Iterable[tuple[dict[str, Any], str]]:
    """What identifies a line, and the name of its run."""
    for case in two_notations.cases(seeds, few):
        yield {"question": None, **dataclasses.asdict(case)}, case.name
    for case in questions.cases(["a"], seeds):
        yield {"question": "a", "seed": case.seed, "arm": case.arm, "dose": 0.0}, case.name


# ---- what is made of the lines ----
def per_token(summed: str, tokens: str) -> Figure:
    """Nats per token: sums over the prompts of a training."""
    return lambda line: Ratio(np.array(line[summed]), np.array(line[tokens], np.float64), "nothing written")


def gone_on(line: Line) -> Ratio:
    return Ratio(digits(line["transfer"]["half"]))


def gained(line: Line) -> Ratio:
    return Ratio(digits(line["transfer"]["half"]) - digits(line["transfer"]["alone"]))


def retained(line: Line) -> Ratio:
    return Ratio(digits(line["right"]["tandem"]), digits(line["right"]["solo"]), "no answer alone is right")


def digits(bits: str) -> FloatArray:
    return np.array([float(c) for c in bits])


MEASURES: Mapping[str, Figure] = {
    "legibility": per_token("legibility", "text_tokens"),
    "drift from the start": per_token("from_start", "tokens"),
    "transfer utility": gone_on,
    "gain by the prefix": gained,
    "KL to the junior": per_token("from_junior", "tokens"),
}
TESTED = tuple(MEASURES)[:3]
"""The protocol's three tests, main job against control; the rest is shown and not tested."""
OUTCOMES: Mapping[str, Figure] = {
    "solo accuracy": right("solo"),
    "tandem accuracy": right("tandem"),
    "retention": retained,
}
AUTHORS = {"solo": "senior, alone", "tandem_senior": "senior, co-written", "tandem_junior": "junior, co-written"}


def table(rows: Sequence[Line]) -> str:
    """The page's tables in Markdown: measures by arm, the three tests, and what the main comparison's repeat shows.

    Arms of question a stand in the first table and in that of the notation; other juniors in one of their own.
    """
    order = [*two_notations.ARMS, *questions.QUESTIONS["a"]]
    arms: dict[str, dict[int, Line]] = {arm: {} for arm in order}
    for row in sorted(rows, key=lambda row: row["seed"]):
        if row["dose"] == 0:
            arms[row["arm"]][row["seed"]] = row
    arms = {arm: by_seed for arm, by_seed in arms.items() if by_seed}
    lines = [f"| arm | seeds | {' | '.join(MEASURES)} |", "|---" * (len(MEASURES) + 2) + "|"]
    for arm, by_seed in arms.items():
        cells = [questions.each([value_of(figure(r)) for r in by_seed.values()]) for figure in MEASURES.values()]
        lines.append(f"| {arm} | {', '.join(map(str, by_seed))} | {' | '.join(cells)} |")
    main, control = (arms.get(arm, {}) for arm in ("tandem + teacher", "solo GRPO"))
    if len(main.keys() & control.keys()) > 1:
        found = {
            name: questions.difference(main, control, figure, (f"{name}: main job", "control"))
            for name, figure in (MEASURES | OUTCOMES).items()
        }
        corrected = holm([found[name].p for name in TESTED])
        tested = list(zip((found[name] for name in TESTED), corrected, strict=True))
        shown = [(d, None) for name, d in found.items() if name not in TESTED]
        for title, differences in (("after training", tested), ("after training, not tested", shown)):
            lines += ["", *questions.differences_table(title, differences)]
    lines += ["", *notation_table(arms), "", *junior_table(rows)]
    return "\n".join(lines).rstrip()


def notation_table(arms: Mapping[str, Mapping[int, Line]]) -> list[str]:
    """The share of the second notation's signs by author."""
    lines = [f"| share of the second notation | {' | '.join(AUTHORS.values())} |", "|---" * (len(AUTHORS) + 1) + "|"]
    for arm, by_seed in arms.items():
        shares = [r["notation"] for r in by_seed.values() if r.get("notation")]
        if shares:
            cells = [questions.each([s[who] for s in shares if s[who] is not None]) for who in AUTHORS]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def junior_table(rows: Sequence[Line]) -> list[str]:
    """Main job and control by what their junior has seen: shares of the second notation by author, and how well it reads them.

    Means over the seeds that have run with every junior, 0 % with these alone. Below it main job less control in tandem
    accuracy, with both intervals; two_notations.py tests these. Shown, not tested.
    """
    pairs = [(dose, arm) for dose in (0.0, *two_notations.DOSES, None) for arm in ("tandem + teacher", "solo GRPO")]
    found = {pair: [r for r in rows if not r["question"] and (r["dose"], r["arm"]) == pair] for pair in pairs}
    found = {pair: runs for pair, runs in found.items() if runs and all(r.get("notation") for r in runs)}
    seeds = sorted(set.intersection(*({r["seed"] for r in runs} for runs in found.values()))) if found else []
    if not seeds or all(dose == 0 for dose, _ in found):
        return []
    measures = ("legibility", "transfer utility", "gain by the prefix")
    head = (f"junior, seeds {', '.join(map(str, seeds))}", "arm", *AUTHORS.values(), *measures)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (dose, arm), runs in found.items():
        kept = [r for r in runs if r["seed"] in seeds]
        shares = [[r["notation"][who] for r in kept if r["notation"][who] is not None] for who in AUTHORS]
        cells = [f"{fmean(values):.2f}" if values else "-" for values in shares]
        cells += [f"{fmean(value_of(MEASURES[m](r)) for r in kept):.3f}" for m in measures]
        lines.append(f"| {seen(dose)} | {arm} | {' | '.join(cells)} |")
    by_seed = {pair: {r["seed"]: r for r in runs if r["seed"] in seeds} for pair, runs in found.items()}
    differences = [
        questions.difference(main, control, right("tandem"), (f"{seen(dose)}: main job", "control"))
        for (dose, arm), main in by_seed.items()
        if arm == "tandem + teacher" and (control := by_seed.get((dose, "solo GRPO")))
    ]
    if differences:
        lines += ["", *questions.differences_table("tandem accuracy", [(d, None) for d in differences])]
    return lines


def seen(dose: float | None) -> str:
    return "the start senior" if dose is None else f"{dose:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    doing = commands.add_parser("run")
    doing.add_argument("--runs", type=Path, nargs="+", default=[Path("runs/two-notations"), Path("runs/questions")])
    doing.add_argument("--out", type=Path, required=True)
    doing.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    doing.add_argument(
        "--few", type=int, nargs="*", default=[1, 2, 3], help="seeds of the dose and the self-paired case"
    )
    doing.add_argument("--doses", nargs="*", help="these alone, `self` for the start senior (default: all)")
    doing.add_argument("--names", nargs="*", help="runs of these names alone, so that many are measured side by side")
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        print(table([json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]))


def run(args: argparse.Namespace) -> None:
    doses = [None if d == "self" else float(d) for d in args.doses or ()]
    keys = ("question", "seed", "arm", "dose")
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {tuple(row[k] for k in keys) for row in map(json.loads, lines)}
    for names, run in cases(args.seeds, args.few):
        if args.names and run not in args.names:
            continue
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
