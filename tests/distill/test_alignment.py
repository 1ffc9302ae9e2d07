"""Byte-exact alignment: the inputs that break other implementations, and an independent oracle for everything else."""

from __future__ import annotations

import codecs
import random
import unicodedata
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import load

from slime_tandem.distill.alignment import UNALIGNED_REASONS, Aligner, Alignment, Bridge, readable_text
from slime_tandem.errors import DataError
from slime_tandem.tokens.reading import read_text
from slime_tandem.tokens.token_bytes import TEXT_CLASSES, TokenBytes, build_token_bytes, encode_exact


def table(*pieces: str | bytes | None, eos: Sequence[int] = (), names: dict[int, str] | None = None) -> TokenBytes:
    """A table by hand; None is a special token."""
    data = tuple(p.encode() if isinstance(p, str) else p for p in pieces)
    return TokenBytes(data, frozenset(i for i, p in enumerate(data) if p is None), frozenset(eos), names or {})


def greedy(t: TokenBytes) -> Callable[[str], list[int]]:
    """An encoder by hand: the longest piece first; U+FFFD needs a piece of its own."""

    def encode(text: str) -> list[int]:
        data, ids = (text.replace("\u2581", " ") if t.marks_spaces else text).encode(), []
        while data:
            known = ((len(p), i) for i, p in enumerate(t.table) if p and data.startswith(p))
            n, i = max(known, key=lambda x: (x[0], -x[1]))
            ids.append(i)
            data = data[n:]
        return ids

    return encode


def run(
    student_ids: Sequence[int], s: TokenBytes, t: TokenBytes, teacher_ids: Sequence[int] | None = None, **options: Any
) -> Alignment:
    """Align; `teacher_ids` stand in for what the teacher's encoder gives for the (only) piece of text."""
    end = min(t.eos_ids, default=0)
    aligner = Aligner(s, t, end_of_turn=end, reuse_ids=False, thinking=options.pop("thinking", "keep"))
    encode = greedy(t) if teacher_ids is None else lambda text: list(teacher_ids)
    return aligner.align(aligner.write(student_ids, encode, **options))


def pairs(aligned: Alignment) -> list[int | None]:
    """Teacher position of every student position."""
    return [j if j >= 0 else None for j in aligned.teacher_index.tolist()]


def align(student_ids: Sequence[int], s: TokenBytes, teacher_ids: Sequence[int] | None, t: TokenBytes) -> Alignment:
    return run(student_ids, s, t, teacher_ids)


def counts(aligned: Alignment) -> dict[str, int]:
    """Reasons that occur, with their counts."""
    unaligned = aligned.scores(np.zeros(len(aligned.teacher_span))).unaligned
    assert tuple(unaligned) == UNALIGNED_REASONS
    return {reason: n for reason, n in unaligned.items() if n}


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


def test_read_text_follows_two_rewritings_at_once() -> None:
    """Composed accents and dropped control characters, broken bytes before and after."""
    letters = tuple(bytes([b]) for b in range(256) if b not in (1, 2))
    reader = TokenBytes(letters, frozenset(), frozenset(), normalises="NFC")
    data = b"\xe4" + "e\u0301\x01x".encode() + b"\x02\x02\xf0\x9f"
    read = read_text(data, reader)
    assert read.text == "\ufffde\u0301\x01x\x02\x02\ufffd"
    assert read.spelt == "\ufffd\u00e9x\ufffd".encode()
    assert read.offsets is not None
    assert read.changed is not None
    #        e4 | e  cc 81 | 01 | x | 02 02 | f0 9f
    assert read.changed.tolist() == [1, 2, 2, 2, 2, 0, 2, 2, 1, 1]
    assert read.offsets.tolist() == [0, 3, -1, -1, 5, 5, 6, 6, 6, -1, 9]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="e\u0301\u0323\u00e9a \u1112\u1161\u11ab\ud55c\u0344\u2126x", max_size=12))
def test_composed_text_keeps_every_byte_that_it_says_it_keeps(text: str) -> None:
    reader = TokenBytes(tuple(bytes([b]) for b in range(256)), frozenset(), frozenset(), normalises="NFC")
    read, data = read_text(text.encode(), reader), text.encode()
    assert read.spelt.decode() == unicodedata.normalize("NFC", text)
    if read.offsets is None or read.changed is None:
        assert read.spelt == data
        return
    for i in range(len(data)):
        if not read.changed[i]:
            at = read.offsets[i]
            assert at >= 0
            assert read.spelt[at] == data[i]
    assert read.offsets[-1] == len(read.spelt)


rewritable = st.sampled_from(["e\u0301", "\u2581", "\u1112\u1161\u11ab", "\u2126", "\x01"]).map(str.encode)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(utf8_like, rewritable), max_size=8).map(b"".join))
def test_all_rewritings_at_once_keep_every_byte_that_they_say_they_keep(data: bytes) -> None:
    """Against the four rewritings done one after the other on the whole text."""
    lost = b"\x01\xbd\xcc"
    letters = tuple(bytes([b]) for b in range(256) if b not in lost)
    reader = TokenBytes(letters, frozenset(), frozenset(), normalises="NFC", marks_spaces=True)
    read = read_text(data, reader)
    text = data.decode("utf-8", "replace")
    assert read.text == text
    assert read.spelt == unicodedata.normalize("NFC", text).replace("\u2581", " ").encode().translate(None, lost)
    if read.offsets is None or read.changed is None:
        assert read.spelt == data
        return
    assert len(read.offsets) == len(data) + 1
    places = read.offsets[read.offsets >= 0].tolist()
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, len(read.spelt))
    for i in np.flatnonzero(read.changed == 0).tolist():
        assert read.spelt[read.offsets[i]] == data[i]
        assert read.offsets[i + 1] == read.offsets[i] + 1


# ---- the cases that break public implementations (reference list, by number) ----


def test_1_a_lone_fragment_in_mid_sequence_shifts_nothing() -> None:
    s = table("a", b"\xe4\xbd", " b", "c")
    t = table("a", "\ufffd", " b", "c")
    aligned = run([0, 1, 2, 3], s, t)
    assert pairs(aligned) == [0, None, 2, 3]
    assert counts(aligned) == {"invalid_utf8": 1}


def test_1_a_real_replacement_character_is_text_like_any_other() -> None:
    t = table("a", "\ufffd")
    assert pairs(run([0, 1, 0], t, t)) == [0, 1, 2]


def test_1_each_broken_stretch_is_one_replacement_character() -> None:
    """A fragment of one character cut short, then a stray continuation byte: two U+FFFD, and the rest still pairs."""
    s = table(b"\xf0\x9f", b"\x9a", b"\x80\x80", "x")
    text, _, _ = readable_text(s.join([0, 0, 3]))
    assert text == "\ufffd\ufffdx"
    t = table("\ufffd", "x", "\U0001f680")
    assert pairs(run([0, 0, 3], s, t)) == [None, None, 2]
    # All four bytes of the character by three tokens, then one byte too many: only the surplus is broken.
    aligned = run([0, 1, 2, 3], s, t)
    assert pairs(aligned) == [None, None, None, 2]
    assert counts(aligned) == {"boundary": 2, "invalid_utf8": 1}


def test_1_a_special_token_ends_a_character_too() -> None:
    """Bytes on its two sides are no character together, unless the teacher has no such token and reads over it."""
    s = table(b"\xe4\xbd", b"\xa0", None, "x", names={2: "<pad>"})
    t = table("\ufffd", "x", "\u4f60", None, names={3: "[PAD]"})
    assert pairs(run([0, 2, 1, 3], s, t)) == [None, 1, None, 3]
    assert pairs(run([0, 1, 3], s, t)) == [None, None, 1]
    assert pairs(run([0, 2, 1, 3], s, table("\ufffd", "x", "\u4f60"))) == [None, None, None, 1]


def test_2_a_full_width_special_token_has_no_bytes(mixed: Any, english: Any) -> None:
    m = build_token_bytes(mixed, frozenset({mixed.eos_token_id}))
    e = build_token_bytes(english, frozenset({english.eos_token_id}))
    assert mixed.eos_token == "<\uff5cend\u2581of\u2581sentence\uff5c>"
    hi = mixed.encode("hi", add_special_tokens=False)
    encode = lambda text: english.encode(text, add_special_tokens=False)  # noqa: E731
    aligner = Aligner(m, e, end_of_turn=english.eos_token_id)
    text = aligner.write([*hi, mixed.eos_token_id, *hi], encode)
    assert text.ids == (*encode("hi"), english.eos_token_id, *encode("hi"))
    assert aligner.align(text).teacher_index[len(hi)] == len(encode("hi"))


def test_3_sampled_ids_are_taken_as_they_are() -> None:
    """The student writes letter by letter what its own encoder would write as one token."""
    s = table("the", "t", "h", "e", " cat")
    t = table("the", " cat", "th", "e")
    assert pairs(align([1, 2, 3, 4], s, [0, 1], t)) == [None, None, None, 1]
    assert pairs(align([1, 2, 3, 4], s, [2, 3, 1], t)) == [None, None, 1, 2]


def test_4_ends_of_turn_pair_by_role_not_by_number() -> None:
    s = table("a", None, None, eos=[1, 2], names={1: "<|endoftext|>", 2: "<|im_end|>"})
    t = table(None, "a", None, eos=[2], names={0: "<|begin_of_text|>", 2: "<|eot_id|>"})
    aligner = Aligner(s, t, end_of_turn=2)
    for end in (1, 2):
        text = aligner.write([0, end], greedy(t))
        assert text.ids == (1, 2)
        assert pairs(aligner.align(text)) == [0, 1]
    # Also in mid-response: the role is the same.
    text = aligner.write([1, 0], greedy(t))
    assert text.ids == (2, 1)
    assert pairs(aligner.align(text)) == [0, 1]
    # What the student did not write, the teacher is not given.
    assert aligner.write([0, 0], greedy(t)).ids == (1, 1)


def test_4_a_begin_of_text_on_one_side_only_is_masked() -> None:
    s = table("a", None, eos=[], names={1: "<s>"})
    t = table("a")
    aligned = run([1, 0, 1], s, t)
    assert pairs(aligned) == [None, 0, None]
    assert counts(aligned) == {"special": 2}


def test_5_a_marker_that_is_one_token_here_and_text_there() -> None:
    s = table("<think>", "x", " y", names={0: "<think>"})
    t = table("<", "think", ">", "x", " y")
    assert pairs(run([0, 1, 2], s, t)) == [None, 3, 4]
    assert pairs(run([0, 1, 2, 3, 4], t, s)) == [None, None, None, 1, 2]
    # The same where the marker is a special token without bytes: the teacher reads it as text, a span of it can be scored.
    special = table(None, "x", " y", names={0: "<think>"})
    aligned = run([0, 1, 2], special, t)
    assert pairs(aligned) == [None, 3, 4]
    assert aligned.scores([-1.0, -2.0, -3.0, -4.0, -5.0], "even").log_probs.tolist() == [-6.0, -4.0, -5.0]


def test_5_markers_pair_by_role_whatever_their_names() -> None:
    s = table(None, "x", None, names={0: "<think>", 2: "</think>"})
    t = table("x", None, None, names={1: "[/THINK]", 2: "[THINK]"})
    aligner = Aligner(s, t, end_of_turn=0)
    text = aligner.write([0, 1, 2, 1], greedy(t))
    assert text.ids == (2, 0, 1, 0)
    assert pairs(aligner.align(text)) == [0, 1, 2, 3]
    assert [str(row) for row in aligner.special.rows] == [
        "0 <think> (think_start) -> 2 [THINK]",
        "2 </think> (think_end) -> 1 [/THINK]",
    ]


def test_5_an_ordinary_token_of_the_teacher_that_spells_the_marker_pairs_by_bytes() -> None:
    s = table(None, "x", names={0: "<think>"})
    t = table("<think>", "x", names={0: "<think>"})
    assert pairs(run([0, 1, 0], s, t)) == [0, 1, 2]
    assert pairs(run([0, 1, 0], t, s)) == [0, 1, 2]


def test_5_a_teacher_that_reads_spelt_text_as_its_special_token_proves_nothing_behind_it() -> None:
    """Offsets at the special token are lost; equal letters there must not pair by accident."""
    s = table("<", "e", ">", "a")
    t = table("<", "e", "a", ">", None)
    spelt = [3, 0, 1, 2, 0, 1, 3, 3]  # a<e><eaa
    assert pairs(run(spelt, s, t)) == list(range(8)), "read as text, all is well"
    aligned = align(spelt, s, [2, 4, 0, 1, 2, 2], t)  # a, <e> as control token, <eaa
    assert pairs(aligned) == [0, None, None, None, 2, 3, 4, 5], "proven from the two ends"
    aligned = align([3, 0, 1, 2, 3], s, [2, 4], t)  # a<e>a, but the teacher's text ends with the control token
    assert pairs(aligned) == [0, None, None, None, None]
    assert counts(aligned) == {"unproven": 4}
    assert pairs(align([3, 0, 1, 2, 3], s, [4, 2], t)) == [None, None, None, None, 1]


def test_6_emoji_and_cjk_split_over_byte_tokens_on_one_side() -> None:
    rocket, ni = "\U0001f680".encode(), "\u4f60".encode()
    s = table(rocket[:2], rocket[2:], ni[:1], ni[1:], "z")
    t = table("\U0001f680", "\u4f60", "z")
    aligned = run([0, 1, 2, 3, 4], s, t)
    assert pairs(aligned) == [None] * 4 + [2]
    assert counts(aligned) == {"boundary": 4}
    assert pairs(run([0, 1, 2, 3, 4], s, s)) == [0, 1, 2, 3, 4], "split alike, the halves do pair"


def test_7_a_teacher_that_changes_the_text_is_believed_only_outside_the_change() -> None:
    s = table(" a", "a", "b", "\uff11", "1", " ")
    assert pairs(align([1, 2], s, [0, 2], s)) == [None, 1], "a space that was not there"
    assert pairs(align([1, 3, 2], s, [1, 4, 2], s)) == [0, None, 2], "NFKC made a 1 of a wide digit"
    assert pairs(align([1, 5, 5, 2], s, [1, 5, 2], s)) == [0, None, None, 2], "one of two spaces was swallowed: which?"
    assert pairs(align([1, 2], s, [1], s)) == [0, None], "text is missing at the end"
    assert pairs(align([1, 1, 1], s, [1, 1], s)) == [None] * 3, "one of three is missing: which?"
    assert counts(align([1, 3, 2], s, [1, 4, 2], s)) == {"unproven": 1}


def test_7_a_composing_teacher_is_known_beforehand() -> None:
    s = table("caf", "e", "\u0301", "!", "\u00e9")
    t = TokenBytes((b"caf", "\u00e9".encode(), b"!"), frozenset(), frozenset(), normalises="NFC")
    aligned = align([0, 1, 2, 3, 4], s, [0, 1, 2, 1], t)
    assert pairs(aligned) == [0, None, None, 2, 3]
    assert counts(aligned) == {"normalised": 2}


def test_7_bytes_that_the_teacher_cannot_write() -> None:
    s = table("a", "\x01", "a\x01", "b")
    t = table("a", "b", *[bytes([b]) for b in range(256) if b != 1])
    assert pairs(align([0, 1, 3], s, [0, 1], t)) == [0, None, 1]
    assert pairs(align([2, 3], s, [0, 1], t)) == [None, 1], "equal places, other bytes"
    assert counts(align([2, 3], s, [0, 1], t)) == {"normalised": 1}
    assert pairs(align([1, 1, 0, 1], s, [0], t)) == [None, None, 0, None]
    # In no policy does such a token get a share.
    assert align([2, 3], s, [0, 1], t).scores([-1.0, -2.0], "even").log_probs.tolist() == [0.0, -2.0]


def test_7_the_mark_of_a_space_is_known_beforehand() -> None:
    """SentencePiece reads U+2581 as a space, wherever it stands."""
    s = table("\u2581", "a", " ", "a\u2581", "\u2582")
    t = TokenBytes((b" ", b"a", "\u2582".encode()), frozenset(), frozenset(), marks_spaces=True)
    aligned = run([0, 1, 2, 1, 4, 0], s, t)
    assert pairs(aligned) == [None, 1, 2, 3, 4, None]
    assert counts(aligned) == {"normalised": 2}
    assert pairs(run([3, 2, 4], s, t)) == [None, 2, 3]
    assert run([0, 1], s, t).text.spelt == b" a"


def test_7_each_unforeseen_change_masks_what_it_touches() -> None:
    """One at the start, one in the middle and one at the end; where the tokenizer cuts the text alike, its places are known."""
    words = " ".join(f"w{i}" for i in range(400))
    text = f"\u2026{words} wow\u2026 {words} no\u2026"
    letters = TokenBytes(tuple(bytes([b]) for b in range(256)), frozenset(), frozenset())

    def encode(given: str) -> list[int]:
        return list(given.replace("\u2026", "...").encode())

    ids = list(text.encode())
    aligner = Aligner(letters, letters, end_of_turn=-1, reuse_ids=False)
    aligned = aligner.align(aligner.write(ids, encode))
    dots = {i for i, b in enumerate(ids) if b in "\u2026".encode()}
    assert {i for i, j in enumerate(pairs(aligned)) if j is None} == dots
    assert counts(aligned) == {"unproven": 9}


def test_7_a_tokenizer_that_cuts_nowhere_alike_is_believed_at_its_two_ends() -> None:
    """Ids that depend on the length of the text: no part of them can be shown, and the work is bounded."""
    letters = TokenBytes(tuple(bytes([b]) for b in range(256)), frozenset(), frozenset())
    given = 0

    def encode(text: str) -> list[int]:
        nonlocal given
        given += len(text)
        return [*b"ab", *([120 + len(text) % 3] * (len(text) - 4)), *b"yz"]

    ids = list(b"ab" + b"-" * 20_000 + b"yz")
    aligner = Aligner(letters, letters, end_of_turn=-1, reuse_ids=False)
    aligned = aligner.align(aligner.write(ids, encode))
    assert [i for i, j in enumerate(pairs(aligned)) if j is not None] == [0, 1, 20_002, 20_003]
    assert given < 60 * len(ids)


def test_7_a_change_does_not_reach_over_a_special_token() -> None:
    s = table("a", "b", None, "\u2026", eos=[2], names={2: "<|im_end|>"})
    t = table("a", "b", None, ".", eos=[2], names={2: "<|eot_id|>"})
    aligner = Aligner(s, t, end_of_turn=2)
    text = aligner.write(
        [3, 0, 2, 0, 1, 2, 0, 3], lambda x: [["a", "b", "", "."].index(c) for c in x.replace("\u2026", "..")]
    )
    assert pairs(aligner.align(text)) == [None, 2, 3, 4, 5, 6, 7, None]


@pytest.mark.parametrize("teacher", ["mistral-v3", "gemma3"])
def test_7_bars_at_both_ends_of_a_long_response_cost_two_tokens_of_coverage(teacher: str) -> None:
    """They took all of it: everything between the first and the last was unproven."""
    student, other = load("qwen"), load(teacher)
    text = "\n".join(line for topic in topics.values() for line in topic.splitlines() if not line.startswith("   "))[
        :30_000
    ]
    aligner = Aligner(student.tokens, other.tokens, end_of_turn=min(other.tokens.eos_ids))
    covered = []
    for source in (text, f"\u2581\u2582\u2583 {text}\u2583\u2582\u2581"):
        written = aligner.write(student.encode(source), lambda t: encode_exact(other.tokens, other.encode, t))
        scores = aligner.align(written).scores(np.zeros(len(written.ids)))
        assert scores.unaligned["unproven"] == 0
        covered.append(scores.coverage)
    assert len(written.student_ids) > 6_500
    assert covered[1] == pytest.approx(covered[0], abs=0.002)
    assert covered[1] > 0.86


def test_a_turn_begins_as_the_teachers_turns_begin() -> None:
    """It reads ' Hello' behind its opening; the token that holds the space has no partner, all behind it has."""
    s, t = table("Hello", " there", "!", " Hello"), table(" Hello", " ", "Hello", " there", "!")
    aligner, added = Aligner(s, t, end_of_turn=-1), {0: (0, " ")}
    text = aligner.write([0, 1, 2], greedy(t), leads=added)
    assert text.ids == (0, 3, 4)
    aligned = aligner.align(text)
    assert (pairs(aligned), counts(aligned)) == ([None, 1, 2], {"boundary": 1})
    assert aligned.scores([-1.0, -2.0, -3.0], "even").log_probs.tolist() == [0.0, -2.0, -3.0], (
        "nor has it a share of a span"
    )
    # Where the space is a token of its own, nothing is lost.
    assert pairs(aligner.align(aligner.write([0, 1, 2], lambda _: [1, 2, 3, 4], leads=added))) == [1, 2, 3]
    # What the student begins with and the teacher does not is given up.
    text = aligner.write([3, 1], greedy(t), leads={0: (1, "")})
    assert (text.ids, counts(aligner.align(text))) == ((2, 3), {"normalised": 1})
    # Behind the messages between two turns, too, and in no other place.
    between = {"bridges": [Bridge(1, 1, (4, 4))], "inserted": [(1, 2)]}
    text = aligner.write([0, 2, 0], greedy(t), leads={**added, 2: (0, " ")}, **between)
    assert text.ids == (0, 4, 4, 0)
    assert aligner.write([0, 2, 0], greedy(t), leads=added, **between).ids == (0, 4, 4, 2)
    assert aligner.write([], greedy(t), leads=added).ids == ()


def test_8_padded_vocabulary_ids_are_no_text() -> None:
    s, t = table("a", "b"), table("ab", "a", "b")
    aligned = align([0, 151_700, 1, -1], s, [1, 2], t)
    assert pairs(aligned) == [0, None, 1, None]
    assert counts(aligned) == {"special": 2}
    assert pairs(align([0, 1], s, [1, 99], t)) == [0, None], "on the teacher's side neither"


def test_9_turns_with_the_teachers_own_markup_between_them() -> None:
    """a, end; the tool says b in the student's markup; a, end. The teacher's template puts four ids there."""
    s = table("a", "b", None, eos=[2], names={2: "<|im_end|>"})
    t = table("a", None, "b", None, eos=[1], names={1: "<|eot_id|>", 3: "<|start_header_id|>"})
    aligner = Aligner(s, t, end_of_turn=1)
    ids = [0, 2, 1, 1, 1, 0, 2]
    text = aligner.write(ids, greedy(t), bridges=[Bridge(2, 3, (3, 2, 3, 2))], inserted=[(2, 5)])
    assert text.ids == (0, 1, 3, 2, 3, 2, 0, 1)
    aligned = aligner.align(text)
    assert pairs(aligned) == [0, 1, None, None, None, 6, 7]
    assert counts(aligned) == {"inserted": 3}
    # Without the messages the text in between is read as text; it has its place, and no value.
    plain = aligner.align(aligner.write(ids, greedy(t), inserted=[(2, 5)]))
    assert pairs(plain) == [0, 1, None, None, None, 5, 6]
    assert counts(plain) == {"inserted": 3}


def test_10_empty_and_single_token_responses() -> None:
    s = table("a", None, eos=[1])
    empty = run([], s, s)
    assert (pairs(empty), empty.scores([]).coverage, counts(empty)) == ([], 1.0, {})
    assert pairs(run([0], s, s)) == [0]
    assert pairs(run([1], s, s)) == [0], "only the end of turn"
    assert pairs(align([0], s, [], s)) == [None]
    assert pairs(align([0, 1], s, [], s)) == [None, 0]


def test_10_cut_in_mid_character_at_the_length_cap() -> None:
    rocket = "\U0001f680".encode()
    s = table("go ", rocket[:2], rocket[2:])
    t = table("go ", "\ufffd", "\U0001f680")
    aligned = run([0, 1], s, t)
    assert pairs(aligned) == [0, None]
    assert counts(aligned) == {"invalid_utf8": 1}
    assert pairs(run([0, 1, 2], s, t)) == [0, None, None]


def test_11_thinking_can_be_kept_from_the_teacher() -> None:
    s = table("x", "y", None, None, None, eos=[4], names={2: "<think>", 3: "</think>", 4: "<|im_end|>"})
    t = table("y", "x", None, eos=[2], names={2: "<|eot_id|>"})
    ids = [2, 0, 0, 3, 1, 4]
    aligner = Aligner(s, t, end_of_turn=2, thinking="drop")
    text = aligner.write(ids, greedy(t))
    assert text.ids == (0, 2)
    aligned = aligner.align(text)
    assert pairs(aligned) == [None, None, None, None, 0, 1]
    assert counts(aligned) == {"thinking": 4}
    # The prompt opened the thinking; then one that never ends.
    assert pairs(aligner.align(aligner.write([0, 3, 1], greedy(t)))) == [None, None, 0]
    assert pairs(aligner.align(aligner.write([1, 2, 0, 0], greedy(t)))) == [0, None, None, None]


def test_11_thinking_as_text() -> None:
    s = table("x", None, names={1: "<think>"})
    t = table("<think", ">", "x", None, names={3: "<think>"})
    assert run([1, 0], s, t).teacher_index.tolist() == [0, 1], "by its role"
    aligned = run([1, 0], s, t, thinking="text")
    assert (pairs(aligned), len(aligned.teacher_span)) == ([None, 2], 3)


def test_equal_spans_with_other_bytes_do_not_pair() -> None:
    """Three bytes of half a character, read as the three bytes of U+FFFD: equal length is no proof."""
    s, t = table(b"\xf0\x9f\x9a", "x"), table("\ufffd", "x")
    assert pairs(run([0, 1], s, t)) == [None, 1]


def test_log_probs_are_the_teachers_own_and_zero_elsewhere() -> None:
    s = table("a", "b", "ab")
    scores = align([2, 0, 1], s, [2, 2], s).scores([-0.25, -7.5])
    assert scores.log_probs.tolist() == [-0.25, 0.0, 0.0]
    assert scores.coverage == pytest.approx(1 / 3)


def test_the_same_vocabulary_sends_the_students_ids() -> None:
    s = table("a", "ab", b"\xe4", None, "b", eos=[3], names={3: "<|im_end|>"})
    aligner = Aligner(s, s, end_of_turn=3)
    assert aligner.same_vocabulary
    text = aligner.write([0, 4, 2, 99, 1, 3], lambda text: pytest.fail("nothing is encoded"))
    assert text.ids == (0, 4, 2, 1, 3)
    aligned = aligner.align(text)
    assert pairs(aligned) == [0, 1, 2, None, 3, 4], "also the broken byte; an id that does not exist is not sent"
    # The same pieces, but an end of turn of another number: it is no other vocabulary for that.
    other = TokenBytes(s.table, s.special, frozenset({3}), s.names)
    assert Aligner(s, other, end_of_turn=3).same_vocabulary
    assert not Aligner(s, table("a", "ab", b"\xe4", None, "c"), end_of_turn=3).same_vocabulary


# ---- spans ----


def test_span_policies_by_hand() -> None:
    """12|34 against 1|234, then x: log-probs of the teacher -1, -3, -0.5; of the student -0.5, -1.5, -9."""
    s, t = table("12", "34", "x"), table("1", "234", "x")
    aligned = run([0, 1, 2], s, t)
    assert aligned.span.tolist() == [0, 0, 1]
    assert aligned.teacher_span.tolist() == [0, 0, 1]
    teacher, student = [-1.0, -3.0, -0.5], [-0.5, -1.5, -9.0]
    strict = aligned.scores(teacher)
    assert (strict.log_probs.tolist(), strict.mask.tolist()) == ([0.0, 0.0, -0.5], [False, False, True])
    assert aligned.scores(teacher, "even").log_probs.tolist() == [-2.0, -2.0, -0.5]
    assert aligned.scores(teacher, "proportional", student).log_probs.tolist() == [-1.0, -3.0, -0.5]
    # The stretch as one action: student -2, teacher -4, so each of its tokens carries the difference 2.
    chained = aligned.scores(teacher, "chain_rule", student)
    assert (np.array(student) - chained.log_probs).tolist() == [2.0, 2.0, -8.5]
    assert chained.mask.all()
    assert aligned.scores(teacher, "proportional", [0.0, 0.0, 0.0]).log_probs.tolist() == [-2.0, -2.0, -0.5]


def test_span_policies_need_what_they_use() -> None:
    aligned = run([0, 1], table("12", "34"), table("1", "234"))
    with pytest.raises(DataError, match="student_log_probs=None: expected one per token for proportional"):
        aligned.scores([-1.0, -1.0], "proportional")
    with pytest.raises(DataError, match="teacher_log_probs='1 values'"):
        aligned.scores([-1.0])
    with pytest.raises(DataError, match="student_log_probs='3 values'"):
        aligned.scores([-1.0, -1.0], "chain_rule", [0.0] * 3)


def test_coverage_by_class() -> None:
    s = table("the", " 12", "\u4f60", "](", None, "3")
    t = table("the", " 1", "2", "\u4f60", "](", "3")
    aligned = run([0, 1, 2, 3, 4, 5], s, t)
    assert [TEXT_CLASSES[c] for c in aligned.classes] == ["text", "digits", "cjk", "code", "special", "digits"]
    covered = aligned.scores(np.zeros(6)).coverage_by_class(TEXT_CLASSES)
    assert covered == {"text": 1.0, "digits": 0.5, "cjk": 1.0, "code": 1.0, "special": 0.0}


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
    return out


@pytest.fixture(scope="session")
def sides(english: Any, mixed: Any, gemma: Any) -> dict[str, tuple[Any, TokenBytes]]:
    named = {"english": english, "mixed": mixed, "gemma": gemma}
    return {name: (hf, build_token_bytes(hf, frozenset({hf.eos_token_id}))) for name, hf in named.items()}


def encoder(hf: Any) -> Callable[[str], list[int]]:
    return lambda text: list(hf.encode(text, add_special_tokens=False, split_special_tokens=True))


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
    special = st.sampled_from(sorted(s.special))
    ids = data.draw(st.lists(st.one_of(st.integers(-1, len(s.table) + 3), special), max_size=25))
    aligner = Aligner(s, t, end_of_turn=hf.eos_token_id, reuse_ids=False)
    text = aligner.write(ids, encoder(hf))
    aligned = aligner.align(text)
    got = pairs(aligned)
    # Special tokens of the two sides meet one to one and in order; between them, the oracle on text alone.
    assert [text.ids[got[i]] for i, x in enumerate(ids) if x in aligner.special.ids] == [  # type: ignore[index]
        aligner.special.ids[x] for x in ids if x in aligner.special.ids
    ]
    want: list[int | None] = []
    at = 0
    for part in split_at(ids, aligner.special.ids):
        if part and part[0] in aligner.special.ids:
            want.append(at)
            at += 1
            continue
        n = len(encoder(hf)(readable_text(s.join(part))[0]))
        piece = [p + at if p is not None else None for p in oracle(part, s, text.ids[at : at + n], t)]
        want += piece
        at += n
    assert got == want
    check_laws(ids, s, text.ids, t, aligned, aligner)


def split_at(ids: Sequence[int], special: Container[int]) -> Iterator[list[int]]:
    part: list[int] = []
    for token in ids:
        if token in special:
            if part:
                yield part
            yield [token]
            part = []
        else:
            part.append(token)
    if part:
        yield part


def check_laws(
    ids: Sequence[int], s: TokenBytes, teacher_ids: Sequence[int], t: TokenBytes, aligned: Alignment, aligner: Aligner
) -> None:
    got = pairs(aligned)
    used = [j for j in got if j is not None]
    assert used == sorted(set(used)), "in order, and no teacher token is used twice"
    assert len(used) + sum(counts(aligned).values()) == len(ids), "each position is counted once"
    for i, j in enumerate(got):
        if j is not None:
            assert s.of(ids[i]) == t.of(teacher_ids[j]) or aligner.special.ids[ids[i]] == teacher_ids[j]
    for span in set(aligned.span.tolist()) - {-1}:
        inside = [i for i, k in enumerate(aligned.span) if k == span]
        across = [j for j, k in enumerate(aligned.teacher_span) if k == span]
        if any(ids[i] in aligner.special.ids for i in inside):
            assert len(inside) == len(across) == 1
        else:
            assert s.join([ids[i] for i in inside]) == t.join([teacher_ids[j] for j in across])
        if len(inside) == len(across) == 1:
            assert got[inside[0]] == across[0]
        else:
            assert all(got[i] is None for i in inside)


PIECES = ["The quick", " brown", " fox", "12", "345", "\n\n", " the answer is", "  ", "<think>", "q"]
PIECES += ["\u4f60\u597d", "\U0001f680", "caf\u00e9"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize(("student", "teacher"), COMBINATIONS[:4])
@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_real_text_pairs_exactly_as_the_oracle_says(sides: Any, student: str, teacher: str, text: str) -> None:
    (student_hf, s), (hf, t) = sides[student], sides[teacher]
    ids = [*student_hf.encode(text, add_special_tokens=False), student_hf.eos_token_id]
    aligner = Aligner(s, t, end_of_turn=hf.eos_token_id)
    written = aligner.write(ids, encoder(hf))
    aligned = aligner.align(written)
    assert pairs(aligned) == [*oracle(ids[:-1], s, written.ids[:-1], t), len(written.ids) - 1]
    assert set(counts(aligned)) <= {"boundary"}
    # Every byte lies in some span, and the policies for spans give each token a share of the teacher's total.
    teacher = -np.arange(1.0, len(written.ids) + 1)
    even = aligned.scores(teacher, "even")
    assert even.mask.all()
    assert even.log_probs.sum() == pytest.approx(teacher.sum())


@pytest.mark.parametrize("name", ["english", "mixed", "gemma"])
@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_one_tokenizer_on_both_sides_covers_everything(sides: Any, name: str, text: str) -> None:
    hf, table_ = sides[name]
    ids = [*encoder(hf)(text), hf.eos_token_id]
    for reuse in (True, False):
        aligner = Aligner(table_, table_, end_of_turn=hf.eos_token_id, reuse_ids=reuse)
        written = aligner.write(ids, encoder(hf))
        assert list(written.ids) == ids
        assert pairs(aligner.align(written)) == list(range(len(ids)))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-1, 9), max_size=15), st.lists(st.integers(-1, 9), max_size=15))
def test_teacher_ids_that_have_nothing_to_do_with_the_text_never_raise(a: list[int], b: list[int]) -> None:
    """And what pairs is still proven: equal bytes, and the teacher's bytes up to there, or from there on, are the text's."""
    s = table("a", "b", "ab", None, b"\xe4", b"\xbd\xa0", "\u4f60", " ", "\ufffd")
    aligned = align(a, s, b, s)
    text, offsets, _ = readable_text(s.join(a))
    for i, j in enumerate(pairs(aligned)):
        if j is not None:
            assert s.of(a[i]) == s.of(b[j])
            before, behind = s.join(b[:j]), s.join(b[j:])
            start = offsets[len(s.join(a[:i]))]
            assert text.encode()[:start] == before or text.encode()[start:] == behind
    assert len(aligned.span) == len(a)


def check_that_the_short_way_is_right(aligner: Aligner, text: Any) -> None:
    """`align` against the general way, in all that an alignment knows."""
    short, general = aligner.align(text), aligner.align_general(text)
    for name in ("teacher_index", "span", "teacher_span", "reason", "classes"):
        assert getattr(short, name).tolist() == getattr(general, name).tolist(), name
    assert short.scores(np.zeros(len(text.ids))).unaligned == general.scores(np.zeros(len(text.ids))).unaligned


LETTERS = st.text("ab\x00 \u00e9\u2581", min_size=1, max_size=20).map(str.encode)
TABLES = st.lists(st.one_of(LETTERS, st.binary(max_size=3), st.none()), min_size=1, max_size=12).map(
    lambda pieces: table(b"a", b"b", *pieces, None, eos=[len(pieces) + 2], names={len(pieces) + 2: "<|im_end|>"})
)


@settings(max_examples=250, deadline=None)
@given(s=TABLES, t=TABLES, data=st.data())
def test_the_short_way_and_the_general_way_agree(s: TokenBytes, t: TokenBytes, data: Any) -> None:
    """Random vocabularies and ids: a teacher that cuts the text in its own way, and one that spells anything."""
    t = replace(
        t, marks_spaces=data.draw(st.booleans()), dummy_prefix=data.draw(st.sampled_from(["no", "missing", "always"]))
    )
    aligner = Aligner(s, t, end_of_turn=len(t.table) - 1, reuse_ids=data.draw(st.booleans()))
    ids = data.draw(st.lists(st.integers(-1, len(s.table)), max_size=20))
    lead, first = data.draw(st.sampled_from(["", " ", "a"])), s.of(ids[0]) if ids else None
    leads = {0: (data.draw(st.integers(0, len(first))), lead)} if first else {}
    stop = data.draw(st.integers(0, len(ids)))
    inserted = [(stop // 2, stop)] if stop // 2 < stop and data.draw(st.booleans()) else []

    def encode(text: str) -> list[int]:
        rest, out = text.encode(), []
        while rest:  # any piece that fits; what the vocabulary cannot spell, it leaves out
            fits = [i for i, p in enumerate(t.table) if p and rest.startswith(p)]
            out += [i := data.draw(st.sampled_from(fits))] if fits else []
            rest = rest[len(t.table[i] or b"") if fits else 1 :]
        if data.draw(st.integers(0, 4)) == 0 and out:
            out[data.draw(st.integers(0, len(out) - 1))] = data.draw(st.integers(-1, len(t.table)))
        return out

    check_that_the_short_way_is_right(aligner, aligner.write(ids, encode, inserted=inserted, leads=leads))


@pytest.mark.parametrize(("student", "teacher"), COMBINATIONS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_short_way_agrees_on_text(sides: Any, student: str, teacher: str, text: str) -> None:
    (student_hf, s), (hf, t) = sides[student], sides[teacher]
    aligner = Aligner(s, t, end_of_turn=hf.eos_token_id)
    ids = [*student_hf.encode(text, add_special_tokens=False), student_hf.eos_token_id]
    check_that_the_short_way_is_right(aligner, aligner.write(ids, encoder(hf)))


@pytest.mark.parametrize("said", [b"ABCDEFGH1234567_x", b"ABCDEFG_12345678x", b"ABCDEFGH12345678_"])
def test_equal_places_are_no_proof_however_long_the_token(said: bytes) -> None:
    """The short way compares eight bytes at once; the last one of a word, and the last of all, must count."""
    letters = [bytes([b]) for b in range(256)]
    s, t = table(b"ABCDEFGH12345678x", "y", *letters), table(said, "y", *letters)
    assert pairs(align([0, 1], s, [0, 1], t)) == [None, 1]
    assert pairs(align([1, 0], s, [1, 0], t)) == [0, None]
    assert counts(align([0, 0, 1, 1], s, [0, 0, 1, 1], t)) == {"unproven": 2}
    # The same bytes between two pairs, where the two cut them at other places.
    cut = table(said[:4], said[4:], "y", *letters)
    assert pairs(align([1, 0, 1], s, [2, 0, 1, 2], cut)) == [0, None, 3]
    assert counts(align([1, 0, 1], s, [2, 0, 1, 2], cut)) == {"unproven": 1}


def test_a_long_broken_response_is_no_trouble() -> None:
    rng = random.Random(0)
    s = TokenBytes(tuple(bytes([b]) for b in range(256)), frozenset(), frozenset())
    ids = [rng.randrange(256) for _ in range(3000)]
    teacher_ids = list(readable_text(s.join(ids))[0].encode())
    assert pairs(align(ids, s, None, s)) == oracle(ids, s, teacher_ids, s)
