"""Reads a run folder back and says what came of the run: the numbers behind the final table, summary.json and the report.

Works on a run that was killed in the middle: what is not there is None, and the verdict says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from slime_tandem.config import RunConfig
from slime_tandem.errors import RunDirError
from slime_tandem.report.metrics import METRICS, Row, Scope, row_keys
from slime_tandem.report.run_folder import REWARDS, RIGHT, disk_errors, read_rows
from slime_tandem.report.statistics import difference_interval, mean_interval, paired_interval
from slime_tandem.report.teachers import TEACHERS, is_teachers, kl_change, teacher_kls

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
    """One of the runs in a folder: the run itself or its control. `teachers`: the KL to each before and after training, where
    there are several."""

    label: str
    steps: int
    before: dict[str, float | None] | None
    after: dict[str, float | None] | None
    teachers: dict[str, tuple[float | None, float | None]]
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
    low: float | None
    high: float | None
    paired: bool
    better: str | None
    text: str


class Verdict(TypedDict):
    """Did it learn? `learned` is None when there is no evaluation before and after. Intervals are at level 0.95.

    `metric`: an accuracy; `eval/reward_mean` where rewards are own numbers, of which none is called `correct`;
    `eval/teacher_kl` where no held-out prompt has a reward. `low`, `high` are of `after - before`; `paired`: by prompt
    (`report.statistics`: `paired_interval`, `mean_interval`, `ratio_difference`), else as of other prompts.
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
    """The rows of one run folder; rows of files that are not there yet are empty.

    Raises RunDirError for damaged rows, and where rows of steps are lost that an evaluation comes after.
    """
    files = RunFiles(_rows(run_dir / "metrics.jsonl", "step"), _rows(run_dir / "eval.jsonl", "eval"))
    done = max((row["step"] for row in files.evals), default=0)
    there = {row["step"] for row in files.steps}
    if len(there) < done:  # which may be any number, so that no list of the lost ones is made
        first_lost = next(step for step in itertools.count() if step not in there)
        raise RunDirError(
            str(run_dir / "metrics.jsonl"),
            f"no row of step {first_lost}",
            f"a row of each of the {done} steps that eval.jsonl has an evaluation after",
            "restore the file",
        )
    return files


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
    wrong += [REWARDS] if scope == "eval" and not _are_values(row.get(REWARDS, [])) else []
    wrong += [TEACHERS] if scope == "eval" and TEACHERS in row and not is_teachers(row[TEACHERS]) else []
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


_OTHERS = {
    "phase": "a name",
    RIGHT: "by metric a list of numbers in [0, 1] or null",
    REWARDS: "a list of finite numbers or null",
    TEACHERS: "what the KL to `all` teachers and to each `by_name` is made of",
}


def _is_right(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(shares, list) and all(_is_value(share, fraction=True) for share in shares)
        for shares in value.values()
    )


def _are_values(values: object) -> bool:
    return isinstance(values, list) and all(_is_value(value) for value in values)


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
        "teachers": _teachers(before, after),
        "seconds": _seconds(steps),
        "retries": int(sum(row["engine/retries"] or 0 for row in steps)),
        "failed_samples": int(sum(row["opd/failed_samples"] or 0 for row in steps)),
    }


def _teachers(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, tuple[float | None, float | None]]:
    first, last = teacher_kls(before), teacher_kls(after)
    return {name: (first.get(name), last.get(name)) for name in sorted(first.keys() | last.keys())}


def shown_metrics(names: Sequence[str], parts: Sequence[RunPart]) -> list[str]:
    """Those of the evaluation's `names` that say something of these runs: without any reward none that is made of rewards."""
    unrewarded = all(_unrewarded(part) for part in parts)
    return [name for name in names if not (unrewarded and name in _OF_REWARDS)]


_OF_REWARDS = ("eval/solo_accuracy", "eval/tandem_accuracy", "eval/handoff_retention", "eval/reward_mean")


def _unrewarded(part: RunPart) -> bool:
    """Whether its evaluations have found no reward; False while there is none."""
    rows = [row for row in (part["before"], part["after"]) if row is not None]
    return bool(rows) and all(row["eval/solo_accuracy"] is None for row in rows)


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


_Rows = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
_KL, _REWARD = "eval/teacher_kl", "eval/reward_mean"


def _measured(config: RunConfig, run: RunPart, rows: _Rows) -> tuple[str, str]:
    """The metric that decides, and what it is called: an accuracy, the reward where it says nothing of right and wrong, or the
    KL to the teachers without any reward."""
    there = [row for row in rows if row is not None]
    if there and all(REWARDS in row for row in there):
        return _REWARD, "reward"
    if _unrewarded(run):
        return _KL, "KL to the teacher" + ("s" if len(run["teachers"]) > 1 else "")
    return (
        ("eval/tandem_accuracy", "tandem accuracy")
        if config.tandem.enabled
        else ("eval/solo_accuracy", "solo accuracy")
    )


class _Change(NamedTuple):
    """Of a metric between two evaluations of the same prompts: its interval (None: not known, and `why`), whether it is paired,
    over how many prompts."""

    low: float | None
    high: float | None
    paired: bool
    prompts: int
    why: str | None = None

    @property
    def words(self) -> str:
        if self.low is None or self.high is None:
            return f"no interval: {self.why}"
        return (
            f"95% interval {self.low:+.3f} to {self.high:+.3f}{', paired by prompt' if self.paired else ', not paired'}"
        )

    def shown(self, metric: str) -> bool | None:
        """Whether the interval shows a change for the better (True) or the worse; None where it shows neither."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return None
        return (self.low > 0) == (METRICS[metric].direction == "up")


def _interval(metric: str, n: int, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> _Change:
    """Of a metric between two evaluations of the same `n` prompts.

    Rows that do not say which prompts were right (of older runs) give an interval as of other prompts, which is too wide.
    """
    assert before is not None
    assert after is not None
    if metric == _KL:
        found = kl_change(before, after)
        if found is None:
            return _Change(None, None, False, n, "the rows do not have it prompt by prompt")
        return _Change(found.low, found.high, True, n, found.reason)
    of_prompts = (
        row.get(REWARDS, ()) if metric == _REWARD else row.get(RIGHT, {}).get(metric, ()) for row in (before, after)
    )
    first, second = of_prompts
    pairs: list[float] = []
    if first and len(first) == len(second):  # prompts without a reward have none
        pairs = [b - a for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if metric == _REWARD:
        if len(pairs) < 2:
            return _Change(None, None, False, n, "fewer than two prompts have a reward in both")
        return _Change(*mean_interval(pairs), True, len(pairs))
    if pairs:
        return _Change(*paired_interval(pairs), True, len(pairs))
    return _Change(*difference_interval(before[metric], after[metric], n), False, n)


def _verdict(
    run: RunPart, config: RunConfig, rows: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
) -> Verdict:
    metric, what = _measured(config, run, rows)
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
    change = _interval(metric, config.eval.prompts, *rows)
    moved = f"{'rose' if after > before else 'fell'} from {before:.3f} to {after:.3f}"
    shown = change.shown(metric)
    lead = "Yes" if shown else "No, it got worse" if shown is False else "Not shown"
    verdict["text"] = (
        f"{lead}: {what} on {change.prompts} held-out prompts {moved if after != before else f'stayed at {after:.3f}'} "
        f"({after - before:+.3f}, {change.words})."
    )
    learned = None if change.low is None else shown is True
    return verdict | {"learned": learned, "low": change.low, "high": change.high, "paired": change.paired}


def _against(
    control: RunPart,
    run: RunPart,
    config: RunConfig,
    control_row: Mapping[str, Any] | None,
    run_row: Mapping[str, Any] | None,
) -> Comparison | None:
    metric, what = _measured(config, run, (control_row, run_row))
    own = run["after"][metric] if run["after"] else None
    other = control["after"][metric] if control["after"] else None
    if own is None or other is None:
        return None
    change = _interval(metric, config.eval.prompts, control_row, run_row)
    shown = change.shown(metric)
    better = run["label"] if shown else control["label"] if shown is False else None
    if better is None:
        lead = f"No difference to the {control['label']} is shown"
    elif better == run["label"]:
        lead = f"It did better than the {control['label']}"
    else:
        lead = f"The {control['label']} did better"
    text = f"{lead}: {what} {own:.3f} against {other:.3f} ({own - other:+.3f}, {change.words})."
    return {
        "label": control["label"], "run": own, "control": other, "low": change.low, "high": change.high,
        "paired": change.paired, "better": better, "text": text,
    }  # fmt: skip
