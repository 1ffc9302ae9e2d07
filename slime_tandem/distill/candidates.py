"""What else might have been written at each position: top-K lists of student and teacher, in the student's ids.

A token is the same on both sides if its bytes are, or its role; others have no entry, and their mass counts as the rest. Exact
log-probs of given ids come from the engine: SGLang takes one id list per request (`token_ids_logprob`), so a response is asked
for in windows of positions, each with the ids that are missing there. Which of them are asked for and what they count is not
decided here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
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
from slime_tandem.protocol import Engine, GenerateRequest, GenerateResult, TopLogProbs
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import Candidates, FloatArray, IntArray, TopLists

_WINDOW, _WINDOW_VALUES = 32, 1024
"""Most positions and values per request for exact log-probs: it answers for every asked id at every position of it."""

LogProbsById = Mapping[int, float]


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


def top_of(result: GenerateResult, n: int, role: str) -> list[dict[int, float]]:
    """The last `n` positions' top lists of a scored input, as {id: log-prob}; raises TeacherScoreError for an unusable one."""
    lists = result.input_top_logprobs[-n:] if n else ()
    return [_checked(entry, result.rid, position, role) for position, entry in _exactly(lists, n, result.rid, role)]


def _exactly(lists: Sequence[TopLogProbs | None], n: int, rid: str, role: str) -> list[tuple[int, TopLogProbs | None]]:
    if len(lists) < n:
        raise TeacherScoreError(
            f"{role} answer {rid}", f"{len(lists)} lists", f"one for each of {n} tokens", f"see the {role}'s log"
        )
    return list(enumerate(lists))


def _checked(entry: TopLogProbs | None, rid: str, position: int, role: str) -> dict[int, float]:
    out: dict[int, float] = {}
    for value, token in entry or ():
        if value is None or not math.isfinite(value) or value > 1e-4:
            raise TeacherScoreError(
                f"{role} answer {rid}, response position {position}, candidate {token}",
                value,
                "a finite log-probability of at most 0",
                f"the {role}'s server is faulty or gives the token no probability at all",
            )
        out[int(token)] = min(float(value), 0.0)
    if not out:
        raise TeacherScoreError(
            f"{role} answer {rid}, response position {position}",
            entry,
            "a list of candidates",
            f"check the {role}'s server or router (some drop log-prob fields: sglang #10764, #10766)",
        )
    return out


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
    """Ids `wanted` at every position of `response` [R], which the engine knows as `prompt` + `response`.

    `conversation`: the name under which the engine has read both (`GenerateRequest.conversation`).
    """

    rid: str
    prompt: Sequence[int]
    response: Sequence[int]
    wanted: Sequence[frozenset[int]]
    conversation: str | None = None


async def exact_log_probs(
    engine: Engine, queries: Sequence[ExactQuery], *, role: str, max_batch: int = 128, temperature: float = 1.0
) -> list[list[dict[int, float]] | TeacherScoreError]:
    """Log-probs (nats, at `temperature`) of the wanted ids at every position [R] of each query, exact.

    A request covers up to 32 positions and 1024 values; `max_batch` of them per HTTP request, one after the other. A
    query whose answer lacks a value is a TeacherScoreError in its place.
    """
    requests: list[GenerateRequest] = []
    spans: list[tuple[int, int, int]] = []
    for q, query in enumerate(queries):
        assert len(query.wanted) == len(query.response)
        for start, stop in _windows(query.wanted):
            ids = frozenset().union(*query.wanted[start:stop])
            requests.append(
                GenerateRequest(
                    rid=f"{query.rid}-at-{start}",
                    input_ids=(*query.prompt, *query.response[:stop]),
                    max_new_tokens=0,
                    logprob_start_len=len(query.prompt) + start - 1,
                    token_ids_logprob=tuple(sorted(ids)),
                    conversation=query.conversation,
                    input_temperature=temperature,
                )
            )
            spans.append((q, start, stop))
    out: list[list[dict[int, float]] | TeacherScoreError] = [[{} for _ in q.response] for q in queries]
    results: list[GenerateResult | TeacherScoreError] = []
    for at in range(0, len(requests), max_batch):
        results += await ask_each(engine, requests[at : at + max_batch])
    for (q, start, stop), result in zip(spans, results, strict=True):
        mine = out[q]
        try:
            if isinstance(result, TeacherScoreError):
                raise result
            if not isinstance(mine, TeacherScoreError):
                mine[start:stop] = _answers(result, queries[q].wanted[start:stop], start, role)
        except TeacherScoreError as error:
            out[q] = error
    return out


def _windows(wanted: Sequence[frozenset[int]]) -> list[tuple[int, int]]:
    """Stretches `[start, stop)` that begin and end with a position that wants something and hold all of those.

    >>> _windows([frozenset(), frozenset({1}), frozenset(), frozenset({2}), frozenset()])
    [(1, 4)]
    """
    out: list[tuple[int, int]] = []
    ids: frozenset[int] = frozenset()
    for at, here in enumerate(wanted):
        if not here:
            continue
        start = out[-1][0] if out else at
        width = at + 1 - start
        if out and width <= _WINDOW and width * len(ids | here) <= _WINDOW_VALUES:
            out[-1], ids = (start, at + 1), ids | here
        else:
            out.append((at, at + 1))
            ids = here
    return out


def _answers(result: GenerateResult, wanted: Sequence[frozenset[int]], start: int, role: str) -> list[dict[int, float]]:
    n, out = len(wanted), []
    for at, entry in _exactly(result.input_token_ids_logprobs[-n:], n, result.rid, role):
        given = {token: value for value, token in entry or ()}  # of every id of the window: most are other positions'
        if missing := wanted[at] - given.keys():
            raise TeacherScoreError(
                f"{role} answer {result.rid}, response position {start + at}",
                f"no log-prob of id {min(missing)}",
                "one for every id that was asked for",
                f"see the {role}'s log",
            )
        mine = tuple((given[i], i) for i in wanted[at])
        out.append(_checked(mine, result.rid, start + at, role) if mine else {})
    return out


def require_whole(lists: Sequence[LogProbsById], k: int, role: str) -> None:
    """Raise TeacherScoreError for a list of less than `k` entries: a server's own limit must not pass for a short list."""
    for position, entries in enumerate(lists):
        if len(entries) < k:
            raise TeacherScoreError(
                f"{role} answer, response position {position}",
                f"{len(entries)} candidates",
                f"the {k} that were asked for",
                f"lower opd.selection.top_k, or raise the limit of the {role}'s server",
            )


def missing_on(
    own: Sequence[LogProbsById],
    other: Sequence[LogProbsById],
    counterpart: IntArray,
    at: Sequence[int],
    partner: Sequence[int],
) -> list[frozenset[int]]:
    """Per position of `own`: ids that `other` lists there (through `counterpart`) and `own` does not. `at` pairs `partner`."""
    wanted: list[frozenset[int]] = [frozenset()] * len(own)
    flat = np.fromiter(itertools.chain.from_iterable(other[j] for j in partner), np.int64)
    listed = iter(SameTokens.of(counterpart, flat).tolist())
    for i, j in zip(at, partner, strict=True):
        known = own[i]
        wanted[i] = frozenset([t for t in itertools.islice(listed, len(other[j])) if t >= 0 and t not in known])
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
    s_ids, s_values = _columns(s_known, k)
    t_own, t_values = _columns(t_known, k)
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


def _columns(known: Sequence[LogProbsById], k: int) -> tuple[IntArray, FloatArray]:
    """Ids and log-probs [n, k] of the best `k` entries at each position."""
    if {len(entries) for entries in known} == {k}:
        all_ids = np.fromiter(itertools.chain.from_iterable(known), np.int64).reshape(-1, k)
        all_values = np.fromiter(itertools.chain.from_iterable(e.values() for e in known), np.float64).reshape(-1, k)
        order = np.lexsort((all_ids, -all_values), axis=-1)
        return np.take_along_axis(all_ids, order, 1), np.take_along_axis(all_values, order, 1)
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
