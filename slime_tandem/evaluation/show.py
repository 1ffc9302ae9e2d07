"""How an evaluation is shown: a table for the terminal, and a plot as one self-contained SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import cast
from xml.sax.saxutils import escape

from rich.table import Table
from rich.text import Text

from slime_tandem.evaluation.figures import TITLES, Part, Result
from slime_tandem.evaluation.run import Evaluation
from slime_tandem.report.curves import nice_ticks, short

DASH = "–"
_WIDTH, _LABELS, _RIGHT, _ROW, _HEAD, _AXIS = 720, 250, 90, 22, 34, 40
_COLOURS: dict[Part, str] = {"solo": "#2563a8", "handoff": "#b4521e", "drift": "#5b4b8a", "legibility": "#2f7d4f"}


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
        title=f"evaluation of {evaluation.setup['models']['senior']}",
        title_justify="left",
        caption=conditions(evaluation),
        caption_justify="left",
    )
    out.add_column("", overflow="fold")
    out.add_column("value", justify="right", no_wrap=True)
    out.add_column("95% interval", justify="right", overflow="fold")
    out.add_column("unit", no_wrap=True)
    for part, title in TITLES.items():
        rows = [r for r in evaluation.results if r.part == part]
        out.add_row(Text(title, style="bold"))
        for row in rows:
            out.add_row(Text(f"  {row.label}"), _number(row.estimate.value), Text(_interval(row)), Text(row.unit))
        out.add_section()
    return out


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _interval(row: Result) -> str:
    e = row.estimate
    if e.low is None or e.high is None:
        return f"not defined: {e.reason}"
    return f"{e.low:.3f} to {e.high:.3f}"


_PANELS: tuple[tuple[str, tuple[str, ...], float | None], ...] = (
    ("Accuracy: pass@k, alone and with handoffs (fraction)", ("solo/pass@", "handoff/pass@"), None),
    ("Retention: handoff pass@k over solo pass@k (ratio; 1: nothing lost)", ("handoff/retention@",), 1.0),
    ("Drift: KL(senior || junior), sampled tokens (nats per token)", ("drift/",), 0.0),
    ("Legibility: the junior's log-likelihood of the senior's text (nats)", ("legibility/",), 0.0),
)


def svg(evaluation: Evaluation) -> str:
    """Dots and 95% whiskers, one panel with its own axis per part; a result without a value is a line of text."""
    top = 46.0
    body: list[str] = []
    for title, prefixes, reference in _PANELS:
        rows = [r for r in evaluation.results if r.name.startswith(prefixes)]
        body += _panel(title, rows, reference, top)
        top += _HEAD + _ROW * len(rows) + _AXIS
    for note in evaluation.notes:
        body += [
            f'<text x="16" y="{top + i * 16:.0f}" fill="#a02020">{escape(t)}</text>' for i, t in enumerate(_wrap(note))
        ]
        top += 16 * len(_wrap(note)) + 8
    for i, line in enumerate(_wrap(conditions(evaluation))):
        body.append(f'<text x="16" y="{top + i * 16:.0f}" fill="#555">{escape(line)}</text>')
    top += 16 * len(_wrap(conditions(evaluation)))
    name = escape(str(evaluation.setup["models"]["senior"]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top:.0f}" width="{_WIDTH}" height="{top:.0f}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>Evaluation of {name}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="16" y="26" font-size="15" font-weight="bold">Evaluation of {name}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _panel(title: str, rows: Sequence[Result], reference: float | None, top: float) -> Iterator[str]:
    yield f'<text x="16" y="{top + 16:.0f}" font-weight="bold">{escape(title)}</text>'
    ends = [x for r in rows for x in (r.estimate.low, r.estimate.value, r.estimate.high) if x is not None]
    at_x = None
    if ends:
        ends += [reference] if reference is not None else []
        pad = (max(ends) - min(ends)) * 0.05 or abs(max(ends)) * 0.1 or 0.5
        low, high = min(ends) - pad, max(ends) + pad

        def at_x(x: float) -> float:
            return _LABELS + (x - low) / (high - low) * (_WIDTH - _LABELS - _RIGHT)

        bottom = top + _HEAD + _ROW * len(rows)
        for tick in nice_ticks(low, high, 6):
            x = at_x(tick)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26:.0f}" y2="{bottom:.0f}" stroke="#e3e3e3"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="middle" fill="#555">{short(tick)}</text>'
        if reference is not None:
            x = at_x(reference)
            where = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26:.0f}" y2="{bottom:.0f}"'
            yield f'<line {where} stroke="#888" stroke-dasharray="4 3"/>'
    for i, row in enumerate(rows):
        y = top + _HEAD + _ROW * (i + 0.5)
        e, colour = row.estimate, _COLOURS[cast(Part, row.part)]
        label = row.label + (f", {row.part}" if "/pass@" in row.name else "")
        yield f'<text x="{_LABELS - 10}" y="{y + 4:.0f}" text-anchor="end">{escape(label)}</text>'
        if e.value is None or at_x is None:
            why = escape(_wrap(f"not defined: {e.reason}", 70)[0])
            yield f'<text x="{_LABELS}" y="{y + 4:.0f}" fill="#a02020">{why}</text>'
            continue
        if e.low is not None and e.high is not None:
            yield (
                f'<line x1="{at_x(e.low):.1f}" x2="{at_x(e.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" '
                'stroke-width="2" stroke-linecap="round"/>'
            )
        words = f"{label}: {_number(e.value)} ({_interval(row)}) {row.unit}"
        yield f'<circle cx="{at_x(e.value):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"><title>{escape(words)}</title></circle>'
        yield f'<text x="{_WIDTH - _RIGHT + 14}" y="{y + 4:.0f}" fill="#333">{_number(e.value)}</text>'


def _wrap(text: str, width: int = 110) -> list[str]:
    return textwrap.wrap(text, width) or [""]
