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

_SPELT = tuple(opening.encode() for opening, _ in MARKERS)
Kind = Literal["text", "open", "thought", "close", "answer", "end"]


def markup_of(tokens: TokenBytes) -> Markup:
    """What is known of a vocabulary's model without its template: the only markers of thinking that it has."""
    starts, ends = tokens.roles.get("think_start", ()), tokens.roles.get("think_end", ())
    return Markup(think=((starts[0],), (ends[0],)) if starts and ends else None)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `[start, stop)` of one kind: text, a marker that opens or closes thinking, thinking, the begin of an answer, the end."""

    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, tokens `[start, stop)`, in parts.

    `opened`: the prompt, or the text before it, has opened its thinking. `spelt`: it begins with a marker of thinking in
    ordinary tokens, by a model that has no other.
    """

    start: int
    stop: int
    opened: bool
    spelt: bool
    parts: tuple[Part, ...]

    @property
    def ended(self) -> bool:
        """Whether its last token is an end of turn."""
        return bool(self.parts) and self.parts[-1].kind == "end"

    @property
    def thinks(self) -> bool:
        """Whether it begins with thinking."""
        kinds = {part.kind for part in self.parts}
        return self.opened or self.spelt or "open" in kinds


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

    heads = {m[0] for m in (opening, closing, markup.answer) if m}
    while at < last:
        if ids[at] not in heads or not sampled[at]:
            at += 1
            continue
        wanted: list[tuple[Kind, Ids]] = [("close", closing)] if inside else [("open", opening), ("answer", markup.answer)]
        for kind, marker in wanted:
            if marker and tuple(ids[at : at + len(marker)]) == marker and at + len(marker) <= last:
                if kind == "answer" and any(p.kind in ("text", "answer") for p in parts) or (kind == "answer" and at > begin):
                    continue
                close_part(at)
                parts.append(Part(kind, at, at + len(marker)))
                inside = kind == "open" or (inside and kind != "close")
                at = begin = at + len(marker)
                break
        else:
            at += 1
    close_part(last)
    if ended:
        parts.append(Part("end", last, stop))
    spelt = markup.think is None and tokens.join(ids[start : start + 16]).lstrip().startswith(_SPELT)
    return Turn(start, stop, opened, spelt, tuple(parts))


@dataclass
class Plan:
    """What `Aligner.write` is told beside the response: see there."""

    bridges: list[Bridge] = field(default_factory=list)
    thinking: list[tuple[int, int]] = field(default_factory=list)
    stands: dict[int, int] = field(default_factory=dict)
    leads: dict[int, tuple[int, str]] = field(default_factory=dict)


def header_only(turns: Sequence[Turn], thinking: Thinking, *, same: bool) -> list[bool]:
    """For each turn whether the teacher's text begins with the bare header: thinking follows, or the student's own begin.

    `same`: student and teacher share vocabulary and markup.
    """
    return [
        (thinking == "keep" and turn.thinks) or (same and bool(turn.parts) and turn.parts[0].kind == "answer")
        for turn in turns
    ]


def plan(
    sample: TandemSample,
    turns: Sequence[Turn],
    frame: Frame,
    aligner: Aligner,
    student: Markup,
    teacher: Markup,
    *,
    same: bool,
) -> Plan:
    """What stands in the teacher's text for the markup of the student's turns; `frame` was made for these turns.

    `same`: the teacher reads the student's own markup, as it is.
    """
    out = Plan()
    for k, turn in enumerate(turns):
        _plan_turn(sample, turn, frame.leads[k] if frame.leads else "", out, aligner, student, teacher, same=same)
        if same:
            continue
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


def _plan_turn(
    sample: TandemSample,
    turn: Turn,
    lead: str,
    out: Plan,
    aligner: Aligner,
    student: Markup,
    teacher: Markup,
    *,
    same: bool,
) -> None:
    mode, table = aligner.thinking, aligner.student
    if turn.opened and not (same and turn.start):  # its own text between turns is read as it is
        if mode == "keep" and teacher.think_texts is not None and teacher.think is not None:
            text = teacher.think_texts[0]
            begin = text.removeprefix(text[: len(text) - len(text.lstrip())])
            out.bridges.append(Bridge(turn.start, 0, _opening_ids(begin, teacher)))
        elif mode != "drop" and student.think_texts is not None and teacher.encode is not None:
            out.bridges.append(Bridge(turn.start, 0, tuple(teacher.encode(student.think_texts[0]))))
    answered = same
    for n, part in enumerate(turn.parts):
        if part.kind in ("open", "close"):
            if mode == "drop":
                out.thinking.append((part.start, part.stop))
                if part.kind == "close":
                    _drop_line_ends(sample, turn, n, out, table)
            elif not same:
                if part.kind == "open" and mode == "keep":
                    _plan_space(sample, turn, n, out, table, teacher)
                _plan_marker(part, 0 if part.kind == "open" else 1, out, aligner, student, teacher)
        elif part.kind == "thought" and mode == "drop":
            out.thinking.append((part.start, part.stop))
        elif part.kind == "answer" and not same:
            out.bridges.append(Bridge(part.start, part.stop - part.start, ()))
        elif part.kind == "text" and not answered:
            answered = True
            if not turn.thinks or turn.spelt:
                _plan_lead(sample, part, lead, out, table, student, teacher)
            elif lead and mode == "text":
                out.leads[turn.start] = (0, lead)
            elif lead:
                hidden = out.thinking[-1][1] if out.thinking else 0
                out.leads[max(part.start, hidden)] = (0, lead)
    if lead and not answered:
        out.bridges.append(Bridge(turn.start, 0, tuple(teacher.encode(lead) if teacher.encode else ())))


def _plan_space(sample: TandemSample, turn: Turn, n: int, out: Plan, table: TokenBytes, teacher: Markup) -> None:
    """White space between the begin of a turn and its thinking is each template's own."""
    if teacher.think_texts is None or teacher.encode is None or any(p.kind != "text" for p in turn.parts[:n]):
        return
    text = teacher.think_texts[0]
    space, part = text[: len(text) - len(text.lstrip())], turn.parts[n]
    begin = turn.parts[0].start if n else part.start
    own = table.join(sample.response_ids[begin : part.start])
    if not own.strip() and own != space.encode():
        out.bridges.append(Bridge(begin, part.start - begin, tuple(teacher.encode(space)) if space else ()))


def _opening_ids(text: str, teacher: Markup) -> Ids:
    """The teacher's opening of thinking: its marker, and the white space that its template puts behind."""
    assert teacher.think is not None
    marker = text.rstrip()
    space = text[len(marker) :]
    return (*teacher.think[0], *(teacher.encode(space) if space and teacher.encode else ()))


def _plan_marker(part: Part, side: int, out: Plan, aligner: Aligner, student: Markup, teacher: Markup) -> None:
    """A sampled marker of thinking: the map has one that is a token on both sides; others are written out."""
    if part.stop - part.start == 1:
        token = student.think[side][0] if student.think else -1
        row_known = token in aligner.special.ids or token in aligner.special.texts
        single = teacher.think is None or len(teacher.think[side]) == 1
        if single and (row_known or aligner.student.of(token) is not None):
            return
    skip = part.stop - part.start
    if aligner.thinking == "keep" and teacher.think is not None:
        out.bridges.append(Bridge(part.start, skip, teacher.think[side]))
    elif teacher.encode is not None:
        name = ("<think>", "</think>")[side]
        out.bridges.append(Bridge(part.start, skip, tuple(teacher.encode(name))))


def _drop_line_ends(sample: TandemSample, turn: Turn, n: int, out: Plan, table: TokenBytes) -> None:
    """Line ends behind dropped thinking belong to it: templates take them off the answer."""
    if n + 1 >= len(turn.parts) or turn.parts[n + 1].kind != "text":
        return
    at = start = turn.parts[n + 1].start
    while at < turn.parts[n + 1].stop and (data := table.of(sample.response_ids[at])) and not data.strip(b"\n"):
        at += 1
    if at > start:
        out.thinking.append((start, at))


def _plan_lead(
    sample: TandemSample, part: Part, lead: str, out: Plan, table: TokenBytes, student: Markup, teacher: Markup
) -> None:
    """The text that one side's template or tokenizer has in front of an answer, and the other has not."""
    own = student.lead.encode()
    data = b""
    for at in range(part.start, part.stop):
        data += table.of(sample.response_ids[at]) or b""
        if len(data) >= max(len(own), 1):
            break
    drop = len(own) if own and data.startswith(own) else 0
    if data[drop:].startswith(b" ") and lead == " " and (teacher.trims or not drop):
        lead = ""
    if own[:drop] == lead.encode() or not data:
        return
    size, at = 0, part.start
    while drop and at < part.stop and size < drop:
        size += len(table.of(sample.response_ids[at]) or b"")
        at += 1
    if drop and size == drop:  # whole tokens
        out.bridges.append(Bridge(part.start, at - part.start, ()))
        drop = 0
    else:
        at = part.start
    if (drop or lead) and at < part.stop:
        out.leads[at] = (drop, lead)
