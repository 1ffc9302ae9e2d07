"""docs/scaling.md: its table is the generated one, its plan is the command's, its constants are those of the result files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.slime_launch import scaling
from slime_tandem.slime_launch.flags import plan

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "scaling.md").read_text()


def test_the_table_is_generated() -> None:
    assert scaling.table() in TEXT, "run python -m slime_tandem.slime_launch.scaling"


def test_the_managers_table_is_generated_from_what_was_measured() -> None:
    assert scaling.manager_table() in TEXT, "run python -m slime_tandem.slime_launch.scaling"
    measured = (DOCS / "results" / "manager-cost.md").read_text()
    for what, (alone, loop, theirs) in scaling.MANAGER.items():
        group = {"fused": "without a teacher", "fused, sampled signal": "with the sampled signal"}.get(
            what, "with exact lists"
        )
        assert re.search(rf"\*\*{group}\*\* \|.*\| {alone:.1f} \|", measured), what
        assert re.search(rf"\| {what} \| 2 \| {loop:.2f} \|", measured), what
        assert what.endswith("lists") or re.search(rf"\| {what} \| 2 \| {loop:.2f} \| {theirs:.2f} \|", measured), what


def test_the_measured_numbers_stand_in_the_results() -> None:
    fused = (DOCS / "results" / "fused.md").read_text()
    servers = (DOCS / "results" / "tandem-rollout.md").read_text()
    assert re.search(r"4B \+ 0\.6B \| 64 \|.*\| 5,788 \|", fused)
    assert "| solo, tokens/s | 3,613 | 9,507 | 16,697 |" in servers
    assert re.search(r"free-running, whole chains \|.*\| 4\.00 \([^|]*\| 4\.31 \([^|]*\| 0\.18 \|", servers)
    for length, size in scaling.BYTES_PER_TOKEN.items():
        assert re.search(rf"{length:,} tokens \|.*\({size:,.0f} per token\)", servers)


def test_by_hand() -> None:
    d = scaling.demand("two_servers", 4, 4096)
    assert d.tokens_per_s == pytest.approx(2 * 9507 / 4.00)
    assert d.requests_per_s == pytest.approx(0.18 * d.tokens_per_s)
    assert d.sent_bytes_per_s == pytest.approx(593 * d.tokens_per_s)
    assert d.teacher_requests_per_s == pytest.approx(d.tokens_per_s / 4096)
    assert d.channel_bytes_per_s == 32 * d.tokens_per_s
    assert scaling.demand("fused", 120, 1024).shown
    assert not scaling.demand("fused", 130, 1024).shown


def test_the_plan_for_a_thousand_gpus_is_what_is_planned(sized: Callable[..., RunConfig], tmp_path: Path) -> None:
    tree = yaml.safe_load(TEXT.split("```yaml\n")[1].split("```")[0])
    shown = TEXT.split("```\n# 125 x 8")[1].split("```")[0]
    launch = plan(sized(**tree), tmp_path)
    notes = [note for note in launch.notes if not note.startswith("sizes only")]
    assert "\n".join(f"# {note}" for note in notes) == "# 125 x 8" + shown.rstrip()
