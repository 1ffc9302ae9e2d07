"""Group-relative advantages: centred per group, whatever the order and the scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slime_tandem.errors import DataError
from slime_tandem.objective.advantages import clip_advantages, group_advantages, reward_histograms

reward = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.1]), st.floats(-100, 100, allow_subnormal=False))
batches = st.lists(st.tuples(reward, st.integers(-3, 5)), min_size=1, max_size=40)
SCALES = ("none", "std")


@given(batches, st.sampled_from(SCALES))
def test_every_group_sums_to_zero(batch: list[tuple[float, int]], scale: str) -> None:
    rewards, ids = zip(*batch, strict=True)
    advantages, _ = group_advantages(rewards, ids, scale)  # type: ignore[arg-type]
    assert advantages.shape == (len(batch),)
    for g in set(ids):
        assert abs(sum(a for a, i in zip(advantages, ids, strict=True) if i == g)) < 1e-6


@given(batches, st.sampled_from(SCALES), st.randoms(use_true_random=False))
def test_order_does_not_matter(batch: list[tuple[float, int]], scale: str, rnd: object) -> None:
    order = list(range(len(batch)))
    rnd.shuffle(order)  # type: ignore[attr-defined]
    rewards, ids = zip(*batch, strict=True)
    straight, flat = group_advantages(rewards, ids, scale)  # type: ignore[arg-type]
    shuffled, flat_too = group_advantages([rewards[i] for i in order], [ids[i] for i in order], scale)  # type: ignore[arg-type]
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6, atol=1e-9)
    assert flat == flat_too


@given(batches)
def test_a_group_does_not_see_the_others(batch: list[tuple[float, int]]) -> None:
    rewards, ids = zip(*batch, strict=True)
    together, _ = group_advantages(rewards, ids)
    for g in set(ids):
        members = [i for i, x in enumerate(ids) if x == g]
        alone, _ = group_advantages([rewards[i] for i in members], [0] * len(members))
        np.testing.assert_allclose(together[members], alone, atol=1e-9)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=10), st.sampled_from([1e-250, 1e-9, 1e-3, 7.0, 1e9, 1e250]))
def test_scaling_the_rewards_scales_the_advantages(units: list[int], c: float) -> None:
    """However small or large the unit of the reward is, no signal is taken for rounding and no rounding for signal."""
    plain, flat = group_advantages(units, [0] * len(units))
    scaled, flat_too = group_advantages([c * u for u in units], [0] * len(units))
    np.testing.assert_allclose(scaled, c * plain, rtol=1e-9, atol=1e-12 * c)
    assert flat == flat_too
    unit_free, _ = group_advantages([c * u for u in units], [0] * len(units), "std")
    np.testing.assert_allclose(unit_free, group_advantages(units, [0] * len(units), "std")[0], rtol=1e-9, atol=1e-9)


@given(batches)
def test_std_scaling_gives_unit_variance(batch: list[tuple[float, int]]) -> None:
    rewards, ids = zip(*batch, strict=True)
    assume(
        all(len({r for r, i in batch if i == g}) == 1 or np.ptp([r for r, i in batch if i == g]) > 1e-3 for g in ids)
    )
    advantages, _ = group_advantages(rewards, ids, "std")
    for g in set(ids):
        group = [i for i, x in enumerate(ids) if x == g]
        flat = len({rewards[i] for i in group}) == 1
        assert np.var(advantages[group]) == pytest.approx(0.0 if flat else 1.0, abs=1e-9)


def test_the_reference_example() -> None:
    """Rewards 1, 1, 1, 9 have mean 3: centring over the group, not over the batch that the second group would shift."""
    advantages, flat = group_advantages([1, 1, 1, 9], [0] * 4)
    assert advantages.tolist() == [-2.0, -2.0, -2.0, 6.0]
    assert flat == 0.0
    scaled, _ = group_advantages([1, 1, 1, 9], [0] * 4, "std")
    np.testing.assert_allclose(scaled, np.array([-2, -2, -2, 6]) / 12**0.5)


def test_groups_need_not_lie_together() -> None:
    advantages, flat = group_advantages([0, 10, 2, 20, 4, 30], [7, -1, 7, -1, 7, -1])
    assert advantages.tolist() == [-2.0, -10.0, 0.0, 0.0, 2.0, 10.0]
    assert flat == 0.0


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e12 / 3, 1e-12])
@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_no_signal(value: float, scale: str) -> None:
    """Also where the mean is rounded: std scaling would blow the rounding up to one."""
    advantages, flat = group_advantages([value] * 7, [3] * 7, scale)  # type: ignore[arg-type]
    assert advantages.tolist() == [0.0] * 7
    assert flat == 1.0


def test_rewards_equal_up_to_rounding_give_no_signal() -> None:
    advantages, flat = group_advantages([0.1 + 0.2, 0.3], [0, 0], "std")
    assert (advantages.tolist(), flat) == ([0.0, 0.0], 1.0)


def test_flat_is_the_share_of_groups() -> None:
    assert group_advantages([1, 1, 0, 1, 5, 5, 5, 5], [0, 0, 1, 1, 2, 2, 2, 2])[1] == pytest.approx(2 / 3)


def test_a_group_of_one_is_flat() -> None:
    advantages, flat = group_advantages([3.0, 1.0, 2.0], [0, 1, 1])
    assert advantages.tolist() == [0.0, -0.5, 0.5]
    assert flat == 0.5


def test_no_samples() -> None:
    advantages, flat = group_advantages([], [])
    assert (advantages.shape, flat) == ((0,), 0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(DataError, match=r"rewards\[2\]=.*expected a finite number"):
        group_advantages([0.0, 1.0, bad], [0, 0, 0])


def test_a_missing_group_id_is_refused() -> None:
    with pytest.raises(DataError, match=r"group_ids=1: expected one per reward \(2\)"):
        group_advantages([0.0, 1.0], [0])


BASELINES = ("mean", "leave_one_out", "median")


def test_the_median_and_the_mad_by_hand() -> None:
    """Rewards 1, 2, 3, 100: median 2.5, distances 1.5, 0.5, 0.5, 97.5, of which the median is 1."""
    rewards, ids = [1, 2, 3, 100], [0] * 4
    advantages, flat = group_advantages(rewards, ids, "mad", "median")
    assert advantages.tolist() == pytest.approx([a / 1.4826 for a in (-1.5, -0.5, 0.5, 97.5)])
    assert flat == 0.0
    # Most of a group alike: the MAD is 0, the mean distance from the median is 1/4.
    advantages, _ = group_advantages([0, 0, 0, 1], ids, "mad")
    assert advantages.tolist() == pytest.approx([a / (1.2533 / 4) for a in (-0.25, -0.25, -0.25, 0.75)])


@given(batches)
def test_leave_one_out_compares_with_the_others(batch: list[tuple[float, int]]) -> None:
    rewards, ids = zip(*batch, strict=True)
    advantages, _ = group_advantages(rewards, ids, baseline="leave_one_out")
    for i, (r, g) in enumerate(batch):
        others = [x for j, (x, h) in enumerate(batch) if h == g and j != i]
        expected = r - sum(others) / len(others) if others else 0.0
        assert advantages[i] == pytest.approx(expected, abs=1e-9 * (1 + abs(r)))


@given(batches, st.sampled_from(BASELINES), st.sampled_from((*SCALES, "mad")), st.randoms(use_true_random=False))
def test_any_baseline_and_scale_keeps_to_the_group_and_the_order(
    batch: list[tuple[float, int]], baseline: str, scale: str, rnd: object
) -> None:
    rewards, ids = zip(*batch, strict=True)
    together, _ = group_advantages(rewards, ids, scale, baseline)  # type: ignore[arg-type]
    order = list(range(len(batch)))
    rnd.shuffle(order)  # type: ignore[attr-defined]
    shuffled, _ = group_advantages([rewards[i] for i in order], [ids[i] for i in order], scale, baseline)  # type: ignore[arg-type]
    np.testing.assert_allclose(shuffled, together[order], rtol=1e-6, atol=1e-9)
    for g in set(ids):
        members = [i for i, x in enumerate(ids) if x == g]
        alone, flat = group_advantages([rewards[i] for i in members], [0] * len(members), scale, baseline)  # type: ignore[arg-type]
        np.testing.assert_allclose(together[members], alone, rtol=1e-6, atol=1e-9)
        if flat:
            assert alone.tolist() == [0.0] * len(members)
        elif baseline != "median":
            assert abs(alone.sum()) < 1e-6 * max(1.0, np.abs(alone).max())
        else:
            assert (alone > 0).sum() <= len(alone) / 2 >= (alone < 0).sum()


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", [*SCALES, "mad"])
def test_a_group_of_one_has_advantage_zero(baseline: str, scale: str) -> None:
    advantages, flat = group_advantages([3.0, 1.0, 2.0], [0, 1, 1], scale, baseline)  # type: ignore[arg-type]
    assert advantages[0] == 0.0
    assert flat == 0.5
    assert advantages[2] == -advantages[1] > 0


def test_clipping_says_how_many_it_changed() -> None:
    advantages = np.array([-3.0, 0.5, 2.0, 2.5])
    clipped, share = clip_advantages(advantages, 2.0)
    assert (clipped.tolist(), share) == ([-2.0, 0.5, 2.0, 2.0], 0.5)
    assert clip_advantages(advantages, None) == (advantages, 0.0)
    assert clip_advantages(np.zeros(0), 2.0)[1] == 0.0


def test_rewards_by_task() -> None:
    rewards = [0.0, 1.0, 1.0, 5.0, 0.25]
    records = reward_histograms(rewards, ["a", "a", "b", "c", "a"])
    assert [r["task"] for r in records] == ["a", "b", "c"]
    first = records[0]
    assert (first["samples"], first["min"], first["max"]) == (3, 0.0, 1.0)
    assert first["p50"] == 0.25
    assert first["mean"] == pytest.approx(1.25 / 3)
    assert first["counts"] == [1, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert len(first["edges"]) == 11
    assert [sum(r["counts"]) for r in records] == [3, 1, 1]
    assert len({tuple(r) for r in records}) == 1, "the same keys for every task"
    assert reward_histograms([], []) == []


def test_ids_of_64_bits_stay_apart_and_the_greatest_rewards_finite() -> None:
    ids = [-1, -1, 2**63, 2**63 + 1, 2**63 + 1]
    assert group_advantages([1.0, 3.0, 5.0, 0.0, 1.0], ids)[0].tolist() == [-1.0, 1.0, 0.0, -0.5, 0.5]
    assert group_advantages([1.5e308, 1.5e308, 0.0, 0.0], [0, 0, 1, 1])[0].tolist() == [0.0] * 4
