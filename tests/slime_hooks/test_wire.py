"""Channels and records: what goes into a field comes out of it, whatever slime does to it on the way."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import Reduction, RunConfig
from slime_tandem.errors import DataError, TeacherScoreError
from slime_tandem.slime_hooks import wire
from slime_tandem.training.rows import TrainRow
from slime_tandem.types import (
    AlignedScores,
    AuthorRun,
    Candidates,
    Message,
    Prompt,
    SampleKey,
    TandemSample,
    TopLists,
)

values = st.floats(-30, 0, width=32)


@st.composite
def rows(draw: st.DrawFn) -> TrainRow:
    R = draw(st.integers(0, 6))
    k = draw(st.sampled_from([0, 2]))

    def per_token(strategy: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(strategy, min_size=R, max_size=R)), dtype=np.float64)

    candidates = None
    if k:
        ids = np.array([[draw(st.integers(-1, 2**24 - 1)) for _ in range(k)] for _ in range(R)], dtype=np.int64)
        known = np.array([[draw(values) for _ in range(k)] for _ in range(R)])
        candidates = Candidates(ids.reshape(R, k), known.reshape(R, k), np.zeros((R, k)))
    weights = st.sampled_from([0.0, 0.25, 1.0])
    total = draw(st.none() | st.floats(0, 8, width=32))
    return TrainRow(
        tuple(range(R + 2)), 0, 0.5, per_token(values), per_token(weights), per_token(weights), per_token(values),
        candidates, total,
    )  # fmt: skip


@given(rows(), st.integers(2, 3))
def test_what_is_packed_is_what_the_loss_is_given(row: TrainRow, width: int) -> None:
    channels = wire.pack(row, width)
    assert channels.dtype == torch.float32
    assert channels.shape == (row.response_length, wire.FIXED + 2 * width)
    packed = wire.packed_tokens(channels, torch.full((row.response_length,), row.advantage), None)
    assert packed.old_log_probs.tolist() == row.old_log_probs.tolist()
    assert packed.weights.tolist() == row.weights.tolist()
    assert packed.opd_weights.tolist() == row.opd_weights.tolist()
    assert packed.teacher_log_probs.tolist() == row.teacher_log_probs.tolist()
    if row.response_length:
        assert float(channels[:, wire.OPD_SHARE].sum()) == pytest.approx(row.opd_share, abs=1e-5)
    assert packed.candidate_ids is not None
    assert packed.candidate_teacher is not None
    ids = row.candidates.ids if row.candidates is not None else np.zeros((row.response_length, 0), dtype=int)
    assert packed.candidate_ids[:, : ids.shape[1]].tolist() == ids.tolist()
    assert (packed.candidate_ids[:, ids.shape[1] :] == -1).all(), "what a row does not have is no candidate"
    if row.candidates is not None:
        assert packed.candidate_teacher[:, :2].tolist() == row.candidates.teacher_log_probs.tolist()


def row(R: int = 2, **changes: Any) -> TrainRow:
    base = TrainRow((1, *range(R)), 3, 1.0, np.full(R, -1.0), np.ones(R), np.ones(R), np.full(R, -2.0))
    return replace(base, **changes)


def test_a_number_that_would_not_survive_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"channel 0 of response token 1, group 3=.*nan.*finite"):
        wire.pack(row(old_log_probs=np.array([0.0, np.nan])))
    big = Candidates(np.array([[2**24], [1]]), np.zeros((2, 1)), np.zeros((2, 1)))
    with pytest.raises(DataError, match=f"candidate id={2**24}"):
        wire.pack(row(candidates=big), 1)


def test_without_candidates_there_are_eight_columns_and_none_for_the_loss() -> None:
    channels = wire.pack(row())
    assert channels.shape == (2, 8)
    assert wire.packed_tokens(channels, torch.zeros(2), None).candidate_ids is None


@given(st.lists(rows(), min_size=1, max_size=4), st.integers(0, 6), st.data())
def test_the_check_sum_is_that_of_the_tokens_wherever_they_lie(
    made: list[TrainRow], cut: int, data: st.DataObject
) -> None:
    channels = [wire.pack(r, 2) for r in made]
    whole = wire.checksum(channels, range(len(channels)))
    pieces = [(piece, i) for i, c in enumerate(channels) for piece in (c[cut:], c[:cut])]
    shuffled = data.draw(st.permutations(pieces))
    assert sum(wire.checksum([piece], [i]) for piece, i in shuffled) % 2**64 == whole
    changed = [c.clone() for c in channels]
    longest = max(range(len(changed)), key=lambda i: len(changed[i]))
    if len(changed[longest]):
        changed[longest][0, wire.WEIGHT] += 0.5
        assert wire.checksum(changed, range(len(channels))) != whole


def test_the_carrier_is_checked_against_the_log_probs_that_slime_slices_itself() -> None:
    channels = wire.pack(row(3, old_log_probs=np.array([-1.0, -2.0, -3.0])))
    batch = {wire.CARRIER: [channels], "rollout_log_probs": [torch.tensor([-1.0, -2.0, -3.0])]}
    assert wire.carried(batch)[0] is channels
    for broken, message in (
        ({**batch, wire.CARRIER: None}, "our channels"),
        ({**batch, wire.CARRIER: [channels[:, 0]]}, r"\(3,\)"),
        ({**batch, "rollout_log_probs": [torch.tensor([-2.0, -1.0, -3.0])]}, "token for token"),
    ):
        with pytest.raises(DataError, match=message):
            wire.carried(broken)


def test_normalised_weights_turn_slimes_sum_into_our_mean() -> None:
    """Two rows, weights 1 and 3 in all, eight rollouts: the sum of weight * term, over eight, is the mean over 4."""
    channels = [wire.pack(row(1)), wire.pack(row(3))]
    totals = wire.StepTotals(pg=4.0, opd=4.0, share=4.0, junior=0.0, rollouts=8)
    terms = [torch.tensor([2.0]), torch.tensor([1.0, 1.0, 4.0])]
    summed = sum((wire.normalise(c, totals)[:, wire.WEIGHT] * t).sum() for c, t in zip(channels, terms, strict=True))
    assert float(summed) / 8 == (2.0 + 1.0 + 1.0 + 4.0) / 4


@pytest.mark.parametrize(
    ("reduction", "expected"), [("token_mean", 22 / 4), ("sequence_mean", (2 / 1 + 20 / 3) / 2), ("constant", 22 / 20)]
)
def test_reductions_over_responses_travel_as_shares_of_what_divides(reduction: Reduction, expected: float) -> None:
    """Three responses, of 1, 3 and 2 tokens, the last without a weight; terms add up to 2 and 20."""
    config = RunConfig.load(overrides=[f"objective.reduction={reduction}", "sampling.max_new_tokens=10"])
    rows = [row(1), row(3), row(2, weights=np.zeros(2))][: 2 if reduction == "constant" else 3]
    channels = [wire.pack(r, 0, config) for r in rows]
    sums = torch.cat(channels).double().sum(0)
    totals = wire.StepTotals(*sums[list(wire.StepTotals.COLUMNS)].tolist(), rollouts=8)
    terms = [torch.tensor([2.0]), torch.tensor([5.0, 5.0, 10.0]), torch.tensor([7.0, 7.0])]
    made = [wire.packed_tokens(wire.normalise(c, totals, reduction), c[:, 0], None) for c in channels]
    assert sum(float((m.reduced * t).sum()) for m, t in zip(made, terms, strict=False)) / 8 == pytest.approx(expected)


def test_the_juniors_weights_and_log_probs_travel_if_the_loss_asks_for_them() -> None:
    pulled = row(junior_weights=np.array([0.0, 1.0]), junior_log_probs=np.array([-9.0, -0.25]))
    channels = wire.pack(pulled)
    assert channels[:, wire.JUNIOR].tolist() == [0.0, 1.0]
    assert channels[:, wire.JUNIOR_LOG_PROB].tolist() == [0.0, -0.25]
    plain = wire.packed_tokens(channels, torch.zeros(2), None)
    assert plain.junior_weights is None
    asked = RunConfig.load(overrides=["objective.lambda_jun=0.5"]).objective
    found = wire.packed_tokens(channels, torch.zeros(2), None, asked)
    assert found.junior_weights is not None
    assert found.junior_weights.tolist() == [0.0, 1.0]


def response(**changes: Any) -> TandemSample:
    base = TandemSample(
        SampleKey(4, 0, 9), 2, Prompt("slime/2", (Message("user", "1+1="),), "2", "sums", {"task": "sums"}), (1, 2),
        (5, 6, 7, 8), (1, 0, 0, 1), (-0.1, -0.2, 0.0, -0.4), "stop", "two", (AuthorRun(1, 0, 1, "3"), AuthorRun(0, 1, 2, "0")),
        discarded_tokens=3, requests=2, inserted=((2, 3),), inserted_messages=((Message("tool", "2"),),),
    )  # fmt: skip
    return replace(base, **changes)


def test_a_response_comes_back_from_a_sample_as_it_went_in(sample_class: Any) -> None:
    sample = sample_class(
        index=9, group_index=2, label="2", metadata={"task": "sums", "messages": [{"role": "user", "content": "1+1="}]}
    )
    wire.put_response(sample, response(), junior_weight=0.0)
    again = pickle.loads(pickle.dumps(sample.metadata))  # a dump, or a buffer of resumed samples
    sample.metadata = again
    assert wire.response_of(sample) == response()
    assert sample.tokens == [1, 2, 5, 6, 7, 8]
    assert (sample.response_length, sample.response, sample.status) == (4, "two", sample_class.Status.COMPLETED)
    assert sample.loss_mask == [1, 0, 0, 1], "slime's own losses train the senior's tokens"
    assert sample.weight_versions == ["3"], "the junior's version is no version of the trained model"
    wire.put_response(sample, response(finish_reason="length"), junior_weight=0.5)
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.status == sample_class.Status.TRUNCATED
    sample.tokens.pop(), setattr(sample, "response_length", 3)
    with pytest.raises(DataError, match="tokens of sample 9=3"):
        wire.response_of(sample)


def test_a_sample_that_slime_wrote_itself_is_the_seniors(sample_class: Any) -> None:
    sample = sample_class(index=3, group_index=1, tokens=[1, 2, 3, 4], response_length=3, prompt="p")
    with pytest.raises(DataError, match="rollout_log_probs of sample 3=None"):
        wire.response_of(sample)
    sample.rollout_log_probs, sample.loss_mask = [-1.0, 0.0, -2.0], [1, 0, 1]
    sample.status = sample_class.Status.TRUNCATED
    found = wire.response_of(sample, seed=5)
    assert (found.key, found.group_id, found.finish_reason) == (SampleKey(5, 0, 3), 1, "length")
    assert found.authorship_mask == found.loss_mask == (1, 0, 1)
    assert found.prompt.messages == ()


def test_scores_come_back_without_their_alignment(sample_class: Any) -> None:
    sample = sample_class()
    assert wire.scores_of(sample) == (None, None)
    lists = TopLists(np.array([[1], [2]]), np.full((2, 1), -0.5), np.array([[1], [3]]), np.full((2, 1), -0.25))
    candidates = Candidates(np.array([[1], [-1]]), np.zeros((2, 1)), np.zeros((2, 1)))
    scores = AlignedScores(
        np.array([-0.5, 0.0]), np.array([True, False]), {"boundary": 1}, candidates=candidates, lists=lists
    )
    wire.put_scores(sample, scores)
    found, error = wire.scores_of(pickle.loads(pickle.dumps(sample)))
    assert error is None
    assert found is not None
    assert found.candidates is not None
    assert found.lists is not None
    assert found.log_probs.tolist() == [-0.5, 0.0]
    assert found.mask.tolist() == [True, False]
    assert found.unaligned == {"boundary": 1}
    assert found.candidates.ids.tolist() == [[1], [-1]]
    assert found.lists.teacher_ids.tolist() == [[1], [3]]
    assert found.lists.teacher_on_student is None
    wire.put_scores(sample, TeacherScoreError("teacher", "short answer", "a whole one", "ask again"))
    scores, error = wire.scores_of(sample)
    assert scores is None
    assert error is not None
    assert (error.field, error.value, error.remedy) == ("teacher", "short answer", "ask again")


def test_a_failed_sample_has_one_token_that_counts_nowhere(sample_class: Any) -> None:
    sample = sample_class(index=1)
    assert wire.failure_of(sample) is None
    wire.put_failure(sample, "refused", (1, 2), 0)
    assert wire.failure_of(sample) == "refused"
    assert (sample.tokens, sample.response_length, sample.loss_mask, sample.remove_sample) == ([1, 2, 0], 1, [0], True)
