"""Reads a run folder back and says what came of the run: the numbers behind the final table, summary.json and the report.

Works on a run that was killed in the middle: what is not there is None, and the verdict says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from slime_tandem.config import RunConfig
from slime_tandem.errors import RunDirError
from slime_tandem.report.metrics import METRICS, Row, Scope, row_keys
from slime_tandem.report.run_folder import RIGHT, disk_errors, read_rows
from slime_tandem.report.statistics import difference_interval, paired_interval

CONTROL_LABEL = "solo control"
DASH = "–"
"""Shown where a run has no such value."""


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


class Comparison(TypedDict):
    """The run against its control after training, on the same held-out prompts; `low`, `high`: of `run - control`.

    `better`: the label of the one whose lead the interval shows, None where it shows none.
    """

    label: str
    run: float
    control: float
    low: float
    high: float
    paired: bool
    better: str | None
    text: str


class Verdict(TypedDict):
    """Did it learn? `learned` is None when there is no evaluation before and after. Intervals are at level 0.95.

    `low`, `high` are of `after - before`; `paired`: by prompt (`report.statistics.paired_interval`), else as of other prompts.
    """

    learned: bool | None
    metric: str
    before: float | None
    after: float | None
    low: float | None
    high: float | None
    paired: bool
    text: str
    control: Comparison | None


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
    return tuple(checked_rewards(path, row) for row in read_rows(path))


def checked_rewards(path: Path, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of rewards.jsonl itself; raises RunDirError for one that cannot be shown."""
    numbers = all(row.get(name) is not None and _is_value(row[name]) for name in ("samples", "mean"))
    if not (isinstance(row.get("task"), str) and numbers):
        found = {name: row.get(name) for name in ("task", "samples", "mean")}
        expected = "a task, and finite numbers of samples and mean reward"
        raise RunDirError(f"{path} step {row['step']}", found, expected, "restore the file, or delete this line")
    return row


def _rows(path: Path, scope: Scope) -> tuple[Mapping[str, Any], ...]:
    return tuple(checked_row(path, scope, row) for row in read_rows(path))


ALWAYS = frozenset({"rollout/reward_mean", "time/step_s", "eval/solo_accuracy"})
"""Metrics without which a row says nothing; each has been in every version."""


def checked_row(path: Path, scope: Scope, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of metrics.jsonl (`step`) or eval.jsonl (`eval`), null for what an earlier version did not measure.

    Raises RunDirError for a damaged one, or one without what every version has measured.
    """
    unmeasured = {name: None for name in row_keys(scope) if name not in row and name not in ALWAYS}
    if unmeasured:
        row = {**row, **unmeasured}
    wrong = [n for n in row_keys(scope) if n not in row or not _is_value(row[n], fraction=_is_fraction(n))]
    wrong += ["phase"] if scope == "eval" and not isinstance(row.get("phase"), str) else []
    wrong += [RIGHT] if scope == "eval" and not _is_right(row.get(RIGHT, {})) else []
    if wrong:
        raise RunDirError(
            f"{path} step {row['step']}: {wrong[0]}",
            row.get(wrong[0], "missing"),
            _OTHERS.get(wrong[0]) or f"{_expected(wrong[0])} or null",
            "restore the file, or delete this line",
        )
    return row


_LARGEST = 1e100
"""Of a measured value: sums and spans of such stay finite."""


def _is_value(value: object, *, fraction: bool = False) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e-6 <= value <= 1 + 1e-6 if fraction else abs(value) <= _LARGEST


_OTHERS = {"phase": "a name", RIGHT: "by metric a list of numbers in [0, 1] or null"}


def _is_right(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(shares, list) and all(_is_value(share, fraction=True) for share in shares)
        for shares in value.values()
    )


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


def summarise(run_dir: Path) -> Summary:
    """Summarise the run in `run_dir` and, if there is one, its control. Raises RunDirError if it is no run folder."""
    config, control = load_config(run_dir), run_dir / "control"
    return summary_of(config, load_files(run_dir), load_files(control) if control.is_dir() else None)


def summary_of(config: RunConfig, files: RunFiles, control_files: RunFiles | None) -> Summary:
    """What came of a run by its rows and those of its control."""
    run = _part(run_label(config), files)
    control = None if control_files is None else _part(CONTROL_LABEL, control_files)
    verdict = _verdict(run, config, _first_and_last(files))
    if control is not None and control_files is not None:
        verdict["control"] = _against(
            control, run, config, _first_and_last(control_files)[1], _first_and_last(files)[1]
        )
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


def verdict_lines(summary: Summary) -> list[str]:
    """What came of the run, in sentences: did it learn, and against its control."""
    control = summary["verdict"]["control"]
    return [summary["verdict"]["text"], *([control["text"]] if control is not None else [])]


def write_summary(run_dir: Path) -> Summary:
    """Summarise and write summary.json."""
    summary = summarise(run_dir)
    path = run_dir / "summary.json"
    with disk_errors(path):
        path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return summary


def _first_and_last(files: RunFiles) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The evaluations before and after training. One called "after" that later steps follow is from before the run was
    extended, and counts as none."""
    last = files.steps[-1]["step"] if files.steps else -1
    before = [row for row in files.evals if row["phase"] == "before"]
    after = [row for row in files.evals if row["phase"] == "after" and row["step"] >= last]
    return before[0] if before else None, after[-1] if after else None


def _part(label: str, files: RunFiles) -> RunPart:
    steps = files.steps
    before, after = _first_and_last(files)
    names = row_keys("eval")
    return {
        "label": label,
        "steps": len(steps),
        "before": None if before is None else {name: before[name] for name in names},
        "after": None if after is None else {name: after[name] for name in names},
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


def _measured(config: RunConfig) -> tuple[str, str]:
    """The metric that decides, and what it is called."""
    return (
        ("eval/tandem_accuracy", "tandem accuracy")
        if config.tandem.enabled
        else ("eval/solo_accuracy", "solo accuracy")
    )


def _interval(
    metric: str, n: int, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[float, float, bool]:
    """(low, high, whether it is paired) of a metric's difference between two evaluations of the same `n` prompts.

    Rows that do not say which prompts were right (of older runs) give an interval as of other prompts, which is too wide.
    """
    assert before is not None
    assert after is not None
    first, second = (row.get(RIGHT, {}).get(metric, ()) for row in (before, after))
    if first and len(first) == len(second):
        pairs = [b - a for a, b in zip(first, second, strict=True) if a is not None and b is not None]
        if pairs:
            return (*paired_interval(pairs), True)
    return (*difference_interval(before[metric], after[metric], n), False)


def _words(low: float, high: float, paired: bool) -> str:
    return f"95% interval {low:+.3f} to {high:+.3f}{', paired by prompt' if paired else ', not paired'}"


def _verdict(
    run: RunPart, config: RunConfig, rows: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
) -> Verdict:
    n = config.eval.prompts
    metric, what = _measured(config)
    before = run["before"][metric] if run["before"] else None
    after = run["after"][metric] if run["after"] else None
    verdict: Verdict = {
        "learned": None, "metric": metric, "before": before, "after": after, "low": None, "high": None,
        "paired": False, "text": "", "control": None,
    }  # fmt: skip
    if before is None or after is None:
        missing = "before" if before is None else "after"
        verdict["text"] = (
            f"Not known: {run['steps']} of {config.train.steps} steps done, no evaluation {missing} training."
        )
        return verdict
    low, high, paired = _interval(metric, n, *rows)
    moved = f"{'rose' if after > before else 'fell'} from {before:.3f} to {after:.3f}"
    lead = "Yes" if low > 0 else "No, it got worse" if high < 0 else "Not shown"
    verdict["text"] = (
        f"{lead}: {what} on {n} held-out prompts {moved if after != before else f'stayed at {after:.3f}'} "
        f"({after - before:+.3f}, {_words(low, high, paired)})."
    )
    return verdict | {"learned": low > 0, "low": low, "high": high, "paired": paired}


def _against(
    control: RunPart,
    run: RunPart,
    config: RunConfig,
    control_row: Mapping[str, Any] | None,
    run_row: Mapping[str, Any] | None,
) -> Comparison | None:
    metric, what = _measured(config)
    own = run["after"][metric] if run["after"] else None
    other = control["after"][metric] if control["after"] else None
    if own is None or other is None:
        return None
    low, high, paired = _interval(metric, config.eval.prompts, control_row, run_row)
    better = run["label"] if low > 0 else control["label"] if high < 0 else None
    if better is None:
        lead = f"No difference to the {control['label']} is shown"
    elif better == run["label"]:
        lead = f"It did better than the {control['label']}"
    else:
        lead = f"The {control['label']} did better"
    text = f"{lead}: {what} {own:.3f} against {other:.3f} ({own - other:+.3f}, {_words(low, high, paired)})."
    return {
        "label": control["label"], "run": own, "control": other, "low": low, "high": high, "paired": paired,
        "better": better, "text": text,
    }  # fmt: skip
