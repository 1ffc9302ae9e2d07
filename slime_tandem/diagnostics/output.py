"""The one shape of every tool's result: rows, as table, CSV, JSON and SVG. It computes nothing."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_tandem.errors import printable
from slime_tandem.files import csv_cell, whole_file
from slime_tandem.report.dots import DASH, Dot, Panel, Scatter, document
from slime_tandem.report.statistics import Estimate

_COLUMNS = ("section", "name", "value", "low", "high", "unit", "n", "reason")


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a result. `section` groups rows into a panel; `n` is what it was measured on (None: see the setup)."""

    section: str
    name: str
    estimate: Estimate
    unit: str = ""
    n: int | None = None


def plain(value: float | None, reason: str | None = None) -> Estimate:
    """A number without an interval.

    >>> plain(1.5).value, plain(None, "no rows").reason
    (1.5, 'no rows')
    """
    return Estimate(value, None, None, reason if value is None else None)


@dataclass(frozen=True)
class Report:
    """The result of a tool: `setup` says of what and how, `notes` what the reader must know; sections in `references` have a
    dashed line, sections in `undrawn` (of several units, say) no panel, and those in `details` are in the files alone."""

    title: str
    setup: Mapping[str, Any]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    references: Mapping[str, float] = field(default_factory=dict)
    undrawn: frozenset[str] = frozenset()
    details: frozenset[str] = frozenset()
    scatters: Sequence[Scatter] = ()

    @property
    def sections(self) -> list[str]:
        """In the order in which they appear."""
        return list(dict.fromkeys(r.section for r in self.rows))

    def to_json(self) -> dict[str, Any]:
        """`title`, `setup`, `notes`, and `results` as a list of rows."""
        return {
            "title": self.title,
            "setup": dict(self.setup),
            "notes": list(self.notes),
            "results": [dict(zip(_COLUMNS, _cells(r), strict=True)) for r in self.rows],
        }

    def to_csv(self) -> str:
        """The rows with a header; empty cells where there is no value."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([_COLUMNS, *([csv_cell(cell) for cell in _cells(row)] for row in self.rows)])
        return text.getvalue()

    def to_svg(self) -> str:
        """The scatters, then a panel per section."""
        panels = [
            Panel(s, [Dot(r.name, r.estimate, r.unit) for r in self.rows if r.section == s], self.references.get(s))
            for s in self.sections
            if s not in self.undrawn | self.details
        ]
        conditions = ", ".join(f"{k}: {v}" for k, v in self.setup.items() if isinstance(v, (str, int, float)))
        return document(self.title, [*self.scatters, *panels], self.notes, conditions)

    def table(self) -> Table:
        """For the terminal."""
        out = Table(
            title=Text(printable(self.title)),
            title_justify="left",
            caption=Text(printable("\n".join(self.notes))) if self.notes else None,
            caption_justify="left",
        )
        out.add_column("", overflow="fold")
        for name in ("value", "95% interval", "unit", "n"):
            out.add_column(name, justify="left" if name == "unit" else "right", overflow="fold")
        for section in (s for s in self.sections if s not in self.details):
            out.add_row(Text(printable(section), style="bold"))
            for r in (r for r in self.rows if r.section == section):
                e = r.estimate
                ends = (
                    f"{_short(e.low)} to {_short(e.high)}"
                    if e.low is not None and e.high is not None
                    else e.reason or ""
                )
                out.add_row(
                    Text(printable(f"  {r.name}")),
                    _short(e.value),
                    Text(printable(ends)),
                    Text(printable(r.unit)),
                    "" if r.n is None else str(r.n),
                )
            out.add_section()
        return out


def _short(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g}"


def _cells(row: Row) -> tuple[Any, ...]:
    e = row.estimate
    return row.section, row.name, e.value, e.low, e.high, row.unit, row.n, e.reason


def write_report(report: Report, prefix: Path) -> list[Path]:
    """PREFIX.csv, PREFIX.json and PREFIX.svg, each whole or not at all; returns their paths."""
    texts = {
        ".csv": report.to_csv(),
        ".json": json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        ".svg": report.to_svg(),
    }
    paths = []
    for ending, text in texts.items():
        path = prefix.with_name(prefix.name + ending)
        with whole_file(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def show(report: Report) -> None:
    """Print the table."""
    Console(highlight=False).print(report.table())
