"""Reads a run folder back and says what came of the run: the numbers behind the final table, summary.json and the report.

Works on a run that was killed in the middle: what is not there is None, and the verdict says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from slime_tandem.config import RunConfig
from slime_tandem.errors import RunDirError
from slime_tandem.report.metrics import METRICS, Row, Scope, row_keys
from slime_tandem.report.run_folder import disk_errors, read_rows

DASH = "–"
"""Shown where a run has no such value."""
Z95 = 1.959963984540054
"""Two-sided 95% quantile of the standard normal."""


class Seconds(TypedDict):
    """Mean seconds per step; `other` is what the four parts leave of the step."""

    rollout: float | None
    scoring: float | None
    training: float | None
    sync: float | None
    other: float | None
    step: float | None


class RunPart(TypedDict):
    """One of the runs in a folder: the run itself or its control."""

    label: str
    steps: int
    before: dict[str, float | None] | None
    after: dict[str, float | None] | None
    seconds: Seconds
    retries: int
    failed_samples: int


class Verdict(TypedDict):
    """Did it learn? `learned` is None when there is no evaluation before and after."""

    learned: bool | None
    metric: str
    before: float | None
    after: float | None
    low: float | None
    high: float | None
    text: str


class Summary(TypedDict):
    """What came of a run; JSON-ready."""

    name: str
    seed: int
    planned_steps: int
    complete: bool
    eval_prompts: int
    verdict: Verdict
    run: RunPart
    control: RunPart | None


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The rows of one run: steps in order, evaluations in order."""

    steps: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]


def load_config(run_dir: Path) -> RunConfig:
    """The config of a run folder; raises RunDirError if `run_dir` is no run folder, ConfigError for a changed config."""
    if not (run_dir / "config.yaml").is_file():
        raise RunDirError(
            "run folder",
            str(run_dir),
            "a folder that `slime-tandem train` wrote, with a config.yaml",
            "give runs/<name>, not a file in it or the folder above",
        )
    return RunConfig.load(run_dir / "config.yaml")


def load_files(run_dir: Path) -> RunFiles:
    """The rows of one run folder; rows of files that are not there yet are empty. Raises RunDirError for damaged rows."""
    return RunFiles(_rows(run_dir / "metrics.jsonl", "step"), _rows(run_dir / "eval.jsonl", "eval"))


def load_rewards(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """The rows of rewards.jsonl, one per step and task tag; raises RunDirError for damaged ones."""
    path = run_dir / "rewards.jsonl"
    rows = tuple(read_rows(path))
    for row in rows:
        numbers = all(row.get(name) is not None and _is_value(row[name]) for name in ("samples", "mean"))
        if not (isinstance(row.get("task"), str) and numbers):
            found = {name: row.get(name) for name in ("task", "samples", "mean")}
            expected = "a task, and finite numbers of samples and mean reward"
            raise RunDirError(f"{path} step {row['step']}", found, expected, "restore the file, or delete this line")
    return rows


def _rows(path: Path, scope: Scope) -> tuple[Mapping[str, Any], ...]:
    rows = tuple(read_rows(path))
    for row in rows:
        wrong = [n for n in row_keys(scope) if n not in row or not _is_value(row[n], fraction=_is_fraction(n))]
        wrong += ["phase"] if scope == "eval" and not isinstance(row.get("phase"), str) else []
        if wrong:
            raise RunDirError(
                f"{path} step {row['step']}: {wrong[0]}",
                row.get(wrong[0], "missing"),
                "a name" if wrong[0] == "phase" else f"{_expected(wrong[0])} or null",
                "restore the file, or delete this line",
            )
    return rows


_LARGEST = 1e100
"""Of a measured value: sums and spans of such stay finite."""


def _is_value(value: object, *, fraction: bool = False) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e-6 <= value <= 1 + 1e-6 if fraction else abs(value) <= _LARGEST


def _is_fraction(name: str) -> bool:
    return METRICS[name].scope == "eval" and METRICS[name].unit == "fraction"


def _expected(name: str) -> str:
    return "a number in [0, 1]" if _is_fraction(name) else f"a number of at most {_LARGEST:g}"


def run_label(config: RunConfig) -> str:
    """What a run is called in tables and legends.

    >>> run_label(RunConfig())
    'tandem + teacher'
    """
    return ("tandem" if config.tandem.enabled else "solo") + (" + teacher" if config.opd.enabled else "")


def difference_interval(before: float, after: float, n: int) -> tuple[float, float]:
    """95% interval of `after - before`, two shares of `n` prompts each.

    Agresti and Caffo (2000): one success and one failure added to each side, which keeps it honest at shares of 0 and 1.

    >>> low, high = difference_interval(0.5, 0.75, 100)
    >>> round(low, 3), round(high, 3)
    (0.116, 0.374)
    """
    p, q = ((share * n + 1) / (n + 2) for share in (before, after))
    half = Z95 * math.sqrt((p * (1 - p) + q * (1 - q)) / (n + 2))
    return q - p - half, q - p + half


def summarise(run_dir: Path) -> Summary:
    """Summarise the run in `run_dir` and, if there is one, its control. Raises RunDirError if it is no run folder."""
    config = load_config(run_dir)
    run = _part(run_label(config), load_files(run_dir))
    control_dir = run_dir / "control"
    control = _part("solo control", load_files(control_dir)) if control_dir.is_dir() else None
    verdict = _verdict(run, config)
    return {
        "name": config.name,
        "seed": config.seed,
        "planned_steps": config.train.steps,
        "complete": run["after"] is not None and run["steps"] >= config.train.steps,
        "eval_prompts": config.eval.prompts,
        "verdict": verdict,
        "run": run,
        "control": control,
    }


def write_summary(run_dir: Path) -> Summary:
    """Summarise and write summary.json."""
    summary = summarise(run_dir)
    path = run_dir / "summary.json"
    with disk_errors(path):
        path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return summary


def _part(label: str, files: RunFiles) -> RunPart:
    steps = files.steps
    last = steps[-1]["step"] if steps else -1
    before = [row for row in files.evals if row["phase"] == "before"]
    # An evaluation called "after" that later steps follow is from before the run was extended.
    after = [row for row in files.evals if row["phase"] == "after" and row["step"] >= last]
    names = row_keys("eval")
    return {
        "label": label,
        "steps": len(steps),
        "before": {name: before[0][name] for name in names} if before else None,
        "after": {name: after[-1][name] for name in names} if after else None,
        "seconds": _seconds(steps),
        "retries": int(sum(row["engine/retries"] or 0 for row in steps)),
        "failed_samples": int(sum(row["opd/failed_samples"] or 0 for row in steps)),
    }


def _seconds(steps: Sequence[Row]) -> Seconds:
    def mean(name: str) -> float | None:
        values = [v for row in steps if (v := row[name]) is not None]
        return sum(values) / len(steps) if values else None

    parts = [mean(f"time/{name}_s") for name in ("rollout", "scoring", "train", "sync")]
    step = mean("time/step_s")
    other = None if step is None else max(0.0, step - sum(v or 0.0 for v in parts))
    rollout, scoring, training, sync = parts
    return {
        "rollout": rollout,
        "scoring": scoring,
        "training": training,
        "sync": sync,
        "other": other,
        "step": step,
    }


def _verdict(run: RunPart, config: RunConfig) -> Verdict:
    n = config.eval.prompts
    metric = "eval/tandem_accuracy" if config.tandem.enabled else "eval/solo_accuracy"
    what = "tandem accuracy" if config.tandem.enabled else "solo accuracy"
    before = run["before"][metric] if run["before"] else None
    after = run["after"][metric] if run["after"] else None
    if before is None or after is None:
        missing = "before" if before is None else "after"
        text = f"Not known: {run['steps']} of {config.train.steps} steps done, no evaluation {missing} training."
        return {
            "learned": None, "metric": metric, "before": before, "after": after, "low": None, "high": None, "text": text
        }  # fmt: skip
    low, high = difference_interval(before, after, n)
    moved = f"{'rose' if after > before else 'fell'} from {before:.3f} to {after:.3f}"
    lead = "Yes" if low > 0 else "No, it got worse" if high < 0 else "Not shown"
    text = (
        f"{lead}: {what} on {n} held-out prompts {moved if after != before else f'stayed at {after:.3f}'} "
        f"({after - before:+.3f}, 95% interval {low:+.3f} to {high:+.3f})."
    )
    return {
        "learned": low > 0, "metric": metric, "before": before, "after": after, "low": low, "high": high, "text": text
    }  # fmt: skip
