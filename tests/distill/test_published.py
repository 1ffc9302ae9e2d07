"""The published selection: by hand where its rules differ from ours, and against the restatement, bit for bit."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_tandem.config import RunConfig, SelectionConfig
from slime_tandem.distill.opd_mask import opd_mask
from slime_tandem.distill.published import PublishedScores, PublishedToken, published_choice
from slime_tandem.distill.selection import TokenKeys
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.types import SampleKey, TopLists

RESTATEMENT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "benchmarks" / "selection_reference.py"))


def test_every_bit_is_the_restatements() -> None:
    """300 random rollouts: raw and normalised scores as bits, masks of every selector."""
    found, seen = RESTATEMENT["run"](0, 300)
    assert not found
    assert set(seen) == set(RESTATEMENT["SELECTORS"]) - {"full"}


def test_the_comparison_would_notice_a_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_tandem.distill import published

    right = published._geometry
    monkeypatch.setattr(published, "_geometry", lambda s, t: (float(np.nextafter(right(s, t)[0], 9)), *right(s, t)[1:]))
    found: Counter[str] = RESTATEMENT["run"](0, 5)[0]
    assert found["d"]


def scores(h: list[float], d: list[float], c: list[float]) -> PublishedScores:
    token = PublishedToken(*(0.0,) * 12, exact=False, prefix=0.0)
    dc = [x * y for x, y in zip(d, c, strict=True)]
    low = [False] * len(h)
    return PublishedScores([token] * len(h), h, d, c, dc, low, [True] * len(h))


def kept(
    s: PublishedScores, selector: str, positions: list[int], sequence: list[int] | None = None, **more: Any
) -> list[int]:
    settings = SelectionConfig.model_validate(
        {"rules": "reference", "missing_mass": "fill", "min_keep_per_sample": 0, **more}
    )
    keys = TokenKeys(np.array(sequence or [0] * len(positions)), np.array(positions))
    mask = published_choice(
        s, np.ones(len(positions), dtype=np.bool_), keys, selector, settings, more.get("counter", 0)
    )
    return np.flatnonzero(mask).tolist()


def test_ties_go_to_the_earliest_position_and_for_the_least_to_the_latest() -> None:
    flat = scores([0.0] * 4, [1.0] * 4, [0.5] * 4)
    assert kept(flat, "divergence", [0, 1, 2, 3], ratio=0.5) == [0, 1]
    assert kept(flat, "q3_lowc", [0, 1, 2, 3], ratio=0.5) == [2, 3]
    assert kept(flat, "q3_dlearn_low", [0, 1, 0, 1], [0, 0, 1, 1], ratio=0.25) == [1], "then the earlier response"


def test_the_budget_is_rounded_up_as_a_float_is() -> None:
    flat = scores([0.0] * 100, [1.0] * 100, [0.5] * 100)
    assert len(kept(flat, "tip", list(range(100)), ratio=0.07)) == 8, "100 * 0.07 is above 7 in floating point"
    assert len(kept(flat, "split_budget_ca", list(range(100)), ratio=0.05)) == 5


def test_draws_stay_without_a_bank_and_advance_with_one() -> None:
    batch = RESTATEMENT["make"](3)
    settings = SelectionConfig(
        selector="random", ratio=0.3, rules="reference", missing_mass="fill", top_k=8, min_keep_per_sample=0
    )

    lists = [TopLists(x.student_ids, x.student_log_probs, x.teacher_ids, x.teacher_log_probs) for x in batch.lists]

    def mask(rollout: int, banks: int) -> list[bool]:
        keys = [SampleKey(0, rollout, i) for i in range(len(batch.able))]
        return np.concatenate(opd_mask(keys, batch.able, lists, settings, banks).masks).tolist()

    assert mask(0, 0) == mask(5, 0)
    assert len({tuple(mask(0, banks)) for banks in range(6)}) > 1


def test_what_the_published_code_does_not_have_is_refused() -> None:
    with pytest.raises(DataError, match="q3_tip"):
        kept(scores([0.0], [0.0], [0.0]), "q3_tip", [0], ratio=0.5)
    base = ["opd.selection.rules=reference", "opd.selection.selector=tip", "opd.selection.ratio=0.1"]
    RunConfig.load(overrides=[*base, "opd.selection.missing_mass=fill"])
    for wrong, named in (
        ([], "opd.selection.missing_mass"),
        (["opd.selection.missing_mass=rest"], "opd.selection.missing_mass"),
        (["opd.selection.missing_mass=fill", "opd.selection.divergence=reverse"], "opd.selection.divergence"),
        (["opd.selection.missing_mass=fill", "opd.selection.selector=a.b:c"], "opd.selection.selector"),
    ):
        with pytest.raises(ConfigError) as caught:
            RunConfig.load(overrides=[*base, *wrong])
        assert caught.value.field == named
    with pytest.raises(ConfigError, match="mask_seed"):
        RunConfig.load(
            overrides=["opd.selection.selector=random", "opd.selection.ratio=0.1", "opd.selection.mask_seed=7"]
        )
