"""The coefficient moves once per optimizer step, by the KL of all ranks, and is found again by a run that resumes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from slime_tandem.config import ObjectiveConfig
from slime_tandem.errors import DataError, TandemError
from slime_tandem.slime_hooks import adaptive
from slime_tandem.slime_hooks.adaptive import AdaptiveCoef, kept_coef

OBJECTIVE = ObjectiveConfig(kl_coef=0.1, kl_target=0.05)


def test_it_moves_behind_the_last_micro_batch_by_the_mean_over_ranks(tmp_path: Path) -> None:
    """Two ranks of equal parts, four rollouts: (0.02 + 0.07) * 2 / 4 = 0.045, a tenth below the target."""
    file = tmp_path / "new" / adaptive.FILE
    coef = AdaptiveCoef(OBJECTIVE, lambda mine: 2 * mine, file)
    coef.start_step(3, 2, 4, last=False, weighted=True)
    coef.after_micro_batch(0.02)
    assert coef.value == 0.1
    coef.after_micro_batch(0.07)
    assert coef.value == pytest.approx(0.1 * math.exp(-0.1))
    assert not file.exists(), "one line per rollout"
    coef.start_step(3, 1, 4, last=True, weighted=False)
    coef.after_micro_batch(0.0)
    assert coef.value == pytest.approx(0.1 * math.exp(-0.1)), "an update without a weighted token measures nothing"
    assert kept_coef(file.parent, 3) == coef.value
    coef.start_step(3, 1, 4, last=True, weighted=True)
    coef.after_micro_batch(10.0)
    assert kept_coef(file.parent, 3) == coef.value == pytest.approx(0.2 * math.exp(-0.1)), (
        "the newest line of a rollout"
    )
    with pytest.raises(AssertionError, match="one call per micro-batch"):
        coef.after_micro_batch(0.0)


def test_a_resumed_run_goes_on_with_it_within_the_bounds_of_now(tmp_path: Path) -> None:
    assert kept_coef(None, 1) is None
    assert kept_coef(tmp_path, 1) is None
    (tmp_path / adaptive.FILE).write_text('{"rollout_id": 1, "kl_coef": 30.0}\n')
    assert kept_coef(tmp_path, 0) is None
    coef = AdaptiveCoef(OBJECTIVE, float)
    coef.restore(None)
    assert coef.value == 0.1
    coef.restore(kept_coef(tmp_path, 1))
    assert coef.value == 10.0
    with (tmp_path / adaptive.FILE).open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="line 2"):
        kept_coef(tmp_path, 1)


def test_the_guard_may_stop_the_run() -> None:
    coef = AdaptiveCoef(OBJECTIVE.model_copy(update={"kl_guard": "stop"}), float)
    coef.start_step(0, 1, 2, last=True, weighted=True)
    with pytest.raises(TandemError, match=r"train/kl=0\.11: expected at most twice objective\.kl_target=0\.05"):
        coef.after_micro_batch(0.22)
