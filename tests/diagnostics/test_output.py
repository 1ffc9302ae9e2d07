"""What a tool's result becomes: a table, CSV, JSON and SVG, whatever stands in the names that a bank brings."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from slime_tandem.diagnostics.output import Report, Row, plain, write_report

FORMULAS = ['=HYPERLINK("http://x","y")', "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1+1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_cell_of_text_is_no_formula_and_numbers_stay_numbers(text: str) -> None:
    report = Report("t", {}, [Row(text, text, plain(-0.5), text, 3), Row("a", "b=1", plain(None, text))])
    head, first, second = csv.reader(io.StringIO(report.to_csv(), newline=""))
    assert head == ["section", "name", "value", "low", "high", "unit", "n", "reason"]
    cell = "\\r=1" if text == "\r=1" else f"'{text}"  # a row would begin behind it
    assert first == [cell, cell, "-0.5", "", "", cell, "3", ""]
    assert second == ["a", "b=1", "", "", "", "", "", cell]


def test_names_are_text_in_every_form(tmp_path: Path) -> None:
    name = "</text><script>alert(1)</script> \x1b[2J\x00\u202e [/bold] &amp; \"'"
    report = Report(name, {"bank": name}, [Row(name, name, plain(0.5), name, 1)], notes=[name])
    out = io.StringIO()
    Console(file=out, force_terminal=False, width=300).print(report.table())
    assert "\\x1b[2J" in out.getvalue()
    assert not [c for c in out.getvalue() if (ord(c) < 32 and c != "\n") or c == "\u202e"]
    paths = write_report(report, tmp_path / "r")
    svg = next(p for p in paths if p.suffix == ".svg")
    tree = ET.parse(svg)
    assert not [e for e in tree.iter() if e.tag.endswith("script")]
