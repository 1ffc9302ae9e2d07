"""Writes report.html of a run folder: one file, no network, opens from disk.

Curves with the control in the same axes, the held-out evaluation, seconds per step, and transcripts coloured by author
with the teacher's signal per token. Everything a model wrote is escaped, and the page's policy runs only its own script.
`python -m slime_tandem.report.html RUN_DIR` writes it for a finished, a running or a killed run. It computes no metric.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from slime_tandem import __version__
from slime_tandem.errors import RunDirError, TandemError, printable
from slime_tandem.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, curve
from slime_tandem.report.metrics import METRICS, Direction
from slime_tandem.report.reward_parts import before_and_after, load_parts, titles
from slime_tandem.report.run_folder import disk_errors, read_rows
from slime_tandem.report.summary import DASH, RunPart, Summary, load_config, load_files, load_rewards, summarise
from slime_tandem.types import SENIOR, is_right

MAX_TRANSCRIPTS = 40
"""Transcripts in one report; with MAX_TOKENS and MAX_PROMPT_CHARS it bounds the file's size."""
MAX_TOKENS = 400
MAX_PROMPT_CHARS = 2000
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
CARDS = EVALUATION[:4]
SECONDS = ("rollout", "scoring", "training", "sync", "other")

# Half-open upper edges, in nats, of the shades of |log pi_student - log pi_teacher|.
SHADE_EDGES = (0.1, 0.5, 2.0)

# These reorder the text around them, so they are shown by number.
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of the page: CSS classes, visible text, log-probs as written into the data attributes (nats)."""

    css: str
    text: Markup
    log_prob: str
    teacher: str | None


@dataclass(frozen=True, slots=True)
class TranscriptView:
    """One transcript of the page; `why` says why tokens without a teacher value have none."""

    step: int
    column: int
    prompt: str
    label: str | None
    task: str
    reward: str
    right: bool
    finish: str
    n_tokens: int
    senior_share: str
    why: str
    tokens: tuple[TokenView, ...]
    skipped: int
    tail: tuple[TokenView, ...]


@dataclass(frozen=True, slots=True)
class TranscriptGroup:
    """Transcripts of one run and phase at its first and last step."""

    key: str
    title: str
    steps: tuple[int, ...]
    transcripts: tuple[TranscriptView, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Before, after and their difference; `good` is True/False where a direction is better."""

    before: str
    after: str
    change: str
    good: bool | None


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
    summary = summarise(run_dir)
    config = load_config(run_dir)
    parts = [("run", summary["run"], run_dir)]
    if summary["control"] is not None:
        parts.append(("control", summary["control"], run_dir / "control"))
    lines = [(part["label"], key, load_files(folder).steps) for key, part, folder in parts]
    groups = _groups([(key, part["label"], folder) for key, part, folder in parts])
    curves = [c for name, title in CURVES if (c := curve(name, title, lines)) is not None]
    by_task, tasks_left_out = task_curves([(part["label"], key, load_rewards(folder)) for key, part, folder in parts])
    env = Environment(
        loader=PackageLoader("slime_tandem.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    assert env.loader is not None
    style, script = (Markup(env.loader.get_source(env, name)[0]) for name in ("report.css", "report.js"))  # noqa: S704
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return env.get_template("report.html.j2").render(
        summary=summary,
        version=__version__,
        status=_status(summary),
        style=style,
        script=script,
        script_hash=digest,
        legend=[(key, part["label"]) for key, part, _ in parts],
        cards=[_card(name, title, [part for _, part, _ in parts]) for name, title in CARDS],
        curves=curves,
        by_task=by_task,
        tasks_left_out=tasks_left_out,
        box={"w": WIDTH, "h": HEIGHT, "l": LEFT, "r": WIDTH - RIGHT, "t": TOP, "b": HEIGHT - BOTTOM},
        evaluation=[
            (title, METRICS[name].unit, METRICS[name].description, [_cell(name, part) for _, part, _ in parts])
            for name, title in EVALUATION
        ]
        + _reward_parts([folder for _, _, folder in parts]),
        seconds=_seconds([part for _, part, _ in parts]),
        groups=groups,
        config_yaml=config.to_yaml(),
        config_line=(
            f"{config.train.steps} steps of {config.train.prompts_per_step} prompts × "
            f"{config.train.samples_per_prompt} responses, seed {config.seed}"
        ),
    )


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


def _groups(parts: Sequence[tuple[str, str, Path]]) -> list[TranscriptGroup]:
    try:
        return transcript_groups(parts)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirError(
            f"transcripts.jsonl in {parts[0][2]} or its control/",
            f"{type(error).__name__}: {error}",
            "rows as `slime-tandem train` writes them",
            "restore the file, or move it away: the report then has no transcripts",
        ) from error


def _status(summary: Summary) -> str:
    if summary["complete"]:
        return "complete"
    return f"stopped after {summary['run']['steps']} of {summary['planned_steps']} steps"


def _card(name: str, title: str, parts: Sequence[RunPart]) -> dict[str, Any]:
    return {"title": title, "unit": METRICS[name].unit, "cells": [(p["label"], _cell(name, p)) for p in parts]}


def _cell(name: str, part: RunPart) -> Cell:
    before, after = ((part[when] or {}).get(name) for when in ("before", "after"))
    return _change(before, after, METRICS[name].direction, 1 if METRICS[name].unit == "tokens" else 3)


def _reward_parts(folders: Sequence[Path]) -> list[tuple[str, str, str, list[Cell]]]:
    """Rows of the evaluation's table for the named parts of a reward: title, unit, what it says, a cell for each run."""
    found = [before_and_after(load_parts(folder)) for folder in folders]
    parts = sorted({part for both in found for means in both for part in means})
    what = "mean of this part over the held-out tandem responses"
    return [
        (title, "reward", what, [_change(before.get(part), after.get(part), "up", 3) for before, after in found])
        for part, title in zip(parts, titles(parts), strict=True)
    ]


def _change(before: float | None, after: float | None, direction: Direction, digits: int) -> Cell:
    def text(value: float | None) -> str:
        return DASH if value is None else f"{value:.{digits}f}"

    if before is None or after is None:
        return Cell(text(before), text(after), "", None)
    change = after - before
    good = None if direction == "none" or change == 0 else (change > 0) == (direction == "up")
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


def transcript_groups(parts: Sequence[tuple[str, str, Path]]) -> list[TranscriptGroup]:
    """First-step and last-step transcripts by run and phase, held-out ones first; at most MAX_TRANSCRIPTS in all.

    `parts` are (key, label, folder). Where both steps hold answers to the same prompts, these come first, in pairs.
    """
    found: list[tuple[str, str, list[int], list[Mapping[str, Any]], list[Mapping[str, Any]]]] = []
    for key, label, folder in parts:
        for phase, words in (("eval", "held-out"), ("train", "training")):
            steps, first, last = _ends(folder / "transcripts.jsonl", phase)
            if steps:
                found.append((f"{key}-{phase}", f"{label}, {words}", steps, first, last))
    each = MAX_TRANSCRIPTS // max(1, 2 * len(found))
    groups = []
    for key, title, steps, first, last in found:
        shared = {row["prompt"] for row in first} & {row["prompt"] for row in last}
        columns = [sorted(rows, key=lambda row: row["prompt"] not in shared)[:each] for rows in (first, last)]
        if shared:
            order = {row["prompt"]: i for i, row in reversed(list(enumerate(columns[0])))}
            columns[1].sort(key=lambda row: order.get(row["prompt"], len(order)))
        views = []
        for i in range(max(len(column) for column in columns)):
            for number, column in enumerate(columns, 1):
                if i < len(column):
                    views.append(_view(column[i], number))
        groups.append(TranscriptGroup(key, title, tuple(steps), tuple(views)))
    return groups


def _ends(path: Path, phase: str) -> tuple[list[int], list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The first and the last step with transcripts of a phase, and those transcripts; one step goes to `first`."""
    first: list[Mapping[str, Any]] = []
    last: list[Mapping[str, Any]] = []
    for row in read_rows(path):
        if row["phase"] != phase:
            continue
        if not first or row["step"] == first[0]["step"]:
            first.append(row)
        else:
            if last and row["step"] != last[0]["step"]:
                last = []
            last.append(row)
    return [rows[0]["step"] for rows in (first, last) if rows], first, last


def _view(row: Mapping[str, Any], column: int) -> TranscriptView:
    raw = row["tokens"]
    has_teacher = any(token["teacher_log_prob"] is not None for token in raw)
    why = (
        "not aligned: no teacher token covers exactly these bytes"
        if has_teacher
        else "no teacher value for this response: no teacher in this run, its answer was unusable, or nothing aligned"
    )
    head, tail = raw, []
    if len(raw) > MAX_TOKENS:
        head, tail = raw[: MAX_TOKENS * 4 // 5], raw[-(MAX_TOKENS // 5) :]
    prompt = str(row["prompt"])
    if len(prompt) > MAX_PROMPT_CHARS:
        prompt = f"{prompt[:MAX_PROMPT_CHARS]} … ({len(prompt) - MAX_PROMPT_CHARS} more characters)"
    senior = sum(token["author"] == SENIOR for token in raw)
    parts: Mapping[str, float] = row.get("parts", {})
    return TranscriptView(
        step=row["step"],
        column=column,
        prompt=prompt,
        label=row["label"],
        task=row["task"],
        reward=_said_reward(row["reward"], parts),
        right=is_right(row["reward"], parts),
        finish={"stop": "", "length": "cut at the length cap", "abort": "aborted"}.get(
            row["finish_reason"], row["finish_reason"]
        ),
        n_tokens=len(raw),
        senior_share=f"{100 * senior / len(raw):.0f}%" if raw else DASH,
        why=why,
        tokens=tuple(_token(token) for token in head),
        skipped=len(raw) - len(head) - len(tail),
        tail=tuple(_token(token) for token in tail),
    )


def _said_reward(reward: float | None, parts: Mapping[str, float]) -> str:
    if reward is None:
        return "none: it failed"
    of = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return f"{reward:.2f}" + (f" ({of})" if of else "")


def _token(token: Mapping[str, Any]) -> TokenView:
    senior = token["author"] == SENIOR
    own, teacher = token["log_prob"], token["teacher_log_prob"]
    css = ["k", "s" if senior else "i" if token["author"] is None else "j"]
    if senior:
        css.append("na" if teacher is None else shade(own - teacher))
    return TokenView(" ".join(css), visible(token["text"]), f"{own:.3f}", None if teacher is None else f"{teacher:.3f}")


def shade(difference: float) -> str:
    """The CSS class of log pi_student - log pi_teacher (nats): d0 near zero, p1..p3 and n1..n3 outwards.

    >>> [shade(d) for d in (0.05, 0.3, 7.0, -1.0)]
    ['d0', 'p1', 'p3', 'n2']
    """
    level = sum(abs(difference) >= edge for edge in SHADE_EDGES)
    return "d0" if level == 0 else f"{'p' if difference > 0 else 'n'}{level}"


def visible(text: str) -> Markup:
    """A token's text as safe HTML: marks for newline, tab, nothing and control characters.

    >>> str(visible("<b>\\n"))
    '&lt;b&gt;<i class="c">↵</i>\\n'
    """
    if not text:
        return Markup('<i class="c">∅</i>')
    out: list[Markup] = []
    for char in text:
        if char == "\n":
            out.append(Markup('<i class="c">↵</i>\n'))
        elif char == "\t":
            out.append(Markup('<i class="c">⇥</i>\t'))
        elif ord(char) < 0x20:
            out.append(Markup('<i class="c">{}</i>').format(chr(0x2400 + ord(char))))
        elif char in _BIDI_CONTROLS or unicodedata.category(char) in ("Cc", "Cs", "Co", "Zl", "Zp"):
            out.append(Markup('<i class="c">U+{}</i>').format(f"{ord(char):04X}"))
        else:
            out.append(escape(char))
    return Markup("").join(out)


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
