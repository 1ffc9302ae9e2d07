"""What a destructive reader of the distillation part found; each test failed before."""

from __future__ import annotations

import asyncio
import unicodedata
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.distill.alignment import Aligner
from slime_tandem.distill.candidates import SameTokens
from slime_tandem.distill.panel import TeacherPanel, combine
from slime_tandem.distill.special_tokens import map_special_tokens
from slime_tandem.distill.teacher import Teacher, check_teacher
from slime_tandem.errors import DataError, ModelError
from slime_tandem.tokens import reading
from slime_tandem.tokens.reading import _nfc, read_text
from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes
from slime_tandem.types import AlignedScores, Message, Origin, Prompt, SampleKey, TandemSample

from .conftest import ENGLISH, byte_level, sentence_piece

BYTES = [bytes([i]) for i in range(256)]


def letters(text: str) -> list[int]:
    return list(text.encode())


def vocabulary(*names: str, eos: tuple[str, ...] = ()) -> TokenBytes:
    """All bytes, and special tokens from id 256 on."""
    ids = {256 + i: name for i, name in enumerate(names)}
    ends = frozenset(i for i, name in ids.items() if name in eos)
    return TokenBytes((*BYTES, *(None for _ in names)), frozenset(ids), ends, ids)


def test_the_same_token_is_the_one_that_the_tokenizer_writes_not_its_byte_fallback() -> None:
    """SentencePiece has b"1" twice, as <0x31> and as 1, and writes only the second."""
    pieces = build_token_bytes(sentence_piece(), frozenset({2}))
    level = build_token_bytes(byte_level(ENGLISH, 300, "</s>"), frozenset({1}))
    written = {b: sentence_piece().encode(b.decode(), add_special_tokens=False)[-1] for b in (b"1", b"q", b".")}
    for data, canonical in written.items():
        assert pieces.table.count(data) == 2
        there = level.table.index(data)
        same = SameTokens(Aligner(level, pieces, end_of_turn=2))
        assert (same.teacher_of[there], same.student_of[canonical]) == (canonical, there)
        back = SameTokens(Aligner(pieces, level, end_of_turn=1))
        assert back.student_of[there] == canonical


def test_the_teachers_end_of_turn_is_the_students_end_of_turn_not_its_end_of_text() -> None:
    """Qwen and Llama-3: both end a generation, the lower id is not the one that ends a chat's turn."""
    s = vocabulary("<|endoftext|>", "<|im_end|>", eos=("<|endoftext|>", "<|im_end|>"))
    t = vocabulary("</s>", eos=("</s>",))
    assert SameTokens(Aligner(s, t, end_of_turn=256)).student_of[256] == 257
    mistral = vocabulary("</s>", "[INST]", "[/INST]", eos=("</s>",))
    assert SameTokens(Aligner(mistral, s, end_of_turn=257)).student_of[257] == 256


def test_an_end_that_both_sides_have_stays_what_it_is() -> None:
    """A model that teaches itself must have nothing to say: the ids sent are the ids sampled."""
    s = vocabulary("<|endoftext|>", "<|im_end|>", eos=("<|endoftext|>", "<|im_end|>"))
    aligner = Aligner(s, s, end_of_turn=257)
    assert aligner.same_vocabulary
    assert aligner.write([65, 256, 257], letters).ids == (65, 256, 257)


def test_a_special_token_is_not_text_of_the_same_name() -> None:
    """Mistral's begin of text is not Gemma's <s>, a tag of HTML."""
    s = vocabulary("<s>", "</s>", eos=("</s>",))
    t = TokenBytes((*BYTES, b"<s>", None, None), frozenset({257, 258}), frozenset({258}), {256: "<s>", 257: "<bos>"})
    assert map_special_tokens(s, t, 258).ids[256] == 257


def test_without_an_end_of_turn_nothing_stands_for_it() -> None:
    s = vocabulary("<|im_end|>", eos=("<|im_end|>",))
    aligner = Aligner(s, vocabulary(), end_of_turn=-1)
    text = aligner.write([65, 256], letters)
    assert text.ids == (65,)
    assert aligner.align(text).teacher_index.tolist() == [0, -1]


@pytest.mark.parametrize("policy", ["even", "proportional", "chain_rule"])
def test_a_sampled_token_never_gets_the_value_of_inserted_text(policy: Any) -> None:
    s, t = TokenBytes(tuple(BYTES), frozenset(), frozenset()), TokenBytes((*BYTES, b"\n\n"), frozenset(), frozenset())
    aligner = Aligner(s, t, end_of_turn=-1)
    text = aligner.write([65, 10, 10, 66], lambda _: [65, 256, 66], inserted=[(1, 2)])
    scores = aligner.align(text).scores([-1.0, -8.0, -2.0], policy, [-1.0, 0.0, -3.0, -1.0])
    assert scores.mask.tolist() == [True, False, False, True]
    assert {k: n for k, n in scores.unaligned.items() if n} == {"inserted": 1, "boundary": 1}


def test_no_id_raises() -> None:
    s = vocabulary("</s>", eos=("</s>",))
    aligner = Aligner(s, s, end_of_turn=256)
    aligned = aligner.align(aligner.write([65, 2**70, -(2**70), 2**63, 66], letters))
    assert aligned.teacher_index.tolist() == [0, -1, -1, -1, 1]


def test_thinking_kept_from_a_teacher_is_found_in_linear_time() -> None:
    """A pass over all markers for each one would take minutes."""
    s = vocabulary("<think>", "</think>")
    aligner = Aligner(s, vocabulary(), end_of_turn=-1, thinking="drop")
    aligned = aligner.align(aligner.write([256, 65, 257] * 100_000 + [66] + [256] * 200_000, letters))
    assert aligned.teacher_index.max() == 0
    assert (aligned.reason == 5).sum() == 500_000


def teacher(student: TokenBytes, own: TokenBytes, **options: Any) -> Teacher:
    engine: Any = None
    return Teacher(engine, Aligner(student, own, end_of_turn=256, **options), lambda _: [1], letters)


def test_thinking_can_be_kept_from_a_teacher_that_has_markers_itself() -> None:
    s = vocabulary("</s>", "[THINK]", "[/THINK]", eos=("</s>",))
    check_teacher(teacher(s, vocabulary("</s>", "<think>", "</think>", eos=("</s>",)), thinking="drop"))


def test_thinking_cannot_be_dropped_where_nothing_marks_it() -> None:
    s = vocabulary("</s>", eos=("</s>",))
    with pytest.raises(ModelError, match=r"thinking of teacher='drop'.*set keep"):
        check_teacher(teacher(s, s, thinking="drop"))


@pytest.mark.parametrize("chosen", [5, True, 0, 2.5, {"teacher": 1}, [["teacher"]], [1], [], ""])
def test_metadata_of_another_type_is_refused(chosen: object) -> None:
    s = vocabulary("</s>", eos=("</s>",))
    prompt = Prompt("p", (Message("user", "q"),), None, "t", {"teacher": chosen})
    sample = TandemSample(SampleKey(0, 0, 0), 0, prompt, (1,), (65,), (1,), (-1.0,), "stop", "", ())
    with pytest.raises(DataError, match=r"metadata.teacher of prompt p=.*names among teacher"):
        asyncio.run(TeacherPanel([teacher(s, s)]).score([sample]))


def test_huge_weights_are_weights() -> None:
    def score(value: float) -> AlignedScores:
        origin = cast("Origin", SimpleNamespace(reason=np.array([-1])))
        return AlignedScores(np.array([value]), np.array([True]), {}, origin)

    assert combine([(1e308, score(-5.0)), (1e308, score(-7.0))]).log_probs.tolist() == [-6.0]


def test_a_tower_of_accents_is_read_in_linear_time() -> None:
    """CPython's own composition sorts accents by insertion: minutes for this one."""
    composing = TokenBytes(tuple(BYTES), frozenset(), frozenset(), normalises="NFC")
    tower = "a" + "\u0301\u0316" * 50_000 + "\uac00\u11a8"
    read = read_text(tower.encode(), composing)
    assert read.spelt.decode().startswith("\u00e1\u0316\u0316")
    assert read.spelt.decode().endswith("\u0301\uac01")


def test_one_accent_costs_what_one_accent_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a pass in Python over the whole text, a hundred times the rest of `write`."""
    composing = TokenBytes(tuple(BYTES), frozenset(), frozenset(), normalises="NFC")
    looked_at: list[int] = []
    monkeypatch.setattr(reading, "_nfc", lambda text: looked_at.append(len(text)) or _nfc(text))
    prose = "The quick br\u00f6wn fox. " * 6_000
    read = read_text((prose + "cafe\u0301" + prose).encode(), composing)
    assert read.spelt == (prose + "caf\u00e9" + prose).encode()
    assert read.edits is not None
    assert [a.tolist() for a in (read.edits.start, read.edits.width)] == [[len(prose.encode()) + 3], [2]]
    assert sum(looked_at) <= 4
    looked_at.clear()
    read_text(unicodedata.normalize("NFD", prose).encode(), composing)
    assert sum(looked_at) <= 4 * 6_000, "in proportion to the accents"


def test_no_character_that_composition_touches_is_overlooked() -> None:
    known = reading._unstable()
    seconds = reading._second_starters()
    for code in range(0x110000):
        c = chr(code)
        if unicodedata.combining(c) or not unicodedata.is_normalized("NFC", c) or c in seconds:
            assert code < len(known) - 1
            assert known[code]
    assert not known[-1]


@given(
    st.text(st.sampled_from("ae\u00e9\u0301\u0316\u0344\u1100\u1161\u11a8\uac00\u304b\u3099\u2126\ufb1d"), max_size=200)
)
def test_linear_nfc_is_nfc(text: str) -> None:
    assert _nfc(text) == unicodedata.normalize("NFC", text)
