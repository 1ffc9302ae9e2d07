"""Rows, mini-batches and micro-batches: weights by author, masks, the policy for failed samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, TeacherScoreError
from slime_tandem.training.rows import TrainRow, build_rows, micro_batches, mini_batches
from slime_tandem.types import AlignedScores, AuthorRun, Prompt, SampleKey, ScoredSample, TandemSample, TopLists


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
    return ScoredSample(
        sample,
        reward,
        scores if teacher else None,
        None if teacher else TeacherScoreError("teacher answer", None, "one", "see its log"),
    )


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
    assert metrics["group/zero_variance_fraction"] == metrics["opd/failed_samples"] == 0.0
    assert metrics["selection/keep_ratio"] == 1.0
    _, off = build_rows(samples, config("opd.enabled=false"))
    assert off.keys() == metrics.keys()
    assert off["selection/keep_ratio"] is None


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


def with_lists(s: ScoredSample, divergences: list[float]) -> ScoredSample:
    """The student is sure of token 1, the teacher of 2, which gives 1 the probability exp(-divergence)."""
    n = len(divergences)
    ids, sure = np.ones((n, 1), dtype=np.int64), np.full((n, 1), np.log(0.9))
    other = -np.array(divergences)[:, None]
    assert s.teacher is not None
    lists = TopLists(ids, sure, 2 * ids, sure, other, other)
    return replace(s, teacher=replace(s.teacher, lists=lists))


SELECT = (
    "opd.selection.selector=divergence",
    "opd.selection.ratio=0.25",
    "opd.selection.min_keep_per_sample=0",
    "opd.selection.top_k=1",
)


def test_a_selection_masks_the_opd_weights_only() -> None:
    """Four usable tokens (senior-written and aligned), one is kept; the task reward keeps all of its own."""
    samples = [
        with_lists(scored(0, 1.0, mask=(1, 1, 1)), [1.0, 2.0, 9.0]),
        with_lists(scored(0, 0.0, mask=(1, 1, 1)), [1.0, 3.0, 9.0]),
    ]
    full, _ = build_rows(samples, config())
    rows, metrics = build_rows(samples, config(*SELECT, "opd.position_discount=0.5"))
    assert [r.opd_weights.tolist() for r in rows] == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.0]]
    assert [r.weights.tolist() for r in rows] == [r.weights.tolist() for r in full] == [[1.0] * 3] * 2
    assert (metrics["selection/valid_tokens"], metrics["selection/keep_ratio"]) == (4.0, 0.25)


def test_the_denominator_is_a_setting() -> None:
    samples = [with_lists(scored(0, r, mask=(1, 1, 1)), [1.0, 2.0, 9.0]) for r in (1.0, 0.0)]
    selected, _ = build_rows(samples, config(*SELECT))
    valid, _ = build_rows(samples, config(*SELECT, "opd.selection.denominator=valid"))
    assert sum(r.opd_share for r in selected) == 1.0
    assert sum(r.opd_share for r in valid) == 4.0, "what the whole distillation would divide by"
    assert [r.opd_weights.tolist() for r in valid] == [r.opd_weights.tolist() for r in selected]


def test_the_references_mask_takes_the_task_rewards_tokens_too() -> None:
    samples = [with_lists(scored(0, r, mask=(1, 1, 1)), [1.0, 2.0, 9.0]) for r in (1.0, 0.0)]
    reference = ("opd.selection.rules=reference", "opd.selection.missing_mass=fill")
    rows, metrics = build_rows(samples, config(*SELECT, *reference))
    assert [r.weights.tolist() for r in rows] == [r.opd_weights.tolist() for r in rows]
    assert sum(r.weights.sum() for r in rows) == metrics["selection/keep_ratio"] * 4 == 1.0


def test_failed_and_dropped_samples_are_no_part_of_the_budget() -> None:
    good = with_lists(scored(0, 1.0, mask=(1, 1, 1)), [1.0, 2.0, 9.0])
    for policy, n in (("drop_opd", 2), ("drop_sample", 1)):
        rows, metrics = build_rows(
            [scored(0, 0.0, teacher=False), good], config(*SELECT, f"opd.on_failed_sample={policy}")
        )
        assert len(rows) == n
        assert metrics["selection/valid_tokens"] == 2.0
        assert rows[-1].opd_weights.tolist() == [0.0, 1.0, 0.0]
    rows, metrics = build_rows([scored(0, 0.0, teacher=False)], config(*SELECT))
    assert rows[0].opd_weights.tolist() == [0.0] * 3, "a batch without any signal trains on the reward alone"
    assert metrics["selection/keep_ratio"] is None


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


def test_the_kl_in_the_reward_counts_before_the_group_is_centred() -> None:
    """Three tokens, two of them the senior's: k1 of these is 1 nat each for the first sample, 0 for the second."""
    samples = [scored(0, 1.0), scored(0, 0.0)]
    settings = ("objective.kl_coef=0.25", "objective.kl_in=reward", "objective.kl_estimator=k1")
    reference = [np.array([-1.5, np.nan, -1.5]), np.full(3, -0.5)]
    rows, _ = build_rows(samples, config(*settings), reference)
    assert [r.advantage for r in rows] == pytest.approx([0.25, -0.25]), "1 - 0.25 * 2 against 0"
    assert rows[0].ref_log_probs is reference[0]
    rows, _ = build_rows(samples, config(*settings), reference, kl_coef=0.5)
    assert [r.advantage for r in rows] == pytest.approx([0.0, 0.0])
    rows, _ = build_rows(samples, config("objective.kl_coef=0.25"), reference)
    assert [r.advantage for r in rows] == [0.5, -0.5], "as a loss term it leaves the rewards alone"


def test_the_juniors_own_tokens_and_log_probs_go_with_the_row() -> None:
    rows, _ = build_rows([scored(0, 1.0), scored(0, 0.0)], config("objective.lambda_jun=0.1"))
    assert rows[0].junior_weights is not None
    assert rows[0].junior_log_probs is not None
    assert rows[0].junior_weights.tolist() == [0.0, 1.0, 0.0]
    assert rows[0].junior_log_probs[1] == -0.5
    rows, _ = build_rows([scored(0, 1.0), scored(0, 0.0)], config())
    assert rows[0].junior_weights is None


def test_the_settings_of_the_advantages_reach_the_rows() -> None:
    samples = [scored(g, r) for g, r in ((0, 0.0), (0, 0.0), (0, 3.0), (1, 5.0))]
    rows, metrics = build_rows(samples, config("objective.baseline=leave_one_out", "objective.clip_advantages=2"))
    assert [r.advantage for r in rows] == [-1.5, -1.5, 2.0, 0.0]
    assert metrics["group/clipped_advantages"] == 0.25
    assert (metrics["group/zero_variance_groups"], metrics["group/zero_variance_fraction"]) == (1.0, 0.5)
    rows, _ = build_rows(samples, config("objective.baseline=median", "objective.scale_advantages=mad"))
    assert rows[2].advantage == pytest.approx(3 / 1.2533)


def test_an_empty_response_is_a_row() -> None:
    rows, _ = build_rows([scored(0, 1.0, mask=()), scored(0, 0.0)], config())
    assert rows[0].response_length == 0
    assert rows[0].advantage == 0.5
