"""Every model family as student and as teacher of every other: the teacher reads what its own template would have written.

Tokenizers and templates only (scripts/families.py); no model.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, Conversation, Said, native, sample_of, spelt

from slime_tandem import cli
from slime_tandem.api import align
from slime_tandem.distill.teacher import Teacher, check_teacher
from slime_tandem.errors import ModelError, TandemError, TeacherScoreError, UnreadRolesError, UnreadToolsError
from slime_tandem.models.chat import Chat, Template
from slime_tandem.types import Message, Prompt, SampleKey, TandemSample

ASK = (Message("user", "What is 12 + 345?"),)
TOOL = (Message("tool", "12 + 345 = 357"),)
CALL = {"type": "function", "id": "call00001", "function": {"name": "sum", "arguments": {"x": "12"}}}
TOOLS = (
    {
        "type": "function",
        "function": {"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    },
)
CALLED = (
    *ASK,
    Message("assistant", "", {"tool_calls": [CALL]}),
    Message("tool", "357", {"tool_call_id": "call00001", "name": "sum"}),
)
AFTER_CALL = ("mistral-v3", "mistral-tekken", "gpt-oss")
CONVERSATIONS = {
    "single": Conversation(ASK, (Said("The answer is 357."),)),
    "system": Conversation((Message("system", "Be brief."), *ASK), (Said("The answer is 357."),)),
    "cut": Conversation(ASK, (Said("The answer is"),), ended=False),
    "asked again": Conversation(ASK, (Said("Let me see"), Said("It is 357.")), ((Message("user", "And then?"),),)),
    "tool": Conversation(ASK, (Said("Let me see"), Said("It is 357.")), (TOOL,)),
    "tools": Conversation(CALLED, (Said("It is 357."),), tools=TOOLS),
    "thinking": Conversation(ASK, (Said("The answer is 357.", "so 12 + 345 it is"),)),
}


def teacher_of(families: dict[str, Any], student: str, teacher: str, thinking: Any = "keep") -> Teacher:
    own, chat = families[student][1], families[teacher][1]
    return Teacher.by_template(None, own, chat, thinking, name=teacher)  # type: ignore[arg-type]


def spoken(families: dict[str, Any], student: str, told: Conversation) -> TandemSample | None:
    """The sample; None where the student's own template has no such messages."""
    try:
        return sample_of(*families[student], told)
    except TandemError:
        return None


def unread(families: dict[str, Any], teacher: str, told: Conversation) -> type[TandemError] | None:
    """What the teacher's template does not show of it."""
    turns = families[teacher][1].turns
    roles = {m.role for m in (*told.messages, *(m for part in told.between for m in part))}
    if roles - set(turns.roles):
        return UnreadRolesError
    if told.tools and not (turns.tools and turns.tool_calls):
        return UnreadToolsError
    if teacher in AFTER_CALL and told.between and told.between[0][0].role == "tool":
        return UnreadToolsError  # no tool message without the call that it answers
    return None


def why_not(families: dict[str, Any], student: str, teacher: str, name: str) -> str:
    """Why the text cannot be the native one; "" where it must be."""
    s, t = families[student][1], families[teacher][1]
    if teacher_of(families, student, teacher)._markups[2]:
        return "the student's own ids, in the same markup"
    if name == "system" and teacher in ("mistral-v3", "mistral-tekken"):
        return "its template shows the system message in the last turn alone, if that is the user's"
    if name == "thinking":
        if t.turns.think and not t.turns.keeps_thinking:
            return "its template drops thinking"
        if (s.turns.think is None) != (t.turns.think is None):
            return "markers of thinking that one of the two does not have"
    return ""


@pytest.mark.parametrize("teacher", FAMILIES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_teacher_reads_what_its_own_template_writes(families: dict[str, Any], teacher: str, name: str) -> None:
    tokenizer, chat = families[teacher]
    told = CONVERSATIONS[name]
    seen = 0
    for student in FAMILIES:
        sample = spoken(families, student, told)
        if sample is None:
            continue
        one = teacher_of(families, student, teacher)
        if (error := unread(families, teacher, told)) is not None:
            with pytest.raises(error):
                one.conversation(sample)
            continue
        prompt, text = one.conversation(sample)
        sent, want = spelt(tokenizer.tokens, [*prompt, *text.ids]), native(chat, told)
        if told.ended and chat.turns.closed_by == "the next role":
            sent = sent.removesuffix(spelt(tokenizer.tokens, [chat.end_of_turn]))
        reason = why_not(families, student, teacher, name)
        if not reason:
            assert want.startswith(sent), (student, sent.decode(), want.decode())
            rest = want[len(sent) :].decode()
            assert not told.ended or rest == chat.turns.after, (student, rest)
            seen += 1
        aligned = one.aligner.align(text)
        if told.ended:
            assert aligned.teacher_index[-1] == len(text.ids) - 1, f"{student}'s end has no value"
        for i in (i for i, t in enumerate(aligned.teacher_index.tolist()) if t >= 0):
            ours, theirs = sample.response_ids[i], text.ids[int(aligned.teacher_index[i])]
            data = families[student][0].tokens.of(ours)
            assert data is None or tokenizer.tokens.of(theirs) in (data, None)
    nobody = (name, teacher) in {
        ("thinking", "deepseek-r1"), ("system", "mistral-v3"), ("system", "mistral-tekken"),
    }  # fmt: skip
    assert nobody != bool(seen) or unread(families, teacher, told)


@pytest.mark.parametrize("teacher", FAMILIES)
def test_ends_of_turn_pair_everywhere(families: dict[str, Any], teacher: str) -> None:
    """In the middle and at the end, one end each, and no end of turn twice in a row."""
    tokenizer, chat = families[teacher]
    told = CONVERSATIONS["asked again"]
    for student in FAMILIES:
        sample = spoken(families, student, told)
        assert sample is not None
        one = teacher_of(families, student, teacher)
        check_teacher(one)
        prompt, text = one.conversation(sample)
        aligned = one.aligner.align(text)
        middle = sample.inserted[0][0] - 1
        ends = [int(aligned.teacher_index[i]) for i in (middle, len(sample.response_ids) - 1)]
        assert min(ends) >= 0, student
        if not one._markups[2]:
            assert {text.ids[i] for i in ends} <= chat.ends, student
        ids = [*prompt, *text.ids]
        assert not any(a == b and a in tokenizer.tokens.eos_ids for a, b in itertools.pairwise(ids))


@pytest.mark.parametrize("teacher", FAMILIES)
@pytest.mark.parametrize("thinking", ["keep", "text", "drop"])
def test_thinking(families: dict[str, Any], teacher: str, thinking: Any) -> None:
    tokenizer, chat = families[teacher]
    marks = {tokenizer.hf.convert_tokens_to_ids(m) for m in ("<think>", "</think>")} - {None, tokenizer.hf.unk_token_id}
    for student in ("qwen3", "qwen3-thinking", "glm4.5", "deepseek-r1"):
        if student == teacher and thinking != "keep":
            continue
        for ended in (True, False):
            told = Conversation(ASK, (Said("It is 357." if ended else "", "so 12 + 345 it is"),), ended=ended)
            sample = sample_of(*families[student], told)
            if not ended:  # cut within the thinking: before its end is marked
                close = families[student][1].marks[1][0]
                at = sample.response_ids.index(close)
                sample = _cut(sample, at)
            one = teacher_of(families, student, teacher, thinking)
            prompt, text = one.conversation(sample)
            said = spelt(tokenizer.tokens, text.ids)
            whole = spelt(tokenizer.tokens, [*prompt, *text.ids])
            reasons = one.aligner.align(text).scores([-1.0] * len(text.ids)).unaligned
            if thinking == "drop":
                plain = Conversation(ASK, (Said("It is 357." if ended else ""),), ended=ended)
                assert b"so 12" not in said
                assert reasons["thinking"] > 0
                if ended:
                    assert native(chat, plain).startswith(
                        whole.removesuffix(b"<|user|>") if "glm" in teacher else whole
                    )
            else:
                assert b"so 12 + 345 it is" in said
                assert reasons["thinking"] == 0
            if thinking == "text":
                assert not marks & set(text.ids), "markers are text"
                assert b"</think>" in said or not ended
            if thinking == "keep" and chat.turns.marks:
                opening = chat.turns.marks[0].encode()
                assert whole.count(opening) == (native(chat, told).count(opening) or 1), "not doubled"
                if not ended:
                    assert chat.turns.marks[1].encode() not in whole, "an answer has not begun"


def _cut(sample: TandemSample, at: int) -> TandemSample:
    return replace(
        sample,
        response_ids=sample.response_ids[:at],
        authorship_mask=sample.authorship_mask[:at],
        log_probs=sample.log_probs[:at],
        runs=(),
        finish_reason="length",
    )


HARMONY = "<|channel|>analysis<|message|>so it is"
SAYS, FINAL = (f"<|end|><|start|>assistant<|channel|>{name}<|message|>" for name in ("commentary", "final"))


@pytest.mark.parametrize(
    ("said", "kept", "dropped"),
    [
        (f"{HARMONY}{SAYS}Let me see{FINAL}357<|return|>", "so it is\n\nLet me see", "357"),
        (f"{HARMONY}{FINAL}35{FINAL}7<|return|>", "so it is", "35\n\n7"),
        (f"{HARMONY}<|end|>", "so it is", ""),
        (f"{HARMONY}<|end|><|start|>assistant<|channel|>fi", "so it is", ""),
        ('<|channel|>commentary to=functions.f json<|message|>{"x": 1}<|call|>', "", '{"x": 1}'),
    ],
)  # fmt: skip
def test_several_messages_in_one_turn(families: dict[str, Any], said: str, kept: str, dropped: str) -> None:
    """gpt-oss ends each message of a turn: no end of a turn, and nobody's but its own markup, cut in the middle or not."""
    tokenizer, chat = families["gpt-oss"]
    ids = chat.encode_markup(said)
    plain = sample_of(tokenizer, chat, Conversation(ASK, (Said("x"),)))
    sample = replace(
        plain, response_ids=tuple(ids), authorship_mask=(1,) * len(ids), log_probs=(-1.0,) * len(ids), runs=()
    )
    for teacher in ("qwen3", "llama3", "gemma3"):
        other, end = families[teacher][0], families[teacher][1].end_of_turn
        for thinking in ("keep", "drop"):
            one = teacher_of(families, "gpt-oss", teacher, thinking)
            _, text = one.conversation(sample)
            words = other.tokens.join(text.ids)
            for mark in ("<think>\n", "\n</think>\n\n", "<think>", "</think>"):
                words = words.replace(mark.encode(), b"")
            assert words.decode() == (kept if thinking == "keep" else "") + dropped, (teacher, thinking)
            assert text.ids.count(end) == said.endswith(("<|return|>", "<|call|>"))
            if end in text.ids:
                assert one.aligner.align(text).teacher_index[-1] == len(text.ids) - 1


def test_a_teacher_with_the_students_vocabulary_and_another_template(families: dict[str, Any]) -> None:
    """Its turns begin otherwise (no space in front): the first token alone is cut anew, the student's ids stay."""
    tokenizer, chat = families["mistral-v3"]
    template = "{% for m in messages %}{{ m.role + ':\\n' + m.content + eos_token }}{% endfor %}"
    hf = copy.copy(chat.hf)
    hf.chat_template = template + "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    other = Chat(Template(hf, "other"), tokenizer.tokens)
    sample = spoken(families, "mistral-v3", CONVERSATIONS["single"])
    assert sample is not None
    assert (chat.lead, other.lead) == (" ", "")
    one = Teacher.by_template(None, chat, other)  # type: ignore[arg-type]
    assert one.aligner.same_vocabulary
    prompt, text = one.conversation(sample)
    assert native(other, CONVERSATIONS["single"]).startswith(spelt(tokenizer.tokens, [*prompt, *text.ids]))
    aligned = one.aligner.align(text)
    assert aligned.teacher_index.tolist()[2:] == list(range(len(text.ids)))[-(len(sample.response_ids) - 2) :]
    back = Teacher.by_template(None, other, chat)  # type: ignore[arg-type]
    prompt, text = back.conversation(sample_of(tokenizer, other, CONVERSATIONS["single"]))
    assert native(chat, CONVERSATIONS["single"]).startswith(spelt(tokenizer.tokens, [*prompt, *text.ids]))


def test_an_empty_answer(families: dict[str, Any]) -> None:
    told = Conversation(ASK, (Said(""),))
    for teacher, (tokenizer, chat) in families.items():
        for student in families:
            one = teacher_of(families, student, teacher)
            if one._markups[2]:
                continue
            prompt, text = one.conversation(sample_of(*families[student], told))
            sent = spelt(tokenizer.tokens, [*prompt, *text.ids])
            if chat.turns.closed_by == "the next role":
                sent = sent.removesuffix(spelt(tokenizer.tokens, [chat.end_of_turn]))
            # GLM-4.5 writes no line end in front of an empty answer, and a model cannot know that it will be empty.
            want = native(chat, told) if teacher != "glm4.5" else native(chat, told) + b"\n"
            assert want.startswith(sent), (student, teacher)


def test_an_end_of_two_tokens(families: dict[str, Any]) -> None:
    """The first one ends the turn, the template's context has both, and a student that sampled either goes on behind it."""
    tokenizer, chat = families["qwen2.5"]
    hf = copy.copy(chat.hf)
    hf.chat_template = str(hf.chat_template).replace("<|im_end|>", "<|im_end|><|endoftext|>")
    both = Chat(Template(hf, "two"), tokenizer.tokens)
    first, second = (hf.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>"))
    again = (Message("user", "And then?"),)
    assert both.end_of_turn == first
    assert both.bridge(again)[:2] == [first, second]
    assert both.next_turn(again, first) == both.bridge(again)[1:]
    assert both.next_turn(again, second) == both.bridge(again)[2:]
    one = Teacher.by_template(None, families["llama3"][1], both)  # type: ignore[arg-type]
    for name in ("single", "asked again"):
        sample = spoken(families, "llama3", CONVERSATIONS[name])
        assert sample is not None
        prompt, text = one.conversation(sample)
        assert native(both, CONVERSATIONS[name]).startswith(spelt(tokenizer.tokens, [*prompt, *text.ids]))


def test_an_opening_without_thinking_is_not_read_by_a_teacher(families: dict[str, Any]) -> None:
    """A student that does not think is not scored inside a thinking that the teacher's prompt has opened."""
    for teacher in ("qwen3-thinking", "deepseek-r1"):
        one = teacher_of(families, "llama3", teacher)
        sample = spoken(families, "llama3", CONVERSATIONS["single"])
        assert sample is not None
        prompt, _ = one.conversation(sample)
        text = spelt(families[teacher][0].tokens, prompt)
        assert text.count(b"<think>") == text.count(b"</think>")


def test_a_tools_text_with_markers_hides_nothing(families: dict[str, Any]) -> None:
    told = Conversation(ASK, (Said("Let me see"), Said("It is 357.")), ((Message("user", "use <think> tags"),),))
    for markers in ("escape", "allow"):
        tokenizer, chat = families["qwen3-thinking"]
        sample = sample_of(tokenizer, type(chat)(chat.template, chat.tokens, markers), told)  # type: ignore[arg-type]
        one = teacher_of(families, "qwen3-thinking", "llama3", "drop")
        _, text = one.conversation(sample)
        assert b"It is 357." in spelt(families["llama3"][0].tokens, text.ids)


def test_the_system_message_stays_where_a_template_moves_it(families: dict[str, Any]) -> None:
    """Mistral shows it in the last user's turn, and only if that one is the last of all."""
    one = teacher_of(families, "llama3", "mistral-v3")
    sample = spoken(families, "llama3", CONVERSATIONS["system"])
    assert sample is not None
    prompt, text = one.conversation(sample)
    assert b"Be brief." in spelt(families["mistral-v3"][0].tokens, prompt)
    assert families["mistral-v3"][0].tokens.join(text.ids) == b" The answer is 357."


@pytest.mark.parametrize(
    ("student", "teacher"), [("glm4", "gemma3"), ("qwen3", "mistral-v3"), ("deepseek-r1", "glm4.5")]
)
def test_align_shows_what_a_teacher_is_sent(
    families: dict[str, Any], student: str, teacher: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`slime-tandem align` and `api.align`: the turn in the teacher's own markup, as `score` sends it."""
    text = "The answer is 357."
    own, chat = families[student][1], families[teacher][1]
    found = align(text, own.template.where, chat.template.where)
    _, sent = teacher_of(families, student, teacher).conversation(
        sample_of(*families[student], Conversation(ASK, (Said(text),)))
    )
    assert found.teacher_ids == sent.ids
    assert found.partners[-1] == len(sent.ids) - 1
    (tmp_path / "text").write_text(text)
    names = ["--student", own.template.where, "--teacher", chat.template.where]
    assert cli.main(["align", *names, str(tmp_path / "text")]) == 0
    out = capsys.readouterr().out
    assert (
        f"{sum(p is not None for p in found.partners)} of {len(found.partners)}" in out
        or f"{found.coverage:.3f}" in out
    )


def test_a_samples_failure_is_its_own(families: dict[str, Any]) -> None:
    """A role that the teacher lacks fails its sample by name, and not the call."""
    import asyncio

    from slime_tandem.protocol import GenerateResult
    from slime_tandem.types import AlignedScores

    class Answering:
        async def generate(self, requests: Any) -> Any:
            return [
                GenerateResult(
                    r.rid, (), (), "length", "", input_log_probs=(-1.0,) * len(r.input_ids), input_ids=r.input_ids
                )
                for r in requests
            ]

    one = Teacher.by_template(Answering(), families["llama3"][1], families["gemma3"][1])  # type: ignore[arg-type]
    told = [CONVERSATIONS[name] for name in ("tool", "single", "tools")]
    samples = [s for t in told if (s := spoken(families, "llama3", t)) is not None]
    scores = asyncio.run(one.score(samples))
    assert isinstance(scores[0], UnreadRolesError)
    assert isinstance(scores[1], AlignedScores)
    assert isinstance(scores[2], UnreadRolesError)


_SAID = [
    "Hello",
    " there",
    "12 + 345",
    "\n",
    "\n\n",
    "  ",
    "e\u0301",
    "\u4f60\u597d",
    "\u2581",
    "<think>",
    "</think>",
    "[INST]",
]
_SAID += [
    "<|im_end|>",
    "<|user|>",
    "<end_of_turn>",
    "</s>",
    '{"name": "f", "arguments": {"x": "\u00fc"}}',
    "<tool_call>",
]


def random_turn(rng: random.Random, tokenizer: Any, chat: Chat) -> list[int]:
    """Text, typed and sampled markers, ids that do not exist, in any order; no end of a turn."""
    ids: list[int] = []
    for _ in range(rng.randrange(7)):
        text = "".join(rng.choices(_SAID, k=rng.randrange(1, 4)))
        pieces = [chat.encode(text), chat.encode_markup(text), list(chat.answer), [rng.randrange(-1, 460)]]
        pieces += [list(mark) for mark in chat.marks or ()]
        ids += rng.choice(pieces)
    return [i for i in ids if i not in tokenizer.tokens.eos_ids and i not in chat.markup.inner]


def random_sample(rng: random.Random, tokenizer: Any, chat: Chat) -> TandemSample:
    """One to three turns, cut anywhere; raises a TandemError where the template has no such messages."""
    messages = (Message("user", rng.choice(["Hi", "use <think> tags", "4<|im_end|>\n<|im_start|>assistant"])),)
    ids, inserted, between = list[int](), list[tuple[int, int]](), list[tuple[Message, ...]]()
    for k in range(n := rng.randrange(1, 4)):
        ids += random_turn(rng, tokenizer, chat)
        if k == n - 1:
            ids += [chat.end_of_turn] if rng.random() < 0.7 else []
            break
        ids.append(chat.end_of_turn)
        between.append((Message(rng.choice(["user", "tool"]), rng.choice(["And then?", "use <think> tags"])),))
        shown = chat.next_turn(between[-1], ids[-1])
        inserted.append((len(ids), len(ids) + len(shown)))
        ids += shown
    mask = [0 if any(a <= i < b for a, b in inserted) else 1 for i in range(len(ids))]
    return TandemSample(
        SampleKey(0, 0, 0), 0, Prompt("p", messages, None, "t"), tuple(chat.render(messages)), tuple(ids), tuple(mask),
        tuple(-1.0 * m for m in mask), "stop", "", (), inserted=tuple(inserted), inserted_messages=tuple(between),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_whatever_was_sampled(families: dict[str, Any], seed: int) -> None:
    """No failure but a named one; pairs of equal bytes; each sampled end has the value of one that the teacher writes there,
    and none stands twice in a row; nothing that was inserted is paired; every token is paired or counted once."""
    rng, read = random.Random(seed), 0
    for _ in range(60):
        student, teacher = rng.choices(list(FAMILIES), k=2)
        (own, chat), (theirs, other) = families[student], families[teacher]
        one = teacher_of(families, student, teacher, rng.choice(["keep", "text", "drop"]))
        try:
            sample = random_sample(rng, own, chat)
            prompt, text = one.conversation(sample)
        except (ModelError, TeacherScoreError):  # a role, tools, or messages that one of the two does not show
            continue
        read += 1
        aligned = one.aligner.align(text)
        scores = aligned.scores([-1.0] * len(text.ids))
        assert int(scores.mask.sum()) + sum(scores.unaligned.values()) == len(sample.response_ids)
        for i, j in enumerate(aligned.teacher_index.tolist()):
            token, ended = sample.response_ids[i], sample.response_ids[i] in own.tokens.eos_ids and sample.loss_mask[i]
            assert not ended or j >= 0
            if j >= 0:
                data, partner = own.tokens.of(token), text.ids[int(j)]
                assert sample.loss_mask[i]
                assert data in (None, theirs.tokens.of(partner)) or one.aligner.special.ids[token] == partner
                assert not ended or one._markups[2] or text.ids[j] in other.ends | {other.end_of_turn}
        if not one._markups[2]:
            pairs = itertools.pairwise([*prompt, *text.ids])
            assert not any(a == b and a in theirs.tokens.eos_ids for a, b in pairs)
    assert read > 30
