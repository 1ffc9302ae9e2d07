"""The plain implementation of `distill.candidates`: dictionaries, one position after the other. What the arrays are held to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from slime_tandem.config import Support
from slime_tandem.distill.alignment import Alignment
from slime_tandem.distill.candidates import SameTokens
from slime_tandem.types import Candidates, FloatArray, IntArray, TopLists

LogProbsById = Mapping[int, float]


def missing_on(
    own: Sequence[LogProbsById],
    other: Sequence[LogProbsById],
    counterpart: IntArray,
    at: Sequence[int],
    partner: Sequence[int],
) -> list[frozenset[int]]:
    """Per position of `own`: ids that `other` lists there (through `counterpart`) and `own` does not. `at` pairs `partner`."""
    wanted: list[frozenset[int]] = [frozenset()] * len(own)
    for i, j in zip(at, partner, strict=True):
        known = own[i]
        mapped = [int(counterpart[t]) if t < len(counterpart) else -1 for t in other[j]]
        wanted[i] = frozenset([t for t in mapped if t >= 0 and t not in known])
    return wanted


def gather_candidates(
    aligned: Alignment,
    same: SameTokens,
    support: Support,
    k: int,
    teacher: Sequence[LogProbsById],
    student: Sequence[LogProbsById] | None,
) -> Candidates:
    """The [R, K] arrays (2K wide with `union`) at paired positions, most likely under the teacher first; elsewhere none.

    `teacher` [Rt] and `student` [R] hold what is known, by each one's own ids: top-K lists, and exact values beyond them. A
    candidate of the support whose teacher value is not known is a bug of the caller.
    """
    R, width = len(aligned.teacher_index), 2 * k if support == "union" else k
    ids = np.full((R, width), -1, dtype=np.int64)
    t_lp, s_lp = np.zeros((R, width)), np.zeros((R, width))
    for i in np.flatnonzero(aligned.teacher_index >= 0).tolist():
        known_t = teacher[int(aligned.teacher_index[i])]
        known_s: LogProbsById = {} if student is None else student[i]
        chosen: dict[int, float] = {}
        if support != "student":
            for token, value in _best(known_t, k):
                counterpart = int(same.student_of[token]) if token < len(same.student_of) else -1
                if counterpart >= 0:
                    chosen[counterpart] = value
        if support != "teacher":
            assert student is not None
            for token, _ in _best(known_s, k):
                counterpart = int(same.teacher_of[token]) if token < len(same.teacher_of) else -1
                # Several ends of turn share one counterpart: its mass must not count twice.
                if counterpart >= 0 and int(same.student_of[counterpart]) == token:
                    chosen[token] = known_t[counterpart]
        for column, (token, value) in enumerate(_best(chosen, width)):
            ids[i, column], t_lp[i, column] = token, value
            s_lp[i, column] = known_s.get(token, math.nan)
    return Candidates(ids, t_lp, s_lp)


def gather_lists(
    aligned: Alignment,
    same: SameTokens,
    k: int,
    teacher: Sequence[LogProbsById],
    student: Sequence[LogProbsById],
    exact: tuple[Sequence[LogProbsById], Sequence[LogProbsById]] | None,
) -> TopLists:
    """The lists [R, K] of both sides at paired positions, restricted to byte strings that both vocabularies hold.

    `teacher` [Rt], `student` [R]: top lists by each one's own ids. `exact`: values beyond the lists, of both, as
    `missing_on` asks for them; None: no cross-scores.
    """
    at = np.flatnonzero(aligned.teacher_index >= 0)
    partner = aligned.teacher_index[at]
    s_known, t_known = [student[i] for i in at.tolist()], [teacher[j] for j in partner.tolist()]
    s_ids, s_values = columns(s_known, k)
    t_own, t_values = columns(t_known, k)
    counterpart = same.of(same.teacher_of, s_ids)
    # Several ends of turn share one counterpart: one counts.
    s_ids = np.where(same.of(same.student_of, counterpart) == s_ids, s_ids, -1)
    t_ids = same.of(same.student_of, t_own)
    values = [s_values, t_values]
    if exact is not None:
        s_beyond, t_beyond = [exact[1][i] for i in at.tolist()], [exact[0][j] for j in partner.tolist()]
        values += [_values(counterpart, s_ids, t_known, t_beyond), _values(t_ids, t_ids, s_known, s_beyond)]
    R = len(aligned.teacher_index)
    ids = np.full((2, R, k), -1, dtype=np.int64)
    ids[:, at] = s_ids, t_ids
    log_probs = np.zeros((len(values), R, k))
    log_probs[:, at] = values
    return TopLists(ids[0], log_probs[0], ids[1], log_probs[1], *log_probs[2:])


def columns(known: Sequence[LogProbsById], k: int) -> tuple[IntArray, FloatArray]:
    """Ids and log-probs [n, k] of the best `k` entries at each position."""
    best = [_best(entries, k) for entries in known]
    ids = np.array([[i for i, _ in row] for row in best], dtype=np.int64).reshape(-1, k)
    return ids, np.array([[v for _, v in row] for row in best], dtype=np.float64).reshape(-1, k)


def _values(ids: IntArray, used: IntArray, known: Sequence[LogProbsById], beyond: Sequence[LogProbsById]) -> FloatArray:
    """Log-probs [n, k] of `ids` where `used` is an id, from a side's lists and what was asked for beyond them."""
    out = [
        [(a[i] if i in a else b[i]) if ok else 0.0 for i, ok in zip(row, oks, strict=True)]
        for row, oks, a, b in zip(ids.tolist(), (used >= 0).tolist(), known, beyond, strict=True)
    ]
    return np.array(out, dtype=np.float64).reshape(ids.shape)


def _best(known: LogProbsById, k: int) -> list[tuple[int, float]]:
    return sorted(known.items(), key=lambda item: (-item[1], item[0]))[:k]


def windows(wanted: Sequence[frozenset[int]]) -> list[tuple[int, int]]:
    """Stretches `[start, stop)` that begin and end with a position that wants something and hold all of those.

    >>> windows([frozenset(), frozenset({1}), frozenset(), frozenset({2}), frozenset()])
    [(1, 4)]
    """
    out: list[tuple[int, int]] = []
    ids: frozenset[int] = frozenset()
    for at, here in enumerate(wanted):
        if not here:
            continue
        start = out[-1][0] if out else at
        width = at + 1 - start
        if out and width <= 32 and width * len(ids | here) <= 1024:
            out[-1], ids = (start, at + 1), ids | here
        else:
            out.append((at, at + 1))
            ids = here
    return out
