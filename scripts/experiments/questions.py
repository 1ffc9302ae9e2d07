"""Four questions on toy models: co-writing (a), distillation (b), chosen tokens (c), both (d); docs/results/protocol.md plans.

    python scripts/experiments/questions.py run --out docs/results/data        # all that is missing, in the protocol's order
    python scripts/experiments/questions.py run --question c --out docs/results/data
    python scripts/experiments/questions.py table c docs/results/data          # the page's tables
    python scripts/experiments/questions.py list                               # what would be run

`run` adds a line to DIR/question_<letter>.jsonl for each training that it lacks, so that it can be stopped and called again; a
training that was cut short goes on from its checkpoint. `--size ci` makes models that have learnt nothing and two steps, for a
look at the machinery. Needs the extra `diagnostics` (scipy).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from filelock import FileLock

from slime_tandem.models.builtin import RECIPES, TASK, Recipe, make_model, pretrain
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.report.statistics import Estimate, Ratio, holm, of_runs
from slime_tandem.types import FloatArray

Changes = Mapping[str, Any]
SEEDS = (1, 2, 3, 4, 5)
SELECTORS = ("teachability", "entropy", "random", "divergence")
SHARES = (0.05, 0.2, 0.1, 0.5)
"""In the order in which they are run."""

ALONE: Changes = {"tandem": {"enabled": False}}
GRPO: Changes = {**ALONE, "opd": {"enabled": False}}
DISTILLED: Changes = {**ALONE, "objective": {"reward_coef": 0.0}}


def _chosen(selector: str, share: float) -> dict[str, Any]:
    return {
        "selection": {
            "selector": selector,
            "ratio": share,
            "missing_mass": "rest",
            "min_keep_per_sample": 0,
            "top_k": 16,
        }
    }


def _tandem(**changes: Any) -> Changes:
    return {"opd": {"enabled": False}, "tandem": changes}


END_OF_TURN = "end of turn"
"""In a setting of token ids: those that end a turn of the senior's tokenizer."""

# Per question the arms: what differs from the common settings. `same_vocabulary` is no setting: which teacher is served.
QUESTIONS: Mapping[str, Mapping[str, Changes]] = {
    "a": {
        "prob_senior 0.3": _tandem(prob_senior=0.3),
        "prob_senior 0.7": _tandem(prob_senior=0.7),
        "chunk": _tandem(selection_strategy="chunk", chunk_size=4),
        # No token of this tokenizer ends a paragraph, so that an end of turn ends the only run: an answer has one author.
        "sentence": _tandem(selection_strategy="sentence", boundary_token_ids=END_OF_TURN),
    },
    "b": {
        "sampled": DISTILLED,
        "GRPO": GRPO,
        "top-K": {**DISTILLED, "opd": {"signal": "reverse_kl", "top_k": 16}},
        "sampled, same vocabulary": {**DISTILLED, "same_vocabulary": True},
        "top-K, same vocabulary": {**DISTILLED, "same_vocabulary": True, "opd": {"signal": "reverse_kl", "top_k": 16}},
        "sampled, spans": {**DISTILLED, "opd": {"alignment": "chain_rule"}},
    },
    "c": {
        f"{selector} {share:g}": {**DISTILLED, "opd": _chosen(selector, share)}
        for share in SHARES
        for selector in SELECTORS
    },
    "d": {
        "tandem + teacher": {"opd": {"coef": 0.2}},
        "tandem + a tenth": {"opd": {"coef": 0.2, **_chosen("teachability", 0.1)}},
        "tandem + a random tenth": {"opd": {"coef": 0.2, **_chosen("random", 0.1)}},
        "tandem": {"opd": {"enabled": False}},
        "solo + a tenth": {**ALONE, "opd": {"coef": 0.2, **_chosen("teachability", 0.1)}},
        "solo GRPO": GRPO,
    },
}
TRAINING: Mapping[str, Mapping[str, int]] = {
    "a": {"steps": 80, "prompts_per_step": 16, "samples_per_prompt": 8},
    "b": {"steps": 20, "prompts_per_step": 16, "samples_per_prompt": 4},
    "c": {"steps": 20, "prompts_per_step": 16, "samples_per_prompt": 4},
    "d": {"steps": 40, "prompts_per_step": 16, "samples_per_prompt": 4},
}
KEPT = (
    "selection/keep_ratio", "selection/end_of_turn", "selection/end_of_turn_kept", "selection/position_mean",
    *(f"selection/position_{i}" for i in range(10)), "selection/H_mean", "selection/D_mean", "selection/C_mean",
    "opd/coverage", "opd/eos_kl", "train/grad_norm", "time/step_s", "time/scoring_s", "time/train_s",
)  # fmt: skip
"""Step metrics of which a line holds the mean over the steps."""


@dataclass(frozen=True)
class Case:
    """One training."""

    question: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in self.arm.lower())
        return f"{self.question}-{'-'.join(filter(None, words.split('-')))}-seed-{self.seed}"

    def recipe(self, size: str) -> Recipe:
        recipe = RECIPES["two-notations"].seeded(self.seed)
        if size == "ci":
            small = {"hidden_size": 16, "intermediate_size": 16, "steps": 2}
            roles = {r: dataclasses.replace(getattr(recipe, r), **small) for r in ("senior", "junior", "teacher")}
            recipe = dataclasses.replace(recipe, **roles, check_prompts=4, final_prompts=4)
        return recipe

    def settings(self, models: Mapping[str, Path], runs: Path, size: str) -> dict[str, Any]:
        """The run's configuration, whole."""
        changes = dict(QUESTIONS[self.question][self.arm])
        teacher = models["same" if changes.pop("same_vocabulary", False) else "teacher"]
        training = {**TRAINING[self.question], "threads": 1}
        tree: dict[str, Any] = {
            "name": self.name,
            "runs_dir": str(runs),
            "seed": self.seed,
            "models": {"senior": str(models["senior"]), "junior": str(models["junior"]), "teacher": str(teacher)},
            "tasks": [TASK.model_dump(exclude={"environment", "max_turns"}, exclude_none=True)],
            "train": training,
            "optimizer": {"lr": 1e-3},
            "eval": {"prompts": 256},
        }
        # A junior co-writes in the evaluation where the question is about one.
        if self.question in "ad":
            tree["eval"]["tandem"] = True
        if size == "ci":
            training |= {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4}
            tree["eval"]["prompts"] = 4
            tree["sampling"] = {"max_new_tokens": 8}
        tandem = changes.get("tandem", {})
        if tandem.get("boundary_token_ids") == END_OF_TURN:
            ends = sorted(ModelTokenizer.load(models["senior"]).tokens.eos_ids)
            changes["tandem"] = {**tandem, "boundary_token_ids": ends}
        return {**tree, **changes}


def cases(questions: Sequence[str], seeds: Sequence[int]) -> Iterator[Case]:
    """The protocol's order: (c) at 5 %, (b), (a), (d), (c) at the other shares; seed by seed within each."""
    first = [f"{s} {SHARES[0]:g}" for s in SELECTORS]
    blocks = [
        ("c", first),
        *((q, list(QUESTIONS[q])) for q in "bad"),
        ("c", [a for a in QUESTIONS["c"] if a not in first]),
    ]
    for question, arms in blocks:
        if question in questions:
            yield from (Case(question, arm, seed) for seed in seeds for arm in arms)
        elif question == "b" and "c" in questions:  # what (c) is compared with
            yield from (Case("b", arm, seed) for seed in seeds for arm in ("sampled", "GRPO"))


def start_models(case: Case, cache: Path, size: str) -> dict[str, Path]:
    """The folders of the start models of a seed; a teacher with the student's vocabulary is made where it is asked for."""
    recipe = case.recipe(size)
    made = pretrain(cache, print, recipe)
    folders = {role: made / role for role in ("senior", "junior", "teacher")}
    if QUESTIONS[case.question][case.arm].get("same_vocabulary"):
        same = dataclasses.replace(recipe, teacher_tokenizer=recipe.student_tokenizer)
        folder = cache / f"same-{same.key}"
        with FileLock(cache / "same.lock"):
            if not (folder / "teacher" / "measured.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                make_model("teacher", same, folder, print)
        folders["same"] = folder / "teacher"
    return folders


def train(case: Case, work: Path, size: str) -> dict[str, Any]:
    """The line of one training; what is there already of it is not done again."""
    settings = case.settings(start_models(case, work / "models", size), work / "runs", size)
    config = work / f"{case.name}.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, "-m", "slime_tandem.cli", "train", "--config", str(config), "--resume"]
    with (work / f"{case.name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code:
        raise SystemExit(f"{case.name}: exit code {code}; see {work / case.name}.log")
    return line_of(case, work / "runs" / case.name)


def line_of(case: Case, run: Path) -> dict[str, Any]:
    """What is kept of a run: its figures before and after, each prompt's outcome, means of step metrics."""
    rows = {name: _rows(run / f"{name}.jsonl") for name in ("eval", "metrics")}
    before, after = rows["eval"]
    line: dict[str, Any] = {**dataclasses.asdict(case), "steps": after["step"]}
    for metric in ("solo_accuracy", "tandem_accuracy", "teacher_kl", "coverage"):
        line |= {f"{metric}_{when}": row[f"eval/{metric}"] for when, row in (("before", before), ("after", after))}
    shares = {who: after["right"].get(f"eval/{who}_accuracy") for who in ("solo", "tandem")}
    line["right"] = {who: None if values is None else bits(values) for who, values in shares.items()}
    for metric in KEPT:
        values = [row[metric] for row in rows["metrics"] if row[metric] is not None]
        line[metric] = round(fmean(values), 5) if values else None
    return line


def bits(shares: Sequence[float | None]) -> str:
    """One digit a prompt: 1 where its answer was right."""
    return "".join("01"[share == 1.0] for share in shares)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(folder: Path, question: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The lines of a question by (arm, seed)."""
    path = folder / f"question_{question}.jsonl"
    return {(r["arm"], r["seed"]): r for r in _rows(path)} if path.exists() else {}


def run(args: argparse.Namespace) -> None:
    work, out = Path(args.work), Path(args.out)
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [
        case
        for case in cases(args.question, args.seeds)
        if (not args.arms or case.arm in args.arms) and (case.arm, case.seed) not in read(out, case.question)
    ]
    paths = {case: out / f"question_{case.question}.jsonl" for case in todo}
    side_by_side(args.jobs, paths, lambda case: train(case, work, args.size))


def side_by_side(jobs: int, paths: Mapping[Any, Path], train: Callable[[Any], dict[str, Any]]) -> None:
    """Train the cases that `paths` names, `jobs` at once in its order; the line of each is added to its file as it ends.

    After a case that fails no other begins; the lines of those that run by then are added, too, before its error is raised.
    """

    def add(case: Any, line: Mapping[str, Any]) -> None:
        with paths[case].open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print("done:", case.name, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(train, case): case for case in paths}
        added = set()
        try:
            for future in as_completed(futures):
                line = future.result()
                added.add(future)
                add(futures[future], line)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for future in as_completed(f for f in futures if f not in added and not f.cancelled()):
                if future.exception() is None:
                    add(futures[future], future.result())
            raise


# ---- what is made of the lines ----
Line = Mapping[str, Any]
Figure = Callable[[Line], Ratio]
"""A figure of a training over its prompts."""


@dataclass(frozen=True)
class Difference:
    """One arm less another, paired by seed and prompt: Student's t over seeds, and the hierarchical bootstrap."""

    arm: str
    base: str
    seeds: int
    mean: float
    student: tuple[float, float]
    bootstrap: Estimate
    p: float


def right(who: str) -> Figure:
    """The share of right answers."""
    return lambda line: Ratio(outcomes(line, who))


def outcomes(line: Line, who: str) -> FloatArray:
    """[N] 1 where the answer to a prompt was right."""
    return np.array([float(c) for c in line["right"][who]])


def value_of(ratio: Ratio) -> float:
    return float(ratio.numerator.mean() / (1.0 if ratio.denominator is None else ratio.denominator.mean()))


def difference(arm: Mapping[int, Line], base: Mapping[int, Line], figure: Figure, names: tuple[str, str]) -> Difference:
    """`arm` and `base`: lines by seed; the seeds that both have."""
    seeds = sorted(arm.keys() & base.keys())
    ours, theirs = ([figure(lines[s]) for s in seeds] for lines in (arm, base))
    mean, low, high, p = student([value_of(a) - value_of(b) for a, b in zip(ours, theirs, strict=True)])
    return Difference(*names, len(seeds), mean, (low, high), of_runs(ours, theirs, resamples=10_000, seed=0), p)


def student(values: Sequence[float]) -> tuple[float, float, float, float]:
    """(mean, its 95 % interval by Student's t, two-sided p against 0); nan where there is one value."""
    from scipy.stats import t

    mean, n = fmean(values), len(values)
    if n < 2:
        return mean, math.nan, math.nan, math.nan
    error = stdev(values) / math.sqrt(n)
    half = float(t.ppf(0.975, n - 1)) * error
    p = float(2 * t.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    return mean, mean - half, mean + half, p


def falling(blocks: Sequence[Sequence[float]]) -> str:
    """Page's trend test in words: do the values of each block (a seed) fall from its first to its last?

    scipy's exact distribution has no ties and cuts a half off the statistic; where values tie, a second p is that of all
    permutations of the ranks as they are.
    """
    from scipy.stats import page_trend_test, rankdata

    # A large statistic means that ranks rise as predicted: the first is predicted to be the largest.
    predicted = np.arange(len(blocks[0]), 0, -1)
    test = page_trend_test(blocks, predicted_ranks=predicted, method="exact")
    told = f"Page's trend test, {len(blocks)} seeds: L = {test.statistic:g}, p = {test.pvalue:.4f}"
    ranks = rankdata(blocks, axis=1)
    if all(len(set(row)) == len(row) for row in ranks.tolist()):
        return f"{told}."
    ways = {0.0: 1.0}
    for row in ranks:
        found: dict[float, float] = {}
        for order in permutations(row.tolist()):
            for statistic, share in ways.items():
                reached = statistic + float(predicted @ np.array(order))
                found[reached] = found.get(reached, 0.0) + share / math.factorial(len(row))
        ways = found
    p = sum(share for statistic, share in ways.items() if statistic >= test.statistic)
    return f"{told}; with its ties over all permutations p = {p:.4f}."


def by_arm(lines: Mapping[tuple[str, int], Line]) -> dict[str, dict[int, Line]]:
    out: dict[str, dict[int, Line]] = {}
    for (arm, seed), line in lines.items():
        out.setdefault(arm, {})[seed] = line
    return out


def arms_of(question: str) -> list[str]:
    """All arms in the order in which tables show them."""
    arms = list(QUESTIONS[question])
    if question == "a":
        return [arms[0], "prob_senior 0.5", *arms[1:], "solo GRPO"]
    if question == "c":
        return ["full", *(f"{s} {share:g}" for share in sorted(SHARES) for s in SELECTORS), "GRPO"]
    return arms


def families(question: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(title, whose accuracy, pairs of arm and base) by family of comparisons; those of one title are corrected together."""
    if question == "a":
        base = "prob_senior 0.5"
        return [
            ("less prob_senior 0.5 by words", who, [(a, base) for a in arms_of("a") if a != base])
            for who in ("tandem", "solo")
        ]
    if question == "b":
        return [("less sampled tokens", "solo", [(a, "sampled") for a in QUESTIONS["b"] if a != "sampled"])]
    if question == "c":
        return [
            (
                f"{share:.0%} of the tokens",
                "solo",
                [(f"{s} {share:g}", "full") for s in SELECTORS]
                + [(f"{s} {share:g}", f"random {share:g}") for s in SELECTORS if s != "random"],
            )
            for share in sorted(SHARES)
        ]
    pairs = [
        ("tandem + a tenth", "tandem + teacher"),
        ("tandem + a random tenth", "tandem"),
        ("tandem + a tenth", "tandem + a random tenth"),
        ("tandem + teacher", "solo GRPO"),
        ("tandem + a tenth", "solo + a tenth"),
    ]
    return [("both together", who, pairs) for who in ("tandem", "solo")]


def lines_of(folder: Path, question: str, seeds: Sequence[int] = SEEDS) -> dict[str, dict[int, Line]]:
    """The lines by arm and seed, in the order of `arms_of`, with those of other files that the question is compared with.

    Those of (a) are measure.py's alone: the outcomes of its own lines are by each arm's own rule, which differ.
    """
    if question == "a":
        names = {"tandem alone": "prob_senior 0.5", "solo GRPO": "solo GRPO"}
        path, arms = folder / "two_notations_measured.jsonl", dict[str, dict[int, Line]]()
        for row in _rows(path) if path.exists() else []:
            name = row["arm"] if row["question"] == "a" else names.get(row["arm"])
            if name and row["dose"] == 0 and row["seed"] in seeds:
                arms.setdefault(name, {})[row["seed"]] = row
    else:
        arms = by_arm(read(folder, question))
    if question == "c":
        arms |= {
            {"sampled": "full"}.get(a, a): v for a, v in by_arm(read(folder, "b")).items() if a in ("sampled", "GRPO")
        }
    return {arm: dict(sorted(arms[arm].items())) for arm in arms_of(question) if arm in arms}


def comparisons(
    folder: Path, question: str, seeds: Sequence[int] = SEEDS
) -> list[tuple[str, str, list[tuple[Difference, float]]]]:
    """Per family: title, whose accuracy, the differences with their p-values corrected together. Arms without lines are left
    out."""
    arms, found = lines_of(folder, question, seeds), []
    for title, who, pairs in families(question):
        differences = [
            difference(arms[a], arms[b], right(who), (a, b))
            for a, b in pairs
            if a in arms and b in arms and len(arms[a].keys() & arms[b].keys()) > 1
        ]
        if differences:
            found.append((title, who, differences))
    out = []
    for title, who, differences in found:
        corrected = iter(holm([d.p for t, _, ds in found if t == title for d in ds]))
        by_family = {w: [next(corrected) for _ in ds] for t, w, ds in found if t == title}
        out.append((title, who, list(zip(differences, by_family[who], strict=True))))
    return out


def table(folder: Path, question: str, seeds: Sequence[int] = SEEDS) -> str:
    """The page's tables in Markdown: accuracies by arm, differences by family, and for (c) where the kept tokens lie."""
    arms = lines_of(folder, question, seeds)
    metrics = ("solo_accuracy", "tandem_accuracy", "teacher_kl")
    ends = {(arm, m): [r.get(f"{m}_after") for r in runs.values()] for arm, runs in arms.items() for m in metrics}
    if question == "a":
        for arm, runs in arms.items():
            ends[arm, "tandem less solo"] = [
                value_of(right("tandem")(r)) - value_of(right("solo")(r)) for r in runs.values()
            ]
    shown = [
        m
        for m in (*metrics, "tandem less solo")
        if any(v is not None for (_, n), vs in ends.items() if n == m for v in vs)
    ]
    lines = [f"| arm | seeds | {' | '.join(m.replace('_', ' ') for m in shown)} |", "|---" * (len(shown) + 2) + "|"]
    for arm, runs in arms.items():
        cells = [
            each([v for v in ends[arm, m] if v is not None], "+" if m == "tandem less solo" else "") for m in shown
        ]
        lines.append(f"| {arm} | {', '.join(map(str, runs))} | {' | '.join(cells)} |")
    for title, who, found in comparisons(folder, question, seeds):
        lines += ["", *differences_table(f"{title}, {who} accuracy", found)]
    if question == "a":
        shown_only = [
            (difference(arms["sentence"], arms["solo GRPO"], right(who), (f"{who}: sentence", "solo GRPO")), None)
            for who in ("tandem", "solo")
            if len(arms.get("sentence", {}).keys() & arms.get("solo GRPO", {}).keys()) > 1
        ]
        if shown_only:  # the protocol expects them alike and tests neither
            lines += ["", *differences_table("accuracy, not tested", shown_only)]
        if trend := trend_of_a(arms):
            lines += ["", trend]
    if question == "c":
        lines += ["", *where(arms)]
    return "\n".join(lines)


def trend_of_a(arms: Mapping[str, Mapping[int, Line]]) -> str | None:
    """The test of (a): tandem less solo accuracy over the three prob_senior."""
    runs = [arms.get(f"prob_senior {p}", {}) for p in (0.3, 0.5, 0.7)]
    seeds = sorted(set.intersection(*map(set, runs)))
    blocks = [[value_of(right("tandem")(r[s])) - value_of(right("solo")(r[s])) for r in runs] for s in seeds]
    return falling(blocks) if len(blocks) > 1 else None


def each(values: Sequence[float], sign: str = "") -> str:
    """Each seed's value, and their mean."""
    return f"{', '.join(f'{x:{sign}.3f}' for x in values)}; mean {fmean(values):{sign}.3f}" if values else ""


def differences_table(title: str, found: Sequence[tuple[Difference, float | None]]) -> list[str]:
    """A difference with both intervals in a row; None as its corrected p: it belongs to no family of tests."""
    tested = any(corrected is not None for _, corrected in found)
    head = (
        "seeds",
        "difference",
        "t over seeds",
        "bootstrap, seeds and prompts",
        *(("p", "p by Holm") if tested else ()),
    )
    lines = [f"| {title} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for d, corrected in found:
        spans = " | ".join(
            "" if low is None or high is None else f"{low:+.3f} to {high:+.3f}"
            for low, high in (d.student, (d.bootstrap.low, d.bootstrap.high))
        )
        ps = "" if corrected is None else f" {chance(d.p)} | {chance(corrected)} |"
        lines.append(f"| {d.arm} less {d.base} | {d.seeds} | {d.mean:+.3f} | {spans} |{ps}")
    return lines


def chance(p: float) -> str:
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def where(arms: Mapping[str, Mapping[int, Line]]) -> list[str]:
    """Where the kept tokens lie, means over steps and seeds."""
    tenths = " | ".join(str(i + 1) for i in range(10))
    lines = [
        f"| kept tokens in tenth | {tenths} | ends of turn among them | ends of turn that are kept | step, s |",
        "|---" * 14 + "|",
    ]
    for arm, runs in arms.items():
        names = (*(f"selection/position_{i}" for i in range(10)), "selection/end_of_turn", "selection/end_of_turn_kept")
        values = [[r[name] for r in runs.values() if r[name] is not None] for name in (*names, "time/step_s")]
        cells = [f"{fmean(v):.2f}" if v else "-" for v in values]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    doing = commands.add_parser("run")
    doing.add_argument("--out", required=True, help="folder of the lines")
    doing.add_argument("--work", default="runs/questions", help="models, runs and logs (default: %(default)s)")
    doing.add_argument("--size", choices=("toy", "ci"), default="toy")
    doing.add_argument("--arms", nargs="*", help="these alone (default: all of the question)")
    doing.add_argument(
        "--jobs", type=int, default=1, help="trainings at once, each on about a core (default: %(default)s)"
    )
    listing = commands.add_parser("list")
    for one in (doing, listing):
        one.add_argument("--question", nargs="*", choices=list(QUESTIONS), default=list(QUESTIONS))
        one.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    showing = commands.add_parser("table")
    showing.add_argument("question", choices=list(QUESTIONS))
    showing.add_argument("folder", type=Path)
    showing.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="of (a)")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    elif args.command == "list":
        print(*(case.name for case in cases(args.question, args.seeds)), sep="\n")
    else:
        print(table(args.folder, args.question, args.seeds))


if __name__ == "__main__":
    main()
