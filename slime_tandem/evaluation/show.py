"""How an evaluation is shown: a table for the terminal, and a plot as one self-contained SVG. It computes no figure."""

from __future__ import annotations

from typing import cast

from rich.table import Table
from rich.text import Text

from slime_tandem.errors import printable
from slime_tandem.evaluation.figures import TITLES, Part, Result
from slime_tandem.evaluation.run import Evaluation
from slime_tandem.report.dots import Dot, Panel, document, number, whiskers

_COLOURS: dict[Part, str] = {
    "solo": "#2563a8",
    "teacher": "#0f7b7b",
    "handoff": "#b4521e",
    "transfer": "#8a6d1e",
    "drift": "#5b4b8a",
    "start": "#7a3f7a",
    "legibility": "#2f7d4f",
}


def conditions(evaluation: Evaluation) -> str:
    """One line: how many prompts and chains, sampled how, handed over where, which interval."""
    s, n = evaluation.setup, evaluation.setup["sampling"]
    return (
        f"{s['prompts']} held-out prompts, {s['chains']} chains each; temperature {n['temperature']:g}, top_p {n['top_p']:g}, "
        f"top_k {n['top_k']}, at most {n['max_new_tokens']} tokens; handoff strategy {s['handoff']['strategy']}, authors "
        f"alternate; intervals: {s['bootstrap']['level']:.0%}, bootstrap over prompts"
    )


def table(evaluation: Evaluation) -> Table:
    """Value, interval and unit of every result; why where there is none."""
    out = Table(
        title=Text(printable(f"evaluation of {evaluation.setup['models']['senior']}")),
        title_justify="left",
        caption=Text(printable(conditions(evaluation))),
        caption_justify="left",
    )
    out.add_column("", overflow="fold")
    out.add_column("value", justify="right", no_wrap=True)
    out.add_column("95% interval", justify="right", overflow="fold")
    out.add_column("unit", no_wrap=True)
    for part, title in TITLES.items():
        rows = [r for r in evaluation.results if r.part == part]
        if not rows:  # where there is no reward: accuracies; else: the teachers, who are not asked
            continue
        out.add_row(Text(title, style="bold"))
        for row in rows:
            label, interval = (Text(printable(t)) for t in (f"  {row.label}", whiskers(row.estimate)))
            out.add_row(label, number(row.estimate.value), interval, Text(row.unit))
        out.add_section()
    return out


_PANELS: tuple[tuple[str, tuple[str, ...], float | None], ...] = (
    ("Accuracy: pass@k, alone and with handoffs (fraction)", ("solo/pass@", "handoff/pass@"), None),
    ("Drift: KL(senior || teacher), sampled tokens (nats per token)", ("teacher/",), 0.0),
    ("Retention: handoff pass@k over solo pass@k (ratio; 1: nothing lost)", ("handoff/retention@",), 1.0),
    ("Transfer: the junior goes on from the senior's first half (fraction right)", ("transfer/",), None),
    ("Drift: KL(senior || junior), sampled tokens (nats per token)", ("drift/",), 0.0),
    ("Drift: KL(senior || start), sampled tokens (nats per token)", ("start/",), 0.0),
    ("Legibility: the junior's log-likelihood of the senior's text (nats)", ("legibility/",), 0.0),
)


def svg(evaluation: Evaluation) -> str:
    """Dots and 95% whiskers, one panel with its own axis per part; a result without a value is a line of text."""
    panels = []
    for title, prefixes, reference in _PANELS:
        rows = [r for r in evaluation.results if r.name.startswith(prefixes)]
        if not rows:
            continue
        panels.append(Panel(title, [_dot(r) for r in rows], reference))
    title = f"Evaluation of {evaluation.setup['models']['senior']}"
    return document(title, panels, evaluation.notes, conditions(evaluation))


def _dot(row: Result) -> Dot:
    label = row.label + (f", {row.part}" if "/pass@" in row.name else "")
    return Dot(label, row.estimate, row.unit, _COLOURS[cast(Part, row.part)])
