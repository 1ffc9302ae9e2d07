"""The exact bytes of every token id of a tokenizer, as one table. Pure once the tokenizer is loaded.

Offsets of a sampled sequence come from its own ids by cumulative sum over this table; decoded text is never re-tokenised
on the student's side. Handled here: fast Hugging Face tokenizers that are byte-level BPE (GPT-2's byte alphabet; Qwen,
Llama-3, SmolLM2, DeepSeek) or SentencePiece-style BPE with byte fallback (Gemma, Llama-2, Mistral). Files of tiktoken,
Tekken and SentencePiece vocabularies: `tokens/vocabularies.py`. Anything else is refused, never approximated.

The table is what the tokenizer's *decoder* writes: made by the decoder's rule, and then shown for every id by decoding it
between two others (`prove`). An added token is no exception: Gemma's `\u2581\u2581` is two spaces.

Ids can have exact bytes though *encoding* changes the text it is given. Three such changes are known and reported on the
table, any other that a probe shows is refused: a space put in front (`inserts_leading_space`; `encode_exact` undoes it), NFC
(`normalises`) and U+2581 for a space (`marks_spaces`); the alignment follows these, proves every pair by its bytes, and counts
what the rewritten text no longer spells. A vocabulary can also lack a byte altogether (`missing_bytes`).
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slime_tandem.errors import ModelError
from slime_tandem.types import IntArray

SPACE_MARK = "\u2581"
"""What SentencePiece writes a space as, and therefore reads as one."""
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What lossy normalisers change (wide digits, accents, line ends, double spaces); all of it is in NFC.
_PROBE = "Round trip: caf\u00e9, \uff11\uff12, \u4f60\u597d, \U0001f680, tabs\tand  two spaces\r\n\nend "
_SENTINEL = "\x02"
_DECOMPOSED = "Two forms: cafe\u0301 "
_MARKED = f"A bar: x{SPACE_MARK}y "

Role = Literal[
    "bos", "eos", "pad", "unk", "turn_start", "turn_end", "think_start", "think_end",
    "tool_call_start", "tool_call_end", "tool_result_start", "tool_result_end",
]  # fmt: skip
# Surfaces by role: Qwen and SmolLM2, Llama-3, Gemma, Mistral, DeepSeek, OpenAI. Ends of turn by `eos_ids` come on top.
ROLE_NAMES: Mapping[Role, frozenset[str]] = MappingProxyType(
    {
        "bos": frozenset({"<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>"}),
        "eos": frozenset(
            {"</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|EOT|>", "<|return|>"}
        ),
        "pad": frozenset({"<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>"}),
        "unk": frozenset({"<unk>", "[UNK]"}),
        "turn_start": frozenset(
            {
                "<|im_start|>",
                "<|start_header_id|>",
                "<start_of_turn>",
                "[INST]",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<|start|>",
            }
        ),
        "turn_end": frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "[/INST]", "<|end|>"}),
        "think_start": frozenset({"<think>", "[THINK]"}),
        "think_end": frozenset({"</think>", "[/THINK]"}),
        "tool_call_start": frozenset({"<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"}),
        "tool_call_end": frozenset({"</tool_call>", "<|eom_id|>", "<｜tool▁calls▁end｜>"}),
        "tool_result_start": frozenset({"<tool_response>", "[TOOL_RESULTS]", "<｜tool▁outputs▁begin｜>"}),
        "tool_result_end": frozenset({"</tool_response>", "[/TOOL_RESULTS]", "<｜tool▁outputs▁end｜>"}),
    }
)


TEXT_CLASSES = ("text", "digits", "cjk", "code", "special")
"""What a token writes, for tables of coverage: `digits` holds an ASCII digit; `cjk` a Chinese, Japanese or Korean character or
bytes of one; `code` has no letter and holds a bracket, an operator, an underscore, or white space other than one blank;
`special` has no bytes; `text` is the rest."""
_CODE = re.compile(rb"[][(){}<>=+*/\\|&^%$#@_~`;]|\s\s|[\t\n\r]")
_LETTER = re.compile(rb"[A-Za-z\x80-\xff]")
# The leading bytes of U+2E80..U+D7FF and U+F900..U+FAFF, of U+FF00..U+FFEF, and of the planes above U+20000.
_CJK = re.compile(rb"\xe2[\xba-\xbf]|[\xe3-\xed]|\xef[\xa4-\xab\xbc-\xbf]|\xf0[\xa0-\xb2]")


def _text_class(data: bytes | None) -> int:
    if not data:
        return TEXT_CLASSES.index("special")
    if re.search(rb"[0-9]", data):
        return TEXT_CLASSES.index("digits")
    if _CJK.search(data):
        return TEXT_CLASSES.index("cjk")
    if not _LETTER.search(data) and _CODE.search(data):
        return TEXT_CLASSES.index("code")
    return TEXT_CLASSES.index("text")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte value (`bytes_to_unicode` of openai/gpt-2, encoder.py), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    extra = 0
    for b in range(256):
        if b not in printable:
            table[chr(256 + extra)] = b
            extra += 1
    return table


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of each id, and which ids are special.

    `table` [V]: the bytes an id stands for; None for special tokens and for ids that the tokenizer does not define.
    `special`: ids of special tokens (they have a role, no text). `eos_ids`: ids that end a turn, from the model folder.
    `names`: surface of every special or added token, as the tokenizer writes it.
    `inserts_leading_space`: encoding puts a space in front of the text (Llama-2, Mistral); the bytes of ids are exact
    all the same. `dummy_prefix`: whether it does so behind each special token, too: `missing`, where no space is there
    (Metaspace), `always` (Llama-2), or `no`. `normalises`: what encoding does to text first (Qwen: NFC), None for nothing.
    `marks_spaces`: encoding reads U+2581 as a space (SentencePiece). `fallback`: ids of single bytes that encoding writes only
    where no other token has the byte (SentencePiece's `<0x41>` beside `A`). `disproved`: ids that are None in the table because
    the tokenizer's own decoder writes something else than their piece says.

    >>> TokenBytes((b"a", b" b", None), special=frozenset({2}), eos_ids=frozenset({2})).join([0, 1, 2])
    b'a b'
    """

    table: tuple[bytes | None, ...]
    special: frozenset[int]
    eos_ids: frozenset[int]
    names: Mapping[int, str] = field(default_factory=dict, hash=False)
    inserts_leading_space: bool = False
    dummy_prefix: Literal["no", "missing", "always"] = "no"
    normalises: Literal["NFC"] | None = None
    marks_spaces: bool = False
    fallback: frozenset[int] = frozenset()
    disproved: frozenset[int] = frozenset()

    def of(self, token: int) -> bytes | None:
        """Bytes of one id; None for special, undefined and out-of-range ids (padded embedding rows can be sampled)."""
        return self.table[token] if 0 <= token < len(self.table) else None

    def join(self, tokens: Sequence[int]) -> bytes:
        """The text bytes of a sequence; special tokens add nothing."""
        if len(tokens) and min(tokens) >= 0 and max(tokens) < len(self.table):  # as nearly always: no call per token
            table = self.table
            return b"".join([table[t] or b"" for t in tokens])
        return b"".join([self.of(t) or b"" for t in tokens])

    @cached_property
    def packed(self) -> tuple[npt.NDArray[np.uint8], IntArray, IntArray]:
        """(bytes of all ids one after the other, start [V] of each in them, length [V], 0 for ids without bytes).

        >>> blob, start, length = TokenBytes((b"ab", None, b"c"), frozenset({1}), frozenset()).packed
        >>> blob.tobytes(), start.tolist(), length.tolist()
        (b'abc', [0, 2, 2], [2, 0, 1])
        """
        length = np.fromiter((len(data or b"") for data in self.table), dtype=np.int64, count=len(self.table))
        ends = np.cumsum(length)
        return np.frombuffer(b"".join(data or b"" for data in self.table), dtype=np.uint8), ends - length, length

    @cached_property
    def text_classes(self) -> npt.NDArray[np.int8]:
        """[V+1]: index into `TEXT_CLASSES` of what each id writes; the last entry is for ids outside the table.

        >>> table = TokenBytes((b" the", b"42", "\u4f60".encode(), b"](", None), frozenset({4}), frozenset())
        >>> [TEXT_CLASSES[c] for c in table.text_classes]
        ['text', 'digits', 'cjk', 'code', 'special', 'special']
        """
        kinds = [*(_text_class(data) for data in self.table), TEXT_CLASSES.index("special")]
        return np.array(kinds, dtype=np.int8)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the byte table, as hex: equal just when every id stands for the same bytes.

        >>> a, b = TokenBytes((b"a", None), frozenset(), frozenset()), TokenBytes((b"a", b""), frozenset(), frozenset())
        >>> a.fingerprint == b.fingerprint, len(a.fingerprint)
        (False, 64)
        """
        digest = hashlib.sha256()
        for data in self.table:
            # The length goes first, so that no two tables run together into the same stream; -1: no bytes at all.
            digest.update((-1 if data is None else len(data)).to_bytes(4, "big", signed=True))
            digest.update(data or b"")
        return digest.hexdigest()

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Byte values that no id stands for alone; encoding loses characters that need one (SmolLM2: control characters).

        >>> len(TokenBytes((b"a", b"bc"), frozenset(), frozenset()).missing_bytes)
        255
        """
        return frozenset(range(256)) - {data[0] for data in self.table if data is not None and len(data) == 1}

    @cached_property
    def unwritable_bytes(self) -> frozenset[int]:
        """Byte values that stand in no token at all: encoding drops them, wherever they are.

        >>> b"a"[0] in TokenBytes((b"a", b"bc"), frozenset(), frozenset()).unwritable_bytes
        False
        """
        return frozenset(range(256)) - set(self.packed[0].tolist())

    @cached_property
    def roles(self) -> Mapping[Role, tuple[int, ...]]:
        """Ids by role, ascending, from their surfaces and `eos_ids`; a role without ids is absent.

        A think or tool marker that is ordinary text to the tokenizer has a role and bytes.

        >>> t = TokenBytes((b"a", None, None), frozenset({1, 2}), frozenset({1}), {1: "<|im_end|>", 2: "<s>"})
        >>> t.roles
        {'bos': (2,), 'eos': (1,), 'turn_end': (1,)}
        """
        found: dict[Role, tuple[int, ...]] = {}
        for role, names in ROLE_NAMES.items():
            text = role.startswith(("think", "tool"))  # "<s>" that is text (Gemma: a tag of HTML) begins no sequence
            ids = {i for i, name in self.names.items() if name in names and (text or i in self.special)}
            ids |= self.eos_ids if role == "eos" else set()
            if ids:
                found[role] = tuple(sorted(ids))
        return found


def make_token_bytes(
    pieces: Mapping[int, bytes],
    names: Mapping[int, str],
    special: frozenset[int],
    eos_ids: frozenset[int],
    **flags: Any,
) -> TokenBytes:
    """A table that reaches to the highest id; special ids and ends of turn have no bytes.

    Ids may leave gaps (removed or reserved tokens): those stay None. `flags` as in `TokenBytes`.
    """
    special |= eos_ids
    table: list[bytes | None] = [None] * (max([-1, *pieces, *names]) + 1)
    for index, data in pieces.items():
        if index not in special:
            table[index] = data
    return TokenBytes(tuple(table), special, eos_ids, dict(names), **flags)


def build_token_bytes(tokenizer: Any, eos_ids: frozenset[int]) -> TokenBytes:
    """The table of a fast Hugging Face tokenizer; `eos_ids` come from the model's generation config.

    Raises ModelError for tokenizers whose ids have no exact bytes (slow ones, unknown decoders), and for those that
    change text in another way than the two that `TokenBytes` can report.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = str(getattr(tokenizer, "name_or_path", "tokenizer"))
    if backend is None:
        raise ModelError("tokenizer", name, "a fast tokenizer (tokenizer.json)", "save the model with one")
    spec = json.loads(backend.to_str())
    decode = _piece_decoder(spec, name)
    added = {int(t["id"]): t for t in spec["added_tokens"]}
    names = {i: str(t["content"]) for i, t in added.items()}
    # The decoder makes no difference between added tokens and others.
    pieces = {i: decode(piece) for i, piece in [*((i, p) for p, i in spec["model"]["vocab"].items()), *names.items()]}
    special = frozenset(i for i, t in added.items() if t["special"])
    fallback: frozenset[int] = frozenset()
    if decode is sentence_piece:
        fallback = frozenset(i for piece, i in spec["model"]["vocab"].items() if _BYTE_FALLBACK.fullmatch(piece))
    made = make_token_bytes(pieces, names, special, eos_ids, fallback=fallback)
    result = prove(made, lambda ids: str(backend.decode(ids, skip_special_tokens=False)), name)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    result = check_encoding(result, encode, name)
    return replace(result, dummy_prefix=_dummy_prefix(result, encode))


def _dummy_prefix(tokens: TokenBytes, encode: Callable[[str], Sequence[int]]) -> Literal["no", "missing", "always"]:
    """Read off the first special token whose name is recognised in text and swallows no space."""
    for i in sorted(tokens.special & tokens.names.keys()):
        plain, spaced = encode(tokens.names[i] + "x"), encode(tokens.names[i] + " x")
        if i in plain and i in spaced:
            found = (tokens.join(plain), tokens.join(spaced))
            kinds = {(b" x", b" x"): "missing", (b" x", b"  x"): "always", (b"x", b" x"): "no"}
            if found in kinds:
                return kinds[found]  # type: ignore[return-value]
    return "no"


_MAX_DISPROVED = 0.01


def prove(tokens: TokenBytes, decode: Callable[[list[int]], str], name: str) -> TokenBytes:
    """`tokens`, with None for every id whose bytes are not what `decode` (ids -> text) writes for it between other ids.

    Each id stands between two of one letter, and half a character between the bytes that complete it. An id whose bytes no
    text can hold (0xFF) shows as U+FFFD, and so do all of its kind: those are compared as far as that goes. Raises ModelError
    if more than one id in a hundred is disproved: the decoder has another rule then.
    """
    pieces = {i: data for i, data in enumerate(tokens.table) if data is not None}
    single = {data[0]: i for i, data in pieces.items() if len(data) == 1}
    letters = [b for b, i in single.items() if b < 128 and i not in tokens.fallback]
    if not letters:
        return tokens
    # The letter that is rarest in the vocabulary: a text of all ids at once can then be cut at it in one way only.
    counts = np.bincount(tokens.packed[0], minlength=256)
    ranked = sorted(letters, key=lambda b: (counts[b], b))
    # Not one that the decoder itself writes as something else.
    letter = next((b for b in ranked if decode([single[b]] * 2) == chr(b) * 2), ranked[0])
    between, mark = single[letter], bytes([letter])
    together = [i for i, data in pieces.items() if mark not in data and _is_text(data)]
    row = [between] * (2 * len(together) + 1)
    row[1::2] = together

    def writes(i: int) -> bool:
        left, right = _completed(pieces[i], single)
        shown = decode([between, *(single[b] for b in left), i, *(single[b] for b in right), between])
        return shown == (mark + left + pieces[i] + right + mark).decode("utf-8", "replace")

    shown = decode(row) == mark.join([b"", *(pieces[i] for i in together), b""]).decode()
    wrong = frozenset(i for i in (pieces.keys() - together if shown else pieces) if not writes(i))
    if len(wrong) > _MAX_DISPROVED * len(pieces):
        some = [(i, tokens.of(i)) for i in sorted(wrong)[:3]]
        raise ModelError(
            "tokenizer",
            name,
            f"ids that its decoder writes as their pieces say; {len(wrong)} of {len(pieces)} are not, such as {some}",
            "this decoder follows another rule; use a tokenizer without it, it cannot be aligned byte by byte",
        )
    if not wrong:
        return tokens
    return replace(
        tokens, table=tuple(None if i in wrong else data for i, data in enumerate(tokens.table)), disproved=wrong
    )


_LEFT = (b"", b"\xc3", b"\xe4", b"\xf1", b"\xe4\xbd", b"\xf1\x80", b"\xf1\x80\x80")
_RIGHT = tuple(first + b"\x80" * n for first in (b"", b"\x80", b"\xa0", b"\x90") for n in range(3 if first else 1))


def _completed(data: bytes, known: Mapping[int, int]) -> tuple[bytes, bytes]:
    r"""Bytes that make text of `data` when they stand before and behind it; none where nothing does.

    >>> _completed("\u4f60".encode()[1:], dict.fromkeys(range(256), 0)), _completed(b"\xff", {})
    ((b'\xe4', b''), (b'', b''))
    """
    pairs = ((left, right) for left in _LEFT for right in _RIGHT if known.keys() >= set(left + right))
    return next(((left, right) for left, right in pairs if _is_text(left + data + right)), (b"", b""))


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_encoding(tokens: TokenBytes, encode: Callable[[str], Sequence[int]], name: str) -> TokenBytes:
    """`tokens` with the flags that say what `encode` (text without special tokens -> ids) does to text.

    Raises ModelError, naming the first byte that differs, for a change that no flag describes.
    """

    def read(text: str, want: bytes) -> bytes:
        got = tokens.join(encode(text))
        return got[1:] if space and got == b" " + want else got

    space = tokens.join(encode(_PROBE)) == b" " + _PROBE.encode()
    marks = read(_MARKED, _MARKED.replace(SPACE_MARK, " ").encode()) == _MARKED.replace(SPACE_MARK, " ").encode()
    nfc = unicodedata.normalize("NFC", _DECOMPOSED)
    normalises = read(_DECOMPOSED, nfc.encode()) == nfc.encode()
    for text in (_PROBE, " " + _PROBE, nfc if normalises else _DECOMPOSED):
        got, want = read(text, text.encode()), text.encode()
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
            raise ModelError(
                "tokenizer",
                name,
                f"ids whose bytes give the encoded text back (differs at byte {at})",
                "this tokenizer normalises or inserts text; use one without, it cannot be aligned byte by byte",
            )
    return replace(tokens, inserts_leading_space=space, marks_spaces=marks, normalises="NFC" if normalises else None)


def encode_exact(tokens: TokenBytes, encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Ids of `text` without a space that the tokenizer inserts: what it would write for text inside a sequence.

    The text is encoded behind a control character, which no vocabulary merges with anything, and the ids that spell space
    and character are cut off. Should these not end with a token, the ids are returned as encoded: their bytes then
    show the space, and an alignment proves and pairs nothing with them.

    >>> pieces = (b" ", b"\\x02", b"a")
    >>> spaced = TokenBytes(pieces, frozenset(), frozenset(), inserts_leading_space=True)
    >>> encode_exact(spaced, lambda text: [pieces.index(c.encode()) for c in " " + text], "a a")
    [2, 0, 2]
    """
    if not tokens.inserts_leading_space:
        return list(encode(text))
    ids = list(encode(_SENTINEL + text))
    head = b""
    for n, token in enumerate([*ids, -1]):
        if head == b" " + _SENTINEL.encode():
            return ids[n:]
        head += tokens.of(token) or b""
    return list(encode(text))


def _piece_decoder(spec: dict[str, Any], name: str) -> Callable[[str], bytes]:
    decoder = spec.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {s.get("type") for s in steps}
    if spec["model"]["type"] == "BPE" and kinds == {"ByteLevel"}:
        alphabet = _byte_alphabet()

        def byte_level(piece: str) -> bytes:
            # Like the ByteLevel decoder of `tokenizers`: a piece with a foreign character stands for its own text.
            return bytes(alphabet[c] for c in piece) if alphabet.keys() >= set(piece) else piece.encode()

        return byte_level
    if spec["model"]["type"] == "BPE" and "ByteFallback" in kinds:
        return sentence_piece
    raise ModelError(
        "tokenizer",
        name,
        "byte-level BPE or BPE with byte fallback",
        f"model type {spec['model']['type']!r} with decoder {sorted(map(str, kinds))} has no exact bytes per id",
    )


def sentence_piece(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: byte fallback, or text in which U+2581 stands for a space.

    >>> sentence_piece("<0xE4>"), sentence_piece("\\u2581you")
    (b'\\xe4', b' you')
    """
    match = _BYTE_FALLBACK.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()
