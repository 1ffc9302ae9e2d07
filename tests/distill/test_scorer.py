"""A scorer of one's own: its answers, and everything that may be wrong with them, come out as a server's do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from slime_tandem.config import TeacherSpec
from slime_tandem.distill.alignment import Aligner
from slime_tandem.distill.scorer import ScorerEngine
from slime_tandem.distill.teacher import Scoring, Teacher
from slime_tandem.errors import EngineRejectedError, TeacherScoreError
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import AlignedScores, Message, Prompt, SampleKey, TandemSample

STUDENT = TokenBytes((b"a", b"b", b"ab", None), frozenset({3}), frozenset({3}))
OTHER = TokenBytes((None, b"b", b"a"), frozenset({0}), frozenset({0}))


SAMPLED = Scoring()


class Letters:
    """A tokenizer of single letters, its own end of turn first."""

    tokens, end_of_turn = OTHER, 0

    def render(self, messages: Sequence[Message]) -> list[int]:
        return [2, 2]

    def encode(self, text: str) -> list[int]:
        return [{"a": 2, "b": 1}[letter] for letter in text]


class Fixed:
    """Log-prob -0.5 times the id, or whatever `answer` is; keeps what it was asked."""

    tokenizer = Letters()

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    async def log_probs(self, ids: Sequence[int], start: int) -> Sequence[float]:
        self.asked.append((tuple(ids), start))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return [-0.5 * i for i in ids[start:]] if self.answer is None else self.answer


def score(scorer: Fixed, ids: tuple[int, ...], scoring: Scoring = SAMPLED) -> AlignedScores | TeacherScoreError:
    letters = scorer.tokenizer
    teacher = Teacher(
        ScorerEngine(scorer, "mine"),
        Aligner(STUDENT, OTHER, end_of_turn=0),
        letters.render,
        letters.encode,
        name="mine",
    )
    n = len(ids)
    sample = TandemSample(
        SampleKey(0, 0, 0), 0, Prompt("p", (), None, "t"), (0,), ids, (1,) * n, (-1.0,) * n, "stop", "", ()
    )
    (found,) = asyncio.run(teacher.score([sample], scoring))
    return found


def test_its_values_stand_where_the_bytes_are_proven() -> None:
    scorer = Fixed()
    found = score(scorer, (0, 2, 1, 3))
    assert scorer.asked == [((2, 2, 2, 2, 1, 1, 0), 2)], "the prompt, and the response in its own tokens"
    assert isinstance(found, AlignedScores)
    assert found.mask.tolist() == [True, False, True, True], "`ab` is two tokens there"
    assert found.log_probs.tolist() == [-1.0, 0.0, -0.5, 0.0]
    even = score(Fixed(), (0, 2, 1, 3), Scoring("even"))
    assert isinstance(even, AlignedScores)
    assert even.log_probs.tolist() == [-1.0, -1.5, -0.5, 0.0]


@pytest.mark.parametrize("answer", [[], [-1.0], [-1.0, float("nan")], [-1.0, 0.5], [-1.0, float("-inf")]])
def test_an_answer_that_cannot_be_fails_its_sample(answer: list[float]) -> None:
    assert isinstance(score(Fixed(answer), (0, 3)), TeacherScoreError)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (KeyError("x"), "KeyError"),
        (SystemExit(0), "SystemExit: 0"),
        (3, "TypeError"),
        (["one"], "ValueError"),
        ([None, None], "TypeError"),
    ],
)
def test_a_scorer_that_breaks_stops_the_run(answer: Any, says: str) -> None:
    with pytest.raises(EngineRejectedError, match=rf"scorer of mine at score-0-0-0=.*{says}.*mend the scorer"):
        score(Fixed(answer), (0, 3))


def test_lists_are_refused_by_name() -> None:
    with pytest.raises(EngineRejectedError, match=r"scorer of mine='lists of likely tokens'.*opd\.signal=sampled"):
        score(Fixed(), (0, 3), Scoring(top_k=2))


def test_an_entry_without_a_model() -> None:
    assert TeacherSpec(name="mine", scorer="m:f").model == ""
