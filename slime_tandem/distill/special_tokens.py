"""Which special token of the teacher stands for which of the student: by role, never by number. Pure.

A special token has a meaning instead of bytes: end of turn, begin of thinking, begin of a tool call. The same meaning has other
names and numbers in other vocabularies. The map is made once per pair of vocabularies, checked and shown at the start. Tokens
with bytes are `alignment.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from slime_tandem.config import Thinking
from slime_tandem.errors import printable
from slime_tandem.tokens.token_bytes import Role, TokenBytes

_WRITABLE = ("think", "tool")  # roles whose marker a teacher without it can read as text


@dataclass(frozen=True, slots=True)
class SpecialRow:
    """What becomes of one special token of the student.

    `teacher_id`: written in its place; else `text`: written in its place, as text; else nothing stands for it, and it is masked
    and counted. `roles` are the student's, () for a token without a known one.
    """

    student_id: int
    name: str
    roles: tuple[Role, ...]
    teacher_id: int | None = None
    teacher_name: str = ""
    text: str | None = None

    def __str__(self) -> str:
        target = (
            f"{self.teacher_id} {self.teacher_name}"
            if self.teacher_id is not None
            else f"the text {self.text!r}"
            if self.text is not None
            else "nothing (masked)"
        )
        return printable(f"{self.student_id} {self.name} ({', '.join(self.roles) or 'no role'}) -> {target}")


@dataclass(frozen=True)
class SpecialMap:
    """The rows for all special tokens and markers of a student.

    >>> s = TokenBytes((b"a", None, None), frozenset({1, 2}), frozenset({1}), {1: "<|im_end|>", 2: "<think>"})
    >>> t = TokenBytes((None, b"a"), frozenset({0}), frozenset({0}), {0: "<|eot_id|>"})
    >>> for row in map_special_tokens(s, t, 0).rows:
    ...     print(row)
    1 <|im_end|> (eos, turn_end) -> 0 <|eot_id|>
    2 <think> (think_start) -> the text '<think>'
    """

    rows: tuple[SpecialRow, ...]

    @cached_property
    def ids(self) -> dict[int, int]:
        """Student id -> teacher id."""
        return {r.student_id: r.teacher_id for r in self.rows if r.teacher_id is not None}

    @cached_property
    def texts(self) -> dict[int, str]:
        """Student id -> the text written for it."""
        return {r.student_id: r.text for r in self.rows if r.text is not None}

    @cached_property
    def unmapped(self) -> tuple[SpecialRow, ...]:
        """Rows with a role that nothing of the teacher's stands for."""
        return tuple(r for r in self.rows if r.roles and r.teacher_id is None and r.text is None)


def map_special_tokens(
    student: TokenBytes, teacher: TokenBytes, end_of_turn: int, thinking: Thinking = "keep"
) -> SpecialMap:
    """The map from a student's special tokens and markers to a teacher's.

    `end_of_turn` is the teacher's id that closes a turn: all the student's ends of turn become it, whatever their numbers and
    names. A think or tool marker becomes the teacher's marker of that role, else its own name as text (`thinking="text"`: think
    markers always). Other tokens need the same name, or a role that exactly one token of the teacher has.
    """
    return SpecialMap(tuple(_rows(student, teacher, end_of_turn, thinking)))


def _rows(student: TokenBytes, teacher: TokenBytes, end_of_turn: int, thinking: Thinking) -> Iterator[SpecialRow]:
    roles: dict[int, list[Role]] = {}
    for role, ids in student.roles.items():
        for i in ids:
            roles.setdefault(i, []).append(role)
    by_name = {name: i for i, name in teacher.names.items()}
    for i in sorted(student.special | student.eos_ids | roles.keys()):
        name, own = student.names.get(i, f"<{i}>"), tuple(roles.get(i, ()))
        marker = any(role.startswith(_WRITABLE) for role in own)
        target: int | None = None
        if i in student.eos_ids:
            same = by_name.get(name)
            target = same if same in teacher.eos_ids else end_of_turn if end_of_turn >= 0 else None
        elif not (thinking == "text" and any(role.startswith("think") for role in own)):
            same = by_name.get(name)
            # A token of that name that is text (Gemma: "<s>", a tag of HTML) has not the meaning of a special one.
            target = _of_role(own, teacher, same if marker or same in teacher.special else None)
        data = student.of(i)
        if data is not None and (target is None or teacher.of(target) == data):
            continue  # a marker with bytes is text like any other
        if target is not None:
            yield SpecialRow(i, name, own, target, teacher.names.get(target, f"<{target}>"))
        elif marker:
            yield SpecialRow(i, name, own, text=name)
        else:
            yield SpecialRow(i, name, own)


def _of_role(own: Sequence[Role], teacher: TokenBytes, same_name: int | None) -> int | None:
    if same_name is not None:
        return same_name
    for role in own:
        ids = teacher.roles.get(role, ())
        if len(ids) == 1:
            return ids[0]
    return None
