"""Byte-exact alignment: the inputs that break other implementations, and an independent oracle for everything else."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.distill.alignment import UNALIGNED_REASONS, align_strict, readable_text
from slime_tandem.distill.token_bytes import TokenBytes, build_token_bytes
from slime_tandem.types import AlignedScores


def table(*pieces: str | bytes | None, eos: Sequence[int] = ()) -> TokenBytes:
    """A table by hand; None is a special token."""
    data = tuple(p.encode() if isinstance(p, str) else p for p in pieces)
    return TokenBytes(data, frozenset(i for i, p in enumerate(data) if p is None), frozenset(eos))


def own_scores(n: int) -> list[float]:
    """Log-probs that name their position: -1, -2, ..."""
    return [-float(j + 1) for j in range(n)]


def pairs(scores: AlignedScores) -> list[int | None]:
    """Teacher position of every student position, read back from `own_scores`."""
    return [round(-lp) - 1 if used else None for lp, used in zip(scores.log_probs, scores.mask, strict=True)]


def align(student_ids: Sequence[int], s: TokenBytes, teacher_ids: Sequence[int], t: TokenBytes) -> AlignedScores:
    return align_strict(student_ids, s, teacher_ids, t, own_scores(len(teacher_ids)))


# ---- readable_text ----


def offsets_oracle(data: bytes) -> tuple[list[int], list[bool]]:
    """The same facts from Python's own decoder: it reports each broken stretch to an error handler."""
    broken_spans: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        broken_spans.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note-spans", note)
    data.decode("utf-8", "note-spans")
    inside = {i for a, b in broken_spans for i in range(a + 1, b)}
    offsets = [
        -1 if i in inside else i + sum(3 - (b - a) for a, b in broken_spans if b <= i) for i in range(len(data) + 1)
    ]
    return offsets, [any(a <= i < b for a, b in broken_spans) for i in range(len(data))]


utf8_like = st.lists(
    st.one_of(st.binary(max_size=4), st.sampled_from(["a", " ", "\u00e9", "\u4f60", "\U0001f680", "\ufffd"]).map(str.encode)),
    max_size=12,
).map(b"".join)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(utf8_like)
def test_readable_text_is_the_lossy_decoding_with_its_offsets(data: bytes) -> None:
    text, offsets, broken = readable_text(data)
    assert text == data.decode("utf-8", "replace")
    assert (offsets.tolist(), broken.tolist()) == offsets_oracle(data)
    assert offsets[-1] == len(text.encode())


# ---- the cases that break public implementations (reference list, by number) ----


def test_1_a_lone_fragment_in_mid_sequence_shifts_nothing() -> None:
    s = table("a", b"\xe4\xbd", " b", "c")
    t = table("a", "\ufffd", " b", "c")
    scores = align([0, 1, 2, 3], s, [0, 1, 2, 3], t)
    assert pairs(scores) == [0, None, 2, 3]
    assert scores.unaligned == {"special": 0, "boundary": 0, "invalid_utf8": 1}


def test_1_a_real_replacement_character_is_text_like_any_other() -> None:
    t = table("a", "\ufffd")
    assert pairs(align([0, 1, 0], t, [0, 1, 0], t)) == [0, 1, 2]


def test_1_each_broken_stretch_is_one_replacement_character() -> None:
    """A fragment of one character cut short, then a stray continuation byte: two U+FFFD, and the rest still pairs."""
    s = table(b"\xf0\x9f", b"\x9a", b"\x80\x80", "x")
    text, _, _ = readable_text(s.join([0, 0, 3]))
    assert text == "\ufffd\ufffdx"
    t = table("\ufffd", "x", "\U0001f680")
    assert pairs(align([0, 0, 3], s, [0, 0, 1], t)) == [None, None, 2]
    # All four bytes of the character by three tokens, then one byte too many: only the surplus is broken.
    scores = align([0, 1, 2, 3], s, [2, 0, 1], t)
    assert pairs(scores) == [None, None, None, 2]
    assert scores.unaligned == {"special": 0, "boundary": 2, "invalid_utf8": 1}


def test_2_a_full_width_special_token_has_no_bytes(mixed: Any) -> None:
    m = build_token_bytes(mixed, frozenset({mixed.eos_token_id}))
    assert mixed.eos_token == "<\uff5cend\u2581of\u2581sentence\uff5c>"
    hi = mixed.encode("hi", add_special_tokens=False)
    s = table("h", "i", None, eos=[2])
    scores = align([0, 1, 2], s, [*hi, mixed.eos_token_id], m)
    assert scores.mask[-1]
    in_middle = align([*hi, mixed.eos_token_id, *hi], m, [*hi, *hi], m)
    assert pairs(in_middle) == [*range(len(hi)), None, *range(len(hi), 2 * len(hi))]
    assert in_middle.unaligned["special"] == 1


def test_3_sampled_ids_are_taken_as_they_are() -> None:
    """The student writes letter by letter what its own encoder would write as one token."""
    s = table("the", "t", "h", "e", " cat")
    t = table("the", " cat", "th", "e")
    assert pairs(align([1, 2, 3, 4], s, [0, 1], t)) == [None, None, None, 1]
    assert pairs(align([1, 2, 3, 4], s, [2, 3, 1], t)) == [None, None, 1, 2]


def test_4_ends_of_turn_pair_by_role_not_by_number() -> None:
    s = table("a", None, None, eos=[1, 2])
    t = table(None, "a", None, eos=[2])
    for end in (1, 2):
        scores = align([0, end], s, [1, 2], t)
        assert pairs(scores) == [0, 1]
        assert scores.coverage == 1.0
    # The teacher was given no end of turn, or ends in a special token of another role: nothing is guessed.
    assert pairs(align([0, 1], s, [1], t)) == [0, None]
    assert pairs(align([0, 1], s, [1, 0], t)) == [0, None]
    # The student did not end its turn: the teacher's surplus end stays unused.
    assert pairs(align([0, 0], s, [1, 1, 2], t)) == [0, 1]
    # An end of turn in mid-response has no counterpart.
    assert pairs(align([1, 0], s, [1], t)) == [None, 0]


def test_5_a_marker_that_is_one_token_here_and_text_there() -> None:
    s = table("<think>", "x", " y")
    t = table("<", "think", ">", "x", " y")
    assert pairs(align([0, 1, 2], s, [0, 1, 2, 3, 4], t)) == [None, 3, 4]
    assert pairs(align([0, 1, 2, 3, 4], t, [0, 1, 2], s)) == [None, None, None, 1, 2]


def test_5_a_teacher_that_reads_spelt_text_as_its_special_token_proves_nothing_behind_it() -> None:
    """Offsets behind the special token are lost; equal letters there must not pair by accident."""
    s = table("<", "e", ">", "a")
    t = table("<", "e", "a", ">", None)
    spelt = [3, 0, 1, 2, 0, 1, 3, 3]  # a<e><eaa
    assert pairs(align(spelt, s, [2, 0, 1, 3, 0, 1, 2, 2], t)) == list(range(8)), "read as text, all is well"
    scores = align(spelt, s, [2, 4, 0, 1, 2, 2], t)  # a, <e> as control token, <eaa
    assert pairs(scores) == [0, *[None] * 7]
    assert scores.unaligned["boundary"] == 7


def test_6_emoji_and_cjk_split_over_byte_tokens_on_one_side() -> None:
    rocket, ni = "\U0001f680".encode(), "\u4f60".encode()
    s = table(rocket[:2], rocket[2:], ni[:1], ni[1:], "z")
    t = table("\U0001f680", "\u4f60", "z")
    scores = align([0, 1, 2, 3, 4], s, [0, 1, 2], t)
    assert pairs(scores) == [None] * 4 + [2]
    assert scores.unaligned == {"special": 0, "boundary": 4, "invalid_utf8": 0}
    assert pairs(align([0, 1, 2, 3, 4], s, [0, 1, 2, 3, 4], s)) == [0, 1, 2, 3, 4], "split alike, the halves do pair"


def test_7_a_teacher_that_changes_the_text_is_believed_only_up_to_the_change() -> None:
    s = table(" a", "a", "b", "\uff11", "1", " ")
    assert pairs(align([1, 2], s, [0, 2], s)) == [None, None], "a space that was not there"
    assert pairs(align([1, 3, 2], s, [1, 4, 2], s)) == [0, None, None], "NFKC made a 1 of a wide digit"
    assert pairs(align([1, 5, 5, 2], s, [1, 5, 2], s)) == [0, 1, None, None], "a space was swallowed"
    assert pairs(align([1, 2], s, [1], s)) == [0, None], "text is missing at the end"


def test_8_padded_vocabulary_ids_are_no_text() -> None:
    s, t = table("a", "b"), table("ab", "a", "b")
    scores = align([0, 151_700, 1, -1], s, [1, 2], t)
    assert pairs(scores) == [0, None, 1, None]
    assert scores.unaligned == {"special": 2, "boundary": 0, "invalid_utf8": 0}
    assert pairs(align([0, 1], s, [1, 99], t)) == [0, None], "on the teacher's side neither"


def test_10_empty_and_single_token_responses() -> None:
    s = table("a", None, eos=[1])
    empty = align([], s, [], s)
    assert (pairs(empty), empty.coverage, sum(empty.unaligned.values())) == ([], 1.0, 0)
    assert pairs(align([0], s, [0], s)) == [0]
    assert pairs(align([1], s, [1], s)) == [0], "only the end of turn"
    assert pairs(align([0], s, [], s)) == [None]
    assert pairs(align([], s, [1], s)) == []


def test_10_cut_in_mid_character_at_the_length_cap() -> None:
    rocket = "\U0001f680".encode()
    s = table("go ", rocket[:2], rocket[2:])
    t = table("go ", "\ufffd", "\U0001f680")
    scores = align([0, 1], s, [0, 1], t)
    assert pairs(scores) == [0, None]
    assert scores.unaligned["invalid_utf8"] == 1
    assert pairs(align([0, 1, 2], s, [0, 2], t)) == [0, None, None]


def test_equal_spans_with_other_bytes_do_not_pair() -> None:
    """Three bytes of half a character, read as the three bytes of U+FFFD: equal length is no proof."""
    s, t = table(b"\xf0\x9f\x9a", "x"), table("\ufffd", "x")
    assert pairs(align([0, 1], s, [0, 1], t)) == [None, 1]


def test_log_probs_are_the_teachers_own_and_zero_elsewhere() -> None:
    s = table("a", "b", "ab")
    scores = align_strict([2, 0, 1], s, [2, 2], s, [-0.25, -7.5])
    assert scores.log_probs.tolist() == [-0.25, 0.0, 0.0]
    assert scores.coverage == pytest.approx(1 / 3)


# ---- laws on real tokenizers ----


def oracle(student_ids: Sequence[int], s: TokenBytes, teacher_ids: Sequence[int], t: TokenBytes) -> list[int | None]:
    """Every pair of equal bytes at the same place, by comparing all with all; `teacher_ids` must spell the text."""
    data = s.join(student_ids)
    offsets, broken = offsets_oracle(data)
    teacher_spans: dict[tuple[int, int], int] = {}
    at = 0
    for j, token in enumerate(teacher_ids):
        n = len(t.of(token) or b"")
        if n:
            teacher_spans[(at, at + n)] = j
        at += n
    out: list[int | None] = []
    at = 0
    for token in student_ids:
        n = len(s.of(token) or b"")
        clean = n and not any(broken[at : at + n])
        out.append(teacher_spans.get((offsets[at], offsets[at + n])) if clean else None)
        at += n
    if student_ids and student_ids[-1] in s.eos_ids and teacher_ids and teacher_ids[-1] in t.eos_ids:
        out[-1] = len(teacher_ids) - 1
    return out


@pytest.fixture(scope="session")
def sides(english: Any, mixed: Any, gemma: Any) -> dict[str, tuple[Any, TokenBytes]]:
    named = {"english": english, "mixed": mixed, "gemma": gemma}
    return {name: (hf, build_token_bytes(hf, frozenset({hf.eos_token_id}))) for name, hf in named.items()}


def teacher_view(hf: Any, t: TokenBytes, student_ids: Sequence[int], s: TokenBytes) -> list[int]:
    """What `distill.scoring` sends."""
    text, _, _ = readable_text(s.join(student_ids))
    ids = list(hf.encode(text, add_special_tokens=False, split_special_tokens=True))
    return [*ids, min(t.eos_ids)] if student_ids and student_ids[-1] in s.eos_ids else ids


COMBINATIONS = [
    ("english", "mixed"),
    ("mixed", "english"),
    ("english", "gemma"),
    ("gemma", "mixed"),
    ("mixed", "mixed"),
]


@pytest.mark.parametrize(("student", "teacher"), COMBINATIONS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_arbitrary_ids_pair_exactly_as_the_oracle_says(sides: Any, student: str, teacher: str, data: Any) -> None:
    """No id sequence raises; every used pair has equal bytes at an equal place, and no such pair is missed."""
    (_, s), (hf, t) = sides[student], sides[teacher]
    ids = data.draw(st.lists(st.integers(-1, len(s.table) + 3), max_size=25))
    teacher_ids = teacher_view(hf, t, ids, s)
    scores = align(ids, s, teacher_ids, t)
    assert pairs(scores) == oracle(ids, s, teacher_ids, t)
    for i, j in enumerate(pairs(scores)):
        assert j is None or s.of(ids[i]) == t.of(teacher_ids[j])
    used = [j for j in pairs(scores) if j is not None]
    assert used == sorted(set(used)), "in order, and no teacher token is used twice"
    assert tuple(scores.unaligned) == UNALIGNED_REASONS
    assert len(used) + sum(scores.unaligned.values()) == len(ids) == len(scores.mask), "each position is counted once"
    assert np.all(scores.log_probs[~scores.mask] == 0.0)


PIECES = ["The quick", " brown", " fox", "12", "345", "\n\n", " the answer is", "  ", "<think>", "q"]
PIECES += ["\u4f60\u597d", "\U0001f680", "caf\u00e9"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize(("student", "teacher"), COMBINATIONS[:4])
@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_real_text_pairs_exactly_as_the_oracle_says(sides: Any, student: str, teacher: str, text: str) -> None:
    (student_hf, s), (hf, t) = sides[student], sides[teacher]
    ids = [*student_hf.encode(text, add_special_tokens=False), student_hf.eos_token_id]
    teacher_ids = teacher_view(hf, t, ids, s)
    scores = align(ids, s, teacher_ids, t)
    assert pairs(scores) == oracle(ids, s, teacher_ids, t)
    assert scores.mask[-1], "the end of turn always pairs"
    assert scores.unaligned["invalid_utf8"] == scores.unaligned["special"] == 0


@pytest.mark.parametrize("name", ["english", "mixed", "gemma"])
@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_one_tokenizer_on_both_sides_covers_everything(sides: Any, name: str, text: str) -> None:
    hf, table_ = sides[name]
    ids = [*hf.encode(text, add_special_tokens=False, split_special_tokens=True), hf.eos_token_id]
    teacher_ids = teacher_view(hf, table_, ids, table_)
    assert teacher_ids == ids
    scores = align(ids, table_, teacher_ids, table_)
    assert scores.coverage == 1.0
    assert scores.log_probs.tolist() == own_scores(len(ids))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, 9), max_size=15), st.lists(st.integers(-1, 9), max_size=15))
def test_teacher_ids_that_have_nothing_to_do_with_the_text_never_raise(a: list[int], b: list[int]) -> None:
    """And what pairs is still proven: the teacher's bytes up to there are the text's."""
    s = table("a", "b", "ab", None, b"\xe4", b"\xbd\xa0", "\u4f60", " ", "\ufffd", eos=[3])
    scores = align(a, s, b, s)
    text, offsets, _ = readable_text(s.join(a))
    for i, j in enumerate(pairs(scores)):
        if j is not None and a[i] != 3:
            before = s.join(b[:j])
            assert text.encode().startswith(before + (s.of(b[j]) or b""))
            assert len(before) == offsets[len(s.join(a[:i]))]
    assert len(scores.mask) == len(a)


def test_a_long_broken_response_is_no_trouble() -> None:
    rng = random.Random(0)
    s = TokenBytes(tuple(bytes([b]) for b in range(256)), frozenset(), frozenset())
    ids = [rng.randrange(256) for _ in range(3000)]
    text, _, _ = readable_text(s.join(ids))
    scores = align(ids, s, list(text.encode()), s)
    assert pairs(scores) == oracle(ids, s, list(text.encode()), s)
