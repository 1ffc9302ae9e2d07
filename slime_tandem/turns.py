"""How a chat template writes turns: what stands around a model's words, found by rendering probes. Pure.

`probe` renders short conversations of made-up words and reads off what the template put around them. Nothing is known of tokens
here (`models.chat` has the ids), of a model's own settings for its end of sequence, or of what is done with the answers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slime_tandem.errors import ModelError, TandemError

Trims = Literal["no", "start", "end", "both"]
ClosedBy = Literal["its own end", "the next role", "nothing"]
FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates take a turn's thinking apart from its text."""
MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""How thinking is marked within a turn's text, where no field is known."""


class Write(Protocol):
    """A chat template: messages to text. Raises a TandemError for what it refuses."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text; `generation`: with the opening of the assistant's next turn."""
        ...


@dataclass(frozen=True)
class Turns:
    """What a template writes around an assistant's turn. All texts are as rendered.

    `start`: in front of the first turn. `closes_user`: what closes a user's message. `header`: the begin of every assistant
    turn. `opened`: what the generation prompt puts behind it. `answer`: what stands between the header and the text of a
    turn without thinking, the last one of the conversation. `think`: what stands before and behind thinking, None: the
    template knows none; `opens_thinking`: its generation prompt has begun it; `keeps_thinking`: it writes the thinking of
    the last turn, `keeps_earlier` of turns before a user's message. `closing`: what closes the last turn; "" where only the
    next role's marker does, or nothing. `after`: what it puts behind that. `next_user`, `next_tool`: from the end of a
    turn's text to the user's or the tool's, None: it has no such message behind a turn. `roles` and `tools`, `tool_calls`:
    what it shows; `tool_after_call`: a tool's message only behind a turn that called it. `trims`: where it takes white
    space off a turn's text, `changes`: it changes text within.
    """

    start: str
    closes_user: str
    header: str
    opened: str
    answer: str
    think: tuple[str, str] | None
    opens_thinking: bool
    keeps_thinking: bool
    keeps_earlier: bool
    closing: str
    after: str
    next_user: str | None
    next_tool: str | None
    roles: tuple[str, ...]
    tools: bool
    tool_calls: bool
    tool_after_call: bool
    trims: Trims
    changes: bool

    @property
    def closed_by(self) -> ClosedBy:
        """What ends a turn."""
        if self.closing:
            return "its own end"
        return "the next role" if self.next_user and self.next_user.strip() else "nothing"

    @property
    def marks(self) -> tuple[str, str] | None:
        """The markers of thinking without white space around them."""
        return None if self.think is None else (self.think[0].strip(), self.think[1].strip())

    @property
    def markup(self) -> tuple[str, ...]:
        """All that the template wrote around words, for finding its markers."""
        found = (
            self.start,
            self.closes_user,
            self.header,
            self.opened,
            self.answer,
            self.closing,
            self.next_user,
            self.next_tool,
        )
        return tuple(text for text in (*found, *(self.think or ())) if text)

    def as_dict(self) -> dict[str, Any]:
        """For a record in JSON."""
        return {**dataclasses.asdict(self), "closed_by": self.closed_by}

    def lines(self) -> list[str]:
        """For the eye, one finding a line."""
        thinks = "unknown to the template"
        if self.marks:
            kept = "kept" if self.keeps_earlier else "kept in the last turn" if self.keeps_thinking else "dropped"
            thinks = f"{self.marks[0]!r} to {self.marks[1]!r}, {kept}"
            thinks += ", opened by the generation prompt" if self.opens_thinking else ""
        closing = repr(self.closing) if self.closing else f"{self.closed_by} ({self.next_user!r} before a user's)"
        more = [name for name, known in (("tools", self.tools), ("tool_calls", self.tool_calls)) if known]
        more += ["a tool only behind a turn that called it"] if self.tool_after_call else []
        changes = {"no": "as it is", "both": "trimmed"}.get(self.trims, f"trimmed at its {self.trims}")
        return [
            f"starts with {self.start!r}, a turn with {self.header + self.answer!r}",
            f"a turn is closed by {closing}",
            f"thinking: {thinks}",
            f"roles: {', '.join((*self.roles, *more))}",
            f"text of a turn: {changes}{', changed within' if self.changes else ''}",
        ]


Ids = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """The ids of a template around the turns of one response, all but the turns' own.

    `prompt`: up to the first turn's text. `bridges`: from the end of each turn's text but the last to the begin of the next.
    `end`: what closes the last. `leads`: one text for each turn, which its tokenizer writes in one token with the first word.
    """

    prompt: tuple[int, ...]
    bridges: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]
    leads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Markup:
    """What a model's template has around the words of a turn, in its ids (`models.chat.Chat`).

    `think`: what opens and closes thinking, without white space, None: unknown; `think_texts` the same as the template writes
    it. `opens`: its generation prompt has opened the thinking. `answer`: ids that the model writes itself in front of an
    answer. `inner`: control tokens of which it makes such markers, where one takes several (harmony, whose turns are messages).
    `lead`: plain text in front of its answers. `end`: the id that closes the last turn, -1: none does alone; `ends`:
    all that may close one; `between`: what it puts between a turn and a user's or a tool's message. `trims`: the template
    trims text at its begin. `encode`: ids of text in which markers are text, too.
    """

    think: tuple[Ids, Ids] | None = None
    think_texts: tuple[str, str] | None = None
    opens: bool = False
    answer: Ids = ()
    inner: frozenset[int] = frozenset()
    lead: str = ""
    end: int = -1
    ends: frozenset[int] = frozenset()
    between: tuple[str | None, ...] = ()
    trims: bool = False
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False)


def stand_in(name: str | int, among: Iterable[str] = ()) -> str:
    """A word that stands for a text while a template is rendered: no template trims, escapes or writes it.

    >>> stand_in(0), stand_in(0, ["a qz0zq"])
    ('qz0zq', 'qz0zzzq')
    """
    texts, word = list(among), f"qz{name}"
    while any(word in text for text in texts):
        word += "z"
    return word + "zq"


def shared_begin(texts: Sequence[str]) -> str:
    """The longest common begin, not within a marker.

    >>> shared_begin(["<a><think>\\n", "<a></think>"]), shared_begin(["<end>\\n", "<end>\\n<user>"])
    ('<a>', '<end>\\n')
    """
    first, last = min(texts), max(texts)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    begin = first[:n]
    if n < max(map(len, texts)):  # else one holds all of it
        for opening, closing in ("<>", "[]"):
            at = begin.rfind(opening)
            if at >= 0 and closing not in begin[at:] and any(closing in text[at:] for text in texts):
                begin = begin[:at]
    return begin


def _shared_end(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b)))
    return a[len(a) - n :]


def _not_within_a_marker(text: str, cut: int) -> str:
    """`text` up to `cut`, or to the end of the marker that it falls into."""
    for opening, closing in ("<>", "[]"):
        at = text.rfind(opening, 0, cut)
        if at >= 0 and closing not in text[at:cut]:
            cut = text.find(closing, at) + 1 or cut
    return text[:cut]


_U, _A, _V, _R, _T, _S = (stand_in(name) for name in ("user", "assistant", "second", "thought", "tool", "system"))
_ODD = f"{_A} <b>&amp; \"x\" 'y'  z\n\n {{{{ 7 }}}} \\n {_A}"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": stand_in("function"),
        "description": "a probe",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}


def _said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_ASKED: dict[str, Any] = {"role": "user", "content": _U}
_CALLS = [
    {"type": "function", "id": "call00001", "function": {"name": stand_in("function"), "arguments": {"x": "1"}}},
]


class _Probe:
    """Renders probes of one template; None where the template refuses."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def __call__(self, *messages: Mapping[str, Any], generation: bool = False, tools: Any = None) -> str | None:
        try:
            return self._write(messages, generation=generation, tools=tools)
        except TandemError:
            return None

    def holding(self, words: Sequence[str], *messages: Mapping[str, Any], **options: Any) -> str | None:
        """The text, if each of the words stands in it once."""
        text = self(*messages, **options)
        return text if text is not None and all(text.count(word) == 1 for word in words) else None


def probe(write: Write, where: str) -> Turns:
    """What the template of `where` (a model, for errors) writes around turns.

    Raises ModelError for a template that does not write a question, or an assistant's turn behind it, out as it is: nothing of
    what it does to a conversation can be found out then.
    """
    ask = _Probe(write)
    asked = write([_ASKED], generation=True)
    said = write([_ASKED, _said(_A)], generation=False)
    for text, words in ((asked, [_U]), (said, [_U, _A])):
        if any(text.count(word) != 1 for word in words):
            raise ModelError(
                "chat template",
                where,
                "one that writes out once what the user and the assistant say",
                "use another template",
            )
    behind_user = asked.partition(_U)[2]
    before, _, tail = said.partition(_U)[2].partition(_A)
    second = ask.holding([_U, _A, _V], _ASKED, _said(_A), {"role": "user", "content": _V})
    between = [second.partition(_U)[2].partition(_A)[0]] if second else []
    next_user = second.partition(_A)[2].partition(_V)[0] if second else None
    next_tool = _next_tool(ask)

    thought = _thinking(ask)
    begins = [behind_user, before, *between]
    if thought and thought.begin is not None:
        begins.append(thought.begin)
    header = shared_begin(begins)
    opened, answer = behind_user[len(header) :], before[len(header) :]
    think: tuple[str, str] | None = None
    if thought:
        think = (thought.before if thought.begin is None else thought.begin[len(header) :], thought.behind)
    plain = ask(_ASKED)
    closes_user = plain.partition(_U)[2] if plain and header.startswith(plain.partition(_U)[2]) else ""
    opens = think is not None and opened.rstrip().endswith(think[0].strip())
    closing = tail.rstrip()
    if next_user and closing:
        # What begins the next user's turn may stand behind the last turn already.
        closing = (shared_begin([tail, next_user]) or closing).rstrip() or closing
    start = asked.partition(_U)[0]
    if next_user is not None:
        start = _not_within_a_marker(start, len(start) - len(_shared_end(start, next_user)))
    return Turns(
        start=start,
        closes_user=closes_user,
        header=header[len(closes_user) :],
        opened=opened,
        answer=answer,
        think=think,
        opens_thinking=opens,
        keeps_thinking=bool(thought and thought.begin is not None),
        keeps_earlier=bool(thought and thought.earlier),
        closing=closing,
        after=tail[len(closing) :],
        next_user=next_user,
        next_tool=next_tool,
        roles=tuple(_roles(ask, next_user is not None, next_tool is not None)),
        tools=_TOOL["function"]["name"] in (ask(_ASKED, generation=True, tools=[_TOOL]) or ""),
        tool_calls=_TOOL["function"]["name"] in (_with_calls(ask) or ""),
        tool_after_call=next_tool is not None and _with_result(ask) is None and _with_result(ask, _CALLS) is not None,
        trims=_trims(ask),
        changes=ask(_ASKED, _said(_ODD)) is None or _ODD not in (ask(_ASKED, _said(_ODD)) or ""),
    )


def _roles(ask: _Probe, user: bool, tool: bool) -> list[str]:
    system = ask.holding([_S, _U], {"role": "system", "content": _S}, _ASKED, generation=True)
    return [
        *(["system"] if system else []),
        "user",
        "assistant",
        *(["tool"] if tool else []),
    ]


def _tool_message() -> dict[str, Any]:
    return {"role": "tool", "content": _T, "tool_call_id": "call00001", "name": stand_in("function")}


def _next_tool(ask: _Probe) -> str | None:
    for said in (_said(_A), _said(_A, tool_calls=_CALLS)):
        text = ask.holding([_U, _A, _T], _ASKED, said, _tool_message(), generation=True)
        if text is not None and text.index(_A) < text.index(_T):
            if "tool_calls" in said:
                return text.partition(_T)[0].partition(_A)[2]
            return text.partition(_A)[2].partition(_T)[0]
    return None


def _with_result(ask: _Probe, calls: Any = None) -> str | None:
    """A tool's message between two turns; `calls` of the first one."""
    first = _said(_A, tool_calls=calls) if calls else _said(_A)
    return ask(_ASKED, first, _tool_message(), _said(_V))


def _with_calls(ask: _Probe) -> str | None:
    for content in (_A, "", None):
        said = {**_said(""), "content": content, "tool_calls": _CALLS}
        text = ask(_ASKED, said, _tool_message(), generation=True)
        if text is not None:
            return text
    return None


@dataclass(frozen=True)
class _Thought:
    """What stands around a thought: `begin`, from the user's words to it, None where the template throws it away."""

    before: str
    behind: str
    begin: str | None = None
    earlier: bool = False


def _thinking(ask: _Probe) -> _Thought | None:
    """How the template writes thinking; None: it knows none."""
    later = {"role": "user", "content": _V}
    fields = dict.fromkeys(FIELDS, _R)
    ways: list[dict[str, Any]] = [_said(_A, **fields)]
    ways += [_said(f"{a}\n{_R}\n{b}\n\n{_A}") for a, b in MARKERS]
    for k, said in enumerate(ways):
        text = ask.holding([_U, _A], _ASKED, said)
        if text is None:
            continue
        a, b = MARKERS[k - 1] if k else ("", "")
        if text.count(_R) == 0:
            if k:  # the field is no proof: unknown ones are passed over
                return _Thought(f"{a}\n", f"\n{b}\n\n")
            continue
        before, _, rest = text.partition(_U)[2].partition(_R)
        behind = rest.partition(_A)[0]
        if k and said["content"] in text:
            continue  # text like any other
        earlier = ask.holding([_U, _A, _V, _R], _ASKED, said, later) is not None
        return _Thought("", behind, before, earlier)
    return None


def _trims(ask: _Probe) -> Trims:
    text = ask(_ASKED, _said(f" \n {_A} \n "))
    if text is None:
        return "both"
    start, end = f" \n {_A}" not in text, f"{_A} \n " not in text
    return "both" if start and end else "start" if start else "end" if end else "no"


def split(text: str, words: Sequence[str]) -> list[str] | None:
    """The parts of `text` around `words`, in this order, each once; None where they are not so.

    >>> split("a1b2c", ["1", "2"]), split("a2b1c", ["1", "2"]), split("1 1", ["1"])
    (['a', 'b', 'c'], None, None)
    """
    if not words:
        return [text]
    found = re.findall("|".join(map(re.escape, sorted(words, key=len, reverse=True))), text)
    if found != list(words):
        return None
    parts = []
    for word in words:
        part, _, text = text.partition(word)
        parts.append(part)
    return [*parts, text]
