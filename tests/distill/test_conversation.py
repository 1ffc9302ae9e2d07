"""A response as turns, and what a teacher reads in their place."""

from __future__ import annotations

from typing import Any

import pytest

from slime_tandem.distill.conversation import aligner_of, header_only, plan, turns_of
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.turns import Frame, Markup
from slime_tandem.types import AuthorRun, Message, Prompt, SampleKey, TandemSample

BYTES = tuple(bytes([b]) for b in range(256))
END, THINK, DONE = 256, 257, 258
TABLE = TokenBytes(
    (*BYTES, None, None, None), frozenset({END, THINK, DONE}), frozenset({END}),
    {END: "<|im_end|>", THINK: "<think>", DONE: "</think>"},
)  # fmt: skip
MARKUP = Markup(think=((THINK,), (DONE,)), think_texts=("<think>\n", "\n</think>\n\n"), end=END, ends=frozenset({END}))


def text(value: str) -> list[int]:
    return list(value.encode())


def sample(ids: list[int], *, prompt: list[int] | None = None, inserted: Any = (), messages: Any = ()) -> TandemSample:
    mask = [1] * len(ids)
    for a, b in inserted:
        mask[a:b] = [0] * (b - a)
    return TandemSample(
        SampleKey(0, 0, 0), 0, Prompt("p", (Message("user", "x"),), None, "t"), tuple(prompt or text("x")), tuple(ids),
        tuple(mask), (0.0,) * len(ids), "stop", "", (AuthorRun(1, 0, len(ids), "0"),), inserted=inserted,
        inserted_messages=messages,
    )  # fmt: skip


def kinds(s: TandemSample, markup: Markup = MARKUP) -> list[list[tuple[str, int, int]]]:
    return [[(p.kind, p.start, p.stop) for p in turn.parts] for turn in turns_of(s, TABLE, markup)]


def test_one_turn() -> None:
    assert kinds(sample([*text("ab"), END])) == [[("text", 0, 2), ("end", 2, 3)]]
    assert kinds(sample(text("ab"))) == [[("text", 0, 2)]]
    assert kinds(sample([])) == [[]]


def test_thinking_and_what_is_cut_of_it() -> None:
    assert kinds(sample([THINK, *text("a"), DONE, *text("b"), END])) == [
        [("open", 0, 1), ("thought", 1, 2), ("close", 2, 3), ("text", 3, 4), ("end", 4, 5)]
    ]
    assert kinds(sample([THINK, *text("ab")])) == [[("open", 0, 1), ("thought", 1, 3)]]


def test_the_prompts_opening_counts_and_only_right_before_the_turn() -> None:
    opened = [*text("x"), THINK, *text("\n")]
    assert kinds(sample(text("ab"), prompt=opened)) == [[("thought", 0, 2)]], "cut before it is closed"
    assert kinds(sample([*text("a"), DONE, *text("b")], prompt=opened)) == [
        [("thought", 0, 1), ("close", 1, 2), ("text", 2, 3)]
    ]
    spoken_of = [THINK, *text(" tags")]
    assert kinds(sample(text("ab"), prompt=spoken_of)) == [[("text", 0, 2)]]
    (turn,) = turns_of(sample(text("ab"), prompt=opened), TABLE, MARKUP)
    assert turn.thinks
    (turn,) = turns_of(sample(text("ab"), prompt=opened), TABLE, Markup())
    assert not turn.thinks, "a model without thinking"


def test_markers_that_nobody_sampled_open_nothing() -> None:
    """A tool's text `use <think> tags` between two turns."""
    ids = [*text("a"), END, THINK, *text(" tags"), *text("b"), END]
    s = sample(ids, inserted=((2, 8),), messages=((Message("tool", "use <think> tags"),),))
    assert kinds(s) == [[("text", 0, 1), ("end", 1, 2)], [("text", 8, 9), ("end", 9, 10)]]
    whole = sample(ids, inserted=((2, 8),))
    assert kinds(whole) == [[("text", 0, 9), ("end", 9, 10)]], "without messages it is one turn"


def test_thinking_of_white_space_is_the_begin_of_the_answer() -> None:
    s = sample([THINK, *text("\n\n"), DONE, *text("\n\n4"), END])
    assert kinds(s) == [[("answer", 0, 6), ("text", 6, 7), ("end", 7, 8)]]
    assert not turns_of(s, TABLE, MARKUP)[0].thinks
    (turn,) = turns_of(sample([*text("\n"), DONE, *text("4")], prompt=[*text("x"), THINK, 10]), TABLE, MARKUP)
    assert not turn.opened


def written(
    s: TandemSample, thinking: Any, frame: Frame, teacher: Markup, student: Markup = MARKUP, table: TokenBytes = TABLE
) -> str:
    other = TokenBytes(
        (*BYTES, None, b"<think>", b"</think>"), frozenset({256}), frozenset({256}),
        {256: "<|eot|>", 257: "<think>", 258: "</think>"},
    )  # fmt: skip
    aligner = aligner_of(table, other, teacher, thinking)
    turns = turns_of(s, table, student)
    told = plan(s, turns, frame, aligner, student, teacher)
    out = aligner.write(
        s.response_ids, text, bridges=told.bridges, inserted=s.inserted, thinking=told.thinking, stands=told.stands,
        leads=told.leads,
    )  # fmt: skip
    assert sum(aligner.align(out).scores([-1.0] * len(out.ids)).unaligned.values()) <= len(s.response_ids)
    return b"".join(other.of(i) or b"<E>" for i in out.ids).decode()


KNOWN = Markup(
    think=((257,), (258,)), think_texts=("<think>\n", "\n</think>\n\n"), end=256, ends=frozenset({256}),
    encode=lambda t: list(t.encode()),
)  # fmt: skip
FRAME = Frame(prompt=(1,), bridges=(), end=(256,))


@pytest.mark.parametrize(
    ("thinking", "want"),
    [
        ("keep", "<think>\nso\n</think>\n\n4<E>"),
        ("text", "<think>\nso\n</think>\n\n4<E>"),
        ("drop", "4<E>"),
    ],
)
def test_the_modes(thinking: Any, want: str) -> None:
    s = sample([THINK, *text("\nso\n"), DONE, *text("\n\n4"), END])
    assert written(s, thinking, FRAME, KNOWN) == want
    opened = sample([*text("so\n"), DONE, *text("\n\n4"), END], prompt=[*text("x"), THINK, 10])
    assert written(opened, thinking, FRAME, KNOWN) == want, "opened by the student's prompt"


def test_white_space_around_markers_is_the_teachers() -> None:
    glm = Markup(think=((THINK,), (DONE,)), think_texts=("\n<think>", "</think>\n"), end=END, ends=frozenset({END}))
    s = sample([*text("\n"), THINK, *text("so"), DONE, *text("\n4"), END])
    assert written(s, "keep", FRAME, KNOWN, glm) == "<think>\nso\n</think>\n\n4<E>"


def test_white_space_in_a_token_with_other_text() -> None:
    """As byte-level tokenizers write `.` and a line end in one; half a character in it stays."""
    table = TokenBytes((*TABLE.table, b".\n", b"\xe4\n"), TABLE.special, TABLE.eos_ids, TABLE.names)
    glm = Markup(
        think=((257,), (258,)), think_texts=("<think>", "</think>"), end=256, ends=frozenset({256}),
        encode=lambda t: list(t.encode()),
    )  # fmt: skip
    s = sample([THINK, *text("\nso"), 259, DONE, *text("\n\n4"), END])
    assert written(s, "keep", FRAME, glm, table=table) == "<think>so.</think>4<E>"
    s = sample([THINK, *text("\nso"), 260, DONE, *text("\n\n4"), END])
    assert written(s, "keep", FRAME, glm, table=table) == "<think>so\ufffd\n</think>4<E>"


def test_thinking_that_was_cut_is_no_answer() -> None:
    assert written(sample([THINK, *text("so")]), "keep", FRAME, KNOWN) == "<think>so"
    assert written(sample([THINK, *text("so")]), "drop", FRAME, KNOWN) == ""
    assert header_only(turns_of(sample([THINK, *text("so")]), TABLE, MARKUP), "keep", KNOWN) == [True]
    assert header_only(turns_of(sample([THINK, *text("so")]), TABLE, MARKUP), "text", KNOWN) == [False]


def test_the_begin_of_an_answer_in_front_of_which_the_template_has_a_space() -> None:
    mistral = Markup(end=256, ends=frozenset({256}), lead=" ", encode=lambda t: list(t.encode()))
    frame = Frame((1,), (), (256,), (" ",))
    assert written(sample([*text("ab"), END]), "keep", frame, mistral) == " ab<E>"
    assert written(sample([*text(" ab"), END]), "keep", frame, mistral) == " ab<E>", "it is there already"
    spaced = Markup(end=END, ends=frozenset({END}), lead=" ")
    assert written(sample([*text(" ab"), END]), "keep", frame, mistral, spaced) == " ab<E>"
    assert written(sample([*text(" ab"), END]), "keep", FRAME, KNOWN, spaced) == "ab<E>", "the student's own space"


def test_an_end_of_several_tokens_or_none() -> None:
    s = sample([*text("ab"), END])
    several = Markup(encode=lambda t: list(t.encode()))
    assert written(s, "keep", Frame((1,), (), tuple(text("\n###"))), several) == "ab\n###"
    cut = sample(text("ab"))
    assert written(cut, "keep", Frame((1,), (), tuple(text("\n###"))), several) == "ab"


def test_thinking_in_the_middle_of_a_turn_does_not_begin_it() -> None:
    (turn,) = turns_of(sample([*text("ab"), THINK, *text("c"), DONE, *text("d")]), TABLE, MARKUP)
    assert not turn.thinks
    assert [part.kind for part in turn.parts] == ["text", "open", "thought", "close", "text"]
    (turn,) = turns_of(sample([*text("\n"), THINK, *text("c")]), TABLE, MARKUP)
    assert turn.thinks


@pytest.mark.parametrize("thinking", ["keep", "text", "drop"])
def test_many_markers_are_read_in_linear_time(thinking: Any) -> None:
    """A pass over all markers for each one would take minutes."""
    ids = [THINK, *text("a"), DONE, *text("b")] * 10_000
    out = written(sample(ids), thinking, FRAME, KNOWN)
    assert out == ("b" if thinking == "drop" else "<think>a</think>b") * 10_000
