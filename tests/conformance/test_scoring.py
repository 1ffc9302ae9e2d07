"""A teacher on both servers: its scores, lists and exact values at the student's positions are those of transformers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_tandem.config import Support
from slime_tandem.distill.alignment import Aligner
from slime_tandem.distill.panel import TeacherPanel
from slime_tandem.distill.teacher import Scoring, Teacher, check_teacher
from slime_tandem.engines.client import EngineClient
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.types import AlignedScores, Message, Prompt, SampleKey, TandemSample

TOLERANCE = 1e-4
TEXTS = ["State the answer: 12 + 34 = 46 \U0001f680", "", "answer", "\u4f60\u597d <answer>7</answer>\n\n  carry"]


def responses(student: ModelTokenizer, teacher: ModelTokenizer) -> list[TandemSample]:
    """Canonical text, letter by letter, broken bytes, and an end of turn in the middle."""
    rng = np.random.default_rng(0)
    letters = {data: i for i, data in enumerate(student.tokens.table) if data and len(data) == 1}
    sequences = [[*student.encode(text), student.end_of_turn] for text in TEXTS]
    sequences += [[letters[bytes([b])] for b in text.encode()] for text in TEXTS]
    sequences += [[int(i) for i in rng.integers(0, len(student.tokens.table), 12)] for _ in range(6)]
    sequences.append([*sequences[0][:4], student.end_of_turn, *sequences[0][4:]])
    out = []
    for i, ids in enumerate(sequences):
        prompt = Prompt(f"p{i}", (Message("user", f"{i} + {i} ="),), None, "t")
        n = len(ids)
        prompt_ids = tuple(student.render(prompt.messages))
        out.append(
            TandemSample(SampleKey(0, 0, i), 0, prompt, prompt_ids, tuple(ids), (1,) * n, (-1.0,) * n, "stop", "", ())
        )
    return out


def score(
    rig: Any, teacher: ModelTokenizer, student: ModelTokenizer, samples: Sequence[TandemSample], scoring: Scoring
) -> Any:
    async def main() -> Any:
        async with (
            EngineClient(rig.servers["senior"].url, role="teacher", api_key=rig.key, max_retries=0) as client,
            EngineClient(rig.servers["junior"].url, role="senior", api_key=rig.key, max_retries=0) as senior,
        ):
            aligner = Aligner(student.tokens, teacher.tokens, end_of_turn=teacher.end_of_turn)
            one = Teacher(client, aligner, teacher.render, teacher.encode, max_batch=5, concurrency=2)
            check_teacher(one)
            return one, await TeacherPanel([one], scoring).score(samples, senior)

    return asyncio.run(main())


# The rig serves no student of another vocabulary, so that only the teacher's own lists can be asked for there.
CASES: list[tuple[str, Support]] = [
    ("other vocabulary", "teacher"),
    ("same vocabulary", "teacher"),
    ("same vocabulary", "student"),
    ("same vocabulary", "union"),
]


@pytest.mark.parametrize(("student_kind", "support"), CASES)
def test_scores_and_candidates_equal_transformers(rig: Any, trio: Any, student_kind: str, support: Support) -> None:
    """The rig's senior is the teacher; its junior plays the student where the vocabulary is the same."""
    teacher = ModelTokenizer.load(rig.folders["senior"])
    same = student_kind == "same vocabulary"
    student = teacher if same else ModelTokenizer.load(trio.teacher)
    samples = responses(student, teacher)
    one, scores = score(rig, teacher, student, samples, Scoring("strict", 4, support))
    assert one.aligner.same_vocabulary == same
    seen = 0
    for sample, got in zip(samples, scores, strict=True):
        assert isinstance(got, AlignedScores)
        text = one.aligner.write(sample.response_ids, teacher.encode)
        aligned = one.aligner.align(text)
        prompt = teacher.render(sample.prompt.messages)
        table = rig.log_probs([*prompt, *text.ids])
        own = rig.log_probs([*sample.prompt_ids, *sample.response_ids], role="junior") if same else None
        assert got.candidates is not None
        for i, j in enumerate(aligned.teacher_index.tolist()):
            if j < 0:
                assert not got.mask[i]
                assert (got.candidates.ids[i] == -1).all()
                continue
            row = table[len(prompt) + j - 1]
            assert got.log_probs[i] == pytest.approx(row[text.ids[j]], abs=TOLERANCE)
            want = set()
            if support != "student":
                best = np.argsort(-row)[:4]
                want |= {int(t) for t in one.same_tokens.student_of[best] if t >= 0}
            if support != "teacher":
                assert own is not None
                want |= {int(t) for t in np.argsort(-own[len(sample.prompt_ids) + i - 1])[:4]}
            found = [int(c) for c in got.candidates.ids[i] if c >= 0]
            assert set(found) == want
            for c, value, own_value in zip(
                found, got.candidates.teacher_log_probs[i], got.candidates.student_log_probs[i], strict=False
            ):
                assert value == pytest.approx(row[one.same_tokens.teacher_of[c]], abs=TOLERANCE)
                if own is not None and not math.isnan(own_value):
                    assert own_value == pytest.approx(own[len(sample.prompt_ids) + i - 1][c], abs=TOLERANCE)
            seen += 1
    assert seen > 60


@pytest.mark.parametrize("student_kind", ["other vocabulary", "same vocabulary"])
def test_what_is_read_along_is_what_a_whole_response_gets(rig: Any, trio: Any, student_kind: str) -> None:
    """Read in parts of four tokens, from a cache that holds the parts before; any cut, also within a word or a letter."""
    teacher = ModelTokenizer.load(rig.folders["senior"])
    student = teacher if student_kind == "same vocabulary" else ModelTokenizer.load(trio.teacher)
    samples = responses(student, teacher)
    _, whole = score(rig, teacher, student, samples, Scoring())

    async def main() -> Any:
        async with EngineClient(rig.servers["senior"].url, role="teacher", api_key=rig.key, max_retries=0) as client:
            aligner = Aligner(student.tokens, teacher.tokens, end_of_turn=teacher.end_of_turn)
            one = Teacher(client, aligner, teacher.render, teacher.encode)
            for sample in samples:
                for n in range(4, len(sample.response_ids), 4):
                    ids = sample.response_ids[:n]
                    part = replace(sample, response_ids=ids, authorship_mask=(1,) * n, log_probs=(-1.0,) * n)
                    await one.read_along(part)
            known = sum(len(read.log_probs) > 0 for read in one._along.values())
            return known, await one.score(samples)

    known, scores = asyncio.run(main())
    assert known >= len(samples) // 2
    for got, expected in zip(scores, whole, strict=True):
        assert isinstance(got, AlignedScores)
        assert (got.mask == expected.mask).all()
        assert np.abs(got.log_probs - expected.log_probs).max(initial=0.0) < TOLERANCE
