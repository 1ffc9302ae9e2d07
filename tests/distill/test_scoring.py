"""What is asked of a teacher, and which answers are believed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from slime_tandem.distill.scoring import Teacher, response_log_probs
from slime_tandem.distill.token_bytes import TokenBytes
from slime_tandem.engines.protocol import GenerateRequest, GenerateResult
from slime_tandem.errors import EngineUnavailableError, TeacherScoreError
from slime_tandem.types import AlignedScores, AuthorRun, Message, Prompt, SampleKey, TandemSample

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

    return Teacher(engine, TEACHER, render, encode, end_of_turn=0, max_batch=max_batch, max_tokens=max_tokens)


def sample(i: int, ids: Sequence[int], prompt: str = "xyz") -> TandemSample:
    n = len(ids)
    key, task = SampleKey(0, 7, i), Prompt("p", (Message("user", prompt),), None, "t")
    return TandemSample(
        key, 0, task, (9,), tuple(ids), (1,) * n, (-1.0,) * n, "stop", "", (AuthorRun(1, 0, n, "v"),)
    )  # fmt: skip


def score(teacher: Teacher, samples: Sequence[TandemSample]) -> list[AlignedScores | TeacherScoreError]:
    return asyncio.run(teacher.score(samples, STUDENT))


@pytest.mark.parametrize("include_start", [True, False])
def test_scores_land_on_the_students_positions(include_start: bool) -> None:
    """Engines differ in whether the entry at `logprob_start_len` comes back; the response is counted from the end."""
    engine = ScriptedTeacher(include_start=include_start)
    (scores,) = score(make_teacher(engine), [sample(0, [2, 0, 1, 2, 3])])
    assert isinstance(scores, AlignedScores)
    # The teacher reads 5 5 5 | c ab c <end>: c at input position 3, ab at 4, c at 5, the end at 6.
    assert scores.log_probs.tolist() == [-0.03, 0.0, 0.0, -0.05, -0.06]
    assert scores.mask.tolist() == [True, False, False, True, True]
    assert scores.unaligned == {"special": 0, "boundary": 2, "invalid_utf8": 0}
    ((request,),) = engine.batches
    assert request.rid == "score-0-7-0"
    assert request.input_ids == (5, 5, 5, 2, 1, 2, 0)
    assert (request.max_new_tokens, request.logprob_start_len, request.return_logprob) == (0, 2, True)
    assert (request.temperature, request.top_p, request.top_k) == (1.0, 1.0, -1), "the teacher's full distribution"


def test_no_end_of_turn_is_added_to_an_unfinished_response() -> None:
    engine = ScriptedTeacher()
    (scores,) = score(make_teacher(engine), [sample(0, [2, 4])])
    assert engine.batches[0][0].input_ids == (5, 5, 5, 2, 3)
    assert isinstance(scores, AlignedScores)
    assert scores.unaligned == {"special": 0, "boundary": 0, "invalid_utf8": 1}


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
    assert response_log_probs(result, [1, 2]) == [0.0, -0.5]


def test_a_fault_in_the_prompt_part_does_not_matter() -> None:
    result = GenerateResult("r", (), (), "length", "v", input_log_probs=(None, None, -0.5), input_ids=(7, 8, 2))
    assert response_log_probs(result, [2]) == [-0.5]
    assert response_log_probs(result, []) == []


def test_an_unreachable_teacher_is_not_a_faulty_sample() -> None:
    class Down(ScriptedTeacher):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            raise EngineUnavailableError("teacher is down")

    with pytest.raises(EngineUnavailableError, match="teacher is down"):
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
