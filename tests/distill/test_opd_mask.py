"""The OPD mask of a rollout: over all responses at once, with masked positions counted and draws that advance."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from slime_tandem.config import SelectionConfig
from slime_tandem.distill.opd_mask import OPD_MASK_METRICS, opd_mask
from slime_tandem.errors import DataError
from slime_tandem.types import BoolArray, SampleKey, TopLists


def lists_of(divergences: list[float]) -> TopLists:
    """One entry each at every position; D grows with the number: the teacher puts exp(-d) on the student's token 1."""
    n = len(divergences)
    ids, two = np.ones((n, 1), dtype=np.int64), np.full((n, 1), 2)
    sure = np.full((n, 1), math.log(0.9))
    other = -np.array(divergences, dtype=np.float64)[:, None]
    return TopLists(ids, sure, two, sure, other, other)


def usable(*lengths: int) -> list[BoolArray]:
    return [np.ones(n, dtype=np.bool_) for n in lengths]


def keys(n: int, rollout_id: int = 0) -> list[SampleKey]:
    return [SampleKey(3, rollout_id, i) for i in range(n)]


def choice(**settings: object) -> SelectionConfig:
    return SelectionConfig.model_validate({"selector": "divergence", "min_keep_per_sample": 0, "top_k": 1, **settings})


def test_without_a_selector_all_usable_tokens_count_and_no_list_is_needed() -> None:
    able = [np.array([True, False, True]), np.array([True])]
    got = opd_mask(keys(2), able, [None, None], SelectionConfig())
    assert [m.tolist() for m in got.masks] == [m.tolist() for m in able]
    assert tuple(got.metrics) == tuple(f"selection/{name}" for name in OPD_MASK_METRICS)
    assert got.metrics["selection/keep_ratio"] == 1.0
    assert got.metrics["selection/valid_tokens"] == 3.0
    assert got.metrics["selection/D_mean"] is None


def test_the_budget_is_of_the_whole_rollout() -> None:
    """Two of six tokens: both of the second response, which disagrees most; a budget per response gives each one."""
    lists = [lists_of([1, 2, 3]), lists_of([1, 8, 9])]
    got = opd_mask(keys(2), usable(3, 3), lists, choice(ratio=0.33))
    assert [m.tolist() for m in got.masks] == [[False] * 3, [False, True, True]]
    assert got.metrics["selection/keep_ratio"] == pytest.approx(1 / 3)
    assert got.metrics["selection/overlap_divergence"] == 1.0
    assert got.metrics["selection/position_3"] == got.metrics["selection/position_6"] == 0.5
    each = opd_mask(keys(2), usable(3, 3), lists, choice(ratio=0.33, budget="sequence"))
    assert [m.tolist() for m in each.masks] == [[False, False, True]] * 2
    kept = opd_mask(keys(2), usable(3, 3), lists, choice(ratio=0.33, min_keep_per_sample=1))
    assert [int(m.sum()) for m in kept.masks] == [1, 2]


def test_ends_of_turn_are_reported_apart() -> None:
    lists, able = [lists_of([1, 2, 9]), lists_of([7, 8, 9])], [*usable(3), np.array([True, True, True])]
    ends = [np.array([False, False, True]), np.array([False, True, False])]
    got = opd_mask(keys(2), able, lists, choice(ratio=0.5), ends=ends)
    assert [m.tolist() for m in got.masks] == [[False, False, True], [False, True, True]]
    assert got.metrics["selection/end_of_turn"] == pytest.approx(2 / 3)
    assert got.metrics["selection/end_of_turn_kept"] == 1.0
    masked = opd_mask(keys(2), [np.array([True, True, False]), able[1]], lists, choice(ratio=0.2), ends=ends)
    assert [m.tolist() for m in masked.masks] == [[False] * 3, [False, False, True]]
    assert (masked.metrics["selection/end_of_turn"], masked.metrics["selection/end_of_turn_kept"]) == (0.0, 0.0)
    full = opd_mask(keys(2), able, [None, None], SelectionConfig(), ends=ends)
    assert (full.metrics["selection/end_of_turn"], full.metrics["selection/end_of_turn_kept"]) == (1 / 3, 1.0)
    unknown = opd_mask(keys(2), able, lists, choice(ratio=0.5))
    assert unknown.metrics["selection/end_of_turn"] is unknown.metrics["selection/end_of_turn_kept"] is None


def test_only_usable_tokens_are_chosen_and_counted() -> None:
    able = [np.array([True, True, False])]
    got = opd_mask(keys(1), able, [lists_of([1, 2, 9])], choice(ratio=0.5))
    assert got.masks[0].tolist() == [False, True, False]
    assert got.metrics["selection/keep_ratio"] == 0.5


def test_positions_without_a_shared_candidate_are_masked_and_counted() -> None:
    lists = lists_of([1, 2, 9])
    lists.teacher_ids[2] = -1
    got = opd_mask(keys(1), usable(3), [lists], choice(ratio=0.5))
    assert got.masks[0].tolist() == [False, True, False]
    assert got.metrics["selection/valid_tokens"] == 2.0
    assert got.metrics["selection/masked_tokens"] == 1.0
    assert got.metrics["selection/unshared_candidates"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("rule", ["exact", "rest"])
def test_nothing_to_choose_from(rule: str) -> None:
    settings = choice(ratio=0.1, missing_mass=rule)
    empty = opd_mask([], [], [], settings)
    assert empty.masks == []
    masked = opd_mask(keys(2), [np.zeros(2, np.bool_), np.zeros(0, np.bool_)], [None, None], settings)
    assert [m.tolist() for m in masked.masks] == [[False, False], []]
    for got in (empty, masked):
        assert got.metrics["selection/keep_ratio"] is None
        assert got.metrics["selection/valid_tokens"] == 0.0
    unshared = dataclasses.replace(lists_of([1, 2]), teacher_ids=np.full((2, 1), -1))
    none = opd_mask(keys(1), usable(2), [unshared], settings)
    assert none.masks[0].tolist() == [False, False]
    assert none.metrics["selection/masked_tokens"] == 2.0


def test_a_response_without_scores_stands_between_others() -> None:
    """Its teacher failed: no list, nothing usable."""
    able = [*usable(2), np.zeros(3, dtype=np.bool_), *usable(1)]
    got = opd_mask(keys(3), able, [lists_of([1, 2]), None, lists_of([9])], choice(ratio=0.4))
    assert [m.tolist() for m in got.masks] == [[False, True], [False] * 3, [True]]


def test_draws_advance_with_the_rollout() -> None:
    def mask(rollout: int, **more: object) -> list[bool]:
        settings = choice(selector="random", ratio=0.3, **more)
        got = opd_mask(keys(1, rollout), usable(40), [lists_of([1.0] * 40)], settings)
        assert got.masks[0].sum() == 12
        return got.masks[0].tolist()

    assert mask(0) == mask(0) != mask(1)


def test_lists_of_every_response_and_one_rollout_are_needed() -> None:
    with pytest.raises(DataError, match=r"AlignedScores.lists=None: expected lists of every response, which selector"):
        opd_mask(keys(1), usable(2), [None], choice(ratio=0.5))
    with pytest.raises(DataError, match="several rollouts"):
        opd_mask([*keys(1), *keys(1, 1)], usable(1, 1), [lists_of([1])] * 2, choice(ratio=0.5))
