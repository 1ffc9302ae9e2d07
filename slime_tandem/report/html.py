"""Writes report.html of a run folder: one file, no network, opens from disk.

Curves with the control in the same axes, the held-out evaluation, seconds per step, and transcripts coloured by author
with the teacher's signal per token. Everything a model wrote is escaped, and the page's policy runs only its own script.
`python -m slime_tandem.report.html RUN_DIR` writes it for a finished, a running or a killed run. It computes no metric.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from slime_tandem import __version__
from slime_tandem.config import RunConfig
from slime_tandem.errors import TandemError, printable
from slime_tandem.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, curve
from slime_tandem.report.metrics import METRICS, Direction
from slime_tandem.report.reward_parts import before_and_after, load_parts, titles
from slime_tandem.report.run_folder import disk_errors
from slime_tandem.report.summary import (
    CONTROL_LABEL,
    DASH,
    RunFiles,
    RunPart,
    Summary,
    load_config,
    load_files,
    load_rewards,
    run_label,
    shown_metrics,
    summary_of,
)
from slime_tandem.report.transcripts import TRANSCRIPTS, Ends, not_transcripts, passage, read_ends, transcript_groups

MAX_TASKS = 24

CURVES = (
    ("rollout/reward_mean", "Reward"),
    ("rollout/accuracy", "Rollout accuracy"),
    ("opd/teacher_kl", "Teacher KL"),
    ("train/kl", "KL to the start"),
    ("tandem/senior_token_fraction", "Senior token fraction"),
    ("rollout/response_tokens_mean", "Response tokens"),
    ("train/entropy", "Entropy"),
    ("train/grad_norm", "Gradient norm"),
    ("time/step_s", "Step time"),
)
EVALUATION = (
    ("eval/solo_accuracy", "Solo accuracy"),
    ("eval/tandem_accuracy", "Tandem accuracy"),
    ("eval/handoff_retention", "Handoff retention"),
    ("eval/teacher_kl", "Teacher KL"),
    ("eval/senior_token_fraction", "Senior token fraction"),
    ("eval/coverage", "Teacher coverage"),
    ("eval/reward_mean", "Reward"),
    ("eval/response_tokens_mean", "Response length"),
)
CARDS = 4
"""How many of them, the first that a run has, stand as large numbers at the top."""
SECONDS = ("rollout", "scoring", "training", "sync", "other")


@dataclass(frozen=True, slots=True)
class Cell:
    """Before, after and their difference; `good` is True/False where a direction is better."""

    before: str
    after: str
    change: str
    good: bool | None


@dataclass(frozen=True, slots=True)
class ArmData:
    """What one run of a folder has written: `key` is its CSS class; rows of rewards.jsonl; `ends_of` its transcripts; rows of
    reward_parts.jsonl."""

    key: str
    label: str
    files: RunFiles
    rewards: Sequence[Mapping[str, Any]]
    ends: Mapping[str, Ends]
    parts: Sequence[Mapping[str, Any]] = ()


PARTS = ("top", "cards", "curves", "tasks", "figures", "transcripts", "settings")
"""The parts of the page, in order: macros of sections.html.j2."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html and return its path.

    Raises RunDirError if it is no run folder, its rows are broken, or the file cannot be written.
    """
    page = render(run_dir)
    path = run_dir / "report.html"
    with disk_errors(path):
        # A lone surrogate (a token's broken bytes) has no UTF-8 form.
        path.write_bytes(page.encode("utf-8", "replace"))
    return path


def render(run_dir: Path) -> str:
    """The report's HTML."""
    config = load_config(run_dir)
    folders = [("run", run_label(config), run_dir)]
    if (run_dir / "control").is_dir():
        folders.append(("control", CONTROL_LABEL, run_dir / "control"))
    arms = [
        ArmData(
            key,
            label,
            load_files(folder),
            load_rewards(folder),
            read_ends(folder / TRANSCRIPTS),
            load_parts(folder),
        )
        for key, label, folder in folders
    ]
    view = page_view(config, arms)
    env = environment()
    style, script = source(env, "report.css"), source(env, "report.js")
    return env.get_template("report.html.j2").render(
        name=view["name"],
        parts=[Markup(part) for part in rendered(env, view).values()],  # noqa: S704 - escaped when rendered
        style=style,
        script=script,
        script_hash=digest(script),
        version=__version__,
    )


def environment() -> Environment:
    """Where the pages' templates are; everything is escaped."""
    return Environment(
        loader=PackageLoader("slime_tandem.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def source(env: Environment, name: str) -> Markup:
    """The text of a style or script of ours, as it is."""
    assert env.loader is not None
    return Markup(env.loader.get_source(env, name)[0])  # noqa: S704 - ours


def digest(script: str) -> str:
    """The SHA-256 by which a content security policy knows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def rendered(env: Environment, view: Mapping[str, Any]) -> dict[str, str]:
    """The HTML of each of PARTS."""
    module: Any = env.get_template("sections.html.j2").module
    return {part: str(getattr(module, part)(view)) for part in PARTS}


def page_view(config: RunConfig, arms: Sequence[ArmData]) -> dict[str, Any]:
    """What the templates show of a run (`arms[0]`) and of its control, if there is one. Raises RunDirError for transcripts of
    another form."""
    control = arms[1] if len(arms) > 1 else None
    summary = summary_of(config, arms[0].files, None if control is None else control.files)
    parts = [summary["run"], *([summary["control"]] if summary["control"] is not None else [])]
    titles_of, lines = dict(EVALUATION), [(arm.label, arm.key, arm.files.steps) for arm in arms]
    shown = [(name, titles_of[name]) for name in shown_metrics(list(titles_of), parts)]
    by_task, tasks_left_out = task_curves([(arm.label, arm.key, arm.rewards) for arm in arms])
    try:
        groups = transcript_groups([(arm.key, arm.label, arm.ends) for arm in arms])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise not_transcripts("transcripts.jsonl of the run or its control", error) from error
    return {
        "summary": summary,
        "name": passage(config.name, 200),
        "status": _status(summary),
        "legend": [(arm.key, arm.label) for arm in arms],
        "cards": [_card(name, title, parts) for name, title in shown[:CARDS]],
        "curves": [c for name, title in CURVES if (c := curve(name, title, lines)) is not None],
        "by_task": by_task,
        "tasks_left_out": tasks_left_out,
        "box": {"w": WIDTH, "h": HEIGHT, "l": LEFT, "r": WIDTH - RIGHT, "t": TOP, "b": HEIGHT - BOTTOM},
        "evaluation": [
            (title, METRICS[name].unit, METRICS[name].description, [_cell(name, part) for part in parts])
            for name, title in shown
        ]
        + _teachers(parts)
        + _reward_parts([arm.parts for arm in arms]),
        "seconds": _seconds(parts),
        "groups": groups,
        "answered": any(t.reward is not None for group in groups for t in group.transcripts),
        "config_yaml": config.to_yaml(),
        "config_line": (
            f"{config.train.steps} steps of {config.train.prompts_per_step} prompts × "
            f"{config.train.samples_per_prompt} responses, seed {config.seed}"
        ),
    }


def task_curves(runs: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> tuple[list[Curve], int]:
    """(a plot of the mean reward for each task tag, all with the same axes; how many tags have none).

    `runs` are (label, css class, rows of rewards.jsonl). None for a single tag, which the plot of the reward shows; of more
    than MAX_TASKS those with most responses. A step without a prompt of the task has no point.
    """
    samples: Counter[str] = Counter()
    for _, _, rows in runs:
        for row in rows:
            samples[row["task"]] += row["samples"]
    if len(samples) < 2:
        return [], 0
    shown = sorted(sorted(samples, key=lambda task: (-samples[task], task))[:MAX_TASKS])
    all_points = [(row["step"], row["mean"]) for _, _, rows in runs for row in rows if row["task"] in shown]
    plots = []
    for task in shown:
        lines = [
            (label, css, [{"step": r["step"], "rollout/reward_mean": r["mean"]} for r in rows if r["task"] == task])
            for label, css, rows in runs
        ]
        plots.append(curve("rollout/reward_mean", task, lines, beside=all_points))
    return [plot for plot in plots if plot is not None], len(samples) - len(shown)


def _status(summary: Summary) -> str:
    if summary["complete"]:
        return "complete"
    return f"stopped after {summary['run']['steps']} of {summary['planned_steps']} steps"


def _card(name: str, title: str, parts: Sequence[RunPart]) -> dict[str, Any]:
    return {"title": title, "unit": METRICS[name].unit, "cells": [(p["label"], _cell(name, p)) for p in parts]}


def _cell(name: str, part: RunPart) -> Cell:
    before, after = ((part[when] or {}).get(name) for when in ("before", "after"))
    return _change(before, after, METRICS[name].direction, 1 if METRICS[name].unit == "tokens" else 3)


def _teachers(parts: Sequence[RunPart]) -> list[tuple[str, str, str, list[Cell]]]:
    """Rows of the evaluation's table for the KL to each teacher, where there are several; as `_reward_parts`."""
    metric = METRICS["eval/teacher_kl"]
    what = "eval/teacher_kl of the responses that this teacher has scored"
    return [
        (
            passage(f"Teacher KL: {name}", 200),
            metric.unit,
            what,
            [_change(*part["teachers"].get(name, (None, None)), metric.direction, 3) for part in parts],
        )
        for name in sorted({name for part in parts for name in part["teachers"]})
    ]


def _reward_parts(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, str, str, list[Cell]]]:
    """Rows of the evaluation's table for the named parts of a reward: title, unit, what it says, a cell for each run."""
    found = [before_and_after(rows) for rows in runs]
    parts = sorted({part for both in found for means in both for part in means})
    what = "mean of this part over the held-out tandem responses"
    return [
        (
            passage(title, 200),
            "reward",
            what,
            [_change(before.get(part), after.get(part), "up", 3) for before, after in found],
        )
        for part, title in zip(parts, titles(parts), strict=True)
    ]


def _change(before: float | None, after: float | None, direction: Direction, digits: int) -> Cell:
    def text(value: float | None) -> str:
        return DASH if value is None else f"{value:.{digits}f}"

    if before is None or after is None:
        return Cell(text(before), text(after), "", None)
    change = round(after - before, digits)
    if change == 0:  # what is shown as no change has no sign and no colour
        return Cell(text(before), text(after), text(0.0), None)
    good = None if direction == "none" else (change > 0) == (direction == "up")
    return Cell(text(before), text(after), f"{change:+.{digits}f}".replace("-", "\N{MINUS SIGN}"), good)


def _seconds(parts: Sequence[RunPart]) -> list[dict[str, Any]]:
    longest = max((part["seconds"]["step"] or 0.0 for part in parts), default=0.0)
    rows = []
    for part in parts:
        values = {name: value for name, value in part["seconds"].items() if isinstance(value, float)}
        bars = [(n, 100 * values[n] / longest) for n in SECONDS if values.get(n)] if longest else []
        cells = [f"{values[n]:.2f}" if n in values else DASH for n in (*SECONDS, "step")]
        rows.append({"label": part["label"], "bars": bars, "cells": cells})
    return rows


def main() -> int:
    """Command line: one run folder; returns the exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m slime_tandem.report.html RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(Path(sys.argv[1])))
    except TandemError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
