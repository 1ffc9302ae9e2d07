"""Two notations: does training with a partner keep a policy readable to it? docs/results/protocol.md has the plan.

    python scripts/experiments/two_notations.py run --out docs/results/data/two_notations.jsonl     # all arms, 40 minutes
    python scripts/experiments/two_notations.py table docs/results/data/two_notations.jsonl
    python scripts/experiments/two_notations.py table FILE --again docs/results/data/two_notations_repeat.jsonl

`run` adds a line for each training that the file lacks, so that it can be stopped and called again. `--jobs` trainings run side
by side, each on about one core. `--tiny` makes models that have learnt nothing, for a look at the machinery. Needs the extra
`diagnostics` (scipy).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from questions import falling, side_by_side, student

from slime_tandem.models.builtin import RECIPES, TASK, Recipe, make_model, pretrain, sample
from slime_tandem.models.hf import load_model, load_tokenizer
from slime_tandem.models.worksheet import other_notation_share
from slime_tandem.report.statistics import holm
from slime_tandem.tasks.families import TaskSet

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "scripts" / "train" / "configs" / "quickstart.yaml"
ARMS: dict[str, dict[str, Any]] = {
    "tandem + teacher": {},
    "solo GRPO": {"tandem": {"enabled": False}, "opd": {"enabled": False}},
    "tandem alone": {"opd": {"enabled": False}},
    "solo + teacher": {"tandem": {"enabled": False}},
}
DOSES = (0.01, 0.05, 0.2, 1.0)
METRICS = ("solo_accuracy", "tandem_accuracy", "handoff_retention", "teacher_kl")


@dataclass(frozen=True)
class Case:
    """One training: `dose` is the junior's share of the second notation, None for a junior that is the start senior."""

    seed: int
    arm: str
    dose: float | None = 0.0

    @property
    def name(self) -> str:
        junior = "self" if self.dose is None else f"{self.dose:g}"
        return f"{self.arm.replace(' + ', '-').replace(' ', '-').lower()}-junior-{junior}-seed-{self.seed}"

    def recipe(self, tiny: bool) -> Recipe:
        recipe = RECIPES["two-notations"].seeded(self.seed)
        if self.dose:
            junior = dataclasses.replace(recipe.junior, other_notation=self.dose, other_slip=recipe.junior.slip)
            recipe = dataclasses.replace(recipe, junior=junior)
        if tiny:
            small = {"hidden_size": 16, "intermediate_size": 16, "steps": 2}
            roles = {r: dataclasses.replace(getattr(recipe, r), **small) for r in ("senior", "junior", "teacher")}
            recipe = dataclasses.replace(recipe, **roles, check_prompts=4, final_prompts=4)
        return recipe


def cases(seeds: Sequence[int], few: Sequence[int]) -> Iterator[Case]:
    """The protocol's, the main comparison first."""
    yield from (Case(seed, arm) for seed in seeds for arm in ARMS)
    main = ("tandem + teacher", "solo GRPO")
    yield from (Case(seed, arm, dose) for seed in few for dose in (None, *DOSES) for arm in main)


def start_models(case: Case, cache: Path, *, tiny: bool) -> Path:
    """The folder of the case's three models. With another dose the junior alone is another: the rest is dose 0's, copied."""
    recipe = case.recipe(tiny)
    if not case.dose or (final := cache / recipe.key).is_dir():
        return pretrain(cache, print, recipe)
    base = pretrain(cache, print, dataclasses.replace(case, dose=0.0).recipe(tiny))
    with tempfile.TemporaryDirectory(prefix=".dose-", dir=cache) as name:
        making = Path(name) / "models"
        shutil.copytree(base, making)
        shutil.rmtree(making / "junior")
        make_model("junior", recipe, making, print)
        record = json.loads((making / "recipe.json").read_text(encoding="utf-8"))
        record["recipe"] = dataclasses.asdict(recipe)
        record["models"]["junior"] = json.loads((making / "junior" / "measured.json").read_text(encoding="utf-8"))
        (making / "recipe.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        making.rename(final)
    return final


def train(case: Case, folder: Path, *, tiny: bool, steps: int | None) -> dict[str, Any]:
    """The line of one training; what is there already of it is not done again.

    The control meets no junior in training, so that its weights do not depend on the dose: they are trained once a seed, and
    with the other juniors evaluated alone (a run of no steps).
    """
    models = start_models(case, folder / "models", tiny=tiny)
    made = json.loads((models / "recipe.json").read_text(encoding="utf-8"))["models"]
    tree = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    roles = {"senior": "senior", "junior": "senior" if case.dose is None else "junior", "teacher": "teacher"}
    tree |= {"name": case.name, "seed": case.seed, "control": False, "runs_dir": str(folder / "runs")}
    tree["models"] = {role: str(models / name) for role, name in roles.items()}
    tree["train"] = {**tree["train"], "threads": 1} | ({} if steps is None else {"steps": steps})
    tree["eval"] = {**tree["eval"], "tandem": True} | ({"prompts": 8} if tiny else {})
    trained = None
    if case.arm == "solo GRPO":
        others = (dataclasses.replace(case, dose=dose) for dose in (0.0, None, *DOSES) if dose != case.dose)
        trained = next((c for c in others if _finished(folder / "runs" / c.name, tree["train"]["steps"])), None)
    if trained is not None:
        tree["models"]["senior"] = str(folder / "runs" / trained.name / "senior")
        tree["train"]["steps"] = 0
    for section, values in ARMS[case.arm].items():
        # What another setting makes void may not be set.
        kept = {} if values.get("enabled") is False else tree.get(section, {})
        tree[section] = {**kept, **values}
    config = folder / f"{case.name}.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    run = folder / "runs" / case.name
    if _steps(run) != tree["train"]["steps"]:
        command = [sys.executable, "-m", "slime_tandem.cli", "train", "--config", str(config), "--resume"]
        with (folder / f"{case.name}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if code:
            raise SystemExit(f"{case.name}: exit code {code}; see {folder / case.name}.log")
    evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    if trained is not None:
        # The start with this junior was evaluated by the main job, whose line comes before this one.
        main = dataclasses.replace(case, arm="tandem + teacher").name
        start = (folder / "runs" / main / "eval.jsonl").read_text(encoding="utf-8").splitlines()[0]
        evaluations.insert(0, json.loads(start) | {"eval/teacher_kl": None})
    before, after = evaluations
    tasks = TaskSet([TASK], seed=0)
    texts = sample(
        load_model(run / "senior"), load_tokenizer(run / "senior"), tasks.heldout_prompts(8 if tiny else 256), 64
    )
    shares = [share for text in texts if not math.isnan(share := other_notation_share(text))]
    return {
        **dataclasses.asdict(case),
        "steps": _steps(run if trained is None else folder / "runs" / trained.name),
        "start_accuracy": {role: made[role]["accuracy"] for role in ("senior", "junior", "teacher")},
        "other_notation": round(fmean(shares), 4) if shares else None,
        **{f"{m}_{when}": row[f"eval/{m}"] for when, row in (("before", before), ("after", after)) for m in METRICS},
    }


def _steps(run: Path) -> int | None:
    """Steps that a run had done at its last evaluation; None before one."""
    path = run / "eval.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else None


def _finished(run: Path, steps: int) -> bool:
    return steps > 0 and _steps(run) == steps


def run(args: argparse.Namespace) -> None:
    folder = Path(args.work)
    folder.mkdir(parents=True, exist_ok=True)
    out = Path(args.out)
    done = (
        {Case(r["seed"], r["arm"], r["dose"]) for r in map(json.loads, out.read_text().splitlines())}
        if out.exists()
        else set()
    )
    doses = [None if d == "self" else float(d) for d in args.doses or ()]
    todo = [
        case
        for case in cases(args.seeds, args.dose_seeds)
        if case not in done and (not args.arms or case.arm in args.arms) and (not doses or case.dose in doses)
    ]
    side_by_side(
        args.jobs, dict.fromkeys(todo, out), lambda case: train(case, folder, tiny=args.tiny, steps=args.steps)
    )


def interval(values: Sequence[float]) -> str:
    """Mean with Student's 95 % interval over seeds."""
    mean, low, high, _ = student(values)
    return f"{mean:+.3f} ({low:+.3f}, {high:+.3f})"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The page's tables in Markdown."""
    found = {Case(r["seed"], r["arm"], r["dose"]): r for r in rows}
    lines = [
        "| seed | arm | solo accuracy | tandem accuracy | retention | second notation, alone |",
        "|---|---|---|---|---|---|",
    ]
    main = sorted((c for c in found if c.dose == 0), key=lambda c: (c.seed, list(ARMS).index(c.arm)))
    for case in main:
        r = found[case]
        change = (f"{r[f'{m}_before']:.3f} → {r[f'{m}_after']:.3f}" for m in METRICS[:3])
        lines.append(f"| {case.seed} | {case.arm} | {' | '.join(change)} | {r['other_notation']:.2f} |")
    lines += ["", "| difference after training | solo accuracy | tandem accuracy | retention |", "|---|---|---|---|"]
    for names, by_metric in differences(found).items():
        lines.append(f"| {' less '.join(names)} | {' | '.join(interval(v) for v in by_metric)} |")
    return "\n".join([*lines, "", *dose_table(found)])


def differences(found: Mapping[Case, Mapping[str, Any]]) -> dict[tuple[str, str], list[list[float]]]:
    """Per pair of arms that have run, per metric, the differences after training by seed."""
    out = {}
    for one in ("tandem + teacher", "tandem alone", "solo + teacher"):
        both = [
            (found[c], found[o])
            for c in sorted(found, key=lambda c: c.seed)
            if c == Case(c.seed, one)
            if (o := Case(c.seed, "solo GRPO")) in found
        ]
        if both:
            out[one, "solo GRPO"] = [[a[f"{m}_after"] - b[f"{m}_after"] for a, b in both] for m in METRICS[:3]]
    return out


def beside(rows: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> str:
    """The main comparison's rows that were run twice, and the differences of both, in Markdown: first / again."""
    first, second = (
        {Case(r["seed"], r["arm"], r["dose"]): r for r in runs if r["dose"] == 0} for runs in (rows, again)
    )
    both = sorted(first.keys() & second.keys(), key=lambda c: (list(ARMS).index(c.arm), c.seed))
    lines = [
        "| arm | seed | solo accuracy: first / again | tandem accuracy: first / again | second notation: first / again |",
        "|---|---|---|---|---|",
    ]
    for case in both:
        cells = [f"{first[case][f'{m}_after']:.3f} / {second[case][f'{m}_after']:.3f}" for m in METRICS[:2]]
        shares = " / ".join(f"{runs[case]['other_notation']:.2f}" for runs in (first, second))
        lines.append(f"| {case.arm} | {case.seed} | {' | '.join(cells)} | {shares} |")
    lines += [
        "",
        "| difference after training | run | solo accuracy | tandem accuracy | retention |",
        "|---|---|---|---|---|",
    ]
    told = {name: differences({c: runs[c] for c in both}) for name, runs in (("first", first), ("again", second))}
    for names in told["first"]:
        for name, found in told.items():
            lines.append(f"| {' less '.join(names)} | {name} | {' | '.join(interval(v) for v in found[names])} |")
    return "\n".join(lines)


def dose_table(found: dict[Case, dict[str, Any]]) -> list[str]:
    """Main job less control in tandem accuracy by the junior's share, p-values corrected together, and the trend."""
    few = sorted({c.seed for c in found if c.dose != 0})
    by_dose: dict[float | None, dict[int, tuple[float, float]]] = {}
    for dose in (0.0, *DOSES, None):
        pairs = {s: (found.get(Case(s, "tandem + teacher", dose)), found.get(Case(s, "solo GRPO", dose))) for s in few}
        values = {s: (a["tandem_accuracy_after"], b["tandem_accuracy_after"]) for s, (a, b) in pairs.items() if a and b}
        if values:
            by_dose[dose] = values
    if len(by_dose) < 2:
        return []
    lines = [
        "| junior's share of the second notation | tandem accuracy after: main job | control | difference | p | p by Holm |",
        "|---|---|---|---|---|---|",
    ]
    tested = [student([a - b for a, b in values.values()]) for values in by_dose.values()]
    corrected = holm([p for *_, p in tested]) if all(p == p for *_, p in tested) else [math.nan] * len(tested)
    for (dose, values), (*_, p), by_holm in zip(by_dose.items(), tested, corrected, strict=True):
        told = [", ".join(f"{v[i]:.3f}" for v in values.values()) for i in (0, 1)]
        name = "the start senior itself" if dose is None else f"{dose:.0%}"
        difference = interval([a - b for a, b in values.values()])
        lines.append(f"| {name} | {told[0]} | {told[1]} | {difference} | {p:.3f} | {by_holm:.3f} |")
    blocks = [
        [by_dose[dose][s][0] - by_dose[dose][s][1] for dose in (0.0, *DOSES)]
        for s in few
        if all(s in by_dose.get(dose, {}) for dose in (0.0, *DOSES))
    ]
    if len(blocks) > 1:
        lines += ["", falling(blocks)]  # the difference is expected to fall with the dose
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    doing = commands.add_parser("run")
    doing.add_argument("--out", required=True, help="file of lines, added to")
    doing.add_argument("--work", default="runs/two-notations", help="models, runs and logs (default: %(default)s)")
    doing.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    doing.add_argument("--dose-seeds", type=int, nargs="*", default=[1, 2, 3])
    doing.add_argument("--arms", nargs="*", choices=list(ARMS), help="these alone (default: all)")
    doing.add_argument("--doses", nargs="*", help="these alone, `self` for the start senior (default: all)")
    doing.add_argument("--jobs", type=int, default=2)
    doing.add_argument("--steps", type=int, help="other than the configuration's")
    doing.add_argument("--tiny", action="store_true")
    showing = commands.add_parser("table")
    showing.add_argument("file")
    showing.add_argument("--again", help="a file of the same runs made elsewhere: both side by side")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    elif args.again:
        print(beside(rows_of(args.file), rows_of(args.again)))
    else:
        print(table(rows_of(args.file)))


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
