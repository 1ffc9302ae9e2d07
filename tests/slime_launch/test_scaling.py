"""docs/scaling.md: its table is the generated one, its plan is the command's, its constants are those of the result files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.distill import candidates
from slime_tandem.slime_launch import scaling
from slime_tandem.slime_launch.flags import plan

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "scaling.md").read_text()


def test_the_table_is_generated() -> None:
    assert scaling.table() in TEXT, "run python -m slime_tandem.slime_launch.scaling"


def test_the_managers_table_is_generated_from_what_was_measured() -> None:
    assert scaling.manager_table() in TEXT, "run python -m slime_tandem.slime_launch.scaling"
    measured = (DOCS / "results" / "manager-cost.md").read_text()
    for what, (alone, beside) in scaling.MANAGER.items():
        if beside is None:
            continue
        loop, theirs = beside
        group = {"fused": "without a teacher", "fused, sampled signal": "with the sampled signal"}.get(
            what, "with exact lists"
        )
        assert re.search(rf"\*\*{group}\*\* \|.*\| {alone:.1f} \|", measured), what
        assert re.search(rf"\| {what} \| 2 \| {loop:.2f} \|", measured), what
        assert what.endswith("lists") or re.search(rf"\| {what} \| 2 \| {loop:.2f} \| {theirs:.2f} \|", measured), what
    by_request, gathered = (scaling.MANAGER[what][0] for what in ("two servers", "two servers, gathered"))
    assert f"156 before, {by_request:.0f} now, **{gathered:.0f} gathered**" in " ".join(measured.split())


def test_the_teachers_table_is_generated() -> None:
    assert scaling.teacher_table() in TEXT, "run python -m slime_tandem.slime_launch.scaling"
    assert scaling.WINDOW == candidates._WINDOW


def test_a_teacher_by_hand() -> None:
    """64 tokens in two windows: 64 ids for the lists, then 32 and 64, on each of two sides."""
    tokens, d = 2 * 5788, scaling.teacher("exact", 2, 64)
    assert d.requests_per_s == d.senior_requests_per_s == pytest.approx(tokens / 64 * 3)
    assert d.id_bytes_per_s == pytest.approx(tokens / 64 * 2 * (64 + 32 + 64) * 7)
    plain = scaling.teacher("sampled", 2, 64)
    assert (plain.requests_per_s, plain.senior_requests_per_s) == (pytest.approx(tokens / 64), 0.0)
    assert plain.gpus == 2  # 11,576 tokens/s over 10,337
    assert scaling.teacher("lists", 2, 64).requests_per_s == pytest.approx(tokens / 64)


def test_a_manager_by_hand() -> None:
    """64 GPUs in pairs: 32 x 2,376.75 tokens/s; at 63 s a million a loop takes 4.79 cores, ten managers at half load."""
    d = scaling.manager("two servers", 64)
    assert d.tokens_per_s == pytest.approx(32 * 9507 / 4)
    assert d.alone == pytest.approx(63 * 0.076056, rel=1e-4)
    assert (d.managers_alone, d.loop, d.processes, d.managers) == (10, None, None, None)
    lists = scaling.manager("fused, exact lists", 8)
    assert lists.alone == pytest.approx(67.6 * 8 * 5788 / 1e6)
    assert (lists.managers_alone, lists.processes, lists.managers) == (7, 6, 1)


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
