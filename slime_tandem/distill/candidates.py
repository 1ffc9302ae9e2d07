"""What else might have been written at each position: top-K lists of student and teacher, in the student's ids.

A token is the same on both sides if its bytes are, or its role; others have no entry, and their mass counts as the rest. Exact
log-probs of given ids come from the engine: SGLang 0.5.15 takes one id list per request (`token_ids_logprob`), so a response is
asked for in windows of positions, each with the ids that are missing there; where a server takes ids of each position's own, in
one request. Which of them are asked for and what they count is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slime_tandem.config import Support
from slime_tandem.distill.alignment import Aligner, Alignment
from slime_tandem.errors import (
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    TeacherScoreError,
    WeightVersionError,
)
from slime_tandem.protocol import (
    CandidateLists,
    Engine,
    GenerateRequest,
    GenerateResult,
    IdsAt,
    IdText,
    PositionEngine,
    TopLogProbs,
)
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import Candidates, FloatArray, IntArray, TopLists

_WINDOW, _WINDOW_VALUES = 32, 1024
"""Most positions and values per request for exact log-probs: it answers for every asked id at every position of it."""


@dataclass(frozen=True)
class SameTokens:
    """The token of the other vocabulary with the same bytes or the same role, -1 for none; one array per direction.

    >>> from slime_tandem.tokens.token_bytes import TokenBytes
    >>> s = TokenBytes((b"a", b"b", None), frozenset({2}), frozenset({2}), {2: "<|im_end|>"})
    >>> t = TokenBytes((None, b"b"), frozenset({0}), frozenset({0}), {0: "<|eot_id|>"})
    >>> same = SameTokens(Aligner(s, t, end_of_turn=0))
    >>> same.teacher_of.tolist(), same.student_of.tolist()
    ([-1, 1, 0], [2, 1])
    """

    aligner: Aligner

    @cached_property
    def teacher_of(self) -> IntArray:
        """[V of the student]: the teacher's id."""
        a = self.aligner
        if a.same_vocabulary:
            out = list(range(len(a.student.table)))
        else:
            by_bytes = {data: i for i, data in _least_likely_first(a.teacher) if data}
            out = [by_bytes.get(data, -1) if data else -1 for data in a.student.table]
        for i, target in a.special.ids.items():
            if i < len(out):
                out[i] = target
        return np.array(out, dtype=np.int64)

    @cached_property
    def student_of(self) -> IntArray:
        """[V of the teacher]: the student's id; of several ends of turn the one that its chats are written with."""
        out = np.full(len(self.aligner.teacher.table), -1, dtype=np.int64)
        for i, _ in _least_likely_first(self.aligner.student):
            target = self.teacher_of[i]
            if 0 <= target < len(out):
                out[target] = i
        return out

    @staticmethod
    def of(table: IntArray, ids: IntArray) -> IntArray:
        """Entries of one of the tables, of the shape of `ids`; -1 for -1 and for ids past the table."""
        inside = (ids >= 0) & (ids < len(table))
        return np.where(inside, table[np.where(inside, ids, 0)], -1)


def _least_likely_first(tokens: TokenBytes) -> list[tuple[int, bytes | None]]:
    """Ids and bytes, so that of several with one meaning the last is what the model writes.

    A byte of a byte fallback stands behind the piece of the same byte, an end of text behind the end of a turn.
    """
    turn_end = set(tokens.roles.get("turn_end", ()))

    def rank(i: int) -> tuple[bool, bool, bool, int]:
        return i not in tokens.fallback, i in tokens.eos_ids, i in turn_end, -i

    return [(i, tokens.table[i]) for i in sorted(range(len(tokens.table)), key=rank)]


def top_of(result: GenerateResult, n: int, role: str) -> CandidateLists:
    """The last `n` positions' top lists of a scored input; raises TeacherScoreError for an unusable one."""
    return _checked(_last(result.input_top_logprobs, n, result.rid, role), result.rid, 0, role)


def _last(lists: Sequence[TopLogProbs | None], n: int, rid: str, role: str) -> CandidateLists:
    found = CandidateLists.of(lists)
    if len(found) < n:
        raise TeacherScoreError(
            f"{role} answer {rid}", f"{len(found)} lists", f"one for each of {n} tokens", f"see the {role}'s log"
        )
    return found.last(n)


def _checked(lists: CandidateLists, rid: str, first: int, role: str) -> CandidateLists:
    """The lists with values of at most 0, each id once; positions are counted from `first` in messages."""
    bad = np.flatnonzero(~(np.isfinite(lists.values) & (lists.values <= 1e-4)))
    empty = np.flatnonzero(lists.counts == 0)
    if len(bad) and not (len(empty) and empty[0] < lists.rows[bad[0]]):
        value = float(lists.values[bad[0]])
        raise TeacherScoreError(
            f"{role} answer {rid}, response position {first + lists.rows[bad[0]]}, candidate {lists.ids[bad[0]]}",
            value,
            "a finite log-probability of at most 0",
            f"the {role}'s server is faulty or gives the token no probability at all",
        )
    if len(empty):
        raise TeacherScoreError(
            f"{role} answer {rid}, response position {first + empty[0]}",
            None,
            "a list of candidates",
            f"check the {role}'s server or router (some drop log-prob fields: sglang #10764, #10766)",
        )
    return _each_once(CandidateLists(lists.ids, lists.starts, np.minimum(lists.values, 0.0)))


def _each_once(lists: CandidateLists) -> CandidateLists:
    """Lists without ids that a position has already: the last value counts, at the first one's place."""
    keys = np.sort((lists.rows << 32) | lists.ids)
    if not (keys[1:] == keys[:-1]).any():
        return lists
    return CandidateLists.of(lists.maps())


async def ask_each(engine: Engine, requests: Sequence[GenerateRequest]) -> list[GenerateResult | TeacherScoreError]:
    """The answer to each request, in order. Where an answer is unusable (NaN, short, no JSON), the client fails a whole batch:
    each request is then asked alone, and the error stands in the place of its own.

    Raises what is nobody's own: EngineUnavailableError, EngineRejectedError, WeightVersionError.
    """
    try:
        return list(await engine.generate(requests))
    except (EngineUnavailableError, EngineRejectedError, WeightVersionError):
        raise
    except EngineError as error:
        if len(requests) == 1:
            return [TeacherScoreError(error.field, error.value, error.expected, error.remedy)]
    return [answer for request in requests for answer in await ask_each(engine, [request])]


@dataclass(frozen=True)
class ExactQuery:
    """Ids `wanted` at each position of `response` [R], which the engine knows as `prompt` + `response`; each id once.

    `conversation`: the name under which the engine has read both (`GenerateRequest.conversation`).
    """

    rid: str
    prompt: Sequence[int]
    response: Sequence[int]
    wanted: IdsAt
    conversation: str | None = None


@dataclass(frozen=True)
class _Window:
    """Positions `[start, stop)` of query number `query` that are asked for together, with `ids` in ascending order."""

    query: int
    start: int
    stop: int
    ids: tuple[int, ...]


async def exact_log_probs(
    engine: Engine, queries: Sequence[ExactQuery], *, role: str, max_batch: int = 128, temperature: float = 1.0
) -> list[CandidateLists | TeacherScoreError]:
    """Log-probs (nats, at `temperature`) of the wanted ids of each query, exact; in the places of `ExactQuery.wanted`.

    A request covers up to 32 positions and 1024 values; `max_batch` of them per HTTP request, one after the other. Where the
    server takes ids of each position's own, it covers the response. A query whose answer lacks a value is a TeacherScoreError
    in its place.
    """
    whole = [IdText([*query.prompt, *query.response]) for query in queries]
    sample = next((ids[:4] for ids in whole if len(ids) >= 4 and len(set(ids[:4])) > 1), None)
    at_once = sample is not None and isinstance(engine, PositionEngine) and await engine.scores_positions(sample)
    parts = _whole_windows if at_once else _windows
    windows = [_Window(q, *window) for q, query in enumerate(queries) for window in parts(query.wanted)]
    found = [np.zeros(len(query.wanted.ids)) for query in queries]
    faults: dict[int, TeacherScoreError] = {}
    for at in range(0, len(windows), max_batch):
        part = windows[at : at + max_batch]
        requests = [
            GenerateRequest(
                rid=f"{queries[w.query].rid}-at-{w.start}",
                input_ids=whole[w.query].prefix(len(queries[w.query].prompt) + w.stop),
                max_new_tokens=0,
                logprob_start_len=len(queries[w.query].prompt) + w.start - 1,
                token_ids_logprob=None if at_once else w.ids,
                token_ids_at=_behind(queries[w.query], w) if at_once else None,
                conversation=queries[w.query].conversation,
                input_temperature=temperature,
            )
            for w in part
        ]
        for w, result in zip(part, await ask_each(engine, requests), strict=True):
            wanted = queries[w.query].wanted
            into = found[w.query][wanted.starts[w.start] : wanted.starts[w.stop]]
            try:
                if isinstance(result, TeacherScoreError):
                    raise result
                into[:] = _answers(result, wanted.part(w.start, w.stop), w, role)
            except TeacherScoreError as error:
                faults.setdefault(w.query, error)
    return [
        faults.get(q) or CandidateLists(query.wanted.ids, query.wanted.starts, values)
        for q, (query, values) in enumerate(zip(queries, found, strict=True))
    ]


def _windows(wanted: IdsAt) -> list[tuple[int, int, tuple[int, ...]]]:
    """Stretches `[start, stop)` that begin and end with a position that wants something, and all ids of each, ascending.

    >>> _windows(IdsAt.of([[], [1], [], [2], []]))
    [(1, 4, (1, 2))]
    """
    out: list[tuple[int, int, tuple[int, ...]]] = []
    flat, bounds = wanted.ids.tolist(), wanted.starts.tolist()
    ids: set[int] = set()
    start = stop = -1
    for at in np.flatnonzero(wanted.counts).tolist():
        here = flat[bounds[at] : bounds[at + 1]]
        new = [i for i in here if i not in ids]
        width = at + 1 - start
        if ids and width <= _WINDOW and width * (len(ids) + len(new)) <= _WINDOW_VALUES:
            ids.update(new)
        else:
            if ids:
                out.append((start, stop, tuple(sorted(ids))))
            start, ids = at, set(here)
        stop = at + 1
    if ids:
        out.append((start, stop, tuple(sorted(ids))))
    return out


def _whole_windows(wanted: IdsAt) -> list[tuple[int, int, tuple[int, ...]]]:
    """One stretch from the first to the last position that wants something.

    >>> _whole_windows(IdsAt.of([[], [1], [], [2], []])), _whole_windows(IdsAt.of([[]]))
    ([(1, 4, ())], [])
    """
    at = np.flatnonzero(wanted.counts).tolist()
    return [(at[0], at[-1] + 1, ())] if at else []


def _behind(query: ExactQuery, window: _Window) -> IdsAt:
    """What a window wants, by positions of its request's input; ids in ascending order or not, as they are wanted."""
    part = query.wanted.part(window.start, window.stop)
    before = np.zeros(len(query.prompt) + window.start, dtype=np.int64)
    return IdsAt(part.ids, np.concatenate((before, part.starts)))


def _answers(result: GenerateResult, wanted: IdsAt, window: _Window, role: str) -> FloatArray:
    """The values [N] of what a window wants, of an answer that has every id of the window at each of its positions, or each
    position's own (then the window names none)."""
    given = _last(result.input_token_ids_logprobs, len(wanted), result.rid, role)
    asked = np.array(window.ids, dtype=np.int64)
    table = given.ids.reshape(len(wanted), -1) if len(given.ids) == len(wanted) * len(asked) else None
    if table is not None and (table == asked).all():  # as they were asked for, as servers answer
        at = wanted.rows * len(asked) + np.searchsorted(asked, wanted.ids)
    else:
        at = given.find(wanted.rows, wanted.ids)
        if (at < 0).any():
            row = wanted.rows[at < 0].min()
            lacking = wanted.ids[(at < 0) & (wanted.rows == row)].min()
            raise TeacherScoreError(
                f"{role} answer {result.rid}, response position {window.start + row}",
                f"no log-prob of id {lacking}",
                "one for every id that was asked for",
                f"see the {role}'s log",
            )
    values = given.values[at]
    bad = np.flatnonzero(~(np.isfinite(values) & (values <= 1e-4)))
    if len(bad):
        where = f"response position {window.start + wanted.rows[bad[0]]}, candidate {wanted.ids[bad[0]]}"
        raise TeacherScoreError(
            f"{role} answer {result.rid}, {where}",
            float(values[bad[0]]),
            "a finite log-probability of at most 0",
            f"the {role}'s server is faulty or gives the token no probability at all",
        )
    capped: FloatArray = np.minimum(values, 0.0)
    return capped


def require_whole(lists: CandidateLists, k: int, role: str) -> None:
    """Raise TeacherScoreError for a list of less than `k` entries: a server's own limit must not pass for a short list."""
    short = np.flatnonzero(lists.counts < k)
    if len(short):
        raise TeacherScoreError(
            f"{role} answer, response position {short[0]}",
            f"{lists.counts[short[0]]} candidates",
            f"the {k} that were asked for",
            f"lower opd.selection.top_k, or raise the limit of the {role}'s server",
        )


def missing_on(
    own: CandidateLists, other: CandidateLists, counterpart: IntArray, at: IntArray, partner: IntArray
) -> IdsAt:
    """Per position of `own`: ids that `other` lists there (through `counterpart`) and `own` does not. `at` pairs `partner`."""
    picked = _taken(other, partner)
    rows, ids = at[picked.rows], SameTokens.of(counterpart, picked.ids)
    lacking = (ids >= 0) & (own.find(rows, ids) < 0)
    keys = np.unique((rows[lacking] << 32) | ids[lacking])
    counts = np.bincount(keys >> 32, minlength=len(own)) if len(keys) else np.zeros(len(own), dtype=np.int64)
    return IdsAt(keys & (2**32 - 1), np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))


def _taken(lists: CandidateLists, at: IntArray) -> CandidateLists:
    """The lists of positions `at` [n], in that order."""
    counts = lists.counts[at]
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    places = np.arange(starts[-1]) + np.repeat(lists.starts[:-1][at] - starts[:-1], counts)
    return CandidateLists(lists.ids[places], starts, lists.values[places])


def gather_candidates(
    aligned: Alignment,
    same: SameTokens,
    support: Support,
    k: int,
    teacher: CandidateLists,
    student: CandidateLists | None,
) -> Candidates:
    """The [R, K] arrays (2K wide with `union`) at paired positions, most likely under the teacher first; elsewhere none.

    `teacher` [Rt] and `student` [R] hold what is known, by each one's own ids: top-K lists, and exact values beyond them. A
    candidate of the support whose teacher value is not known is a bug of the caller.
    """
    R, width = len(aligned.teacher_index), 2 * k if support == "union" else k
    at = np.flatnonzero(aligned.teacher_index >= 0)
    partner = aligned.teacher_index[at]
    rows, tokens, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    if support != "student":
        best = _best(_taken(teacher, partner), k)
        counterpart = same.of(same.student_of, best.ids)
        there = counterpart >= 0
        rows.append(at[best.rows[there]])
        tokens.append(counterpart[there])
        values.append(best.values[there])
    if support != "teacher":
        assert student is not None
        best = _best(_taken(student, at), k)
        counterpart = same.of(same.teacher_of, best.ids)
        # Several ends of turn share one counterpart: its mass must not count twice.
        there = (counterpart >= 0) & (same.of(same.student_of, counterpart) == best.ids)
        found = teacher.find(partner[best.rows[there]], counterpart[there])
        assert (found >= 0).all(), "a candidate without a value of the teacher's"
        rows.append(at[best.rows[there]])
        tokens.append(best.ids[there])
        values.append(teacher.values[found])
    row, token, value = np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)
    _, first = np.unique((row << 32) | token, return_index=True)  # in a union both sides may have it
    row, token, value = row[first], token[first], value[first]
    order = np.lexsort((token, -value, row))
    row, token, value = row[order], token[order], value[order]
    column = np.arange(len(row)) - np.searchsorted(row, row)
    ids = np.full((R, width), -1, dtype=np.int64)
    t_lp, s_lp = np.zeros((R, width)), np.zeros((R, width))
    ids[row, column], t_lp[row, column], s_lp[row, column] = token, value, math.nan
    if student is not None:
        there_too = student.find(row, token)
        s_lp[row, column] = np.where(there_too >= 0, _at(student.values, there_too), math.nan)
    return Candidates(ids, t_lp, s_lp)


def _at(values: FloatArray, places: IntArray) -> FloatArray:
    """`values` at `places`; anything where a place is -1."""
    return values[places] if len(values) else np.zeros(places.shape)


def gather_lists(
    aligned: Alignment,
    same: SameTokens,
    k: int,
    teacher: CandidateLists,
    student: CandidateLists,
    exact: tuple[CandidateLists, CandidateLists] | None,
) -> TopLists:
    """The lists [R, K] of both sides at paired positions, restricted to byte strings that both vocabularies hold.

    `teacher` [Rt], `student` [R]: top lists by each one's own ids. `exact`: values beyond the lists, of both, as
    `missing_on` asks for them; None: no cross-scores.
    """
    own = _own_lists(aligned, same, k, teacher, student)
    values = [own.student_values, own.teacher_values]
    if exact is not None:
        values += [
            _values(own.counterpart, own.student_ids, own.partner, teacher, exact[0]),
            _values(own.teacher_ids, own.teacher_ids, own.at, student, exact[1]),
        ]
    return own.joined(values, len(aligned.teacher_index), k)


def gather_deep(
    aligned: Alignment, same: SameTokens, k: int, teacher: CandidateLists, student: CandidateLists
) -> tuple[TopLists, FloatArray]:
    """(lists [R, K] with cross-scores, bound [R]), out of one pass over longer lists `teacher` [Rt] and `student` [R].

    A side's value of an entry of the other's is its own list's. An entry that it does not hold has at most the probability of
    its last entry, and at most what all of its entries leave: the lesser of the two stands for it. The bound is the sum of
    such stand-ins at a position, of the side where it is larger: so much too large a mass may be, and never too small.
    """
    own = _own_lists(aligned, same, k, teacher, student)
    on_student, s_bound = _deep_values(own.counterpart, own.student_ids, own.partner, teacher)
    on_teacher, t_bound = _deep_values(own.teacher_ids, own.teacher_ids, own.at, student)
    R = len(aligned.teacher_index)
    bound = np.zeros(R)
    bound[own.at] = np.maximum(s_bound, t_bound)
    return own.joined([own.student_values, own.teacher_values, on_student, on_teacher], R, k), bound


@dataclass(frozen=True)
class _OwnLists:
    """Both sides' best K at the n paired positions `at`, the teacher's at `partner`: ids [n, k] in the student's vocabulary
    (-1: no counterpart), their values, and of the student's the `counterpart` in the teacher's."""

    at: IntArray
    partner: IntArray
    student_ids: IntArray
    student_values: FloatArray
    counterpart: IntArray
    teacher_ids: IntArray
    teacher_values: FloatArray

    def joined(self, values: Sequence[FloatArray], R: int, k: int) -> TopLists:
        """[R, K] out of what stands at the paired positions."""
        ids = np.full((2, R, k), -1, dtype=np.int64)
        ids[:, self.at] = self.student_ids, self.teacher_ids
        log_probs = np.zeros((len(values), R, k))
        log_probs[:, self.at] = values
        return TopLists(ids[0], log_probs[0], ids[1], log_probs[1], *log_probs[2:])


def _own_lists(
    aligned: Alignment, same: SameTokens, k: int, teacher: CandidateLists, student: CandidateLists
) -> _OwnLists:
    at = np.flatnonzero(aligned.teacher_index >= 0)
    partner = aligned.teacher_index[at]
    s_ids, s_values = _columns(_taken(student, at), k)
    t_own, t_values = _columns(_taken(teacher, partner), k)
    counterpart = same.of(same.teacher_of, s_ids)
    # Several ends of turn share one counterpart: one counts.
    s_ids = np.where(same.of(same.student_of, counterpart) == s_ids, s_ids, -1)
    return _OwnLists(at, partner, s_ids, s_values, counterpart, same.of(same.student_of, t_own), t_values)


def _deep_values(ids: IntArray, used: IntArray, rows: IntArray, known: CandidateLists) -> tuple[FloatArray, FloatArray]:
    """(log-probs [n, k] of `ids` where `used` is an id, the sum [n] of those that are bounds)."""
    taken = _taken(known, rows)
    probabilities = np.exp(taken.values)
    sums = np.bincount(taken.rows, probabilities, minlength=len(rows))
    last = np.minimum.reduceat(probabilities, taken.starts[:-1]) if len(rows) else sums
    most = np.maximum(np.minimum(last, 1.0 - sums), _LEAST)
    listed = known.find(np.broadcast_to(rows[:, None], ids.shape), ids)
    beyond = (used >= 0) & (listed < 0)
    values = np.where(listed >= 0, _at(known.values, listed), np.log(most)[:, None])
    return np.where(used >= 0, values, 0.0), np.where(beyond, most[:, None], 0.0).sum(1)


_LEAST = 1e-30
"""A probability, where rounding leaves none for what a list does not hold."""


def _columns(known: CandidateLists, k: int) -> tuple[IntArray, FloatArray]:
    """Ids and log-probs [n, k] of the best `k` entries at each position, which has as many."""
    best = _best(known, k)
    return best.ids.reshape(-1, k), best.values.reshape(-1, k)


def _best(known: CandidateLists, k: int) -> CandidateLists:
    """The likeliest `k` entries of each position, likeliest first, by ids where that is equal."""
    counts = known.counts
    if len(counts) and (counts == counts[0]).all():
        ids, values = known.ids.reshape(len(counts), -1), known.values.reshape(len(counts), -1)
        order = np.lexsort((ids, -values), axis=-1)[:, :k]
        starts = np.arange(len(counts) + 1, dtype=np.int64) * order.shape[1]
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
        return CandidateLists(ids.ravel(), starts, values.ravel())
    order = np.lexsort((known.ids, -known.values, known.rows))
    order = order[np.arange(len(order)) - known.starts[known.rows[order]] < k]
    starts = np.concatenate(([0], np.cumsum(np.minimum(counts, k), dtype=np.int64)))
    return CandidateLists(known.ids[order], starts, known.values[order])


def _values(ids: IntArray, used: IntArray, rows: IntArray, known: CandidateLists, beyond: CandidateLists) -> FloatArray:
    """Log-probs [n, k] of `ids` where `used` is an id, at positions `rows` [n] of a side: from its lists, else beyond them."""
    at = np.broadcast_to(rows[:, None], ids.shape)
    listed, asked = known.find(at, ids), beyond.find(at, ids)
    assert ((used < 0) | (listed >= 0) | (asked >= 0)).all(), "missing_on asks for what the lists lack"
    values = np.where(listed >= 0, _at(known.values, listed), _at(beyond.values, asked))
    return np.where(used >= 0, values, 0.0)
