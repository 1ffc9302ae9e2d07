"""A gate for changes: a short job whose reward, KL, retention, coverage and losses must lie where those of past runs lay.

    python scripts/experiments/gate.py check                  # one run, half a minute; exit code 1 and the names of what moved
    python scripts/experiments/gate.py record --seeds 58      # after a change that is meant to move something; commit the bands
    python scripts/experiments/gate.py seed 7 --lines FILE    # one of those runs, many side by side; then record --lines FILE

The bands that stand here were made by `record --seeds 58 --lines docs/results/data/gate.jsonl`.

Unit tests say whether a part does what its author thought. This asks whether the whole still learns as it did: a wrong sign, a
shifted mask, a lost weight moves a figure that no assertion is about. Bands are two-sided, so that what gets better by accident
is found, too. Models are made on the spot and have learnt little; the reward is whether an answer holds a 7, which they can
learn in a few steps.

A band is Student's prediction interval over the recorded seeds for the next run of an unchanged program, all figures together
(Bonferroni), at 99.99 %. Some figures have longer tails than Student's interval knows: at 99 % each of 5 among 58 runs of one
program left the interval of the others, at 99.99 % one did. So a band is also widened until each recorded run lies within what
the others make. The checked seed is none of the recorded ones. A figure that hardly varies (the ratio at the first update is 1)
gets at least the width of what another machine's arithmetic may change.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.local.run import train
from slime_tandem.models.builtin import Recipe, make_model
from slime_tandem.report.run_folder import read_rows

BANDS = Path(__file__).with_name("gate_bands.json")
CHECKED_SEED = 0
STEPS = (0, 7)
LEVEL = 0.9999
STEP_METRICS = (
    "rollout/reward_mean", "tandem/senior_token_fraction", "opd/teacher_kl", "opd/coverage", "train/loss", "train/pg_loss",
    "train/opd_loss", "train/kl_loss", "train/kl", "train/junior_kl_loss", "train/grad_norm", "train/entropy",
    "train/ratio_mean", "train/logprob_diff",
)  # fmt: skip
EVAL_METRICS = (
    "eval/solo_accuracy", "eval/tandem_accuracy", "eval/handoff_retention", "eval/teacher_kl", "eval/coverage",
)  # fmt: skip
LEAST_HALF_WIDTH = 1e-4
"""Of a figure of size 1 or less, and in proportion of a greater one."""


def make_models(folder: Path) -> Path:
    """Three small models with two tokenizers that have seen a few worksheets; seconds of one core."""
    recipe = Recipe()
    changes = {"hidden_size": 32, "intermediate_size": 64, "steps": 40, "stop_accuracy": None}
    roles = {role: dataclasses.replace(getattr(recipe, role), **changes) for role in ("junior", "senior", "teacher")}
    recipe = dataclasses.replace(recipe, **roles, check_prompts=1, final_prompts=1)
    for role in roles:
        make_model(role, recipe, folder, lambda line: None)
    return folder


def settings(models: Path, runs: Path, seed: int, **engine: Any) -> RunConfig:
    """The job: co-writing, a teacher of another vocabulary, a KL to the start, a pull to the junior."""
    prompts = runs / "prompts.jsonl"
    if not prompts.exists():
        rng = random.Random(0)
        asked = [f"Calculate {rng.randrange(100)} + {rng.randrange(100)}." for _ in range(400)]
        runs.mkdir(parents=True, exist_ok=True)
        prompts.write_text("".join(json.dumps({"prompt": p, "label": "7"}) + "\n" for p in asked), encoding="utf-8")
    return RunConfig.from_mapping(
        {
            "name": f"gate-{seed}",
            "runs_dir": str(runs),
            "seed": seed,
            "models": {role: str(models / role) for role in ("senior", "junior", "teacher")},
            "tasks": [{"family": "jsonl", "path": str(prompts), "answer": "number", "answer_format": "regex:7"}],
            "sampling": {"max_new_tokens": 12},
            "tandem": {"max_gap_tokens": 4},
            "opd": {"coef": 0.1},
            "objective": {"kl_coef": 0.1, "lambda_jun": 0.05},
            "optimizer": {"lr": 3e-3},
            "train": {
                "steps": STEPS[-1] + 1,
                "prompts_per_step": 16,
                "samples_per_prompt": 8,
                "threads": 1,
                "save_every": 100,
            },
            "eval": {"prompts": 40, "samples_per_prompt": 4},
            "engine": {"cache_tokens": 16384, **engine},
        }
    )


def figures(run: Path) -> dict[str, float]:
    """`metric@step` (or @before, @after) to value, of a finished run."""
    steps = {row["step"]: row for row in read_rows(run / "metrics.jsonl")}
    out = {f"{m}@{step}": steps[step][m] for step in STEPS for m in STEP_METRICS}
    for row in read_rows(run / "eval.jsonl"):
        out |= {f"{m}@{row['phase']}": row[f"{m}"] for m in EVAL_METRICS}
    return out


def bands(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """[low, high] for each figure, from two recorded runs or more."""
    out = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        mean, half = interval(values, len(runs[0]))
        if len(values) > 2:
            half *= max(1.0, *(far_out(values, i, len(runs[0])) for i in range(len(values))))
        out[name] = [float(f"{mean - half:.6g}"), float(f"{mean + half:.6g}")]
    return out


def interval(values: Sequence[float], figures: int) -> tuple[float, float]:
    """Student's prediction interval for the next of `values`, one of `figures` judged together: its middle and half."""
    from scipy.stats import t

    n, mean = len(values), fmean(values)
    quantile = float(t.ppf(1 - (1 - LEVEL) / 2 / figures, n - 1))
    return mean, max(quantile * stdev(values) * math.sqrt(1 + 1 / n), LEAST_HALF_WIDTH * max(1.0, abs(mean)))


def far_out(values: Sequence[float], i: int, figures: int) -> float:
    """How far the i-th of three values or more lies from the middle of the others' interval, in halves of it."""
    mean, half = interval([v for j, v in enumerate(values) if j != i], figures)
    return abs(values[i] - mean) / half


def moved(found: Mapping[str, float], expected: Mapping[str, Sequence[float]]) -> list[str]:
    """A line for each figure outside its band, or that only one side has; the farthest out first."""
    lines = [
        (math.inf, f"{name}: {'not recorded' if name in found else 'gone'}") for name in found.keys() ^ expected.keys()
    ]
    for name in found.keys() & expected.keys():
        value, (low, high) = found[name], expected[name]
        if value is None or not low <= value <= high:
            far = math.inf if value is None else max(low - value, value - high) / (high - low)
            lines.append((far, f"{name}: {value} outside {low:g} to {high:g}"))
    return [line for _, line in sorted(lines, key=lambda x: (-x[0], x[1]))]


def one(models: Path, runs: Path, seed: int, **engine: Any) -> dict[str, float]:
    """The figures of one run of the job."""
    config = settings(models, runs, seed, **engine)
    train(config)
    return figures(config.run_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    recording = commands.add_parser("record")
    recording.add_argument("--seeds", type=int, default=12, help="runs, with seeds from 1 on")
    checking = commands.add_parser("check")
    running = commands.add_parser("seed")
    running.add_argument("seed", type=int, help="1 or more")
    for command in (recording, checking):
        command.add_argument("--bands", type=Path, default=BANDS)
    for command in (recording, running):
        command.add_argument("--lines", type=Path, required=command is running, help="runs that are done, a line each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gate-") as name:
        models, runs = make_models(Path(name) / "models"), Path(name) / "runs"
        if args.command == "seed":
            line = json.dumps({"seed": args.seed, "figures": one(models, runs, args.seed)}) + "\n"
            with args.lines.open("a", encoding="utf-8") as file:
                file.write(line)
            return 0
        if args.command == "record":
            seeds = range(CHECKED_SEED + 1, CHECKED_SEED + 1 + args.seeds)
            lines = args.lines.read_text(encoding="utf-8").splitlines() if args.lines else []
            done = {row["seed"]: row["figures"] for row in map(json.loads, lines)}
            recorded = [done[seed] if seed in done else one(models, runs, seed) for seed in seeds]
            content = {"seeds": list(seeds), "bands": bands(recorded)}
            args.bands.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            return 0
        lines = moved(one(models, runs, CHECKED_SEED), json.loads(args.bands.read_text(encoding="utf-8"))["bands"])
    print(*lines or ["nothing moved"], sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
