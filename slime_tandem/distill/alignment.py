"""Byte-exact alignment of a teacher's tokens to a student's. Pure, vectorised, linear in the length.

Both token sequences are read as one stream of symbols: a byte of text, or a special token by its role. Tokens pair where both
sides cut the stream at the same two places and nothing in between was changed on the way. What has no partner is masked and
counted by reason:
  special       a special token, or an id without bytes, that nothing of the teacher's stands for
  boundary      the two tokenizers cut the text at other places here
  invalid_utf8  bytes that are no UTF-8 (a lone fragment, a response cut in mid-character): no tokenizer of text can have them;
                the teacher reads U+FFFD in their place and later tokens still pair up
  normalised    characters that the teacher's tokenizer rewrites (NFC, U+2581, a space in front) or has no token for
  unproven      the teacher's ids do not spell what they should here, so places are unknown
  thinking      thinking that is kept from this teacher
  inserted      text between turns that nobody sampled

`strict` (one token for one token) is the default: it did best in the published comparison (arXiv 2610.08448). The other
policies also use spans, the shortest stretches that both sides cut out alike with more than one token on a side; each
gives a span's student tokens values from the teacher's log-prob of the whole span, the sum over its tokens:
  even          an equal share each
  proportional  shares in proportion to the student's own log-probs
  chain_rule    the span counts as one action: each of its tokens carries the difference of the whole span

It knows no engine, no template and no log-prob but those that it is given: `teacher.py` asks for them.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_tandem.config import AlignmentPolicy, Thinking
from slime_tandem.distill.special_tokens import SpecialMap, map_special_tokens
from slime_tandem.errors import DataError
from slime_tandem.tokens.reading import (
    INVALID_UTF8,
    NORMALISED,
    Edits,
    ReadText,
    joint_edits,
    lead_with,
    read_text,
    readable_text,
)
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import AlignedScores, BoolArray, FloatArray, IntArray

__all__ = ["Aligner", "Alignment", "AlignmentPolicy", "Bridge", "TeacherText", "readable_text"]

UNALIGNED_REASONS = ("special", "boundary", "invalid_utf8", "normalised", "unproven", "thinking", "inserted")
_SPECIAL, _BOUNDARY, _INVALID, _NORMALISED, _UNPROVEN, _THINKING, _INSERTED = range(len(UNALIGNED_REASONS))
_PAIRED = -1
_NOTHING: Mapping[int, Any] = MappingProxyType({})

_FAR = np.iinfo(np.int64).max
Symbols = npt.NDArray[np.uint16]
Encode = Callable[[str], Sequence[int] | IntArray]


@dataclass(frozen=True)
class Bridge:
    """Teacher ids that stand at student position `at` [0, R] and for no token of the student's: its template between turns.

    `skip` student tokens from `at` on, the student's own text there, are kept from the teacher.
    """

    at: int
    skip: int
    ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TeacherText:
    """A response in the teacher's ids.

    `ids` [Rt] to send; `symbols_of` [Rt] the same for the alignment, where a special token that stands for the student's has a
    number of its own. The student's ids, where their symbols lie, how many, and the sums of that: `student_ids`, `places`,
    `lengths`, `ends` [R]. What the teacher should spell: `spelt`, with any byte in the place of a special symbol; `special`:
    which ids are these, `special_at`: where in it. What of the student's symbols was rewritten on the way (`edits`, None:
    nothing), and why a student token without symbols has none (`silent` [R], else -1).
    """

    ids: tuple[int, ...]
    symbols_of: IntArray
    student_ids: IntArray
    places: IntArray
    lengths: IntArray
    ends: IntArray
    spelt: bytes
    special: IntArray
    special_at: IntArray
    edits: Edits | None
    silent: npt.NDArray[np.int8]
    _prove: Callable[[], IntArray]

    @cached_property
    def zones(self) -> IntArray:
        """[Z, 3] (start, stop, shift): stretches of `spelt` that the teacher's ids spell, that much further on. Nothing
        outside is certain.
        """
        return self._prove()


@dataclass(frozen=True, eq=False)
class Alignment:
    """Which teacher tokens stand for which student tokens.

    `teacher_index` [R]: the one-to-one partner, -1 for none. `span` [R], `teacher_span` [Rt]: number of the proven
    stretch that a token lies in, -1 for none; a pair is a stretch of one token each. `reason` [R]: index into
    UNALIGNED_REASONS of a token without a partner, -1 for one with. `classes` [R]: index into `TEXT_CLASSES` of the
    student's table. All but the first are worked out when they are asked for.
    """

    teacher_index: IntArray
    text: TeacherText
    _masked: npt.NDArray[np.int8]  # [R], the reason that a token has if it finds no partner, -1: `boundary`
    _spans: Callable[[], tuple[IntArray, IntArray]]
    _class_of: npt.NDArray[np.int8]

    @cached_property
    def _both_spans(self) -> tuple[IntArray, IntArray]:
        return self._spans()

    @property
    def span(self) -> IntArray:
        """[R]: the stretch of each student token."""
        return self._both_spans[0]

    @property
    def teacher_span(self) -> IntArray:
        """[Rt]: the stretch of each teacher token."""
        return self._both_spans[1]

    @cached_property
    def reason(self) -> IntArray:
        """[R]: why a token has no partner."""
        return np.where(self.teacher_index >= 0, np.int64(_PAIRED), self._why(slice(None)))

    def _why(self, part: slice | BoolArray) -> npt.NDArray[np.int8]:
        """The reasons of some tokens, if they have no partner."""
        masked = self._masked[part]
        return np.where(masked < 0, np.int8(_BOUNDARY), masked)

    @cached_property
    def classes(self) -> IntArray:
        """[R]: what each student token writes."""
        return self._class_of[self.text.student_ids].astype(np.int64)

    def scores(
        self,
        teacher_log_probs: Sequence[float] | FloatArray,
        policy: AlignmentPolicy = "strict",
        student_log_probs: Sequence[float] | FloatArray | None = None,
    ) -> AlignedScores:
        """Teacher log-probs at the student's positions, from those at its own [Rt], nats.

        `student_log_probs` [R] nats are needed by `proportional` and `chain_rule`. A policy for spans gives every token of a
        proven stretch a value; the sums over a stretch are the teacher's with `even` and `proportional`. Raises DataError
        for another number of log-probs than tokens.
        """
        lt = as_floats(teacher_log_probs)
        _check_length("teacher_log_probs", lt, self.text.symbols_of)
        mask = self.teacher_index >= 0
        # Behind the last stands the value of those without a partner, whose index is -1.
        values = np.concatenate((lt, [0.0]))[self.teacher_index]
        if policy != "strict":
            inside = (self.span >= 0) & ~mask
            n = int(max(self.span.max(initial=-1), self.teacher_span.max(initial=-1))) + 1
            total = _sums(self.teacher_span, lt, n)
            spans = self.span[inside]
            if policy == "even":
                values[inside] = total[spans] / np.bincount(spans, minlength=n)[spans]
            else:
                if student_log_probs is None:
                    raise DataError("student_log_probs", None, f"one per token for {policy}", "pass them")
                ls = as_floats(student_log_probs)
                _check_length("student_log_probs", ls, self.span)
                own = _sums(self.span, ls, n)
                if policy == "chain_rule":
                    values[inside] = ls[inside] - (own[spans] - total[spans])
                else:
                    count = np.bincount(spans, minlength=n)[spans]
                    # A student that was certain of all its tokens gives no proportions.
                    certain = own[spans] == 0.0
                    share = np.where(certain, 1.0 / count, ls[inside] / np.where(certain, 1.0, own[spans]))
                    values[inside] = total[spans] * share
            mask = mask | inside
        return AlignedScores(values, mask, count_reasons(self._why(~mask)), origin=self)


def as_floats(values: Sequence[float] | FloatArray) -> FloatArray:
    """As float64; `struct` takes a list in a third of the time that numpy does. Raises struct.error for what is no number."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64, copy=False)
    return np.frombuffer(struct.pack(f"{len(values)}d", *values), dtype=np.float64)


def count_reasons(reason: npt.NDArray[np.integer]) -> dict[str, int]:
    """How many tokens have no value, by reason; every name of UNALIGNED_REASONS is there. `reason` is of those tokens alone.

    >>> {k: n for k, n in count_reasons(np.array([1, 1, 0])).items() if n}
    {'special': 1, 'boundary': 2}
    """
    counts = np.bincount(reason, minlength=len(UNALIGNED_REASONS))
    return dict(zip(UNALIGNED_REASONS, counts.tolist(), strict=True))


def _check_length(name: str, values: FloatArray, like: IntArray) -> None:
    if len(values) != len(like):
        raise DataError(name, f"{len(values)} values", f"one for each of the {len(like)} tokens", "pass them all")


def _sums(groups: IntArray, values: FloatArray, n: int) -> FloatArray:
    used = groups >= 0
    return np.bincount(groups[used], values[used], minlength=n).astype(np.float64)


class _Streams:
    """One vocabulary's ids as symbols: `codes` maps an id to the one symbol it is, `texts` to the text it is read as.

    Ids past the table: `unknown` has no symbols, `unknown + 1 + k` is the symbol of number k (a special token set by the plan).
    Bytes lie in words of eight, each id's from a whole word on, so that eight are compared at once; a special symbol takes the
    place of one byte (any), from `special_start` on.
    """

    def __init__(self, tokens: TokenBytes, codes: Mapping[int, int], texts: Mapping[int, str], n_codes: int) -> None:
        size = self.unknown = len(tokens.table)
        pieces: list[bytes] = [data or b"" for data in tokens.table]
        for i, text in texts.items():
            if i < size:
                pieces[i] = text.encode()
        length = np.fromiter(map(len, pieces), dtype=np.int64, count=size)
        words = (length + 7) // 8
        start = 8 * (np.cumsum(words) - words)
        self.special_start = 8 * int(words.sum())
        # Both in one number: a look into a table of this size costs more than taking them apart.
        special = (self.special_start + 8 * np.arange(n_codes)) << 32 | 1
        self._places = np.concatenate((start << 32 | length, [0], special))
        for i, code in codes.items():
            if i < size:
                self._places[i] = special[code]
        padded = [data.ljust(-(-len(data) // 8) * 8, b"\0") for data in (*pieces, *([b"\0"] * (n_codes + 1)))]
        self._words = np.frombuffer(b"".join(padded), dtype=np.uint64)
        self._bytes = self._words.view(np.uint8)

    def clip(self, ids: Sequence[int] | IntArray) -> IntArray:
        """Ids as an array; negative ones and those past the table become `unknown`."""
        if isinstance(ids, np.ndarray):
            out = ids.astype(np.int64).reshape(-1)
        else:
            try:  # a third of the time that numpy takes for a list
                out = np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)
            except struct.error:  # ids that no 64 bits hold belong to no vocabulary either
                out = np.array([i if 0 <= i < self.unknown else self.unknown for i in ids], dtype=np.int64)
        outside = out.view(np.uint64) >= self.unknown  # a negative number is a huge one without its sign
        return np.where(outside, np.int64(self.unknown), out) if outside.any() else out

    def places(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """(start, length) [n] of each id's symbols."""
        both = self._places.take(ids)
        return both >> 32, both & 0xFFFFFFFF

    def read(self, start: IntArray, length: IntArray) -> bytes:
        """The bytes of ids whose symbols are at `start` [n], `length` [n] of them (0 for those to leave out)."""
        ends = np.cumsum(length)
        index = np.repeat(start - (ends - length), length)
        index += np.arange(len(index))
        return self._bytes.take(index, mode="clip").tobytes()

    def words(self, word: IntArray) -> npt.NDArray[np.uint64]:
        """Eight bytes each, from word number `word` on; behind the end of a token stand zeros."""
        return self._words.take(word)


class Aligner:
    """Puts responses of one student into the ids of one teacher, and aligns them.

    `end_of_turn` is the teacher's id that closes a turn, -1: none does alone; `turn_ends` are all that may (before another
    role's turn). `special` shows what becomes of each special token. `same_vocabulary`: the two share every id, so that the
    student's ids are sent as they are (not with `reuse_ids=False`). Make one per pair of vocabularies and keep it: it holds
    their tables (a few megabytes).

    >>> s = TokenBytes((b"a", b"b", b"ab", None), frozenset({3}), frozenset({3}))
    >>> t = TokenBytes((None, b"b", b"a", b"bb"), frozenset({0}), frozenset({0}))
    >>> aligner = Aligner(s, t, end_of_turn=0)
    >>> text = aligner.write([0, 1, 1, 3], lambda text: {"abb": [2, 3]}[text])
    >>> text.ids
    (2, 3, 0)
    >>> aligned = aligner.align(text)
    >>> aligned.teacher_index.tolist(), aligned.span.tolist()
    ([0, -1, -1, 2], [0, 1, 1, 2])
    >>> aligned.scores([-0.1, -0.2, -0.3], "even").log_probs.tolist()
    [-0.1, -0.1, -0.1, -0.3]
    """

    def __init__(
        self,
        student: TokenBytes,
        teacher: TokenBytes,
        *,
        end_of_turn: int,
        thinking: Thinking = "keep",
        reuse_ids: bool = True,
        turn_ends: frozenset[int] = frozenset(),
    ) -> None:
        self.student, self.teacher, self.thinking, self.end_of_turn = student, teacher, thinking, end_of_turn
        self.special: SpecialMap = map_special_tokens(student, teacher, end_of_turn, thinking)
        self.turn_ends = turn_ends | ({end_of_turn} if end_of_turn >= 0 else set())
        targets = sorted({*self.special.ids.values(), *self.turn_ends})
        self._targets = targets
        code_of = {target: k for k, target in enumerate(targets)}
        codes = {i: code_of[target] for i, target in self.special.ids.items()}
        self._from = _Streams(student, codes, self.special.texts, len(targets))
        self._to = _Streams(teacher, {}, {}, len(targets))
        self._think = (set(student.roles.get("think_start", ())), set(student.roles.get("think_end", ())))
        self.same_vocabulary = (
            reuse_ids
            and thinking == "keep"
            and student.fingerprint == teacher.fingerprint
            and student.special == teacher.special
            and student.names == teacher.names
        )

    def write(
        self,
        student_ids: Sequence[int] | IntArray,
        encode: Encode,
        *,
        bridges: Sequence[Bridge] = (),
        inserted: Sequence[tuple[int, int]] = (),
        thinking: Sequence[tuple[int, int]] | None = None,
        stands: Mapping[int, int] = _NOTHING,
        leads: Mapping[int, tuple[int, str]] = _NOTHING,
    ) -> TeacherText:
        """The response in the teacher's ids: `encode` plain text (no special tokens), special tokens by the map.

        `bridges`, in order, stand between turns; `inserted` spans `[start, stop)` were not sampled and never pair.
        `thinking`: spans that the teacher does not read (None: with `thinking="drop"` those between sampled markers). `stands`:
        the teacher id, one of `turn_ends`, in the place of the student's token at a position. `leads`: at a position where text
        begins, so many bytes of it that the teacher does not read, and what it reads in their place.
        """
        s = self._from.clip(student_ids)
        places, length = self._from.places(s)
        silent, length = self._silence(s, length, bridges, inserted, thinking)
        for at, target in stands.items():
            places[at] = self._from.special_start + 8 * self._targets.index(target)
            length[at], silent[at] = 1, _PAIRED
        ends = np.cumsum(length)
        lead_at = {int(ends[at - 1]) if at else 0: lead for at, lead in leads.items()}
        stream = self._from.read(places, length)
        cuts = self._interruptions(places, length, ends, bridges)

        ids: list[int] = []
        marks: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        spelt: list[bytes] = []
        special_ids: list[int] = []
        special_at: list[int] = []
        parts: list[_Piece | None] = []
        at = out = 0
        behind_special = False
        for start, stop, what in [*cuts, (len(stream), len(stream), ())]:
            if start > at:
                data = stream[at:start]
                if self.same_vocabulary:
                    first, last = np.searchsorted(ends, (at, start - 1), side="right")
                    own = s[first : last + 1]
                    piece = own[length[first : last + 1] > 0].tolist()
                    read, piece = self._own(data, piece, lead_at.get(at), encode)
                else:
                    read = self._read(data, lead_at.get(at), behind_special=behind_special)
                    encoded = encode(read.text)
                    piece = encoded.tolist() if isinstance(encoded, np.ndarray) else encoded
                marks.append(self._to.clip(piece))
                parts.append(_Piece(at, read, piece))
                ids += piece
                spelt.append(read.spelt)
                out += len(read.spelt)
            if isinstance(what, int):
                special_ids.append(len(ids))
                special_at.append(out)
                parts.append(None)
                ids.append(self._targets[what])
                marks.append(np.array([self._to.unknown + 1 + what]))
                spelt.append(stream[start:stop])
                out += 1
            else:
                ids += what
                marks.append(np.full(len(what), self._to.unknown))
            behind_special = isinstance(what, int)
            at = stop
        return TeacherText(
            tuple(ids),
            np.concatenate(marks),
            s,
            places,
            length,
            ends,
            b"".join(spelt),
            np.array(special_ids, dtype=np.int64),
            np.array(special_at, dtype=np.int64),
            joint_edits([(part.at, part.read.edits) for part in parts if part is not None]),
            silent,
            lambda: self._zones(parts, encode),
        )

    def _own(
        self, data: bytes, ids: list[int], told: tuple[int, str] | None, encode: Encode
    ) -> tuple[ReadText, Sequence[int]]:
        """The student's own ids for a teacher with the same vocabulary; where it is told a begin, the first is cut anew."""
        same = ReadText("", data)
        if told is None:
            return same, ids
        drop, lead = told
        first = self.student.of(ids[0]) or b""
        try:
            text = lead + first[drop:].decode()
        except UnicodeDecodeError:  # half a character: it stays as it was sampled
            return same, ids
        begin = list(encode(text)) if text else []
        if len(first) < drop or self.teacher.join(begin) != text.encode():
            return same, ids
        return lead_with(ReadText("", data[drop:]), lead, drop), [*begin, *ids[1:]]

    def _read(self, data: bytes, told: tuple[int, str] | None, *, behind_special: bool) -> ReadText:
        """A piece of text for the teacher, with what it is told to read in front, or what its tokenizer puts there."""
        if told is not None:
            drop, lead = told
            return lead_with(read_text(data[drop:], self.teacher), lead, drop)
        read = read_text(data, self.teacher)
        if not behind_special:
            return read
        there = self.teacher.dummy_prefix == "missing" and read.spelt.startswith(b" ")
        return read if there or self.teacher.dummy_prefix == "no" else lead_with(read, " ")

    def _zones(self, parts: Sequence[_Piece | None], encode: Encode) -> IntArray:
        """`TeacherText.zones` from its pieces of text; None for a special symbol, which is what was written."""
        rows: list[tuple[int, int, int]] = []
        at = out = 0  # in what should be spelt, and in what is
        for part in parts:
            if part is None:
                rows.append((at, at + 1, out - at))
                at, out = at + 1, out + 1
                continue
            for spelt, ids in _cut_alike(part.read, part.ids, encode, self.teacher):
                pieces = [self.teacher.of(i) or b"" for i in ids]
                spells = b"".join(pieces)
                head, tail = _shared_ends(spelt, spells, pieces)
                m, n = len(spelt), len(spells)
                rows += [(at, at + head, out - at), (at + m - tail, at + m, out + n - at - m)]
                at, out = at + m, out + n
        joined: list[tuple[int, int, int]] = []
        for start, stop, shift in rows:
            if joined and joined[-1][1:] == (start, shift):
                start = joined.pop()[0]
            joined.append((start, stop, shift))
        return np.array(joined, dtype=np.int64).reshape(-1, 3)

    def _silence(
        self,
        s: IntArray,
        length: IntArray,
        bridges: Sequence[Bridge],
        inserted: Sequence[tuple[int, int]],
        thinking: Sequence[tuple[int, int]] | None,
    ) -> tuple[npt.NDArray[np.int8], IntArray]:
        """(why each token never pairs, `_PAIRED` where it may; symbols that each writes: none where the teacher reads none)."""
        silent = np.full(len(s), _PAIRED, dtype=np.int8)
        sampled = np.ones(len(s), dtype=np.bool_)
        for start, stop in inserted:
            sampled[start:stop] = False
        if thinking is None:
            self._hide_thinking(np.where(sampled, s, -1), silent)
        for start, stop in thinking or ():
            silent[start:stop] = _THINKING
        silent[~sampled] = _INSERTED
        if self.thinking == "drop" or bridges:
            hidden = silent == _THINKING
            for bridge in bridges:
                hidden[bridge.at : bridge.at + bridge.skip] = True
            length = np.where(hidden, 0, length)
        if not length.all():
            silent[(length == 0) & (silent < 0)] = _SPECIAL
        return silent, length

    def _interruptions(
        self, places: IntArray, length: IntArray, ends: IntArray, bridges: Sequence[Bridge]
    ) -> list[tuple[int, int, tuple[int, ...] | int]]:
        """Places of the stream where text is interrupted: special symbols, and bridges (which take no symbol).

        (start, stop, number of the special symbol or ids of the bridge), in order.
        """
        special = np.flatnonzero(places >= self._from.special_start)
        special = special[length[special] > 0]
        numbers = (places[special] - self._from.special_start) >> 3
        cuts: list[tuple[int, int, tuple[int, ...] | int]] = [
            (end - 1, end, number) for end, number in zip(ends[special].tolist(), numbers.tolist(), strict=True)
        ]
        cuts += [(at, at, b.ids) for b in bridges for at in [int(ends[b.at - 1]) if b.at else 0]]
        cuts.sort(key=lambda cut: cut[:2])
        return cuts

    def _hide_thinking(self, s: IntArray, silent: npt.NDArray[np.int8]) -> None:
        if self.thinking != "drop" or not (self._think[0] or self._think[1]):
            return
        starts = np.flatnonzero(np.isin(s, list(self._think[0])))
        ends = np.flatnonzero(np.isin(s, list(self._think[1])))
        # A prompt can open the thinking already: then the first marker of the response is the one that ends it.
        if len(ends) and (not len(starts) or ends[0] < starts[0]):
            starts = np.concatenate(([0], starts))
        after = np.concatenate((ends + 1, [len(s)]))[np.searchsorted(ends, starts)]
        depth = np.bincount(starts, minlength=len(s) + 1) - np.bincount(after, minlength=len(s) + 1)
        silent[np.cumsum(depth[:-1]) > 0] = _THINKING

    def align(self, text: TeacherText) -> Alignment:
        """Who stands for whom; `text` comes from `write`."""
        t_start, t_length = self._to.places(text.symbols_of)
        t_end = np.cumsum(t_length)
        alike = t_end[-1:].sum() == len(text.spelt) and np.array_equal(t_end[text.special] - 1, text.special_at)
        if alike:
            masked, ends = text.silent, text.ends
            if text.edits is not None:
                touched, ends = _rewritten(text)
                masked = np.where(masked < 0, touched, masked)
            partner, paired = _same_places(text, masked, ends, t_length, t_end)
            if self._same_bytes(text, t_start, t_length, partner, paired):

                def spans() -> tuple[IntArray, IntArray]:
                    if text.edits is None:
                        return _spans(text, t_length, t_end)
                    general = self.align_general(text)
                    return general.span, general.teacher_span

                return Alignment(np.where(paired, partner, -1), text, masked, spans, self.student.text_classes)
        return self.align_general(text)

    def _same_bytes(
        self, text: TeacherText, t_start: IntArray, t_length: IntArray, partner: IntArray, paired: BoolArray
    ) -> bool:
        """Whether the teacher spells what it should, if student tokens that are `paired` lie where their partners do.

        Such pairs are compared by words, which puts nothing together; only what lies between them is read.
        """
        ours = np.flatnonzero(~paired)
        if 2 * len(ours) > len(paired) or text.edits is not None:
            return self._to.read(t_start, t_length) == text.spelt
        one, two = text.places >> 3, t_start[partner] >> 3
        equal = self._from.words(one) == self._to.words(two)
        equal |= ~paired
        if not equal.all():
            return False
        left = text.lengths
        long = np.flatnonzero(paired & (left > 8))
        while len(long):
            one, two, left = one[long] + 1, two[long] + 1, left[long] - 8
            if not np.array_equal(self._from.words(one), self._to.words(two)):
                return False
            long = np.flatnonzero(left > 8)
        rest = np.ones(len(t_length), dtype=np.bool_)
        rest[partner[paired]] = False
        theirs = np.flatnonzero(rest)
        return self._from.read(text.places[ours], text.lengths[ours]) == self._to.read(
            t_start[theirs], t_length[theirs]
        )

    def align_general(self, text: TeacherText) -> Alignment:
        """The same as `align` by the general way, for a teacher that spells something else than the student wrote, too."""
        start, length = self._to.places(text.symbols_of)
        ends = np.cumsum(length)
        numbers = text.symbols_of[text.special] - self._to.unknown - 1
        spelt = _symbols(text.spelt, text.special_at, numbers)
        spells = _symbols(self._to.read(start, length), ends[text.special] - 1, numbers)
        return _align(text, length, ends, spelt, spells, self.student.text_classes)


def _symbols(data: bytes, special_at: IntArray, numbers: IntArray) -> Symbols:
    """A stream in which no special symbol equals a byte."""
    out = np.frombuffer(data, dtype=np.uint8).astype(np.uint16)
    out[special_at] = 256 + numbers
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text between two special symbols: where it begins in the student's stream, how it was read, the teacher's ids."""

    at: int
    read: ReadText
    ids: Sequence[int]


_EFFORT = 24


def _cut_alike(
    read: ReadText, ids: Sequence[int], encode: Encode, reader: TokenBytes
) -> Iterator[tuple[bytes, Sequence[int]]]:
    """(what should be spelt, ids) of stretches that add up to the whole: as short as they get where these two differ.

    A place to cut at is one where `encode` gives for the two sides the ids of the whole: what stands for each side is then
    certain, whatever the tokenizer did to it. A bounded number of places is tried, about `_EFFORT` times the text in all.
    """
    effort = _EFFORT * (len(read.text) + 64)
    stack = [(read.text, read.spelt, list(ids))]
    while stack:
        text, spelt, whole = stack.pop()
        found = False
        for at in () if reader.join(whole) == spelt or effort < 0 else _middles(text):
            effort -= len(text) + 64
            left = list(encode(text[:at]))
            if left != whole[: len(left)] or list(encode(text[at:])) != whole[len(left) :]:
                continue
            one, other = (read_text(part.encode(), reader).spelt for part in (text[:at], text[at:]))
            if found := one + other == spelt:
                stack += [(text[at:], other, whole[len(left) :]), (text[:at], one, left)]
                break
        if not found:
            yield spelt, whole


_WORD = re.compile(r"(?<=\S)\s")


def _middles(text: str) -> list[int]:
    """Places near the middle of a text where a tokenizer is likely to cut it: before words, else anywhere."""
    middle = len(text) // 2
    words = [m.start() for m in _WORD.finditer(text)]
    k = bisect_left(words, middle)
    near = sorted(words[max(k - 3, 0) : k + 3], key=lambda at: abs(at - middle))
    any_place = [middle, middle + 1, middle - 1, middle + 2, middle - 2]
    return [*near, *(at for at in any_place if 0 < at < len(text) and at not in near)]


def _shared_ends(spelt: bytes, spells: bytes, pieces: Sequence[bytes]) -> tuple[int, int]:
    """How many bytes the two are known to share at their beginning and at their end; `pieces` of `spells`, by ids.

    An id without bytes (the tokenizer read text as its special token) hides an unknown stretch, so nothing counts behind the
    first and before the last of them, unless all bytes are there. Where the two ends could overlap, the place of a byte is not
    certain, and neither counts.
    """
    m, n = len(spelt), len(spells)
    if spelt == spells:
        return m, 0
    short = min(m, n)
    a, b = np.frombuffer(spelt, dtype=np.uint8), np.frombuffer(spells, dtype=np.uint8)
    differs = np.flatnonzero(a[:short] != b[:short])
    head = int(differs[0]) if len(differs) else short
    differs = np.flatnonzero(a[m - short :][::-1] != b[n - short :][::-1])
    tail = int(differs[0]) if len(differs) else short
    blind = [k for k, piece in enumerate(pieces) if not piece]
    if blind:
        head = min(head, sum(map(len, pieces[: blind[0]])))
        tail = min(tail, sum(map(len, pieces[blind[-1] :])))
    if head + tail > short:
        head, tail = max(short - tail, 0), max(short - head, 0)
    return head, tail


def _rewritten(text: TeacherText) -> tuple[npt.NDArray[np.int8], IntArray]:
    """(how each token [R] was changed on the way, else `_PAIRED`; its end [R] in what should be spelt, -1: inside a change)."""
    touched = np.full(len(text.ends), _PAIRED, dtype=np.int8)
    if text.edits is None:
        return touched, text.ends
    for kind, reason in ((NORMALISED, _NORMALISED), (INVALID_UTF8, _INVALID)):
        touched[text.edits.touched(text.ends - text.lengths, text.ends, kind)] = reason
    return touched, text.edits.moved(text.ends)


def _same_places(
    text: TeacherText, masked: npt.NDArray[np.int8], ends: IntArray, t_length: IntArray, t_end: IntArray
) -> tuple[IntArray, BoolArray]:
    """(partner [R], paired [R]): the teacher token that begins and ends where a sampled student token does, if there is one.

    For streams of one length. Each place ends at most one token that has symbols.
    """
    j = np.arange(len(t_length))
    if not t_length.all():
        j = np.flatnonzero(t_length)
    ending = np.zeros(len(text.spelt) + 1, dtype=np.int64)
    ending[t_end[j]] = j
    partner = ending.take(ends)  # -1 belongs to a token that cannot pair
    if not len(j):
        return partner, np.zeros(len(partner), dtype=np.bool_)
    paired = (t_end.take(partner) == ends) & (t_length.take(partner) == text.lengths)
    paired &= masked < 0  # also what has no symbols
    return partner, paired


def _spans(text: TeacherText, t_length: IntArray, t_end: IntArray) -> tuple[IntArray, IntArray]:
    """(span [R], teacher_span [Rt]) of two token lists that spell one stream: what lies between neighbouring common cuts."""
    s_cut, t_cut = (np.zeros(len(text.spelt) + 1, dtype=np.bool_) for _ in range(2))
    s_cut[text.ends], t_cut[t_end] = True, True
    s_cut[0] = False  # the end of a token without symbols
    rank = np.cumsum(s_cut & t_cut)
    spans = [np.where(n > 0, rank.take(end - n), -1) for end, n in ((text.ends, text.lengths), (t_end, t_length))]
    return _unspoilt(spans[0], spans[1], int(rank[-1]) + 1, text.silent)


def _unspoilt(
    span: IntArray, teacher_span: IntArray, spans: int, silent: npt.NDArray[np.int8]
) -> tuple[IntArray, IntArray]:
    """Without the spans of inserted text: it has its place in the stream, but nobody sampled it, and what shares a stretch with
    it has no value of its own.
    """
    if not (silent >= 0).any():
        return span, teacher_span
    spoilt = np.zeros(spans + 1, dtype=np.bool_)
    spoilt[span[silent >= 0] + 1] = True
    spoilt[0] = False
    return np.where(spoilt[span + 1], -1, span), np.where(spoilt[teacher_span + 1], -1, teacher_span)


def _align(
    text: TeacherText,
    t_length: IntArray,
    t_end: IntArray,
    spelt: Symbols,
    spells: Symbols,
    class_of: npt.NDArray[np.int8],
) -> Alignment:
    """Cut both streams at their common places. `spelt` is what the teacher should spell, `spells` what it does."""
    R, n = len(text.lengths), len(spells)
    s_length, (touched, end) = text.lengths, _rewritten(text)
    s_seen, t_seen = s_length > 0, t_length > 0
    if not np.array_equal(spelt, spells):
        end, unproven = _proven(end, s_length, text.zones)
        touched[unproven & s_seen & (touched < 0)] = _UNPROVEN
    # A touched token has no span; what shares one with it is found out by the widths below, unless it was dropped whole.
    s_in, t_in = s_seen & (touched < 0), t_seen
    assert not (s_in & (end < 0)).any(), "what is neither changed nor unproven has its place"
    # Common cuts: places where tokens of both sides end. A token's last symbol says between which of them it lies.
    t_cut = np.zeros(n + 1, dtype=np.bool_)
    t_cut[t_end[t_in]] = True
    s_cut = np.zeros(n + 1, dtype=np.bool_)
    s_cut[end[s_seen & (end >= 0)]] = True
    s_cut[(end - s_length)[s_in]] = True  # behind what was put in, no token ends
    rank: IntArray = np.cumsum(s_cut & t_cut, dtype=np.int64)
    spans = int(rank[-1]) + 1
    s_span: IntArray = rank[end[s_in] - 1]
    t_span: IntArray = rank[t_end[t_in] - 1]
    good = np.bincount(s_span, s_length[s_in], minlength=spans) == np.bincount(t_span, t_length[t_in], minlength=spans)
    span, teacher_span = np.full(R, -1, dtype=np.int64), np.full(len(t_length), -1, dtype=np.int64)
    span[s_in] = np.where(good[s_span], s_span, -1)
    teacher_span[t_in] = np.where(good[t_span], t_span, -1)
    both = span, teacher_span = _unspoilt(span, teacher_span, spans, text.silent)
    # A pair is a span with one token on each side. Entry 0 counts and answers for tokens without a span.
    s_count = np.bincount(span + 1, minlength=spans + 1)
    t_count = np.bincount(teacher_span + 1, minlength=spans + 1)
    partner = np.zeros(spans + 1, dtype=np.int64)
    partner[teacher_span + 1] = np.arange(len(teacher_span))
    partner[(s_count != 1) | (t_count != 1)] = -1
    partner[0] = -1
    masked = np.where(text.silent < 0, touched, text.silent)
    return Alignment(partner[span + 1], text, masked, lambda: both, class_of)


def _proven(end: IntArray, length: IntArray, zones: IntArray) -> tuple[IntArray, BoolArray]:
    """(ends in the teacher's stream, -1 where not known; unproven [R]) of tokens, where the teacher spells something else than
    it should. A token is proven if it lies in one zone as a whole (`TeacherText.zones`).
    """
    start, stop, shift = np.concatenate((zones, [[_FAR, _FAR, 0]])).T
    zone = np.searchsorted(stop, end, side="left")
    known = (end >= 0) & (start[zone] <= end)
    return np.where(known, end + shift[zone], -1), ~known | (end - length < start[zone])
