"""What is measured of a rollout, computed by hand; its names are those of the table in report/metrics.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slime_tandem.distill.alignment import UNALIGNED_REASONS
from slime_tandem.errors import UnreadRolesError, UnreadToolsError
from slime_tandem.report.metrics import METRICS
from slime_tandem.training.metrics import response_metrics, rollout_metrics, teacher_metrics
from slime_tandem.types import AlignedScores, AuthorRun, Prompt, SampleKey, ScoredSample, TandemSample

EOS = 9


def scored(
    ids: tuple[int, ...],
    authors: tuple[int, ...],
    reward: float = 0.0,
    mask: tuple[int, ...] | None = None,
    task: str = "t",
    finish: str = "stop",
    inserted: tuple[tuple[int, int], ...] = (),
) -> ScoredSample:
    """Student's log-probs are -1 nat, the teacher's -0.5 where `mask` is 1."""
    sample = TandemSample(
        SampleKey(0, 0, 0),
        0,
        Prompt("p", (), "0", task),
        (1,),
        ids,
        authors,
        (-1.0,) * len(ids),
        finish,  # type: ignore[arg-type]
        "",
        (AuthorRun(1, 0, len(ids), "v"),),
        requests=2,
        inserted=inserted,
    )
    if mask is None:
        return ScoredSample(sample, reward, None, None)
    there = np.array(mask, dtype=np.bool_)
    unaligned = dict.fromkeys(UNALIGNED_REASONS, 0) | {"boundary": int((~there).sum())}
    return ScoredSample(sample, reward, AlignedScores(np.where(there, -0.5, 0.0), there, unaligned))


def test_responses_are_counted_by_author() -> None:
    one = scored((5, 6, 7, EOS), (1, 1, 0, 1), reward=1.0, task="a")
    two = scored((5, 6), (1, 0), task="b", finish="length", inserted=((1, 2),))
    found = response_metrics([one, two])
    assert found["rollout/reward_mean"] == 0.5
    assert (found["rollout/reward_worst_task"], found["rollout/reward_best_task"]) == (0.0, 1.0)
    assert found["rollout/response_tokens_mean"] == 3.0
    assert found["rollout/truncated_fraction"] == 0.5
    assert found["tandem/senior_token_fraction"] == pytest.approx(4 / 5)
    assert found["tandem/junior_token_fraction"] == pytest.approx(1 / 5), "inserted text is nobody's"
    assert found["tandem/switches_per_seq"] == 1.0
    assert found["tandem/tokens_per_sent"] == pytest.approx((4 / 3 + 1 / 1) / 2), "as published: a mean of ratios"
    assert found["tandem/tokens_per_stretch"] == 5 / 2
    assert found["tandem/requests_per_token"] == pytest.approx(4 / 5)


def test_the_teachers_kl_is_of_aligned_senior_tokens_and_ends_count_apart() -> None:
    known = scored((5, 6, EOS), (1, 0, 1), mask=(1, 1, 1))
    unknown = scored((5, EOS), (1, 1), mask=(1, 0))
    open_end = scored((5, 6), (1, 1), mask=(0, 0))
    found = teacher_metrics([known, unknown, open_end], frozenset({EOS}))
    assert found["opd/teacher_kl"] == pytest.approx(-0.5)
    assert found["opd/coverage"] == pytest.approx(4 / 7)
    assert found["opd/eos_coverage"] == 0.5
    assert found["opd/eos_kl"] == pytest.approx(-0.5)
    assert found["opd/unaligned_boundary"] == 3.0


def test_every_sampled_end_of_turn_counts_and_nothing_else() -> None:
    """Two turns with text between; a stop string ends the other response, and the junior's end is no word of the student's."""
    turns = scored((5, EOS, EOS, 6, EOS), (1, 1, 0, 1, 1), mask=(1, 1, 0, 1, 0), inserted=((2, 3),))
    stopped = scored((5, 6), (1, 1), mask=(0, 0))
    found = teacher_metrics([turns, stopped], frozenset({EOS}))
    assert found["opd/eos_coverage"] == 0.5
    assert found["opd/eos_kl"] == pytest.approx(-0.5)
    by_junior = teacher_metrics([scored((5, EOS), (1, 0), mask=(1, 1))], frozenset({EOS}))
    assert (by_junior["opd/eos_coverage"], by_junior["opd/eos_kl"]) == (1.0, None)


def test_unread_samples_are_counted_by_name() -> None:
    read = scored((5,), (1,), mask=(1,))
    errors = [UnreadRolesError("t", "tool", "user", "x"), UnreadToolsError("t", "tools", "none", "x")]
    failed = [replace(scored((5,), (1,)), teacher_error=error) for error in (*errors, errors[0])]
    found = teacher_metrics([read, *failed], frozenset())
    assert [found[f"opd/unread_{name}"] for name in ("roles", "tools", "template")] == [2.0, 1.0, 0.0]


def test_without_a_teacher_every_name_is_there_and_nothing_is_measured() -> None:
    with_teacher = teacher_metrics([scored((5,), (1,), mask=(1,))], frozenset())
    without = teacher_metrics([scored((5,), (1,))], frozenset())
    assert without.keys() == with_teacher.keys()
    assert set(without.values()) == {None}


def test_the_names_stand_in_the_table() -> None:
    half = replace(scored((5, EOS), (1, 1), mask=(1, 1)), reward=0.5)
    found = rollout_metrics([half, replace(half, reward=1.0)], frozenset({EOS}), lambda _: 0)
    assert found["rollout/accuracy"] == 0.5, "part marks are no accuracy"
    assert found.keys() <= METRICS.keys()
