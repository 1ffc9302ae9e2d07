"""Dots with whiskers on one axis, as a part of an SVG. Pure; user units, y down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from slime_tandem.report.curves import nice_ticks, short

WIDTH = 720
_LABELS, _RIGHT, _ROW, _HEAD, _AXIS = 250, 90, 22, 34, 40


@dataclass(frozen=True, slots=True)
class Dot:
    """One line of a panel: a value with its interval (None: none); `words` say it, `why` stands where there is no value."""

    label: str
    value: float | None
    low: float | None
    high: float | None
    colour: str
    words: str
    why: str = ""


def panel_height(rows: int) -> float:
    """What a panel of so many dots takes."""
    return _HEAD + _ROW * rows + _AXIS


def panel(title: str, dots: Sequence[Dot], reference: float | None, top: float) -> Iterator[str]:
    """The elements of one panel from `top` on; `reference` is a dashed line across."""
    yield f'<text x="16" y="{top + 16:.0f}" font-weight="bold">{escape(title)}</text>'
    ends = [x for d in dots for x in (d.low, d.value, d.high) if x is not None]
    at_x = None
    if ends:
        ends += [reference] if reference is not None else []
        pad = (max(ends) - min(ends)) * 0.05 or abs(max(ends)) * 0.1 or 0.5
        low, high = min(ends) - pad, max(ends) + pad

        def at_x(x: float) -> float:
            return _LABELS + (x - low) / (high - low) * (WIDTH - _LABELS - _RIGHT)

        bottom = top + _HEAD + _ROW * len(dots)
        for tick in nice_ticks(low, high, 6):
            x = at_x(tick)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26:.0f}" y2="{bottom:.0f}" stroke="#e3e3e3"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="middle" fill="#555">{short(tick)}</text>'
        if reference is not None:
            x = at_x(reference)
            where = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26:.0f}" y2="{bottom:.0f}"'
            yield f'<line {where} stroke="#888" stroke-dasharray="4 3"/>'
    for i, dot in enumerate(dots):
        y = top + _HEAD + _ROW * (i + 0.5)
        yield f'<text x="{_LABELS - 10}" y="{y + 4:.0f}" text-anchor="end">{escape(dot.label)}</text>'
        if dot.value is None or at_x is None:
            yield f'<text x="{_LABELS}" y="{y + 4:.0f}" fill="#a02020">{escape(dot.why)}</text>'
            continue
        if dot.low is not None and dot.high is not None:
            yield (
                f'<line x1="{at_x(dot.low):.1f}" x2="{at_x(dot.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{dot.colour}" '
                'stroke-width="2" stroke-linecap="round"/>'
            )
        yield (
            f'<circle cx="{at_x(dot.value):.1f}" cy="{y:.1f}" r="4.5" fill="{dot.colour}"><title>{escape(dot.words)}</title>'
            "</circle>"
        )
        yield f'<text x="{WIDTH - _RIGHT + 14}" y="{y + 4:.0f}" fill="#333">{dot.value:.3f}</text>'
