"""docs/settings.md is what the settings tree says."""

from pathlib import Path

import pytest

from slime_tandem.config import RunConfig, TaskSpec, TeacherSpec, choices_of, fields_of
from slime_tandem.config.reference import settings_markdown

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_docs_are_the_settings():
    assert DOCS.read_text(encoding="utf-8") == settings_markdown(), (
        "run `python -m slime_tandem.config.reference > docs/settings.md`"
    )


def test_every_setting_has_one_row():
    rows = [line.split("`")[1] for line in settings_markdown().splitlines() if line.startswith("| `")]
    expected = [name for name, _, _ in fields_of()]
    expected += [name for name, _, _ in fields_of(TaskSpec, "tasks[].")]
    expected += [name for name, _, _ in fields_of(TeacherSpec, "opd.teachers[].")]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("tandem.prob_senior", ["`0.5`", "number, at least 0, at most 1"]),
        ("opd.clip", ["`10.0`", "number, above 0 or null"]),
        ("tasks[].family", ["required", "text"]),
        ("seed", ["`0`", "whole number, at least 0, below 2^63"]),
        ("tandem.boundary_classes", ['`["space"]`', "list: `space`, `newline`, `punctuation`, not empty"]),
        ("engine.tokens_per_request", ["`null`", "whole number, at least 1 or `auto` or null"]),
        ("tasks[].config", ["`{}`", "mapping"]),
    ],
)
def test_a_row_by_hand(name, cells):
    (row,) = [line for line in settings_markdown().splitlines() if line.startswith(f"| `{name}` ")]
    assert row.split(" | ")[1:3] == cells


def test_choices_are_those_of_the_help():
    text = settings_markdown()
    for name, _, _ in fields_of(RunConfig):
        assert all(f"`{choice}`" in text for choice in choices_of(name))
