"""The paper's measure of toy seniors: means over seeds, paired differences, and that the page's table is the data's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("eight_chains")


def line(module: ModuleType, arm: str, seed: int, solo: float, handoff: float) -> dict[str, Any]:
    results = dict.fromkeys(module.SHOWN, 0.5) | {"solo/pass@1": solo, "handoff/pass@1": handoff}
    return {"arm": arm, "seed": seed, "results": results}


def test_arms_are_compared_seed_by_seed(module: ModuleType) -> None:
    rows = [line(module, "solo GRPO", s, 0.75 + 0.25 * (s == 2), 0.25) for s in (2, 1)]
    rows += [line(module, "prob_senior 0.5", s, 0.5, 0.75) for s in (1, 2, 3)]
    shown = module.table(rows).splitlines()
    assert shown[2] == "| prob_senior 0.5 | 1, 2, 3 | 0.500 | 0.750 | 0.500 | 0.500 | 0.500 | 0.500 |"
    assert shown[3] == "| solo GRPO | 1, 2 | 0.875 | 0.250 | 0.500 | 0.500 | 0.500 | 0.500 |"
    # Of 0.25 and 0.5: mean 0.375, standard error 0.125, Student's quantile 12.706.
    assert shown[-1] == "| solo GRPO | +0.375 (-1.213, +1.963) | -0.500 (-0.500, -0.500) | +0.000 (+0.000, +0.000) |"


def test_one_seed_has_no_difference(module: ModuleType) -> None:
    shown = module.table([line(module, arm, 1, 0.5, 0.5) for arm in ("prob_senior 0.5", "sentence")]).splitlines()
    assert shown[-1].startswith("|---"), "no row below the head"


@pytest.mark.parametrize(("seeds", "runs", "differences"), [("6_to_10", 25, 4), ("1_to_5", 30, 5)])
def test_the_pages_tables_are_the_datas(module: ModuleType, seeds: str, runs: int, differences: int) -> None:
    data = REPO / "docs" / "results" / "data" / f"seeds_{seeds}" / "eight_chains.jsonl"
    rows = [json.loads(text) for text in data.read_text(encoding="utf-8").splitlines()]
    assert len({(r["arm"], r["seed"]) for r in rows}) == len(rows) == runs
    page = (REPO / "docs" / "results" / "question-a-tandem-against-solo.md").read_text(encoding="utf-8")
    shown = [row for row in module.table(rows).splitlines() if row and not row.startswith(("| arm", "| less", "|---"))]
    assert len(shown) == runs // 5 + differences
    each = ", ".join(map(str, sorted({r["seed"] for r in rows})))
    assert all(row.replace(f"{each} | ", "") in page for row in shown)
