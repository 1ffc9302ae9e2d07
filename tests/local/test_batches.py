"""Rows, mini-batches and micro-batches: weights by author, masks, the policy for failed samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, TeacherScoreError
from slime_tandem.local.batches import TrainRow, build_rows, micro_batches, mini_batches
from slime_tandem.types import AlignedScores, AuthorRun, Prompt, SampleKey, ScoredSample, TandemSample


def scored(
    group: int,
    reward: float,
    mask: tuple[int, ...] = (1, 0, 1),
    teacher: bool = True,
    senior_log_probs: tuple[float, ...] = (),
) -> ScoredSample:
    R = len(mask)
    sample = TandemSample(
        SampleKey(0, 0, group),
        group,
        Prompt("p", (), None, "t"),
        (1, 2),
        tuple(range(3, 3 + R)),
        mask,
        (-0.5,) * R,
        "stop",
        "",
        (AuthorRun(1, 0, R, "v"),),
        senior_log_probs=senior_log_probs,
    )
    aligned = np.arange(R) != 2
    scores = AlignedScores(np.where(aligned, -0.25, 0.0), aligned, {"boundary": int((~aligned).sum())})
    return ScoredSample(sample, reward, scores if teacher else None, None if teacher else "teacher answer=None")


def config(*overrides: str) -> RunConfig:
    return RunConfig.load(overrides=overrides)


def test_weights_are_the_authorship_and_the_opd_weights_is_senior_and_aligned() -> None:
    senior = (-0.5, -2.0, -0.5)
    samples = [scored(0, 1.0, senior_log_probs=senior), scored(0, 0.0, senior_log_probs=senior)]
    rows, metrics = build_rows(samples, config("tandem.junior_token_loss_weight=0.25"))
    assert rows[0].old_log_probs.tolist() == [-0.5, -2.0, -0.5], "the ratio of a junior token is the senior's own"
    assert rows[0].weights.tolist() == [1.0, 0.25, 1.0]
    assert rows[0].opd_weights.tolist() == [1.0, 0.0, 0.0]
    assert rows[0].teacher_log_probs.tolist() == [-0.25, -0.25, 0.0]
    assert [r.advantage for r in rows] == [0.5, -0.5]
    assert rows[0].tokens == (1, 2, 3, 4, 5)
    assert metrics == {"group/zero_variance_fraction": 0.0, "opd/failed_samples": 0.0}


def test_junior_tokens_with_weight_need_the_seniors_log_probs() -> None:
    with pytest.raises(DataError, match=r"senior_log_probs.*junior_token_loss_weight=0.25"):
        build_rows([scored(0, 1.0), scored(0, 0.0)], config("tandem.junior_token_loss_weight=0.25"))
    rows, _ = build_rows([scored(0, 1.0), scored(0, 0.0)], config())
    assert rows[0].old_log_probs.tolist() == [-0.5, -0.5, -0.5]


def test_a_failed_sample_loses_its_opd_signal_only() -> None:
    rows, metrics = build_rows([scored(0, 1.0, teacher=False), scored(0, 0.0)], config())
    assert rows[0].opd_weights.tolist() == [0.0, 0.0, 0.0]
    assert rows[0].weights.tolist() == [1.0, 0.0, 1.0]
    assert metrics["opd/failed_samples"] == 1.0


def test_a_dropped_sample_still_counts_in_its_groups_mean() -> None:
    rows, _ = build_rows([scored(0, 1.0, teacher=False), scored(0, 0.0)], config("opd.on_failed_sample=drop_sample"))
    assert [r.advantage for r in rows] == [-0.5]


def test_stop_raises_the_teachers_reason() -> None:
    with pytest.raises(TeacherScoreError, match="teacher answer"):
        build_rows([scored(0, 1.0, teacher=False)], config("opd.on_failed_sample=stop"))


def row(group: int, length: int) -> TrainRow:
    z = np.zeros(1)
    return TrainRow(tuple(range(length)), group, 0.0, z, z, z, z)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), max_size=40), st.integers(1, 4), st.integers(1, 200))
def test_batches_hold_every_row_once_and_mini_batches_whole_groups(
    sizes: list[tuple[int, int]], n: int, max_tokens: int
) -> None:
    rows = [row(g, length) for g, length in sizes]
    minis = list(mini_batches(rows, n))
    assert sorted(id(r) for m in minis for r in m) == sorted(map(id, rows))
    assert len(minis) <= n
    for a in minis:
        for b in minis:
            assert a is b or not {r.group_id for r in a} & {r.group_id for r in b}
    micros = list(micro_batches(rows, max_tokens))
    assert sorted(id(r) for m in micros for r in m) == sorted(map(id, rows))
    for m in micros:
        assert len(m) == 1 or max(len(r.tokens) for r in m) * len(m) <= max_tokens
