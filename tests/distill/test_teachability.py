"""Scores by hand, against an oracle in plain Python, and their laws."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.config import Compatibility, MissingMass
from slime_tandem.distill import teachability
from slime_tandem.distill.teachability import (
    RawScores,
    normalise,
    raw_scores,
    token_scores,
)
from slime_tandem.errors import DataError
from slime_tandem.types import TopLists


def lists_of(
    student: dict[int, float], teacher: dict[int, float], p: dict[int, float], q: dict[int, float]
) -> TopLists:
    """Lists of one position; `p`, `q` are the full distributions for the cross-scores."""

    def row(values: list[float]) -> np.ndarray:
        return np.log(np.maximum(np.array([values]), 1e-300))

    return TopLists(
        np.array([list(student)]), row(list(student.values())), np.array([list(teacher)]), row(list(teacher.values())),
        row([q[i] for i in student]), row([p[i] for i in teacher]),
    )  # fmt: skip


P = {1: 0.5, 2: 0.3, 3: 0.1, 4: 0.1}
Q = {1: 0.1, 2: 0.2, 3: 0.6, 4: 0.1}
BY_HAND = lists_of({1: 0.5, 2: 0.3}, {3: 0.6, 2: 0.2}, P, Q)


def test_exact_by_hand() -> None:
    """Student lists 1, 2; teacher 3, 2. Over the union: student 5/9, 3/9, 1/9; teacher 1/9, 2/9, 6/9."""
    got = raw_scores(BY_HAND, "exact")
    h = lambda p: -sum(x * math.log(x) for x in p) / math.log(2)  # noqa: E731
    assert got.entropy[0] == pytest.approx(h([0.625, 0.375]), abs=1e-6)
    assert got.teacher_entropy[0] == pytest.approx(h([0.75, 0.25]), abs=1e-6)
    want = 1 / 9 * math.log(1 / 5) + 2 / 9 * math.log(2 / 3) + 6 / 9 * math.log(6)
    assert got.divergence[0] == pytest.approx(want, abs=1e-6)
    back = 5 / 9 * math.log(5) + 3 / 9 * math.log(3 / 2) + 1 / 9 * math.log(1 / 6)
    assert got.reverse_divergence[0] == pytest.approx(back, abs=1e-6)
    assert got.compatibility[0] == pytest.approx(0.3), "the teacher's mass on 1 and 2"


def test_rest_by_hand() -> None:
    """Shared is 2 alone: student 0.3 against 0.7, teacher 0.2 against 0.8. What the teacher gives 1 is not known."""
    got = raw_scores(BY_HAND, "rest")
    assert got.divergence[0] == pytest.approx(0.2 * math.log(2 / 3) + 0.8 * math.log(8 / 7), abs=1e-6)
    assert got.compatibility[0] == pytest.approx(0.2)


def test_fill_is_the_references_rule() -> None:
    """Lists renormalised, 1e-12 where one lacks a token: 3 alone costs 0.75 * ln(0.75 / 1e-12)."""
    got = raw_scores(BY_HAND, "fill")
    s, t = {1: 0.625, 2: 0.375, 3: 1e-12}, {1: 1e-12, 2: 0.25, 3: 0.75}
    assert got.divergence[0] == pytest.approx(sum(t[i] * math.log(t[i] / s[i]) for i in s), rel=1e-5)
    assert got.divergence[0] > 20


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("overlap", 0.5),
        ("bhattacharyya", sum(math.sqrt(a * b) for a, b in ((5, 1), (3, 2), (1, 6))) / 9),
        ("mass", 0.3),
    ],
)
def test_compatibilities_by_hand(kind: Compatibility, want: float) -> None:
    assert raw_scores(BY_HAND, "exact", kind).compatibility[0] == pytest.approx(want, abs=1e-6)


def test_prefix_is_a_mean_along_each_response() -> None:
    """Masses 0.2 everywhere but the first of a response."""
    five = TopLists(
        *(
            np.repeat(x, 5, axis=0)
            for x in (BY_HAND.student_ids, BY_HAND.student_log_probs, BY_HAND.teacher_ids, BY_HAND.teacher_log_probs)
        )
    )
    log_probs = five.teacher_log_probs.copy()
    log_probs[[0, 3], 1] = math.log(0.4)
    varied = TopLists(five.student_ids, five.student_log_probs, five.teacher_ids, log_probs)
    got = raw_scores(varied, "rest", "prefix", sequence=np.array([7, 7, 7, 2, 2]), prefix_alpha=0.5).compatibility
    assert got == pytest.approx([0.4, 0.3, 0.25, 0.4, 0.3], abs=1e-6)


def distribution(rng: np.random.Generator, v: int) -> np.ndarray:
    x = rng.normal(size=v) * 2
    return np.exp(x) / np.exp(x).sum()


def random_lists(rng: np.random.Generator, n: int, k: int, v: int = 40) -> tuple[TopLists, np.ndarray, np.ndarray]:
    p, q = (np.stack([distribution(rng, v) for _ in range(n)]) for _ in range(2))
    s, t = (np.argsort(-x, axis=1)[:, :k] for x in (p, q))
    at = lambda x, i: np.log(np.take_along_axis(x, i, 1))  # noqa: E731
    return TopLists(s, at(p, s), t, at(q, t), at(q, s), at(p, t)), p, q


@pytest.mark.parametrize("rule", ["exact", "rest"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 16))
def test_against_plain_python(rule: MissingMass, seed: int, k: int) -> None:
    lists, p, q = random_lists(np.random.default_rng(seed), 3, k)
    got = raw_scores(lists, rule)
    for n in range(3):
        s, t = set(lists.student_ids[n].tolist()), set(lists.teacher_ids[n].tolist())
        if rule == "exact":
            a, b = {i: p[n, i] for i in s | t}, {i: q[n, i] for i in s | t}
            a, b = ({i: x / sum(d.values()) for i, x in d.items()} for d in (a, b))
            mass = sum(q[n, i] for i in s)
        else:
            a, b = {i: p[n, i] for i in s & t}, {i: q[n, i] for i in s & t}
            a[-1], b[-1] = 1 - sum(a.values()), 1 - sum(b.values())
            mass = sum(q[n, i] for i in s & t)
        assert got.divergence[n] == pytest.approx(sum(b[i] * math.log(b[i] / a[i]) for i in a), abs=2e-5)
        assert got.reverse_divergence[n] == pytest.approx(sum(a[i] * math.log(a[i] / b[i]) for i in a), abs=2e-5)
        assert got.compatibility[n] == pytest.approx(mass, abs=1e-5)
    assert (got.divergence >= 0).all()
    if rule == "rest":
        full = (q * np.log(q / p)).sum(1)
        assert (got.divergence <= full + 1e-4).all(), "a coarser view never shows more"


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, _, _ = random_lists(np.random.default_rng(0), 25, 5)
    whole = raw_scores(lists, "exact", "prefix", sequence=np.repeat([0, 1, 2], [5, 13, 7]))
    monkeypatch.setattr(teachability, "_CHUNK", 4)
    parts = raw_scores(lists, "exact", "prefix", sequence=np.repeat([0, 1, 2], [5, 13, 7]))
    for name in RawScores.__dataclass_fields__:
        assert getattr(whole, name) == pytest.approx(getattr(parts, name), abs=1e-6)


def test_missing_entries_are_no_tokens() -> None:
    """-1 on both sides is no shared candidate, whatever stands in its place."""
    lists = TopLists(
        np.array([[1, -1]]), np.array([[math.log(0.5), 0.0]]), np.array([[2, -1]]), np.array([[math.log(0.5), 0.0]])
    )
    got = raw_scores(lists, "rest")
    assert (got.divergence[0], got.compatibility[0], got.entropy[0]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rule", get_args(MissingMass))
@pytest.mark.parametrize("kind", get_args(Compatibility))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_what_does_not_exist_changes_nothing(rule: MissingMass, kind: Compatibility, seed: int) -> None:
    """Lists with entries taken out score as shorter lists do; where both are empty all is 0 and nothing is divided by it."""
    rng = np.random.default_rng(seed)
    lists, _, _ = random_lists(rng, 6, 4)
    short = TopLists(*(getattr(lists, name)[:, :3] for name in TopLists.__dataclass_fields__))
    order = rng.permutation(4)
    gone = np.array([0, 0, 0, 1], dtype=np.bool_)[order]
    holes = TopLists(
        *(
            np.where(gone, -1 if name.endswith("ids") else rng.normal(), getattr(lists, name)[:, order])
            for name in TopLists.__dataclass_fields__
        )
    )
    sequence = np.zeros(6, dtype=np.int64)
    got, want = (raw_scores(x, rule, kind, sequence) for x in (holes, short))
    for name in RawScores.__dataclass_fields__:
        if kind == "overlap" and name == "compatibility":  # over K, whatever exists of it
            assert 4 * getattr(got, name) == pytest.approx(3 * getattr(want, name))
        else:
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6, abs=1e-5)
    nothing = TopLists(
        *(np.full((2, 4), -1.0 if name.endswith("ids") else 0.0) for name in TopLists.__dataclass_fields__)
    )
    none = raw_scores(nothing, rule, kind, sequence[:2])
    assert none.entropy.tolist() == none.divergence.tolist() == none.reverse_divergence.tolist() == [0.0, 0.0]
    assert none.compatibility == pytest.approx(float(rule == "rest" and kind == "bhattacharyya")), "the rest is all"


def test_a_probability_of_zero_stays_finite() -> None:
    lists = lists_of({1: 0.5, 2: 0.3}, {3: 0.6, 2: 0.2}, {**P, 3: 0.0}, {**Q, 1: 0.0})
    lists.teacher_on_student[0, 0] = lists.student_on_teacher[0, 0] = -math.inf  # type: ignore[index]
    got = raw_scores(lists, "exact")
    assert np.isfinite([got.divergence, got.reverse_divergence]).all()
    assert got.divergence[0] > 20


def test_bad_lists_are_refused() -> None:
    ids, lp = np.array([[1, 2]]), np.log([[0.5, 0.4]])
    with pytest.raises(DataError, match=r"teacher_log_probs\[0, 1\]=nan"):
        TopLists(ids, lp, ids, np.array([[-1.0, math.nan]]))
    with pytest.raises(DataError, match=r"student_log_probs\[0, 0\]=0.5"):
        TopLists(ids, np.array([[0.5, -1.0]]), ids, lp)
    with pytest.raises(DataError, match="the shape of its ids"):
        TopLists(ids, lp[:, :1], ids, lp)
    with pytest.raises(DataError, match="both or none"):
        TopLists(ids, lp, ids, lp, teacher_on_student=lp)
    with pytest.raises(DataError, match="with the same N"):
        TopLists(ids, lp, np.array([[1], [2]]), np.log([[0.5], [0.5]]))
    with pytest.raises(DataError, match="rule='exact': expected cross-scores"):
        raw_scores(TopLists(ids, lp, ids, lp), "exact")
    with pytest.raises(DataError, match="compatibility='prefix': expected `sequence`"):
        raw_scores(TopLists(ids, lp, ids, lp), "rest", "prefix")


# ---- normalisation ----


def test_quantiles_of_valid_tokens_only() -> None:
    values = np.array([*range(21), 1e9])
    valid = np.array([True] * 21 + [False])
    n = normalise(values, valid)
    assert n.clipped[[0, 1, 10, 19, 20, 21]].tolist() == pytest.approx([0, 0, 0.5, 1, 1, 0])
    assert n.unclipped[20] > n.unclipped[19], "what is clipped keeps its order"
    assert normalise(values, valid, "none").unclipped[5] == 5.0


@pytest.mark.parametrize("mode", ["batch_quantile", "batch_minmax"])
def test_batches_without_spread_or_tokens_are_zero(mode: teachability.Normalisation) -> None:
    same = normalise(np.full(4, 2.0), np.ones(4, dtype=np.bool_), mode)
    assert same.clipped.tolist() == same.unclipped.tolist() == [0.0] * 4
    none = normalise(np.full(3, 2.0), np.zeros(3, dtype=np.bool_), mode)
    assert none.clipped.tolist() == [0.0] * 3
    assert normalise(np.zeros(0), np.zeros(0, dtype=np.bool_), mode).clipped.size == 0


def test_a_batch_that_is_flat_between_the_quantiles_keeps_its_order() -> None:
    values = np.full(100, 0.5)
    values[[7, 8, 9]] = 0.1, 0.9, 0.8
    n = normalise(values, np.ones(100, dtype=np.bool_))
    assert np.argsort(-n.unclipped, kind="stable")[:2].tolist() == [8, 9]
    assert n.clipped[7:11].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert n.unclipped[7] < 0.0


def test_a_score_that_is_no_number_is_named() -> None:
    with pytest.raises(DataError, match=r"score\[1\]=nan: expected a finite number"):
        normalise(np.array([0.0, math.nan]), np.array([True, True]))
    normalise(np.array([0.0, math.nan]), np.array([True, False]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_learnable_and_incompatible_add_up(seed: int) -> None:
    lists, _, _ = random_lists(np.random.default_rng(seed), 30, 4)
    valid = np.random.default_rng(seed + 1).random(30) < 0.8
    s = token_scores(raw_scores(lists, "exact"), valid)
    assert s.dlearn + s.dincompat == pytest.approx(s.D.clipped)
    for score in (s.tip, s.ca_softor, s.dlearn):
        assert ((score >= 0) & (score <= 1 + 1e-12)).all()
        assert (score[~valid] == 0).all()
    assert (s.tip >= np.maximum(s.H.clipped, s.D.clipped) - 1e-12).all(), "soft-or is at least either"
    assert (s.ca_softor <= s.tip + 1e-12).all()
