"""Turns metric rows into drawn curves: axes, ticks and polyline points for the report's inline SVG. Pure.

Coordinates are SVG user units in a box of WIDTH x HEIGHT, y down. It knows no page.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_tandem.report.metrics import METRICS

WIDTH, HEIGHT = 320.0, 168.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 10.0, 8.0, 22.0
MAX_POINTS = 300
"""Longer runs are drawn as means over stretches of steps, which keeps the file small."""

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_LEAST_SPAN = 0.01
"""Of an axis, relative to its values: less is noise drawn large, and its labels have more digits than there is room for."""

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Tick:
    """A grid line at `at` user units, with its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `css` is its class, `lines` its unbroken stretches, `end` its last point, `last` that value's text."""

    label: str
    css: str
    lines: tuple[str, ...]
    end: tuple[float, float]
    last: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One small plot. `points` is JSON for the read-out; `aria` says in words what the lines show."""

    title: str
    unit: str
    better: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    points: str
    aria: str
    stretch: int


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round values in [low, high], about `count` of them, 1-2-5 apart.

    >>> nice_ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number for a label: at most three significant digits, thousands as k.

    >>> [short(v) for v in (0.0, 0.25, 0.1234, 12.34, 123.4, 25000.0)]
    ['0', '0.25', '0.123', '12.3', '123', '25k']
    """
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels of ticks at equal distances, no two alike: as many decimals as the distance needs, thousands as k.

    >>> tick_labels([6.128, 6.13, 6.132]), tick_labels([0.0, 0.5, 1.0]), tick_labels([10000.0, 12500.0])
    (['6.128', '6.130', '6.132'], ['0.0', '0.5', '1.0'], ['10.0k', '12.5k'])
    """
    largest = max((abs(tick) for tick in ticks), default=0.0)
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=largest) or 1.0
    size, suffix = next((part for part in _UNITS if largest >= 10 * part[0]), (1.0, ""))
    if largest and not 1e-4 <= largest < 1e13:  # in none of the units, short
        power = math.floor(math.log10(largest))
        size, suffix = 10.0**power, f"e{power}"
    decimals = 0
    while any(abs(round(tick / size, decimals) - tick / size) > 0.01 * step / size for tick in ticks):
        decimals += 1
    return [f"{tick / size + 0.0:.{decimals}f}{suffix}" for tick in ticks]


def curve(
    name: str,
    title: str,
    runs: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]],
    *,
    beside: Sequence[tuple[float, float]] = (),
) -> Curve | None:
    """The plot of one step metric; `runs` are (label, css class, rows). None if no run has a value of it.

    `beside`: (step, value) points of other plots, which this one's axes hold, too, so that they can be compared.
    """
    metric = METRICS[name]
    longest = max((len(rows) for _, _, rows in runs), default=0)
    stretch = max(1, math.ceil(longest / MAX_POINTS))
    data: list[tuple[str, str, list[Point]]] = []
    for label, css, rows in runs:
        points = _thin([(row["step"], row[name]) for row in rows], stretch)
        if any(y is not None for _, y in points):
            data.append((label, css, points))
    if not data:
        return None
    ys = [y for _, _, points in data for _, y in points if y is not None] + [y for _, y in beside]
    xs = [x for _, _, points in data for x, _ in points] + [x for x, _ in beside]
    low, high = _range(min(ys), max(ys), bounded=metric.unit == "fraction")
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)

    def at_x(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    series, read_out, words = [], [], []
    for label, css, points in data:
        here = [(x, y) for x, y in points if y is not None]
        (x0, y0), (x1, y1) = here[0], here[-1]
        series.append(Series(label, css, _lines(points, at_x, at_y), (at_x(x1), at_y(y1)), short(y1)))
        read_out.append({"label": label, "css": css, "xy": [[x, y, at_x(x), at_y(y)] for x, y in here]})
        words.append(f"{label}: {short(y0)} at step {x0:g}, {short(y1)} at step {x1:g}")
    return Curve(
        title,
        metric.unit,
        {"up": "higher is better", "down": "lower is better", "none": ""}[metric.direction],
        _ticks([x for x in nice_ticks(x_low, x_high, 5) if x == int(x)], at_x),
        _ticks(nice_ticks(low, high, 5), at_y),
        tuple(series),
        json.dumps(_rounded(read_out), separators=(",", ":")),
        f"{title} in {metric.unit}. " + "; ".join(words),
        stretch,
    )


def _ticks(values: Sequence[float], place: Callable[[float], float]) -> tuple[Tick, ...]:
    return tuple(Tick(place(value), label) for value, label in zip(values, tick_labels(values), strict=True))


def _range(low: float, high: float, *, bounded: bool) -> tuple[float, float]:
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 0.5
    if bounded:
        # A share that hardly moves must not look as if it did.
        pad = max(pad, (0.2 - (high - low)) / 2)
    else:
        pad = max(pad, (max(abs(low), abs(high)) * _LEAST_SPAN - (high - low)) / 2)
    low, high = (low if low == 0.0 else low - pad), high + pad
    return (max(low, 0.0), min(high, 1.0)) if bounded else (low, high)


def _thin(points: Sequence[Point], stretch: int) -> list[Point]:
    if stretch == 1:
        return list(points)
    thin: list[Point] = []
    for i in range(0, len(points), stretch):
        part = points[i : i + stretch]
        values = [y for _, y in part if y is not None]
        thin.append((part[len(part) // 2][0], sum(values) / len(values) if values else None))
    return thin


def _lines(points: Sequence[Point], at_x: Any, at_y: Any) -> tuple[str, ...]:
    lines: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            lines.append([])
        else:
            lines[-1].append(f"{at_x(x):.1f},{at_y(y):.1f}")
    return tuple(" ".join(line) for line in lines if len(line) > 1)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value
