"""A model's chat template in its tokenizer's ids: prompts, what stands around turns, and markers in text that is not trusted.

What the template writes is found by `turns.probe`; nothing here takes a model's end of turn from its special tokens' names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from slime_tandem.config import TextMarkers
from slime_tandem.errors import ModelError
from slime_tandem.tokens.token_bytes import ROLE_NAMES, TokenBytes, encode_exact
from slime_tandem.turns import Frame, Markup, Turns, probe, split, stand_in
from slime_tandem.types import Message, TandemSample

_OURS = frozenset(
    {
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "padding",
        "truncation",
        "tools",
    }
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Parameters of `apply_chat_template` that are no variables of a template, and `tools`, which come with the prompt."""
_TRUSTED = frozenset({"system", "assistant"})
"""Roles whose text in a prompt may hold markers: the operator's, and turns of models."""
_MARKER_ROLES = ("think", "tool")
_WORD = "Hello"
_MOST_WORDS = 64
"""Characters that a template may write otherwise the next time, in `render_again`."""
_BRACKETED = re.compile(r"<[^<>\[\]\s]+>|\[[^<>\[\]\s]+\]")

Pieces = list[tuple[str, bool]]
"""Text in pieces, and whether each is the template's (its markers are tokens) or a marker that somebody typed."""


class Template:
    """The chat template of a Hugging Face tokenizer with some of its variables set, as text.

    Raises ModelError where it is broken, or refuses the messages.
    """

    def __init__(self, hf: Any, where: str, kwargs: Mapping[str, Any] | None = None) -> None:
        self.hf, self.where, self.kwargs = hf, where, dict(kwargs or {})
        taken = sorted(_OURS & self.kwargs.keys())
        if taken:
            raise ModelError(
                "template_kwargs", taken, "variables of the chat template", "remove these, they are set by the caller"
            )

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, generation: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """As `turns.Write`."""
        try:
            return str(
                self.hf.apply_chat_template(
                    [dict(m) for m in messages],
                    tokenize=False,
                    add_generation_prompt=generation,
                    tools=list(tools) if tools else None,
                    **self.kwargs,
                )
            )
        except Exception as error:  # a template is a program: it raises what it likes
            why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            roles = ", ".join(str(m["role"]) for m in messages)
            raise ModelError(
                "chat template",
                self.where,
                f"a template that renders messages of these roles: {roles} ({why})",
                "mend chat_template.jinja or tokenizer_config.json, or leave these roles out of the prompts",
            ) from error

    @cached_property
    def turns(self) -> Turns:
        """What it writes around turns; raises ModelError as `turns.probe`."""
        return probe(self, self.where)


def end_ids(template: Template) -> frozenset[int]:
    """Single ids that the template's model ends a turn with: its own end, else the markers of the roles that may follow."""
    turns, hf = template.turns, template.hf
    texts = [turns.closing] if turns.closing else [turns.next_user, turns.next_tool]
    added = {i for i, token in hf.added_tokens_decoder.items() if str(token.content).strip()}
    firsts = [hf.encode(text, add_special_tokens=False)[:1] for text in texts if text and text.strip()]
    return frozenset(ids[0] for ids in firsts if ids and ids[0] in added)


class Chat:
    """A template and a tokenizer's ids. `text_markers`: what becomes of markers in text of users, tools and environments."""

    def __init__(self, template: Template, tokens: TokenBytes, text_markers: TextMarkers = "escape") -> None:
        self.template, self.tokens, self.text_markers = template, tokens, text_markers
        self.hf, self.turns = template.hf, template.turns

    # ---- text to ids ----

    @cached_property
    def _marker_names(self) -> dict[int, str]:
        known = {name for role, names in ROLE_NAMES.items() if role.startswith(_MARKER_ROLES) for name in names}
        markup = self.turns.markup
        return {
            i: name
            for i, name in self.tokens.names.items()
            if name.strip(" \t\r\n\u2581")
            and (i in self.tokens.special or name in known or any(name in text for text in markup))
        }

    @cached_property
    def markers(self) -> re.Pattern[str]:
        """Finds what the tokenizer would read as a control token in text: its special tokens, and the template's markers."""
        return _any_of(self._marker_names.values())

    @cached_property
    def typed(self) -> re.Pattern[str]:
        """The same and the template's markers that are no tokens (Mistral v1's `[INST]`): nothing makes plain text of those."""
        letters = {mark for text in self.turns.markup for mark in _BRACKETED.findall(text)}
        return _any_of({*self._marker_names.values(), *letters})

    @cached_property
    def _unsplit(self) -> re.Pattern[str]:
        """Markers that are tokens without being special: no option of the tokenizer makes text of them."""
        return _any_of(name for i, name in self._marker_names.items() if i not in self.tokens.special)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no special token or leading space is added, and no special token is recognised inside."""
        return encode_exact(
            self.tokens, lambda t: self.hf.encode(t, add_special_tokens=False, split_special_tokens=True), text
        )

    def encode_plain(self, text: str) -> list[int]:
        """The same, and no marker of thinking or tools is recognised either, where that is a token like any other."""
        cuts = [0, *(match.start() + 1 for match in self._unsplit.finditer(text)), len(text)]
        return [i for a, b in itertools.pairwise(cuts) if b > a for i in self.encode(text[a:b])]

    def encode_markup(self, text: str) -> list[int]:
        """Ids of what a template wrote within a conversation, its markers as tokens."""
        return encode_exact(self.tokens, lambda t: self.hf.encode(t, add_special_tokens=False), text)

    def _encode_pieces(self, pieces: Pieces, *, begins: bool) -> list[int]:
        ids: list[int] = []
        for k, (text, markup) in enumerate(pieces):
            if not text:
                continue
            if not markup:
                ids += self.encode_plain(text)
            elif begins and k == 0:
                ids += self.hf.encode(text, add_special_tokens=False)
            else:
                ids += self.encode_markup(text)
        return ids

    # ---- conversations ----

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Prompt ids, with the generation prompt.

        Raises ModelError if the template is broken or refuses these messages (some know no system role), or for a marker in
        their text with `text_markers` refuse.
        """
        self._require_shown(messages, [k for k, m in enumerate(messages) if m.role not in self.turns.roles])
        (pieces,) = self._pieces(messages, (), generation=True, tools=tools)
        return self._encode_pieces(pieces, begins=True)

    def _require_shown(self, messages: Sequence[Message], at: Sequence[int], turns: Sequence[str] = ()) -> None:
        """Raise ModelError for one of the messages at these places that the template leaves out without a word.

        `turns`: the contents of assistants behind which those after them must stand.
        """
        word = stand_in("shown", (m.content for m in messages))
        for k in at:
            asked = [replace(m, content=word if i == k else m.content).as_dict() for i, m in enumerate(messages)]
            before = next((m.content for m in messages[:k][::-1] if m.content in turns), "")
            text = self.template(asked, generation=True)
            if messages[k].content.strip() and word not in (text.partition(before)[2] if before else text):
                raise ModelError(
                    "chat template",
                    self.template.where,
                    f"one that shows a message of the role {messages[k].role} behind {messages[k - 1].role}"
                    if k
                    else f"one that shows a first message of the role {messages[k].role}",
                    "use another template, or leave this role out",
                )

    def render_again(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int] | None:
        """Ids of `text`, which this template wrote of these messages before; None: it did not.

        It can write a few words otherwise now (a date), in one place and in no text of the messages'. Raises as `render`.
        """
        (pieces,) = self._pieces(messages, (), generation=True, tools=tools)
        now = _text(pieces)
        if now != text:
            start, stop, word = _other_words(now, text)
            inside = 0 < stop - start <= _MOST_WORDS and 0 < len(word) <= _MOST_WORDS
            said = (
                m
                for text in messages
                if text.content.strip()
                for m in re.finditer(re.escape(text.content.strip()), now)
            )
            touched = any(m.start() < stop and start < m.end() for m in said)
            if not inside or touched or self.typed.search(now[start:stop]) or self.typed.search(word):
                return None
            at = 0
            for k, (piece, markup) in enumerate(pieces):
                if at <= start and stop <= at + len(piece):
                    if not markup:
                        return None
                    pieces[k] = (piece[: start - at] + word + piece[stop - at :], True)
                at += len(piece)
            if _text(pieces) != text:
                return None
        return self._encode_pieces(pieces, begins=True)

    def bridge(self, messages: Sequence[Message]) -> list[int]:
        """What the template puts from the end of an assistant turn over `messages` to the begin of the next one.

        Rendered behind a made-up turn, so that a template that rewrites earlier turns (drops their thinking) changes
        nothing. Raises ModelError as `render`, and for a template that does not write an assistant's turn out.
        """
        word = stand_in("turn", (m.content for m in messages))
        around = [Message("user", "probe"), Message("assistant", word), *messages]
        self._require_shown(around, self._doubtful(around, 2), [word])
        parts = self._pieces(around, (word,), generation=True, untrusted=messages)
        if len(parts) != 2:
            raise ModelError(
                "chat template",
                self.template.where,
                "an assistant's turn written out once",
                "use another template, or insert text without its messages",
            )
        return self._encode_pieces(parts[1], begins=False)

    def next_turn(self, messages: Sequence[Message], sampled: int) -> list[int]:
        """`bridge` behind a turn whose last token is `sampled`: an end of turn stands there already.

        Where the next role's marker ends turns, one of another role than the sampled one stays: it says whose the text is.
        """
        ids = self.bridge(messages)
        if sampled not in self.tokens.eos_ids:
            return ids
        closing = self.encode_markup(self.turns.closing) if self.turns.closing else []
        # The end in the middle of a conversation may be another one than at its end (harmony).
        if closing and ids[: len(closing)] == closing:
            return ids[closing.index(sampled) + 1 if sampled in closing else len(closing) :]
        own = self.turns.closed_by == "its own end" and self._is_marker(ids[:1])
        return ids[1:] if own or ids[:1] == [sampled] else ids

    def frame(
        self,
        messages: Sequence[Message],
        between: Sequence[Sequence[Message]] = (),
        thinks: Sequence[bool] = (False,),
        tools: Sequence[Any] | None = None,
    ) -> Frame:
        """The ids around a response of `len(thinks)` turns, with the messages `between` them.

        A turn that `thinks` begins where the template begins turns, before it opens any thinking; any other where it begins
        the text of an answer. Raises ModelError as `render`, and where the turns do not come out once and in order.
        """
        assert len(thinks) == len(between) + 1
        texts = [m.content for m in (*messages, *(m for part in between for m in part))]
        words = [stand_in(k, texts) for k in range(len(thinks))]
        chat = list(messages)
        for k, word in enumerate(words):
            chat += [Message("assistant", word), *(between[k] if k < len(between) else ())]
        untrusted = [m for part in between for m in part]
        self._require_shown(chat, self._doubtful(chat, len(messages)), words)
        parts = self._pieces(chat, words, generation=False, tools=tools, untrusted=untrusted)
        if len(parts) != len(words) + 1:
            raise ModelError(
                "chat template",
                self.template.where,
                f"one that writes out {len(words)} turns of the assistant, once each and in order",
                "use another template, or an environment with messages that it knows",
            )
        (asked,) = self._pieces(messages, (), generation=True, tools=tools)
        t = self.turns
        head = _without_end(asked, t.opened if _text(asked).endswith(t.opened) else "")
        if not _text(parts[0]).startswith(_text(head)):
            # A template can write a question otherwise once it is answered (Mistral's system message); it asked this.
            parts[0] = [*head, (t.answer, True)]
        lead, leads = self.lead if not self.lead.strip(" ") else "", []
        for k, thinking in enumerate(thinks):
            begin = parts[k]
            if thinking:
                begin = head if k == 0 else _without_end(begin, t.answer)
                leads.append("")
            else:
                written = bool(lead) and t.answer == lead  # else the tokenizer puts it there
                leads.append(lead if not written or _text(begin).endswith(lead) else "")
                begin = _without_end(begin, lead) if written else begin
            parts[k] = begin
        tail = _text(parts[-1])
        closing = tail.rstrip() or (t.next_user or "")
        end = self.encode_markup(closing) if t.closed_by != "nothing" else [self.end_of_turn]
        return Frame(
            prompt=tuple(self._encode_pieces(parts[0], begins=True)),
            bridges=tuple(tuple(self._encode_pieces(part, begins=False)) for part in parts[1:-1]),
            end=tuple(end if tail.strip() else end[:1]),
            leads=tuple(leads),
        )

    def _doubtful(self, chat: Sequence[Message], begin: int) -> list[int]:
        """Places from `begin` on of messages that a template may leave out: of no role that it showed, or a late system's."""
        known = set(self.turns.roles) - {"system"}
        return [k for k in range(begin, len(chat)) if chat[k].role not in known]

    def _is_marker(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[0] in self._marker_names

    def _pieces(
        self,
        messages: Sequence[Message],
        words: Sequence[str],
        *,
        generation: bool,
        tools: Sequence[Any] | None = None,
        untrusted: Sequence[Message] = (),
    ) -> list[Pieces]:
        """The rendered text around `words`, each part with the markers of untrusted text apart; one part if they are not so."""
        held: dict[str, str] = {}
        shown: list[Mapping[str, Any]] = []
        doubted = set(map(id, untrusted))
        for message in messages:
            if self.text_markers != "allow" and (message.role not in _TRUSTED or id(message) in doubted):
                message = self._guarded(message, held, [m.content for m in messages])
            shown.append(message.as_dict())
        text = self.template(shown, generation=generation, tools=tools)
        parts = split(text, words)
        if not held:
            return [[(part, True)] for part in parts or [text]]
        lost = [held[word] for word in held if word not in text]
        if lost:
            raise ModelError(
                "chat template",
                self.template.where,
                f"one that writes out text with the markers {lost}",
                "remove them from the prompt, or set models.text_markers=allow",
            )
        cut = re.compile("(" + "|".join(map(re.escape, held)) + ")")
        return [[(held.get(p, p), p not in held) for p in cut.split(part)] for part in parts or [text]]

    def _guarded(self, message: Message, held: dict[str, str], texts: Sequence[str]) -> Message:
        """The message with a stand-in for each marker in its text."""
        if self.text_markers == "refuse" and (found := self.typed.findall(message.content)):
            raise ModelError(
                f"text of the role {message.role}",
                found[:5],
                f"no control tokens of {self.template.where} in text of users, tools and environments",
                "remove them, or set models.text_markers=escape to read them as plain text",
            )

        if not self.markers.search(message.content):
            return message

        def put_aside(match: re.Match[str]) -> str:
            word = stand_in(f"marker{len(held)}", texts)
            held[word] = match[0]
            return word

        return Message(message.role, self.markers.sub(put_aside, message.content), message.extra)

    def count_markers(self, messages: Sequence[Message], *, environment: bool = False) -> int:
        """How many markers stand in the text of users, tools and (`environment`: any role) environments."""
        texts = (m.content for m in messages if environment or m.role not in _TRUSTED)
        return sum(len(self.typed.findall(text)) for text in texts)

    def markers_in(self, sample: TandemSample) -> int:
        """How many stand in a sample's prompt and between its turns."""
        between = sum(self.count_markers(part, environment=True) for part in sample.inserted_messages)
        return self.count_markers(sample.prompt.messages) + between

    def lines(self) -> list[str]:
        """What was found out, for the eye."""
        ends = ", ".join(f"{i} {self.hf.convert_ids_to_tokens(i)}" for i in sorted(self.ends)) or "no token"
        prefix = ["the tokenizer puts a space in front of a turn's first word"] if self.dummy_prefix else []
        return [*self.turns.lines(), f"ids that may end a turn: {ends}", *prefix]

    def as_dict(self) -> dict[str, Any]:
        """For a record in JSON."""
        return {
            **self.turns.as_dict(),
            "end_of_turn": self.end_of_turn,
            "ends": sorted(self.ends),
            "dummy_prefix": self.dummy_prefix,
            "template_kwargs": self.template.kwargs,
            "text_markers": self.text_markers,
        }

    # ---- what turns are in ids ----

    @cached_property
    def end_of_turn(self) -> int:
        """The id that ends a turn, the last one of a conversation.

        Where the template writes several, the first of them; where it writes words for it, or nothing, that is the model's one
        end of turn (generation_config.json). Raises ModelError for several of these.
        """
        text = self.turns.closing or self.turns.next_user or ""
        ids = self.encode_markup(text) if text.strip() else []
        if self._is_marker(ids):
            return ids[0]
        eos = self.tokens.eos_ids
        if len(eos) == 1:
            return min(eos)
        raise ModelError(
            "end of turn",
            self.template.where,
            f"a template that closes a turn with one token, or one eos_token_id (the ids {sorted(eos)} are named)",
            "let the template write what ends a turn, or name one id in generation_config.json",
        )

    @cached_property
    def markup(self) -> Markup:
        """What the alignment needs to know of this model's turns."""
        t = self.turns
        return Markup(
            think=self.marks,
            think_texts=t.think,
            opens=t.opens_thinking,
            answer=self.answer,
            inner=frozenset(i for mark in self.marks or () if len(mark) > 1 for i in mark if i in self.tokens.special),
            lead=self.lead,
            end=self.end_of_turn if self.end_of_turn in self.ends or self.turns.closed_by == "nothing" else -1,
            ends=self.ends,
            between=(t.next_user, t.next_tool),
            trims=t.trims in ("start", "both"),
            encode=self.encode_plain,
        )

    @cached_property
    def ends(self) -> frozenset[int]:
        """All single ids with which the template may close a turn: at the end, before a user's or a tool's message."""
        texts = (self.turns.closing, self.turns.next_user, self.turns.next_tool)
        firsts = (self.encode_markup(text)[:1] for text in texts if text and text.strip())
        return frozenset(ids[0] for ids in firsts if self._is_marker(ids))

    @cached_property
    def marks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids that open and close thinking; None: neither the template nor the vocabulary has any."""
        if self.turns.marks is not None:
            return (tuple(self.encode_markup(self.turns.marks[0])), tuple(self.encode_markup(self.turns.marks[1])))
        roles = self.tokens.roles
        starts, ends = roles.get("think_start", ()), roles.get("think_end", ())
        return ((starts[0],), (ends[0],)) if starts and ends else None

    @cached_property
    def answer(self) -> tuple[int, ...]:
        """The ids of what the model writes itself between the begin of a turn and its answer; () where that is plain text."""
        return tuple(self.encode_markup(self.own_begin)) if self.markers.search(self.own_begin) else ()

    @cached_property
    def lead(self) -> str:
        """Plain text in front of a turn's answer: the template's, and the space that the tokenizer puts there (" " mostly)."""
        return ("" if self.markers.search(self.own_begin) else self.own_begin) + self.dummy_prefix

    def finished(self, text: str) -> list[int]:
        """`text` as one finished turn that the model itself would have sampled: with what it writes before an answer.

        A text that closes its thinking is taken as it is.
        """
        t = self.turns
        begin = self.own_begin
        if t.think is not None and t.think[1].strip() in text:
            begin = ""
        elif t.think is not None and t.opens_thinking:
            begin = t.think[1]
        if self.markers.search(begin):
            return [*self.encode_markup(begin), *self.encode(text), self.end_of_turn]
        return [*self.encode(begin + self.dummy_prefix + text), self.end_of_turn]

    @property
    def own_begin(self) -> str:
        """What the model writes between the generation prompt and its answer."""
        t = self.turns
        return t.answer.removeprefix(t.opened) if not t.opens_thinking and t.answer.startswith(t.opened) else ""

    @cached_property
    def dummy_prefix(self) -> Literal["", " "]:
        """The space that the tokenizer adds in front of a turn's first word, where the text has none."""
        if not self.tokens.inserts_leading_space:
            return ""
        text = self.template(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _WORD}], generation=False
        )
        ids = self.hf.encode(text, add_special_tokens=False)
        read = b"".join(self.tokens.of(i) or self.tokens.names.get(i, "").encode() for i in ids)
        before, written = read.rpartition(_WORD.encode())[0], text.rpartition(_WORD)[0].encode()
        spaces = len(before) - len(before.rstrip(b" ")) - (len(written) - len(written.rstrip(b" ")))
        return " " if spaces > 0 and not written.endswith(b" ") else ""


def _any_of(names: Any) -> re.Pattern[str]:
    found = sorted(set(names), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, found)) if found else r"(?!)")


def _other_words(now: str, then: str) -> tuple[int, int, str]:
    """(start, stop, words): `then` is `now` with these whole words in the place of those at [start, stop).

    >>> _other_words("on 9 May, so", "on 19 May, so")
    (3, 4, '19')
    """
    short = min(len(now), len(then))
    start = next((i for i in range(short) if now[i] != then[i]), short)
    while start and now[start - 1].isalnum():
        start -= 1
    same = next((i for i in range(short - start) if now[-1 - i] != then[-1 - i]), short - start)
    while same and now[len(now) - same].isalnum():
        same -= 1
    return start, len(now) - same, then[start : len(then) - same]


def _text(pieces: Pieces) -> str:
    return "".join(text for text, _ in pieces)


def _without_end(pieces: Pieces, end: str) -> Pieces:
    """The pieces without `end`, which the last one, the template's, holds."""
    if not end or not pieces or not pieces[-1][0].endswith(end):
        return list(pieces)
    text, markup = pieces[-1]
    return [*pieces[:-1], (text[: len(text) - len(end)], markup)]
