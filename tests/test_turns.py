"""What is found out of a template by rendering it: small templates with one behaviour each, written in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from slime_tandem.errors import ModelError
from slime_tandem.turns import Turns, probe, shared_begin, split, stand_in

Say = Callable[[Mapping[str, Any]], str]


def template(
    say: Callable[[Mapping[str, Any], bool], str],
    prompt: str = "<a>",
    roles: Sequence[str] = ("system", "user", "assistant"),
) -> Any:
    """A template that writes each message with `say(message, is the last)`."""

    def write(messages: Sequence[Mapping[str, Any]], *, generation: bool, tools: Sequence[Any] | None = None) -> str:
        if strange := {m["role"] for m in messages} - set(roles):
            raise ModelError("chat template", str(strange), "known roles", "leave them out")
        text = "".join(say(m, m is messages[-1]) for m in messages)
        return text + (prompt if generation else "")

    return write


def plain(m: Mapping[str, Any], _: bool) -> str:
    return f"<{m['role'][0]}>{m['content']}<end>\n"


def found(say: Callable[[Mapping[str, Any], bool], str] = plain, **options: Any) -> Turns:
    return probe(template(say, **options), "test")


def test_a_turn_with_an_end_of_its_own() -> None:
    turns = found()
    assert (turns.start, turns.header, turns.opened, turns.answer) == ("", "<a>", "", "")
    assert (turns.closing, turns.after, turns.closed_by) == ("<end>", "\n", "its own end")
    assert (turns.next_user, turns.next_tool) == ("<end>\n<u>", None)
    assert turns.roles == ("system", "user", "assistant")
    assert (turns.think, turns.opens_thinking, turns.tools, turns.tool_calls) == (None, False, False, False)
    assert (turns.trims, turns.changes) == ("no", False)


def test_a_turn_that_the_next_role_closes() -> None:
    turns = found(lambda m, _: f"<{m['role'][0]}>{m['content']}", roles=("user", "assistant", "tool"))
    assert (turns.closing, turns.closed_by) == ("", "the next role")
    assert (turns.next_user, turns.next_tool) == ("<u>", "<t>")
    assert turns.roles == ("user", "assistant", "tool")


def test_nothing_closes_a_turn() -> None:
    assert found(lambda m, _: m["content"], prompt="").closed_by == "nothing"


def test_the_last_turn_can_end_in_another_way() -> None:
    turns = found(lambda m, last: f"<{m['role'][0]}>{m['content']}{'<return>' if last else '<end>'}")
    assert (turns.closing, turns.next_user) == ("<return>", "<end><u>")


def test_text_in_front_of_the_first_turn() -> None:
    def say(m: Mapping[str, Any], last: bool) -> str:
        return plain(m, last)

    def write(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return "<bos>" + template(say)(messages, **options)

    assert probe(write, "test").start == "<bos>"


@pytest.mark.parametrize(
    ("trim", "trims"),
    [(str.strip, "both"), (str.lstrip, "start"), (str.rstrip, "end"), (str, "no")],
)
def test_where_text_is_trimmed(trim: Callable[[str], str], trims: str) -> None:
    assert found(lambda m, _: f"<{m['role'][0]}>{trim(m['content'])}<end>").trims == trims


def test_text_that_is_changed_within() -> None:
    turns = found(lambda m, _: f"<{m['role'][0]}>{m['content'].replace('&', '&amp;')}<end>")
    assert turns.changes
    assert not found().changes


def test_a_template_that_rewrites_words_is_refused() -> None:
    for say in (
        lambda m, _: plain(m, _).upper(),
        lambda m, _: "" if m["role"] == "assistant" else plain(m, _),
        lambda m, _: plain(m, _) * 2,
    ):
        with pytest.raises(ModelError, match=r"chat template='test': expected one that writes out once"):
            found(say)


def thinking(m: Mapping[str, Any], last: bool) -> str:
    thought = m.get("reasoning_content")
    before = f"<think>{thought}</think>\n" if thought else ""
    return f"<{m['role'][0]}>{before}{m['content']}<end>"


def test_thinking_in_a_field() -> None:
    turns = found(thinking)
    assert turns.think == ("<think>", "</think>\n")
    assert (turns.keeps_thinking, turns.keeps_earlier, turns.opens_thinking, turns.answer) == (True, True, False, "")
    last = found(lambda m, end: thinking(m if end else {**m, "reasoning_content": ""}, end))
    assert (last.keeps_thinking, last.keeps_earlier) == (True, False)


def test_thinking_in_the_text_that_is_thrown_away_and_opened_by_the_prompt() -> None:
    def say(m: Mapping[str, Any], last: bool) -> str:
        return plain({**m, "content": m["content"].split("</think>")[-1].lstrip()}, last)

    turns = found(say, prompt="<a><think>\n")
    assert turns.marks == ("<think>", "</think>")
    assert (turns.header, turns.opened, turns.opens_thinking) == ("<a>", "<think>\n", True)
    assert not turns.keeps_thinking


def test_thinking_in_the_text_that_is_text_like_any_other() -> None:
    assert found().think is None


def test_a_block_of_no_thinking_is_the_begin_of_an_answer() -> None:
    def say(m: Mapping[str, Any], last: bool) -> str:
        empty = "<think>\n\n</think>\n\n" if m["role"] == "assistant" and last and "reasoning_content" not in m else ""
        filled = f"<think>\n{m['reasoning_content']}\n</think>\n\n" if last and m.get("reasoning_content") else ""
        return f"<{m['role'][0]}>{empty}{filled}{m['content']}<end>\n"

    turns = found(say)
    assert (turns.header, turns.answer) == ("<a>", "<think>\n\n</think>\n\n")
    assert turns.think == ("<think>\n", "\n</think>\n\n")


def test_tools() -> None:
    def write(messages: Sequence[Mapping[str, Any]], *, generation: bool, tools: Sequence[Any] | None = None) -> str:
        def say(m: Mapping[str, Any], last: bool) -> str:
            calls = "".join(f"[{c['function']['name']}]" for c in m.get("tool_calls", ()))
            return f"<{m['role'][0]}>{m['content'] or ''}{calls}<end>"

        text = "".join(t["function"]["name"] for t in tools or ())
        return text + template(say, roles=("user", "assistant", "tool"))(messages, generation=generation)

    turns = probe(write, "test")
    assert (turns.tools, turns.tool_calls, turns.next_tool) == (True, True, "<end><t>")


def test_a_stand_in_stands_in_no_text() -> None:
    assert stand_in(0, [stand_in(0)]) not in stand_in(0)
    assert split("x" + stand_in(1) + "y" + stand_in(11) + "z", [stand_in(1), stand_in(11)]) == ["x", "y", "z"]


def test_a_shared_begin_ends_at_a_marker() -> None:
    assert shared_begin(["<a><think>", "<a></think>x"]) == "<a>"
    assert shared_begin(["[INST]a", "[INST]b"]) == "[INST]"
    assert shared_begin(["ab", "abc"]) == "ab"


def test_the_findings_as_lines_and_as_a_record() -> None:
    turns = found(thinking, prompt="<a>")
    assert any("'<think>' to '</think>', kept" in line for line in turns.lines())
    assert turns.as_dict()["closed_by"] == "its own end"
