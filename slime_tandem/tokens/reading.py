"""What a tokenizer of text can be given for some bytes, and where each byte went. Pure.

A student samples any bytes: half a character, a decomposed accent, a control character. A teacher's tokenizer takes text, and
may change it: Qwen's composes accents (NFC), SmolLM2's has no token for most control characters. `read_text` says beforehand
what the teacher will spell, byte for byte, so that what stays the same keeps its place and what changes is masked, not guessed.
"""

from __future__ import annotations

import codecs
import threading
import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np

from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import BoolArray, IntArray

INVALID_UTF8, NORMALISED = 1, 2
"""Why a byte cannot be taken over: it is no UTF-8, or the teacher's tokenizer rewrites or drops its character."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class ReadText:
    """`text` for the tokenizer, the bytes `spelt` that its ids will stand for, and where the bytes of the source are in them.

    `offsets` [n+1] maps a byte offset of the source to one of `spelt`, -1 inside a changed stretch; None: nothing changed.
    `changed` [n] is INVALID_UTF8 or NORMALISED on changed bytes of the source, else 0; None with `offsets`.
    """

    text: str
    spelt: bytes
    offsets: IntArray | None = None
    changed: IntArray | None = None


def readable_text(data: bytes) -> tuple[str, IntArray, BoolArray]:
    """(text, offsets, broken): `data` decoded, each broken stretch as one U+FFFD, and where each byte went.

    `offsets` [len(data)+1] maps a byte offset of `data` to one of `text.encode()`, -1 inside a broken sequence;
    `broken` [len(data)] marks bytes that are no UTF-8.

    >>> text, offsets, broken = readable_text(b"a\\xe4b")
    >>> text, offsets.tolist(), broken.tolist()
    ('a\ufffdb', [0, 1, 4, 5], [False, True, False])
    """
    text, replaced = _decode(data)
    offsets = np.arange(len(data) + 1, dtype=np.int64)
    broken = np.zeros(len(data), dtype=np.bool_)
    width = len(_REPLACEMENT.encode())
    shift = np.zeros(len(data) + 1, dtype=np.int64)
    for a, b in replaced:
        broken[a:b] = True
        shift[b] += width - (b - a)
    offsets += np.cumsum(shift)
    for a, b in replaced:
        offsets[a + 1 : b] = -1
    return text, offsets, broken


def _decode(data: bytes) -> tuple[str, list[tuple[int, int]]]:
    """Text, and the byte stretches that became a U+FFFD each: one pass, however many are broken."""
    spans: list[tuple[int, int]] = []
    _noted.spans = spans
    return data.decode("utf-8", _NOTE), spans


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
    try:
        text = data.decode()
        plain = True
    except UnicodeDecodeError:
        plain = False
    # Deleting them in one pass is the fastest way to see whether there are any.
    dropped = bytes(sorted(reader.unwritable_bytes))
    if plain and not _rewrites(text, reader) and not (dropped and len(data.translate(None, dropped)) < len(data)):
        return ReadText(text, data)
    text, offsets, broken = readable_text(data)
    changed = np.where(broken, INVALID_UTF8, 0).astype(np.int64)
    spelt = text.encode()
    if _rewrites(text, reader):
        spelt, then, touched = _compose(text)
        changed, offsets = _follow(changed, offsets, then, touched)
    if len(spelt.translate(None, dropped)) < len(spelt):
        source = np.frombuffer(spelt, dtype=np.uint8)
        gone = np.isin(source, np.frombuffer(dropped, dtype=np.uint8))
        then = np.concatenate(([0], np.cumsum(~gone, dtype=np.int64)))
        changed, offsets = _follow(changed, offsets, then, gone)
        spelt = source[~gone].tobytes()
    return ReadText(text, spelt, offsets, changed)


def _rewrites(text: str, reader: TokenBytes) -> bool:
    return reader.normalises == "NFC" and not text.isascii() and not unicodedata.is_normalized("NFC", text)


def _follow(changed: IntArray, offsets: IntArray, then: IntArray, touched: BoolArray) -> tuple[IntArray, IntArray]:
    """The map and the marks after one more rewriting, given by its own map `then` and its changed bytes `touched`."""
    known = offsets >= 0
    moved = np.where(known, then[np.where(known, offsets, 0)], -1)
    total = np.concatenate(([0], np.cumsum(touched)))
    # A source byte is touched if its image is; the image of a byte inside a broken stretch is the whole U+FFFD.
    ends = np.where(known, offsets, -1)
    left = np.maximum.accumulate(ends[:-1])
    right = np.minimum.accumulate(np.where(known, offsets, len(touched))[::-1])[::-1][1:]
    hit = total[np.maximum(right, left)] > total[left]
    return np.where((changed == 0) & hit, NORMALISED, changed), moved


@cache
def _second_starters() -> frozenset[str]:
    """Characters without combining class that can merge with the one before them when text is composed (NFC)."""
    found = {chr(c) for c in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # Hangul vowels and finals
    for code in range(0x110000):
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


def _compose(text: str) -> tuple[bytes, IntArray, BoolArray]:
    """(NFC bytes, offsets, touched): offsets of `text.encode()` in them, -1 inside a stretch that changed; touched bytes."""
    seconds = _second_starters()
    starts = [i for i, c in enumerate(text) if i == 0 or (unicodedata.combining(c) == 0 and c not in seconds)]
    clusters = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    composed = [_nfc(c) for c in clusters]
    whole = _nfc(text)
    if "".join(composed) != whole:  # never seen; then nothing in the text is taken over
        clusters, composed = [text], [whole]
    n = len(text.encode())
    offsets, touched = np.full(n + 1, -1, dtype=np.int64), np.zeros(n, dtype=np.bool_)
    at = out = 0
    for before, after in zip(clusters, composed, strict=True):
        width, new = len(before.encode()), len(after.encode())
        if before == after:
            offsets[at : at + width] = np.arange(out, out + width)
        else:
            offsets[at] = out
            touched[at : at + width] = True
        at, out = at + width, out + new
    offsets[n] = out
    return "".join(composed).encode(), offsets, touched
