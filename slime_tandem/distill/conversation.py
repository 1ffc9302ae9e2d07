"""A response as turns, and what a teacher with another template reads in their place. Pure.

`turns_of` cuts a sample into turns and finds what of them is markup that the student sampled: markers of thinking, the begin of
an answer, the end. `plan` says what stands in a teacher's text for it. Bytes and tokens of text are `alignment.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slime_tandem.config import Thinking
from slime_tandem.distill.alignment import Aligner, Bridge
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.turns import MARKERS, Frame, Ids, Markup
from slime_tandem.types import TandemSample

Kind = Literal["text", "open", "thought", "close", "answer", "between", "end"]
_LONGEST_HEADER = 48
"""Tokens that a header within a turn may take: harmony's names a role, a recipient, a channel and a type."""


def markup_of(tokens: TokenBytes) -> Markup:
    """What is known of a vocabulary's model without its template: the only markers of thinking that it has."""
    starts, ends = tokens.roles.get("think_start", ()), tokens.roles.get("think_end", ())
    return Markup(think=((starts[0],), (ends[0],)) if starts and ends else None)


def aligner_of(student: TokenBytes, teacher: TokenBytes, markup: Markup, thinking: Thinking = "keep") -> Aligner:
    """The alignment of a student's tokens to those of a teacher with this markup."""
    return Aligner(student, teacher, end_of_turn=markup.end, thinking=thinking, turn_ends=markup.ends)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `[start, stop)` of one kind: text, a marker of thinking, thinking, the begin of an answer, what stands between
    two messages of one turn (`Markup.inner`), the end.
    """

    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, tokens `[start, stop)`, in parts.

    `opened`: the prompt, or the text before it, has opened its thinking; `thinks`: it begins with thinking. `spelt`: the marker
    of thinking that it begins with in ordinary tokens, by a model that has no other, else "". Thinking of white space alone is
    none: it is part of the begin of the answer.
    """

    start: int
    stop: int
    opened: bool
    thinks: bool
    spelt: str
    parts: tuple[Part, ...]

    @property
    def ended(self) -> bool:
        """Whether its last token is an end of turn."""
        return bool(self.parts) and self.parts[-1].kind == "end"


def turns_of(sample: TandemSample, tokens: TokenBytes, markup: Markup) -> list[Turn]:
    """The turns of a response, between inserted spans whose messages are known.

    Only what was sampled opens and closes thinking, and what stands directly in front of a turn. Without messages the whole
    response is one turn.
    """
    spans = sample.inserted if sample.inserted_messages else ()
    starts = [0, *(stop for _, stop in spans)]
    stops = [*(start for start, _ in spans), len(sample.response_ids)]
    sampled = sample.loss_mask
    turns = []
    for k, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        before = sample.prompt_ids if k == 0 else sample.response_ids[spans[k - 1][0] : start]
        opened = _opens(before, tokens, markup) if before else markup.opens
        turns.append(_read(sample.response_ids, sampled, start, stop, opened, tokens, markup))
    return turns


def _opens(before: Sequence[int], tokens: TokenBytes, markup: Markup) -> bool:
    """Whether a prompt ends with an opened thinking."""
    if markup.think is None:
        return False
    at = len(before)
    while at and (tokens.of(before[at - 1]) or b"x").isspace():
        at -= 1
    opening = markup.think[0]
    return tuple(before[max(0, at - len(opening)) : at]) == opening


def _read(
    ids: Sequence[int], sampled: Sequence[int], start: int, stop: int, opened: bool, tokens: TokenBytes, markup: Markup
) -> Turn:
    last = stop
    ended = stop > start and bool(sampled[stop - 1]) and ids[stop - 1] in tokens.eos_ids
    last -= ended
    parts: list[Part] = []
    opening, closing = markup.think or ((), ())
    inside, at, begin = opened, start, start

    def close_part(here: int) -> None:
        if here > begin:
            parts.append(Part("thought" if inside else "text", begin, here))

    heads = {m[0] for m in (opening, closing, markup.answer) if m} | markup.inner
    while at < last:
        if ids[at] not in heads or not sampled[at]:
            at += 1
            continue
        wanted: list[tuple[Kind, Ids]] = [("close", closing)] if inside else [("open", opening)]
        if at == start:
            wanted.append(("answer", markup.answer))
        for kind, marker in wanted:
            if marker and tuple(ids[at : at + len(marker)]) == marker and at + len(marker) <= last:
                close_part(at)
                parts.append(Part(kind, at, at + len(marker)))
                inside = kind == "open" or (inside and kind != "close")
                at = begin = at + len(marker)
                break
        else:
            if ids[at] not in markup.inner:
                at += 1
                continue
            close_part(at)
            behind = _behind_header(ids, at, last, markup)
            parts.append(Part("between", at, behind))
            at = begin = behind
    close_part(last)
    if ended:
        parts.append(Part("end", last, stop))
    spelt = ""
    if markup.think is None:
        begin_text = tokens.join(ids[start : start + 16]).lstrip()
        spelt = next((mark for mark, _ in MARKERS if begin_text.startswith(mark.encode())), "")
    parts, opened = _without_empty_thinking(parts, opened, ids, tokens)
    before = tokens.join(ids[start : next((part.start for part in parts if part.kind == "open"), start)])
    thinks = opened or (any(part.kind == "open" for part in parts) and not before.strip())
    return Turn(start, stop, opened, thinks, spelt, tuple(parts))


def _behind_header(ids: Sequence[int], at: int, last: int, markup: Markup) -> int:
    """Where the message begins whose header begins at `at`, the end of the one before first; in a cut one: where it is cut.

    A control token alone, in the middle of text, is a header of its own.
    """
    assert markup.think is not None
    final = markup.think[0][-1]
    stop = min(last, at + _LONGEST_HEADER)
    return next((k + 1 for k in range(at, stop) if ids[k] == final), stop if stop == last else at + 1)


def _without_empty_thinking(
    parts: list[Part], opened: bool, ids: Sequence[int], tokens: TokenBytes
) -> tuple[list[Part], bool]:
    """Thinking of white space at the begin of a turn, and the line ends behind it, as the begin of the answer."""
    n = next((n for n, part in enumerate(parts) if part.kind == "close"), -1)
    head = parts[: n + 1]
    if not head or not (opened or any(part.kind == "open" for part in head)):
        return parts, opened
    if any(part.kind in ("text", "thought") and tokens.join(ids[part.start : part.stop]).strip() for part in head):
        return parts, opened
    stop, rest = head[-1].stop, parts[n + 1 :]
    if rest and rest[0].kind == "text":
        stop = _behind_line_ends(ids, rest[0], tokens)
        rest = [Part("text", stop, rest[0].stop), *rest[1:]] if stop < rest[0].stop else rest[1:]
    return [Part("answer", head[0].start, stop), *rest], False


def _behind_line_ends(ids: Sequence[int], part: Part, tokens: TokenBytes) -> int:
    """Where a part goes on behind tokens of line ends alone."""
    at = part.start
    while at < part.stop and (data := tokens.of(ids[at])) and not data.strip(b"\n"):
        at += 1
    return at


@dataclass
class Plan:
    """What `Aligner.write` is told beside the response: see there."""

    bridges: list[Bridge] = field(default_factory=list)
    thinking: list[tuple[int, int]] = field(default_factory=list)
    stands: dict[int, int] = field(default_factory=dict)
    leads: dict[int, tuple[int, str]] = field(default_factory=dict)


def header_only(turns: Sequence[Turn], thinking: Thinking, teacher: Markup) -> list[bool]:
    """For each turn whether the teacher's text begins with the bare header, since its thinking follows."""
    if thinking != "keep" or teacher.think_texts is None:
        return [False] * len(turns)
    marker = teacher.think_texts[0].strip()
    return [turn.thinks or turn.spelt == marker for turn in turns]


def plan(
    sample: TandemSample, turns: Sequence[Turn], frame: Frame, aligner: Aligner, student: Markup, teacher: Markup
) -> Plan:
    """What stands in the teacher's text for the markup of the student's turns; `frame` was made for these turns."""
    out = Plan()
    for k, turn in enumerate(turns):
        lead = frame.leads[k] if frame.leads else ""
        _TurnPlan(sample, turn, lead, out, aligner, student, teacher).make()
        last = k == len(turns) - 1
        between = frame.end if last else frame.bridges[k]
        stop = turn.stop if last else turns[k + 1].start
        if turn.ended and between and between[0] in aligner.turn_ends:
            out.stands[turn.stop - 1] = between[0]
            out.bridges.append(Bridge(turn.stop, stop - turn.stop, () if last else between[1:]))
        elif turn.ended:
            out.bridges.append(Bridge(turn.stop - 1, stop - turn.stop + 1, between))
        elif not last:
            out.bridges.append(Bridge(turn.stop, stop - turn.stop, between))
    out.bridges = [b for b in out.bridges if b.skip or b.ids]
    return out


@dataclass
class _TurnPlan:
    """Adds what one turn needs to `out`, from its begin to its end; `lead`: what the teacher reads in front of an answer."""

    sample: TandemSample
    turn: Turn
    lead: str
    out: Plan
    aligner: Aligner
    student: Markup
    teacher: Markup
    spaced: int = 0
    """Where the white space around the last marker ends."""

    def make(self) -> None:
        keep, drop = self.aligner.thinking == "keep", self.aligner.thinking == "drop"
        parts = self.turn.parts
        if self.turn.opened and not drop:
            self._opened(keep)
        if drop and [part.kind for part in parts[:2]] == ["text", "open"] and not self._read(parts[0]).strip():
            self.out.thinking.append((parts[0].start, parts[0].stop))  # white space of the template's
        for n, part in enumerate(parts):
            if part.kind == "answer":
                self._put(part.start, part.stop, ())
            elif part.kind == "between":
                read = {"text"} if drop else {"text", "thought"}
                apart = 0 < n < len(parts) - 1 and {parts[n - 1].kind, parts[n + 1].kind} <= read
                self._put(part.start, part.stop, self._ids("\n\n") if apart else ())
            elif drop and part.kind in ("open", "thought", "close"):
                stop = part.stop
                if part.kind == "close" and n + 1 < len(parts) and parts[n + 1].kind == "text":
                    # Line ends behind dropped thinking belong to it: templates take them off the answer.
                    stop = _behind_line_ends(self.sample.response_ids, parts[n + 1], self.aligner.student)
                self.out.thinking.append((part.start, stop))
            elif part.kind in ("open", "close"):
                side = 0 if part.kind == "open" else 1
                if part.kind == "open" and self.teacher.think_texts is None:
                    self._lead_here(part.start)
                if keep:
                    self._white_space(n, side, behind=False)
                self._marker(part, side)
                if keep:
                    self._white_space(n, side, behind=True)
            elif part.kind == "text":
                self._text(part)
        if self.lead:
            self._put(self.turn.start, self.turn.start, self._ids(self.lead))

    def _read(self, part: Part) -> bytes:
        return self.aligner.student.join(self.sample.response_ids[part.start : part.stop])

    def _put(self, start: int, stop: int, ids: Ids) -> None:
        self.out.bridges.append(Bridge(start, stop - start, ids))

    def _ids(self, text: str) -> Ids:
        return tuple(self.teacher.encode(text)) if text and self.teacher.encode else ()

    def _lead_here(self, at: int) -> None:
        if self.lead:
            self.out.leads[at] = (0, self.lead)
            self.lead = ""

    def _opened(self, keep: bool) -> None:
        """Thinking that the prompt has opened: the teacher's own opening, or the student's as text."""
        t = self.teacher
        if keep and t.think_texts is not None and t.think is not None:
            space, _, behind = _around(t.think_texts[0])
            ids = (*self._ids(space), *t.think[0], *self._ids(behind))
        else:
            ids = self._ids(self.lead + (self.student.think_texts[0] if self.student.think_texts else ""))
            self.lead = ""
        self._put(self.turn.start, self.turn.start, ids)

    def _text(self, part: Part) -> None:
        start = max(part.start, self.out.thinking[-1][1] if self.out.thinking else 0)
        if start < part.stop and not self.turn.thinks:
            self._begin_of_answer(Part("text", start, part.stop))
        elif start < part.stop:
            self._lead_here(start)

    def _begin_of_answer(self, part: Part) -> None:
        """The text that one side's template or tokenizer has in front of an answer, and the other has not."""
        if part.start != self.turn.start and not self.lead:
            return
        ids, table, own = self.sample.response_ids, self.aligner.student, self.student.lead.encode()
        if part.start != self.turn.start:
            own = b""  # the begin of the answer was sampled
        lead, self.lead = self.lead, ""
        data, size, at = table.join(ids[part.start : min(part.stop, part.start + 8)]), 0, part.start
        drop = len(own) if own and data.startswith(own) else 0
        if data[drop:].startswith(b" ") and lead == " " and (self.teacher.trims or not drop):
            lead = ""
        if own[:drop] == lead.encode() or not data:
            return
        while size < drop:
            size += len(table.of(ids[at]) or b"")
            at += 1
        if drop and size == drop:  # whole tokens
            self._put(part.start, at, () if at < part.stop else self._ids(lead))
            drop = 0
        else:
            at = part.start
        if (drop or lead) and at < part.stop:
            self.out.leads[at] = (drop, lead)

    def _marker(self, part: Part, side: int) -> None:
        """A sampled marker of thinking: the map has one that is a token on both sides; others are written out."""
        a, t = self.aligner, self.teacher
        keep = a.thinking == "keep" and t.think is not None
        if part.stop - part.start == 1 and (not keep or (t.think is not None and len(t.think[side]) == 1)):
            return  # text, or a token by the map
        ids = t.think[side] if keep and t.think is not None else self._ids(MARKERS[0][side])
        self._put(part.start, part.stop, ids)

    def _white_space(self, n: int, side: int, *, behind: bool) -> None:
        """White space around a marker belongs to the template: where it is the student's own, the teacher reads its own.

        What else a token of it holds is written out beside.
        """
        if self.teacher.think_texts is None or self.student.think_texts is None:
            return
        have, want = (
            _around(texts[side])[2 * behind] for texts in (self.student.think_texts, self.teacher.think_texts)
        )
        if have == want:
            return
        parts, at = self.turn.parts, self.turn.parts[n].stop if behind else self.turn.parts[n].start
        k = n + 1 if behind else n - 1
        near = parts[k] if 0 <= k < len(parts) and parts[k].kind in ("text", "thought") else Part("text", at, at)
        far, data, own = at, b"", have.encode()
        while len(data) < len(own) and (far < near.stop if behind else far > max(near.start, self.spaced)):
            far += 1 if behind else -1
            data = self._read(Part("text", min(at, far), max(at, far)))
        try:
            if behind and data.startswith(own):
                ids = self._ids(want + data[len(own) :].decode())
            elif not behind and data.endswith(own):
                ids = (*self._ids(data[: len(data) - len(own)].decode()), *self._ids(want))
            else:
                return
        except UnicodeDecodeError:  # half a character beside it: all stays as it was sampled
            return
        self.spaced = max(at, far)
        self._put(min(at, far), self.spaced, ids)


def _around(text: str) -> tuple[str, str, str]:
    """White space in front, the rest, white space behind."""
    core = text.strip()
    before, _, behind = text.partition(core) if core else (text, "", "")
    return before, core, behind
