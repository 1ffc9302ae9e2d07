"""What a tokenizer of text can be given for some bytes, and where each byte went. Pure.

A student samples any bytes: half a character, a decomposed accent, a control character. A teacher's tokenizer takes text, and
may change it: Qwen's composes accents (NFC), SentencePiece reads U+2581 as a space, SmolLM2's has no token for most control
characters. `read_text` says beforehand what the teacher will spell, byte for byte, so that what stays the same keeps its place
and what changes is masked, not guessed. What is rewritten is kept as a list of stretches (`Edits`): nothing is computed for the
bytes between them.
"""

from __future__ import annotations

import codecs
import re
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from slime_tandem.tokens.token_bytes import SPACE_MARK, TokenBytes
from slime_tandem.types import BoolArray, IntArray

INVALID_UTF8, NORMALISED = 1, 2
"""Why a byte cannot be taken over: it is no UTF-8, or the teacher's tokenizer rewrites or drops its character."""
_REPLACEMENT = "\ufffd"
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Stretches [start, stop) of bytes that were rewritten, in order, and apart; all between them stayed as it was.

    `start`, `stop`, `width` [k]: bytes of the source, and how many stand in their place; `kind` [k]: INVALID_UTF8 or
    NORMALISED. A stretch of no bytes is an insertion.
    """

    start: IntArray
    stop: IntArray
    width: IntArray
    kind: IntArray

    def moved(self, at: IntArray) -> IntArray:
        """Where the ascending offsets `at` of the source are now, -1 inside a stretch; an insertion stands behind its offset.

        >>> edits = make_edits([(0, 0, 1, NORMALISED), (3, 5, 1, NORMALISED)])
        >>> edits.moved(np.arange(7)).tolist()
        [0, 2, 3, 4, -1, 5, 6]
        """
        empty = self.start == self.stop
        behind = np.where(empty, np.searchsorted(at, self.stop, "right"), np.searchsorted(at, self.stop, "left"))
        shift = np.zeros(len(at) + 1, dtype=np.int64)
        np.add.at(shift, behind, self.width - self.stop + self.start)
        out = at + np.cumsum(shift[:-1])
        out[_covered(np.searchsorted(at, self.start, "right")[~empty], behind[~empty], len(at))] = -1
        return out

    def touched(self, start: IntArray, stop: IntArray, kind: int) -> BoolArray:
        """Which of the neighbouring stretches [start, stop) of the source hold a byte that was rewritten so."""
        mine = (self.kind == kind) & (self.start < self.stop)
        first = np.searchsorted(stop, self.start[mine], "right")
        return _covered(first, np.searchsorted(start, self.stop[mine], "left"), len(start))

    def shifted(self, by: int) -> Edits:
        """The same behind `by` more bytes."""
        return Edits(self.start + by, self.stop + by, self.width, self.kind)


def _covered(start: IntArray, stop: IntArray, n: int) -> BoolArray:
    """[n]: whether an index lies in any of the ranges."""
    depth = np.zeros(n + 1, dtype=np.int64)
    np.add.at(depth, start, 1)
    np.add.at(depth, stop, -1)
    return np.cumsum(depth[:-1]) > 0


def make_edits(rows: Sequence[tuple[int, int, int, int]]) -> Edits | None:
    """Rows of (start, stop, width, kind), in order; None for none."""
    return Edits(*np.array(rows, dtype=np.int64).T) if rows else None


def joint_edits(parts: Sequence[tuple[int, Edits | None]]) -> Edits | None:
    """Edits of pieces that begin at the given offsets, in order, as one."""
    some = [edits.shifted(at) for at, edits in parts if edits is not None]
    if len(some) < 2:
        return some[0] if some else None
    return Edits(*(np.concatenate([getattr(e, name) for e in some]) for name in Edits.__slots__))


def _then(first: Edits | None, second: Edits | None) -> Edits | None:
    """Both rewritings as one. A stretch of the second lies within what one of the first wrote, or outside of all."""
    if first is None or second is None:
        return first or second
    written = first.start + np.cumsum(
        first.width - first.stop + first.start
    )  # where each begins now, behind its own change
    begins = written - first.width + first.stop - first.start
    ends = begins + first.width
    at = np.searchsorted(ends, second.start, side="right")
    inside = np.concatenate((begins, [_FAR]))[at] <= second.start
    width = first.width.copy()
    np.add.at(width, at[inside], (second.width - second.stop + second.start)[inside])
    back = np.concatenate(([0], first.stop - ends))[at[~inside]]
    columns = (
        (first.start, second.start[~inside] + back),
        (first.stop, second.stop[~inside] + back),
        (width, second.width[~inside]),
        (first.kind, second.kind[~inside]),
    )
    order = np.argsort(np.concatenate(columns[0]), kind="stable")
    return Edits(*(np.concatenate(column)[order] for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """`text` for the tokenizer, the bytes `spelt` that its ids will stand for, and what became other bytes on the way.

    `edits` None: nothing.
    """

    text: str
    spelt: bytes
    edits: Edits | None = None

    @property
    def _source_bytes(self) -> int:
        e = self.edits
        return len(self.spelt) if e is None else len(self.spelt) - int((e.width - e.stop + e.start).sum())

    @property
    def offsets(self) -> IntArray | None:
        """[n+1]: each byte offset of the source as one of `spelt`, -1 inside a changed stretch; None: nothing changed."""
        return None if self.edits is None else self.edits.moved(np.arange(self._source_bytes + 1))

    @property
    def changed(self) -> IntArray | None:
        """[n]: INVALID_UTF8 or NORMALISED for changed bytes of the source, else 0; None: nothing changed."""
        if self.edits is None:
            return None
        at = np.arange(self._source_bytes)
        kinds = (NORMALISED, INVALID_UTF8)
        return np.select([self.edits.touched(at, at + 1, kind) for kind in kinds], kinds, 0).astype(np.int64)


def readable_text(data: bytes) -> tuple[str, IntArray, BoolArray]:
    """(text, offsets, broken): `data` decoded, each broken stretch as one U+FFFD, and where each byte went.

    `offsets` [len(data)+1] maps a byte offset of `data` to one of `text.encode()`, -1 inside a broken sequence;
    `broken` [len(data)] marks bytes that are no UTF-8.

    >>> text, offsets, broken = readable_text(b"a\\xe4b")
    >>> text, offsets.tolist(), broken.tolist()
    ('a\ufffdb', [0, 1, 4, 5], [False, True, False])
    """
    text, edits = _decode(data)
    read = ReadText(text, text.encode(), edits)
    if read.offsets is None or read.changed is None:
        return text, np.arange(len(data) + 1, dtype=np.int64), np.zeros(len(data), dtype=np.bool_)
    return text, read.offsets, read.changed > 0


def _decode(data: bytes) -> tuple[str, Edits | None]:
    """Text, and the byte stretches that became a U+FFFD each: one pass, however many are broken."""
    spans: list[tuple[int, int]] = []
    _noted.spans = spans
    text = data.decode("utf-8", _NOTE)
    return text, make_edits([(a, b, len(_REPLACEMENT.encode()), INVALID_UTF8) for a, b in spans])


def _note(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _noted.spans.append((error.start, error.end))
    return _REPLACEMENT, error.end


_NOTE = "slime_tandem.note"
_noted = threading.local()
codecs.register_error(_NOTE, _note)


def read_text(data: bytes, reader: TokenBytes) -> ReadText:
    """What `reader`'s tokenizer is given for `data`, and what its ids will spell.

    >>> composed = TokenBytes(tuple(bytes([i]) for i in range(256)), frozenset(), frozenset(), normalises="NFC")
    >>> r = read_text("e\\u0301!".encode(), composed)
    >>> r.spelt.decode(), r.offsets.tolist(), r.changed.tolist()
    ('é!', [0, -1, -1, 2, 3], [2, 2, 2, 0])
    """
    text, edits = _decode(data)
    spelt = data if edits is None else text.encode()
    if reader.normalises == "NFC" and not text.isascii():
        spelt, more = _compose(text, spelt)
        edits = _then(edits, more)
    if reader.marks_spaces and _MARK in spelt:
        edits = _then(edits, make_edits([(m.start(), m.end(), 1, NORMALISED) for m in re.finditer(_MARK, spelt)]))
        spelt = spelt.replace(_MARK, b" ")
    dropped = bytes(sorted(reader.unwritable_bytes))
    # Deleting them in one pass is the fastest way to see whether there are any.
    if dropped and len(kept := spelt.translate(None, dropped)) < len(spelt):
        gone = re.finditer(b"[" + re.escape(dropped) + b"]", spelt)
        edits = _then(edits, make_edits([(m.start(), m.end(), 0, NORMALISED) for m in gone]))
        spelt = kept
    return ReadText(text, spelt, edits)


_MARK = SPACE_MARK.encode()


def lead_with(read: ReadText, lead: str, instead_of: int = 0) -> ReadText:
    """`read` with `lead` before it, in the place of `instead_of` bytes of the source that are not in `read`.

    >>> led = lead_with(ReadText("Hello", b"Hello"), " ")
    >>> led.text, led.spelt, led.offsets.tolist()
    (' Hello', b' Hello', [0, 2, 3, 4, 5, 6])
    """
    own = make_edits([(0, instead_of, len(lead.encode()), NORMALISED)])
    return ReadText(lead + read.text, lead.encode() + read.spelt, joint_edits([(0, own), (instead_of, read.edits)]))


_LAST_UNSTABLE = 0x30000
"""No character from here on has a canonical decomposition or a combining class (a test holds this)."""


@cache
def _unstable() -> npt.NDArray[np.bool_]:
    """[code point]: whether composition (NFC) can change the character, or merge it with the one before; last: all others."""
    seconds = _second_starters()
    found = np.zeros(_LAST_UNSTABLE + 1, dtype=np.bool_)
    for code in range(0x300, _LAST_UNSTABLE):
        c = chr(code)
        found[code] = unicodedata.combining(c) or c in seconds or not unicodedata.is_normalized("NFC", c)
    return found


@cache
def _second_starters() -> frozenset[str]:
    """Characters without combining class that can merge with the one before them when text is composed (NFC)."""
    found = {chr(c) for c in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # Hangul vowels and finals
    for code in range(_LAST_UNSTABLE):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            second = chr(int(parts[1], 16))
            if unicodedata.combining(second) == 0:
                found.add(second)
    return frozenset(found)


def _nfc(text: str) -> str:
    """NFC in linear time: CPython sorts accents by insertion, so they come to it in their order already.

    >>> _nfc("e\u0301\u0316") == unicodedata.normalize("NFC", "e\u0301\u0316")
    True
    """
    if len(text) < 64:
        return unicodedata.normalize("NFC", text)
    out: list[str] = []
    accents: list[str] = []
    for c in (part for whole in text for part in unicodedata.normalize("NFD", whole)):
        if unicodedata.combining(c):
            accents.append(c)
        else:
            out += [*sorted(accents, key=unicodedata.combining), c]
            accents = []
    return unicodedata.normalize("NFC", "".join(out + sorted(accents, key=unicodedata.combining)))


def _compose(text: str, data: bytes) -> tuple[bytes, Edits | None]:
    """(NFC bytes, edits) of `data`, the bytes of `text`. Only what composition can touch is looked at one by one."""
    table = _unstable()
    code = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    at = np.flatnonzero(table.take(np.minimum(code, len(table) - 1)))
    if not len(at):
        return data, None
    seconds = _second_starters()
    rows: list[tuple[int, int, int, int]] = []
    out: list[bytes] = []
    char = byte = done = 0  # how far characters are counted in bytes, and bytes written
    firsts = np.flatnonzero(np.diff(at, prepend=-2) > 1)
    for a, b in zip(at[firsts].tolist(), (at[np.append(firsts[1:] - 1, -1)] + 1).tolist(), strict=True):
        a = max(a - 1, 0)  # what it can merge with
        starts = [i for i in range(a, b) if i == a or (unicodedata.combining(text[i]) == 0 and text[i] not in seconds)]
        clusters = [text[i:j] for i, j in zip(starts, [*starts[1:], b], strict=True)]
        composed = [_nfc(c) for c in clusters]
        if "".join(composed) != (whole := _nfc(text[a:b])):  # never seen; then all of it counts as changed
            clusters, composed = [text[a:b]], [whole]
        byte += len(text[char:a].encode())
        char = b
        for before, after in zip(clusters, composed, strict=True):
            stop = byte + len(before.encode())
            if before != after:
                new = after.encode()
                out += [data[done:byte], new]
                rows.append((byte, stop, len(new), NORMALISED))
                done = stop
            byte = stop
    return b"".join([*out, data[done:]]), make_edits(rows)
