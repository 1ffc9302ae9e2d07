"""What is asked of a teacher, and which answers are believed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import Support
from slime_tandem.distill.alignment import Aligner
from slime_tandem.distill.candidates import (
    ExactQuery,
    SameTokens,
    _columns,
    _windows,
    exact_log_probs,
    gather_candidates,
    gather_deep,
    gather_lists,
    missing_on,
    top_of,
)
from slime_tandem.distill.panel import TeacherPanel, combine, student_candidates
from slime_tandem.distill.teacher import Scoring, Teacher, check_teacher, describe_special, response_log_probs
from slime_tandem.errors import (
    DataError,
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    ModelError,
    TeacherScoreError,
)
from slime_tandem.protocol import CandidateLists, GenerateRequest, GenerateResult, IdsAt, IdText
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import AlignedScores, AuthorRun, Message, Prompt, SampleKey, TandemSample

from . import plain_candidates as plain

# The student writes "ab" in two tokens, the teacher in one; ends of turn have other numbers.
STUDENT = TokenBytes((b"a", b"b", b"c", None, b"\xe4"), frozenset({3}), frozenset({3}))
TEACHER = TokenBytes((None, b"ab", b"c", b"\xef\xbf\xbd", b"a", b"b"), frozenset({0}), frozenset({0}))
PIECES = {"ab": 1, "c": 2, "\ufffd": 3, "a": 4, "b": 5}

Spoil = Callable[[GenerateResult], GenerateResult]


def encode(text: str) -> list[int]:
    ids = []
    while text:
        piece = next(p for p in PIECES if text.startswith(p))
        ids.append(PIECES[piece])
        text = text[len(piece) :]
    return ids


@dataclass
class ScriptedTeacher:
    """Gives the token at input position p the log-prob -p/100; `spoil` maps a rid's last number to a fault."""

    spoil: dict[int, Spoil] = field(default_factory=dict)
    include_start: bool = True
    batches: list[list[GenerateRequest]] = field(default_factory=list)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.batches.append(list(requests))
        out = []
        for r in requests:
            start = r.logprob_start_len + (not self.include_start)
            values: list[float | None] = [-p / 100 for p in range(start, len(r.input_ids))]
            if self.include_start:
                values[0] = None
            result = GenerateResult(
                r.rid, (), (), "length", "t0", input_log_probs=tuple(values), input_ids=r.input_ids[start:]
            )
            out.append(self.spoil.get(int(r.rid.rsplit("-", 1)[1]), lambda x: x)(result))
        return out


def make_teacher(engine: ScriptedTeacher, max_batch: int = 128, max_tokens: int | None = None) -> Teacher:
    def render(messages: Sequence[Message]) -> list[int]:
        return [5] * len(messages[0].content)

    aligner = Aligner(STUDENT, TEACHER, end_of_turn=0)
    return Teacher(engine, aligner, render, encode, max_batch=max_batch, max_tokens=max_tokens)


def sample(i: int, ids: Sequence[int], prompt: str = "xyz") -> TandemSample:
    n = len(ids)
    key, task = SampleKey(0, 7, i), Prompt("p", (Message("user", prompt),), None, "t")
    return TandemSample(
        key, 0, task, (9,), tuple(ids), (1,) * n, (-1.0,) * n, "stop", "", (AuthorRun(1, 0, n, "v"),)
    )  # fmt: skip


def score(teacher: Teacher, samples: Sequence[TandemSample]) -> list[AlignedScores | TeacherScoreError]:
    return asyncio.run(teacher.score(samples))


@pytest.mark.parametrize("include_start", [True, False])
def test_scores_land_on_the_students_positions(include_start: bool) -> None:
    """Engines differ in whether the entry at `logprob_start_len` comes back; the response is counted from the end."""
    engine = ScriptedTeacher(include_start=include_start)
    (scores,) = score(make_teacher(engine), [sample(0, [2, 0, 1, 2, 3])])
    assert isinstance(scores, AlignedScores)
    # The teacher reads 5 5 5 | c ab c <end>: c at input position 3, ab at 4, c at 5, the end at 6.
    assert scores.log_probs.tolist() == [-0.03, 0.0, 0.0, -0.05, -0.06]
    assert scores.mask.tolist() == [True, False, False, True, True]
    assert {reason: n for reason, n in scores.unaligned.items() if n} == {"boundary": 2}
    ((request,),) = engine.batches
    assert request.rid == "score-0-7-0"
    assert request.input_ids == (5, 5, 5, 2, 1, 2, 0)
    assert (request.max_new_tokens, request.logprob_start_len, request.return_logprob) == (0, 2, True)
    assert (request.temperature, request.top_p, request.top_k) == (1.0, 1.0, -1), "the teacher's full distribution"


def test_what_was_read_along_is_not_asked_for_again() -> None:
    """The student's a b c a | b c <end>: the teacher's last word changes with what follows, its values count up to there."""
    engine = ScriptedTeacher()
    teacher, whole = make_teacher(engine), sample(0, [0, 1, 2, 0, 1, 2, 3])

    async def run() -> list[AlignedScores | TeacherScoreError]:
        await teacher.read_along(sample(0, [0, 1]))
        await teacher.read_along(sample(0, [0, 1, 2, 0]))
        return await teacher.score([whole])

    (scores,) = asyncio.run(run())
    asked = [(r.rid, r.input_ids, r.logprob_start_len) for (r,) in engine.batches]
    assert asked == [
        ("score-0-7-0-1", (5, 5, 5, 1), 2),
        ("score-0-7-0-2", (5, 5, 5, 1, 2, 4), 3),  # "ab" is known
        ("score-0-7-0", (5, 5, 5, 1, 2, 1, 2, 0), 4),  # "a" became "ab": it is asked for, not "c" before it
    ]
    (at_once,) = score(make_teacher(ScriptedTeacher()), [whole])
    assert isinstance(scores, AlignedScores)
    assert isinstance(at_once, AlignedScores)
    assert scores.log_probs.tolist() == at_once.log_probs.tolist()
    assert not teacher._along


def test_a_part_that_fails_is_asked_for_with_the_rest() -> None:
    engine = ScriptedTeacher(spoil={1: lambda r: dataclasses.replace(r, input_log_probs=())})
    teacher, whole = make_teacher(engine), sample(3, [0, 1, 2, 3])

    async def run() -> list[AlignedScores | TeacherScoreError]:
        await teacher.read_along(sample(3, [0, 1]))
        return await teacher.score([whole])

    (scores,) = asyncio.run(run())
    assert isinstance(scores, AlignedScores)
    assert [b[0].logprob_start_len for b in engine.batches] == [2, 2]
    assert scores.log_probs.tolist() == score(make_teacher(ScriptedTeacher()), [whole])[0].log_probs.tolist()  # type: ignore[union-attr]


def test_no_end_of_turn_is_added_to_an_unfinished_response() -> None:
    engine = ScriptedTeacher()
    (scores,) = score(make_teacher(engine), [sample(0, [2, 4])])
    assert engine.batches[0][0].input_ids == (5, 5, 5, 2, 3)
    assert isinstance(scores, AlignedScores)
    assert {reason: n for reason, n in scores.unaligned.items() if n} == {"invalid_utf8": 1}


def test_an_empty_response_scores_nothing() -> None:
    (scores,) = score(make_teacher(ScriptedTeacher()), [sample(0, [])])
    assert isinstance(scores, AlignedScores)
    assert (scores.log_probs.size, scores.coverage) == (0, 1.0)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 7, 100])
def test_batches_keep_the_order(max_batch: int) -> None:
    engine = ScriptedTeacher()
    samples = [sample(i, [2] * i, "x" * (i + 1)) for i in range(7)]
    scores = score(make_teacher(engine, max_batch), samples)
    assert [len(s.mask) for s in scores if isinstance(s, AlignedScores)] == list(range(7))
    for i, s in enumerate(scores):
        assert isinstance(s, AlignedScores)
        assert s.log_probs.tolist() == [-(i + 1 + k) / 100 for k in range(i)]
    assert [r.rid for batch in engine.batches for r in batch] == [f"score-0-7-{i}" for i in range(7)]
    assert max(map(len, engine.batches)) <= max_batch
    assert len(engine.batches) == -(-7 // max_batch)


def test_no_samples_no_request() -> None:
    engine = ScriptedTeacher()
    assert score(make_teacher(engine), []) == []
    assert engine.batches == []


def with_value(position: int, value: float | None) -> Spoil:
    def spoil(r: GenerateResult) -> GenerateResult:
        values = list(r.input_log_probs)
        values[position] = value
        return dataclasses.replace(r, input_log_probs=tuple(values))

    return spoil


FAULTS: dict[str, tuple[Spoil, str]] = {
    "nan": (with_value(-1, float("nan")), r"response position 2=nan: expected a finite log-prob"),
    "none": (with_value(-2, None), r"response position 1=None"),
    "minus inf": (with_value(-3, float("-inf")), r"response position 0=-inf"),
    "plus inf": (with_value(-1, float("inf")), r"response position 2=inf"),
    "positive": (with_value(-1, 0.5), r"response position 2=0\.5"),
    "no log-probs": (lambda r: dataclasses.replace(r, input_log_probs=()), r"'0 input log-probs'"),
    "too short": (lambda r: dataclasses.replace(r, input_log_probs=r.input_log_probs[-2:]), r"'2 input log-probs'"),
    "ids too short": (lambda r: dataclasses.replace(r, input_ids=r.input_ids[-2:]), r"with the ids that were sent"),
    "no ids": (lambda r: dataclasses.replace(r, input_ids=()), r"with the ids that were sent"),
    "other ids": (lambda r: dataclasses.replace(r, input_ids=(*r.input_ids[:-1], 4)), r"with the ids that were sent"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("max_batch", [1, 128])
def test_a_faulty_answer_fails_its_own_sample_only(fault: str, max_batch: int) -> None:
    spoil, message = FAULTS[fault]
    samples = [sample(i, [2, 2, 2]) for i in range(3)]
    healthy = score(make_teacher(ScriptedTeacher(), max_batch), samples)
    first, second, third = score(make_teacher(ScriptedTeacher({1: spoil}), max_batch), samples)
    assert isinstance(second, TeacherScoreError)
    with pytest.raises(TeacherScoreError, match=rf"teacher answer score-0-7-1.*{message}"):
        raise second
    for got, want in ((first, healthy[0]), (third, healthy[2])):
        assert isinstance(got, AlignedScores)
        assert isinstance(want, AlignedScores)
        assert got.log_probs.tolist() == want.log_probs.tolist()


def test_rounding_above_zero_is_zero() -> None:
    result = GenerateResult("r", (), (), "length", "v", input_log_probs=(None, 5e-5, -0.5), input_ids=(7, 1, 2))
    assert response_log_probs(result, [1, 2]).tolist() == [0.0, -0.5]


def test_a_fault_in_the_prompt_part_does_not_matter() -> None:
    result = GenerateResult("r", (), (), "length", "v", input_log_probs=(None, None, -0.5), input_ids=(7, 8, 2))
    assert response_log_probs(result, [2]).tolist() == [-0.5]
    assert response_log_probs(result, []).tolist() == []


def test_an_unreachable_teacher_is_not_a_faulty_sample() -> None:
    class Down(ScriptedTeacher):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            raise EngineUnavailableError("teacher", "down", "an answer", "start it")

    with pytest.raises(EngineUnavailableError, match="teacher='down'"):
        score(make_teacher(Down()), [sample(0, [2])])


@pytest.mark.parametrize("max_batch", [1, 2, 100])
def test_a_sample_too_long_for_the_teacher_fails_alone_and_is_not_sent(max_batch: int) -> None:
    """The prompt takes 3 teacher tokens; responses of 2, 3, 1 and 4 tokens meet a limit of 5."""
    engine = ScriptedTeacher()
    samples = [sample(i, [2] * n) for i, n in enumerate((2, 3, 1, 4))]
    got = score(make_teacher(engine, max_batch, max_tokens=5), samples)
    free = score(make_teacher(ScriptedTeacher()), samples)
    for i in (0, 2):
        assert isinstance(got[i], AlignedScores)
        assert got[i].log_probs.tolist() == free[i].log_probs.tolist()
    for i, n in ((1, 6), (3, 7)):
        assert isinstance(got[i], TeacherScoreError)
        assert str(got[i]).startswith(f"teacher request score-0-7-{i}='{n} tokens': expected at most 5, ")
        assert "Remedy: " in str(got[i])
    assert [r.rid for batch in engine.batches for r in batch] == ["score-0-7-0", "score-0-7-2"]


# ---- what else a teacher can be asked ----


class Listing(ScriptedTeacher):
    """Also answers with a top list of the ids 1, 2, 3 (log-prob -id/10 - p/100 at position p), and with asked ids."""

    def __init__(self, top: Sequence[int] = (1, 2, 3), drop: int | None = None) -> None:
        super().__init__()
        self.top, self.drop = top, drop

    def value(self, p: int, token: int) -> float:
        return -token / 10 - p / 100

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        out = []
        for r, answer in zip(requests, await super().generate(requests), strict=True):
            at = range(r.logprob_start_len, len(r.input_ids))
            best = tuple(tuple((self.value(p, i), i) for i in self.top[: r.top_logprobs_num]) for p in at)
            asked = tuple(tuple((self.value(p, i), i) for i in r.token_ids_logprob or () if i != self.drop) for p in at)
            out.append(
                dataclasses.replace(
                    answer,
                    input_top_logprobs=(None, *best[1:]) if r.top_logprobs_num else (),
                    input_token_ids_logprobs=(None, *asked[1:]) if r.token_ids_logprob else (),
                )
            )
        return out


def test_candidates_of_the_teacher_come_in_the_students_ids() -> None:
    """Teacher ids 1 (ab), 2 (c), 3 (U+FFFD): the student has c as 2, and neither of the others."""
    engine = Listing()
    (scores,) = asyncio.run(make_teacher(engine).score([sample(0, [2, 0, 1, 3])], Scoring(top_k=3)))
    assert isinstance(scores, AlignedScores)
    assert scores.candidates is not None
    # Aligned are c (input position 3) and the end of turn (5); a and b are not.
    assert scores.candidates.ids.tolist() == [[2, -1, -1], [-1] * 3, [-1] * 3, [2, -1, -1]]
    assert scores.candidates.teacher_log_probs[[0, 3], 0] == pytest.approx([-0.23, -0.25])
    assert np.isnan(scores.candidates.student_log_probs[0, 0]), "nobody asked the student"
    assert engine.batches[0][0].top_logprobs_num == 3


def test_candidates_of_the_student_get_exact_values() -> None:
    """The student lists c (2), a (0) and its end (3); the teacher's own list has c; a and the end are asked for."""
    engine = Listing(top=(2,))
    tops = [[{2: -0.5, 0: -1.0, 3: -2.0}] * 2]
    samples = [sample(0, [2, 3])]
    scoring = Scoring(top_k=3, support="student")
    (scores,) = asyncio.run(make_teacher(engine).score(samples, scoring, tops))
    assert isinstance(scores, AlignedScores)
    c = scores.candidates
    assert c is not None
    # Input: 5 5 5 c end. At position 3 the teacher's values are end(0): -0.03, c(2): -0.23, a(4): -0.43.
    assert c.ids.tolist() == [[3, 2, 0], [3, 2, 0]]
    assert c.teacher_log_probs[0] == pytest.approx([-0.03, -0.23, -0.43])
    assert c.student_log_probs[0].tolist() == [-2.0, -0.5, -1.0]
    exact = engine.batches[1][0]
    assert exact.token_ids_logprob == (0, 4), "only what the list does not tell"
    assert (exact.input_ids, exact.logprob_start_len) == ((5, 5, 5, 2, 0), 2)
    both = asyncio.run(make_teacher(engine).score(samples, Scoring(top_k=3, support="union"), tops))[0]
    assert isinstance(both, AlignedScores)
    assert both.candidates is not None
    assert both.candidates.ids.shape == (2, 6)
    assert set(both.candidates.ids[0].tolist()) == {0, 2, 3, -1}


def test_long_responses_are_asked_for_in_windows() -> None:
    engine = Listing(top=(2,))
    n = 70
    tops = [[{0: -1.0}] * n]
    (scores,) = asyncio.run(make_teacher(engine).score([sample(0, [2] * n)], Scoring(top_k=1, support="student"), tops))
    assert isinstance(scores, AlignedScores)
    assert scores.candidates is not None
    assert (scores.candidates.ids[:, 0] == 0).all()
    want = [engine.value(3 + i, 4) for i in range(n)]
    assert scores.candidates.teacher_log_probs[:, 0] == pytest.approx(want)
    windows = engine.batches[1]
    assert [(len(r.input_ids), r.logprob_start_len) for r in windows] == [(35, 2), (67, 34), (73, 66)]


def test_a_candidate_without_an_answer_fails_the_sample() -> None:
    tops = [[{0: -1.0}]]
    teacher = make_teacher(Listing(top=(2,), drop=4))
    (error,) = asyncio.run(teacher.score([sample(0, [2])], Scoring(top_k=1, support="student"), tops))
    assert isinstance(error, TeacherScoreError)
    assert "response position 0" in str(error)
    no_list = asyncio.run(make_teacher(ScriptedTeacher()).score([sample(0, [2])], Scoring(top_k=2)))[0]
    assert isinstance(no_list, TeacherScoreError)
    assert "0 lists" in str(no_list)


def test_the_student_is_asked_for_its_own_lists() -> None:
    engine = Listing(top=(1, 2))
    (top,) = asyncio.run(student_candidates(engine, [sample(0, [2, 2])], 2))
    assert isinstance(top, CandidateLists)
    assert top.maps() == [
        {1: pytest.approx(-0.11), 2: pytest.approx(-0.21)},
        {1: pytest.approx(-0.12), 2: pytest.approx(-0.22)},
    ]
    assert engine.batches[0][0].input_ids == (9, 2, 2)
    (error,) = asyncio.run(student_candidates(ScriptedTeacher(), [sample(0, [2])], 2))
    assert isinstance(error, TeacherScoreError)
    assert str(error).startswith("senior answer")


# ---- lists of both sides, by which tokens are selected ----

STUDENT_TOPS = [[{2: -0.5, 0: -1.0, 4: -2.0}, {3: -0.1, 2: -3.0, 1: -4.0}]]


def test_lists_of_both_sides_with_exact_values_of_each_others_entries() -> None:
    """The student lists c a \\xe4, then end c b; the teacher c end a (ids 2, 0, 4) at both positions."""
    engine, senior = Listing(top=(0, 2, 4)), Listing()
    scoring = Scoring(lists=3)
    (scores,) = asyncio.run(make_teacher(engine).score([sample(0, [2, 3])], scoring, STUDENT_TOPS, senior))
    assert isinstance(scores, AlignedScores)
    lists = scores.lists
    assert lists is not None
    assert scores.candidates is None
    assert lists.student_ids.tolist() == [[2, 0, -1], [3, 2, 1]], "the byte \\xe4 has no counterpart"
    assert lists.student_log_probs[1].tolist() == [-0.1, -3.0, -4.0]
    assert lists.teacher_ids.tolist() == [[3, 2, 0], [3, 2, 0]]
    # Input of the teacher: 5 5 5 c end; its value of id t at position p is -t/10 - p/100.
    assert lists.teacher_log_probs[0] == pytest.approx([-0.03, -0.23, -0.43])
    assert lists.teacher_on_student is not None
    assert lists.teacher_on_student[1] == pytest.approx([-0.04, -0.24, -0.54]), "b (5) was asked for"
    assert lists.student_on_teacher is not None
    # Input of the student: 9 c end; its end (3) at position 1, a (0) at position 2 were asked for.
    assert lists.student_on_teacher == pytest.approx(np.array([[-0.31, -0.5, -1.0], [-0.1, -3.0, -0.02]]))
    assert engine.batches[1][0].token_ids_logprob == (5,)
    assert [r.token_ids_logprob for r in senior.batches[0]] == [(0, 3)]
    assert senior.batches[0][0].input_ids == (9, 2, 3)


def test_unpaired_positions_have_no_lists_and_without_cross_scores_nothing_more_is_asked() -> None:
    engine = Listing(top=(0, 2, 4))
    tops = [[STUDENT_TOPS[0][0]] * 4]
    scoring = Scoring(lists=3, cross=False)
    (scores,) = asyncio.run(make_teacher(engine).score([sample(0, [2, 0, 1, 3])], scoring, tops))
    assert isinstance(scores, AlignedScores)
    assert scores.lists is not None
    assert (scores.lists.student_ids[1:3] == -1).all(), "a and b are one token of the teacher's"
    assert scores.lists.teacher_on_student is None
    assert len(engine.batches) == 1


def test_a_server_that_gives_shorter_lists_than_asked_is_reported() -> None:
    """K larger than its limit must not pass for distributions with fewer tokens."""
    (error,) = asyncio.run(
        make_teacher(Listing(top=(0, 2))).score([sample(0, [2, 3])], Scoring(lists=3), STUDENT_TOPS, Listing())
    )
    assert isinstance(error, TeacherScoreError)
    assert "2 candidates': expected the 3 that were asked for. Remedy: lower opd.selection.top_k" in str(error)
    short = [[{2: -0.5}, {2: -0.5}]]
    (error,) = asyncio.run(
        make_teacher(Listing(top=(0, 2, 4))).score([sample(0, [2, 3])], Scoring(lists=3), short, Listing())
    )
    assert isinstance(error, TeacherScoreError)
    assert str(error).startswith("senior answer")


def test_a_cross_score_that_is_missing_fails_its_sample_only() -> None:
    engine, senior = Listing(top=(0, 2, 4)), Listing(drop=0)
    samples = [sample(0, [2, 3]), sample(1, [2])]
    tops = [*STUDENT_TOPS, [{2: -0.5, 0: -1.0, 3: -2.0}]]
    bad, good = asyncio.run(make_teacher(engine).score(samples, Scoring(lists=3), tops, senior))
    assert isinstance(bad, TeacherScoreError)
    assert "no log-prob of id 0" in str(bad)
    assert isinstance(good, AlignedScores)


def test_a_panel_asks_the_senior_only_where_lists_are_wanted() -> None:
    engine, senior = Listing(top=(0, 2, 4)), Listing(top=(0, 1, 2))
    panel = TeacherPanel([make_teacher(engine)], Scoring(lists=3))
    (plain,) = asyncio.run(panel.score([sample(0, [2, 3])], senior, plain=True))
    assert isinstance(plain, AlignedScores)
    assert plain.lists is None
    assert (len(senior.batches), engine.batches[0][0].top_logprobs_num) == (0, 0)
    (scores,) = asyncio.run(panel.score([sample(0, [2, 3])], senior))
    assert isinstance(scores, AlignedScores)
    assert scores.lists is not None
    assert senior.batches[0][0].top_logprobs_num == 3
    with pytest.raises(DataError, match="one teacher per sample"):
        combine([(1.0, scores), (1.0, scores)])


@pytest.mark.parametrize("n", [64, 256, 1024])
def test_deep_lists_ask_twice_whatever_the_length_and_windows_more_and_more(n: int) -> None:
    """What is sent: ids of one reading on each side, against windows whose prefixes are sent again and again."""
    table = TokenBytes(tuple(f" {i}".encode() for i in range(200)), frozenset(), frozenset())
    sent = {}
    for depth in (0, 64):
        engine = Waiting()
        engine.let.set()
        teacher = Teacher(engine, Aligner(table, table, end_of_turn=-1), lambda _: [1, 2, 3], lambda _: [])
        panel = TeacherPanel([teacher], Scoring(lists=8, depth=depth))
        (scores,) = asyncio.run(panel.score([sample(0, [i % 200 for i in range(n)])], engine))
        assert isinstance(scores, AlignedScores)
        assert (scores.bounded is not None) == (depth > 0)
        sent[depth] = (engine.requests, engine.ids)
    assert sent[64] == (2, 2 * n + 4)
    assert sent[0][0] >= 2 + 2 * (n // 32)
    assert sent[0][1] > 2 * n + 2 * n * (n // 32) // 2


class Waiting:
    """Both sides' engine: ten ids a position in arrays, shifted on the teacher's side; exact values wait until `let`."""

    def __init__(self) -> None:
        self.let, self.reached = asyncio.Event(), asyncio.Event()
        self.requests = self.ids = 0

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return [await self.one(r) for r in requests]

    async def one(self, r: GenerateRequest) -> GenerateResult:
        n = len(r.input_ids) - r.logprob_start_len
        self.requests, self.ids = self.requests + 1, self.ids + len(r.input_ids)
        asked = tuple(r.token_ids_logprob or ())
        if asked:
            self.reached.set()
            await self.let.wait()
        ids = np.array(asked or [100 + (5 * r.rid.startswith("score")) + i for i in range(10)], dtype=np.int64)
        lists = CandidateLists(np.tile(ids, n), np.arange(n + 1) * len(ids), np.tile(-1.0 - np.arange(len(ids)) / 8, n))
        return GenerateResult(
            r.rid, (), (), "length", "1", input_log_probs=(None, *[-0.5] * (n - 1)),
            input_ids=r.input_ids[r.logprob_start_len :],
            input_top_logprobs=() if asked else lists, input_token_ids_logprobs=lists if asked else (),
        )  # fmt: skip


def test_a_response_in_flight_takes_a_bounded_number_of_bytes() -> None:
    """With lists of both sides, while exact values are awaited: what docs/results/manager-cost.md says, at two lengths."""
    table = TokenBytes(tuple(f" {i}".encode() for i in range(200)), frozenset(), frozenset())
    held = {}
    for n in (1000, 4000):
        engine = Waiting()
        teacher = Teacher(engine, Aligner(table, table, end_of_turn=-1), lambda _: [1, 2, 3], lambda _: [])
        panel = TeacherPanel([teacher], Scoring(lists=10))
        one = sample(0, [i % 200 for i in range(n)])

        async def run(panel: TeacherPanel = panel, engine: Waiting = engine, one: TandemSample = one) -> int:
            tracemalloc.start()
            task = asyncio.create_task(panel.score([one], engine))
            await engine.reached.wait()
            await asyncio.sleep(0.05)
            now = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            engine.let.set()
            (scores,) = await task
            assert isinstance(scores, AlignedScores), scores
            assert scores.lists is not None
            return now

        held[n] = asyncio.run(run())
    assert (held[4000] - held[1000]) / 3000 < 1500, held


def test_windows_hold_so_many_values_at_most() -> None:
    """Each position wants 100 ids of its own: three times 300 values are within 1024, four times 400 are not."""
    senior = Listing()
    wanted = [frozenset(range(100 * i, 100 * i + 100)) for i in range(4)]
    query = ExactQuery("x-0", [9], [2] * 4, IdsAt.of(wanted))
    (got,) = asyncio.run(exact_log_probs(senior, [query], role="senior"))
    assert not isinstance(got, TeacherScoreError)
    assert [set(g) for g in got.maps()] == [set(w) for w in wanted]
    assert got.maps()[3][305] == pytest.approx(senior.value(4, 305))
    assert [len(r.token_ids_logprob or ()) for r in senior.batches[0]] == [300, 100]


lists = st.dictionaries(st.integers(0, 30), st.sampled_from([-3.0, -1.5, -0.25, -0.0, 0.0]), max_size=6)


@given(
    st.lists(st.tuples(lists, lists), max_size=12), st.lists(st.integers(-1, 30), min_size=1, max_size=25), st.randoms()
)
def test_what_a_side_lacks_is_what_the_other_lists_and_it_does_not(
    pairs: list[tuple[dict[int, float], dict[int, float]]], table: list[int], rng: random.Random
) -> None:
    own, other = [a for a, _ in pairs], [b for _, b in pairs]
    at = rng.sample(range(len(own)), rng.randint(0, len(own)))
    partner = [rng.randrange(len(other)) for _ in at]
    counterpart = np.array(table, dtype=np.int64)
    got = missing_on(
        CandidateLists.of(own), CandidateLists.of(other), counterpart, np.array(at, int), np.array(partner, int)
    )
    expected = plain.missing_on(own, other, counterpart, at, partner)
    assert [frozenset(got.part(i, i + 1).ids.tolist()) for i in range(len(got))] == expected
    assert [(a, b) for a, b, _ in _windows(got)] == plain.windows(expected)


@given(st.lists(lists.filter(lambda entries: len(entries) >= 2), max_size=8), st.booleans())
def test_the_best_of_each_list_are_taken_likeliest_first(known: list[dict[int, float]], alike: bool) -> None:
    if alike:
        known = [dict(list(entries.items())[:2]) for entries in known]
    ids, values = _columns(CandidateLists.of(known), 2)
    expected = plain.columns(known, 2)
    assert (ids.tolist(), values.tolist()) == (expected[0].tolist(), expected[1].tolist())


SAME = SameTokens(make_teacher(ScriptedTeacher()).aligner)
"""Five tokens of the student's, six of the teacher's; both have more than these two, which stand for nothing."""
values_ = st.sampled_from([-3.0, -1.5, -0.25, -0.0, 0.0])
students = st.lists(st.dictionaries(st.integers(0, 6), values_, min_size=2, max_size=4), min_size=4, max_size=4)
teachers = st.lists(st.dictionaries(st.integers(0, 7), values_, min_size=2, max_size=4), min_size=3, max_size=3)


@given(students, teachers, st.sampled_from(["teacher", "student", "union"]), st.booleans(), st.randoms())
def test_arrays_gather_what_dictionaries_do_to_the_last_bit(
    student: list[dict[int, float]], teacher: list[dict[int, float]], support: Support, alike: bool, rng: random.Random
) -> None:
    """c, then a and b (one token of the teacher's), then the end, and every pairing of these."""
    aligner = SAME.aligner
    if alike:
        student, teacher = ([dict(list(m.items())[:2]) for m in side] for side in (student, teacher))
    aligned = aligner.align(aligner.write([2, 0, 1, 3], lambda _: [2, 1]))
    aligned = dataclasses.replace(
        aligned, teacher_index=np.array(rng.choice([[0, -1, -1, 2], [1, 0, 2, -1], [-1] * 4]))
    )
    at = np.flatnonzero(aligned.teacher_index >= 0)
    partner = aligned.teacher_index[at]
    pairs = ((teacher, student, SAME.teacher_of, partner, at), (student, teacher, SAME.student_of, at, partner))
    beyond = []
    for own, other, counterpart, of, by in pairs:
        wanted = plain.missing_on(own, other, counterpart, of.tolist(), by.tolist())
        beyond.append([{i: -1.0 - i / 8 for i in sorted(ids)} for ids in wanted])
    t, s, t_exact, s_exact = map(CandidateLists.of, (teacher, student, *beyond))
    known = [{**a, **b} for a, b in zip(teacher, beyond[0], strict=True)]
    mine = gather_candidates(aligned, SAME, support, 2, t.merged(t_exact), None if support == "teacher" else s)
    theirs = plain.gather_candidates(aligned, SAME, support, 2, known, None if support == "teacher" else student)
    for name in ("ids", "teacher_log_probs", "student_log_probs"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    for exact in (None, (t_exact, s_exact)):
        lists_ = gather_lists(aligned, SAME, 2, t, s, exact)
        plainly = plain.gather_lists(
            aligned, SAME, 2, teacher, student, None if exact is None else (beyond[0], beyond[1])
        )
        for a, b in zip(lists_.columns, plainly.columns, strict=True):
            np.testing.assert_array_equal(a, b)


@given(students, teachers, st.sampled_from([[0, -1, -1, 2], [1, 0, 2, -1], [-1] * 4]))
def test_deep_lists_are_exact_where_they_reach_and_an_upper_bound_beyond(
    student: list[dict[int, float]], teacher: list[dict[int, float]], index: list[int]
) -> None:
    """Whole distributions over all ids; lists of 2 out of deep ones of 3 or of all."""

    def whole(row: dict[int, float], size: int) -> dict[int, float]:
        weights = {i: math.exp(row.get(i, -4.0 - i / 16)) for i in range(size)}
        return {i: math.log(w / sum(weights.values())) for i, w in weights.items()}

    s, t = [whole(r, 7) for r in student], [whole(r, 8) for r in teacher]
    aligner = SAME.aligner
    aligned = aligner.align(aligner.write([2, 0, 1, 3], lambda _: [2, 1]))
    aligned = dataclasses.replace(aligned, teacher_index=np.array(index))

    def top(rows: list[dict[int, float]], n: int) -> CandidateLists:
        return CandidateLists.of([dict(sorted(r.items(), key=lambda e: (-e[1], e[0]))[:n]) for r in rows])

    exact = gather_lists(aligned, SAME, 2, top(t, 2), top(s, 2), (CandidateLists.of(t), CandidateLists.of(s)))
    everything, none = gather_deep(aligned, SAME, 2, top(t, 8), top(s, 7))
    for a, b in zip(everything.columns, exact.columns, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not none.any()
    deep, bound = gather_deep(aligned, SAME, 2, top(t, 3), top(s, 3))
    for a, b in zip(deep.columns[:4], exact.columns[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    for ids, mine, true in (
        (deep.student_ids, deep.teacher_on_student, exact.teacher_on_student),
        (deep.teacher_ids, deep.student_on_teacher, exact.student_on_teacher),
    ):
        assert mine is not None
        assert true is not None
        assert (mine >= true - 1e-12).all(), "never too small"
        too_much = np.where(ids >= 0, np.exp(mine) - np.exp(true), 0.0).sum(1)
        assert (too_much <= bound + 1e-12).all()


@given(st.lists(lists, max_size=8), st.data())
def test_lists_in_arrays_are_the_lists(rows: list[dict[int, float]], data: st.DataObject) -> None:
    arrays = CandidateLists.of(rows)
    assert arrays.maps() == rows
    n = data.draw(st.integers(0, len(rows)))
    assert arrays.last(n).maps() == rows[len(rows) - n :]
    others = data.draw(st.lists(lists, min_size=len(rows), max_size=len(rows)))
    merged = arrays.merged(CandidateLists.of(others))
    assert merged.maps() == [{**a, **b} for a, b in zip(rows, others, strict=True)]
    for i, row in enumerate(rows):
        found = arrays.find(np.full(31, i), np.arange(31)).tolist()
        assert [None if at < 0 else arrays.values[at] for at in found] == [row.get(t) for t in range(31)]


@given(st.lists(st.integers(0, 10**9), max_size=80), st.data())
def test_a_prefix_of_ids_is_their_json(ids: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, len(ids)))
    prefix = IdText(ids).prefix(n)
    assert json.loads(b"".join(prefix.json)) == ids[:n] == list(prefix)
    assert prefix[n // 2 :] == tuple(ids[n // 2 : n])
    grown = IdText(ids[:n])
    grown.extend(ids[n:])
    assert json.loads(b"".join(grown.json)) == ids
    assert grown.prefix(n).json[1] == prefix.json[1]


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, 0.5])
def test_a_list_with_a_value_that_is_none_is_refused(bad: float | None) -> None:
    whole = GenerateResult("r", (), (), "length", "1", input_top_logprobs=(((-1.0, 4), (-2.0, 5)),))
    assert top_of(whole, 1, "teacher").maps() == [{4: -1.0, 5: -2.0}]
    tiny = dataclasses.replace(whole, input_top_logprobs=(((5e-5, 4), (-1e308, 5), (-1e308, 6)),))
    assert top_of(tiny, 1, "teacher").maps() == [{4: 0.0, 5: -1e308, 6: -1e308}]
    twice = dataclasses.replace(whole, input_top_logprobs=(((-1.0, 4), (-2.0, 5), (-3.0, 4)),))
    assert top_of(twice, 1, "teacher").maps() == [{4: -3.0, 5: -2.0}]
    broken = dataclasses.replace(whole, input_top_logprobs=(((-1.0, 4), (bad, 5)),))  # type: ignore[arg-type]
    with pytest.raises(TeacherScoreError, match="response position 0, candidate 5"):
        top_of(broken, 1, "teacher")


# ---- several teachers ----


def panel_teacher(name: str, **options: object) -> Teacher:
    return dataclasses.replace(make_teacher(ScriptedTeacher()), name=name, **options)


def task_sample(task: str, **metadata: object) -> TandemSample:
    s = sample(0, [2, 3])
    return dataclasses.replace(s, prompt=dataclasses.replace(s.prompt, task=task, metadata=metadata))


def test_routing_by_name_then_task_then_the_rest() -> None:
    math = panel_teacher("math", tasks=frozenset({"sum", "product"}))
    code = panel_teacher("code", tasks=frozenset({"python"}))
    rest, other = panel_teacher("rest"), panel_teacher("other")
    panel = TeacherPanel([math, code, rest, other])

    def names(s: TandemSample) -> list[str]:
        return [t.name for t in panel.route(s.prompt)]

    assert names(task_sample("sum")) == ["math"]
    assert names(task_sample("python")) == ["code"]
    assert names(task_sample("poem")) == ["rest", "other"]
    assert names(task_sample("sum", teacher="code")) == ["code"]
    assert names(task_sample("sum", teacher=["rest", "math"])) == ["math", "rest"]
    with pytest.raises(DataError, match=r"metadata.teacher of prompt p='judge': expected names among math, code"):
        panel.route(task_sample("sum", teacher="judge").prompt)
    with pytest.raises(DataError, match=r"opd.teachers=.*expected one for task 'poem'"):
        TeacherPanel([math, code]).route(task_sample("poem").prompt)
    with pytest.raises(DataError, match="a name of its own"):
        TeacherPanel([math, math])


def test_a_panel_asks_each_teacher_for_its_samples_only() -> None:
    a, b = panel_teacher("a", tasks=frozenset({"x"})), panel_teacher("b")
    samples = [dataclasses.replace(task_sample(t), key=SampleKey(0, 7, i)) for i, t in enumerate("xyx")]
    scores = asyncio.run(TeacherPanel([a, b]).score(samples))
    assert all(isinstance(s, AlignedScores) for s in scores)
    assert [[r.rid for r in batch] for batch in a.engine.batches] == [["score-0-7-0", "score-0-7-2"]]  # type: ignore[attr-defined]
    assert [[r.rid for r in batch] for batch in b.engine.batches] == [["score-0-7-1"]]  # type: ignore[attr-defined]


def test_several_teachers_of_a_sample_are_one_weighted_teacher() -> None:
    """One sees the prompt as three tokens, the other as one, so that their values differ."""
    a = panel_teacher("a", weight=3.0)
    b = panel_teacher("b", render=lambda messages: [5])
    (mixed,) = asyncio.run(TeacherPanel([a, b]).score([sample(0, [2, 3])]))
    assert isinstance(mixed, AlignedScores)
    assert mixed.log_probs == pytest.approx([(3 * -0.03 - 0.01) / 4, (3 * -0.04 - 0.02) / 4])
    spoilt = dataclasses.replace(b, engine=ScriptedTeacher({0: FAULTS["no ids"][0]}))
    (error,) = asyncio.run(TeacherPanel([a, spoilt]).score([sample(0, [2, 3])]))
    assert isinstance(error, TeacherScoreError)
    assert str(error).startswith("b answer")
    with pytest.raises(DataError, match=r"opd\.signal"):
        asyncio.run(
            TeacherPanel(
                [panel_teacher("a", engine=Listing()), panel_teacher("b", engine=Listing())], Scoring(top_k=2)
            ).score([sample(0, [2, 3])])
        )


def test_a_position_counts_where_any_teacher_has_a_value() -> None:
    one = panel_teacher("one")
    views = [asyncio.run(one.score([sample(0, ids)]))[0] for ids in ([2, 0, 1],)]
    assert isinstance(views[0], AlignedScores)
    same = dataclasses.replace(
        views[0], log_probs=np.array([-9.0, -8.0, 0.0]), mask=np.array([True, True, False]), unaligned={"boundary": 1}
    )
    mixed = combine([(1.0, views[0]), (1.0, same)])
    assert mixed.log_probs == pytest.approx([(-9 - 0.03) / 2, -8.0, 0.0])
    assert mixed.mask.tolist() == [True, True, False]
    assert mixed.unaligned["boundary"] == 1


# ---- turns, and the check at the start ----


def test_between_turns_the_teacher_reads_its_own_markup() -> None:
    """c, end | the student's markup of a tool's answer | c, end; the teacher's template writes end 1 4 there."""
    engine = ScriptedTeacher()
    shown = (Message("tool", "b"),)
    teacher = dataclasses.replace(make_teacher(engine), bridge=lambda messages: [0, 1, 4] if messages == shown else [])
    plain = sample(0, [2, 3, 1, 1, 2, 3])
    turns = dataclasses.replace(plain, inserted=((2, 4),), inserted_messages=(shown,))
    (scores,) = score(teacher, [turns])
    assert engine.batches[0][0].input_ids == (5, 5, 5, 2, 0, 1, 4, 2, 0)
    assert isinstance(scores, AlignedScores)
    assert scores.mask.tolist() == [True, True, False, False, True, True]
    assert scores.log_probs.tolist() == [-0.03, -0.04, 0.0, 0.0, -0.07, -0.08]
    assert scores.unaligned["inserted"] == 2
    with pytest.raises(DataError, match="inserted_messages='1 entries': expected one per inserted span"):
        dataclasses.replace(plain, inserted_messages=(shown,))


def test_a_teacher_that_cannot_work_is_refused_at_the_start() -> None:
    letters = TokenBytes(tuple(bytes([b]) for b in range(256)), frozenset(), frozenset())
    student = TokenBytes((*letters.table, None), frozenset({256}), frozenset({256}), {256: "<|im_end|>"})
    teacher = TokenBytes((*letters.table, None), frozenset({256}), frozenset({256}), {256: "<|eot_id|>"})

    def make(encode: Callable[[str], list[int]]) -> Teacher:
        aligner = Aligner(student, teacher, end_of_turn=256)
        return Teacher(ScriptedTeacher(), aligner, lambda messages: [1], encode)

    good = make(lambda text: list(text.encode()))
    check_teacher(good)
    assert "256 <|im_end|> (eos, turn_end) -> 256 <|eot_id|>" in describe_special(good.aligner)
    with pytest.raises(ModelError, match=r"tokenizer of teacher=.*expected ids that spell"):
        check_teacher(make(lambda text: list(text.upper().encode())))


class Strict(ScriptedTeacher):
    """Fails a whole batch for one unusable answer, as the HTTP client does."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        answers = await super().generate(requests)
        for answer in answers:
            if any(v is not None and not math.isfinite(v) for v in answer.input_log_probs[1:]):
                raise EngineError(f"teacher engine answer {answer.rid!r}", math.nan, "a finite log-prob", "see its log")
        return answers


@pytest.mark.parametrize("max_batch", [1, 2, 128])
def test_an_engine_that_fails_a_batch_for_one_answer_fails_its_own_sample_only(max_batch: int) -> None:
    samples = [sample(i, [2, 2, 2]) for i in range(4)]
    healthy = score(make_teacher(ScriptedTeacher(), max_batch), samples)
    spoilt = {i: with_value(-1, float("nan")) for i in (1, 2)}
    found = score(make_teacher(Strict(spoilt), max_batch), samples)
    for i, (got, want) in enumerate(zip(found, healthy, strict=True)):
        if i in spoilt:
            assert isinstance(got, TeacherScoreError)
            assert f"score-0-7-{i}" in str(got)
        else:
            assert isinstance(got, AlignedScores)
            assert isinstance(want, AlignedScores)
            assert got.log_probs.tolist() == want.log_probs.tolist()


@pytest.mark.parametrize("kind", [EngineUnavailableError, EngineRejectedError])
def test_an_engine_that_is_away_or_refuses_is_no_samples_own_fault(kind: type[EngineError]) -> None:
    class Away:
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            raise kind("teacher engine", "away", "an answer", "start it")

    with pytest.raises(kind):
        score(make_teacher(Away()), [sample(0, [2])])  # type: ignore[arg-type]
