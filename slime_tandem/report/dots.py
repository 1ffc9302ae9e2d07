"""Estimates drawn as dots with whiskers, one panel with its own axis each, and scatters: self-contained SVG. Pure.

It knows no page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax import saxutils

from slime_tandem.errors import printable
from slime_tandem.report.curves import nice_ticks, tick_labels
from slime_tandem.report.statistics import Estimate
from slime_tandem.types import FloatArray

DASH = "–"
_WIDTH, _LABELS, _RIGHT, _ROW, _HEAD, _AXIS = 720, 250, 90, 22, 34, 40
_SIDE = 300
"""Height of a scatter in user units."""


@dataclass(frozen=True, slots=True)
class Dot:
    """One row of a panel: a value with its interval, or the reason why there is none."""

    label: str
    estimate: Estimate
    unit: str
    colour: str = "#2563a8"


@dataclass(frozen=True, slots=True)
class Panel:
    """Dots on one axis; a dashed line at `reference`."""

    title: str
    dots: Sequence[Dot]
    reference: float | None = None


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points `x`, `y` [N] on axes of their own, with a dashed line where both are equal if `diagonal`."""

    title: str
    x: FloatArray
    y: FloatArray
    x_label: str
    y_label: str
    diagonal: bool = False


def number(value: float | None) -> str:
    """Three decimals, two digits of what they would not show, or a dash for what is not defined.

    >>> number(0.25), number(-1.23e-5), number(None)
    ('0.250', '-1.2e-05', '–')
    """
    if value is None:
        return DASH
    return f"{value:.2g}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def whiskers(e: Estimate) -> str:
    """The interval in words, or why there is none."""
    if e.low is None or e.high is None:
        return f"not defined: {e.reason}"
    return f"{number(e.low)} to {number(e.high)}"


def document(title: str, parts: Sequence[Panel | Scatter], notes: Sequence[str], conditions: str) -> str:
    """One SVG: the parts below each other, then `notes` (what the reader must know) and the conditions."""
    top = 46.0
    body: list[str] = []
    for part in parts:
        body += _panel(part, top) if isinstance(part, Panel) else _scatter(part, top)
        top += _HEAD + _AXIS + (_ROW * len(part.dots) if isinstance(part, Panel) else _SIDE + 16)
    for note in notes:
        body += _lines(note, top, "#a02020")
        top += 16 * len(_wrap(note)) + 8
    body += _lines(conditions, top, "#555")
    top += 16 * len(_wrap(conditions))
    name = _escaped(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top:.0f}" width="{_WIDTH}" height="{top:.0f}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{name}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="16" y="26" font-size="15" font-weight="bold">{name}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _lines(text: str, top: float, colour: str) -> Iterator[str]:
    for i, line in enumerate(_wrap(text)):
        yield f'<text x="16" y="{top + i * 16:.0f}" fill="{colour}">{_escaped(line)}</text>'


def _range(values: Iterable[float]) -> tuple[float, float]:
    ends = list(values)
    pad = (max(ends) - min(ends)) * 0.05 or abs(max(ends)) * 0.1 or 0.5
    return min(ends) - pad, max(ends) + pad


def _ticks(low: float, high: float) -> Iterator[tuple[float, str]]:
    ticks = nice_ticks(low, high, 6)
    return zip(ticks, tick_labels(ticks), strict=True)


def _panel(panel: Panel, top: float) -> Iterator[str]:
    rows, reference = panel.dots, panel.reference
    yield f'<text x="16" y="{top + 16:.0f}" font-weight="bold">{_escaped(panel.title)}</text>'
    ends = [x for r in rows for x in (r.estimate.low, r.estimate.value, r.estimate.high) if x is not None]
    at_x = None
    if ends:
        low, high = _range([*ends, *([reference] if reference is not None else [])])

        def at_x(x: float) -> float:
            return _LABELS + (x - low) / (high - low) * (_WIDTH - _LABELS - _RIGHT)

        bottom = top + _HEAD + _ROW * len(rows)
        for tick, label in _ticks(low, high):
            x = at_x(tick)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26:.0f}" y2="{bottom:.0f}" stroke="#e3e3e3"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="middle" fill="#555">{label}</text>'
        if reference is not None:
            x = at_x(reference)
            where = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26:.0f}" y2="{bottom:.0f}"'
            yield f'<line {where} stroke="#888" stroke-dasharray="4 3"/>'
    for i, row in enumerate(rows):
        y = top + _HEAD + _ROW * (i + 0.5)
        e = row.estimate
        yield f'<text x="{_LABELS - 10}" y="{y + 4:.0f}" text-anchor="end">{_escaped(row.label)}</text>'
        if e.value is None or at_x is None:
            why = _escaped(_wrap(f"not defined: {e.reason}", 70)[0])
            yield f'<text x="{_LABELS}" y="{y + 4:.0f}" fill="#a02020">{why}</text>'
            continue
        if e.low is not None and e.high is not None:
            yield (
                f'<line x1="{at_x(e.low):.1f}" x2="{at_x(e.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{row.colour}" '
                'stroke-width="2" stroke-linecap="round"/>'
            )
        between = "" if (e.low, e.high, e.reason) == (None, None, None) else f" ({whiskers(e)})"
        words = f"{row.label}: {number(e.value)}{between} {row.unit}".rstrip()
        circle = f'<circle cx="{at_x(e.value):.1f}" cy="{y:.1f}" r="4.5" fill="{row.colour}">'
        yield f"{circle}<title>{_escaped(words)}</title></circle>"
        yield f'<text x="{_WIDTH - _RIGHT + 14}" y="{y + 4:.0f}" fill="#333">{number(e.value)}</text>'


def _scatter(plot: Scatter, top: float) -> Iterator[str]:
    yield f'<text x="16" y="{top + 16:.0f}" font-weight="bold">{_escaped(plot.title)}</text>'
    (x0, x1), (y0, y1) = _range(map(float, plot.x)), _range(map(float, plot.y))
    if plot.diagonal:
        x0 = y0 = min(x0, y0)
        x1 = y1 = max(x1, y1)
    left, right, up, down = 70.0, 70.0 + 1.6 * _SIDE, top + _HEAD, top + _HEAD + _SIDE

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (right - left), down - (y - y0) / (y1 - y0) * (down - up)

    for tick, label in _ticks(x0, x1):
        x = at(tick, y0)[0]
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up:.0f}" y2="{down:.0f}" stroke="#e3e3e3"/>'
        yield f'<text x="{x:.1f}" y="{down + 14:.0f}" text-anchor="middle" fill="#555">{label}</text>'
    for tick, label in _ticks(y0, y1):
        y = at(x0, tick)[1]
        yield f'<line x1="{left:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>'
        yield f'<text x="{left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{label}</text>'
    if plot.diagonal:
        (ax, ay), (bx, by) = at(x0, x0), at(x1, x1)
        line = f'x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}"'
        yield f'<line {line} stroke="#888" stroke-dasharray="4 3"/>'
    points = "".join("M{:.1f} {:.1f}h0".format(*at(float(x), float(y))) for x, y in zip(plot.x, plot.y, strict=True))
    style = 'stroke="#2563a8" stroke-width="3" stroke-linecap="round" stroke-opacity="0.35" fill="none"'
    yield f'<path d="{points}" {style}/>'
    yield f'<text x="{(left + right) / 2:.0f}" y="{down + 32:.0f}" text-anchor="middle">{_escaped(plot.x_label)}</text>'
    middle = (up + down) / 2
    turn = f'transform="rotate(-90 20 {middle:.0f})"'
    yield f'<text x="20" y="{middle:.0f}" text-anchor="middle" {turn}>{_escaped(plot.y_label)}</text>'


def _wrap(text: str, width: int = 110) -> list[str]:
    return textwrap.wrap(text, width) or [""]


def _escaped(text: str) -> str:
    """Text as SVG may hold it: markup and control characters are shown, not obeyed."""
    return saxutils.escape(printable(text))
