"""The exact bytes of every token id of a tokenizer, as one table. Pure once the tokenizer is loaded.

Offsets of a sampled sequence come from its own ids by cumulative sum over this table; decoded text is never re-tokenised
on the student's side. Handled: byte-level BPE (GPT-2's byte alphabet; Qwen, Llama-3, SmolLM2) and SentencePiece-style
BPE with byte fallback as `tokenizers` writes it (Gemma). Anything else is refused, never approximated; so are tokenizers
that put a space before the text (Llama-2, Mistral v1: what they encode is not what they were given).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_tandem.errors import ModelError, explain

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Every string here must survive encode -> bytes; it has what lossy normalisers change: accents in two forms, wide digits.
_PROBE = "Round trip: caf\u00e9, cafe\u0301, \uff11\uff12, \u4f60\u597d, \U0001f680, tabs\tand  two spaces\r\n\nend "


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

    >>> TokenBytes((b"a", b" b", None), special=frozenset({2}), eos_ids=frozenset({2})).join([0, 1, 2])
    b'a b'
    """

    table: tuple[bytes | None, ...]
    special: frozenset[int]
    eos_ids: frozenset[int]

    def of(self, token: int) -> bytes | None:
        """Bytes of one id; None for special, undefined and out-of-range ids (padded embedding rows can be sampled)."""
        return self.table[token] if 0 <= token < len(self.table) else None

    def join(self, tokens: Sequence[int]) -> bytes:
        """The text bytes of a sequence; special tokens add nothing."""
        return b"".join(self.of(t) or b"" for t in tokens)


def build_token_bytes(tokenizer: Any, eos_ids: frozenset[int]) -> TokenBytes:
    """The table of a fast Hugging Face tokenizer; `eos_ids` come from the model's generation config.

    Raises ModelError for tokenizers whose ids have no exact bytes (slow ones, unknown decoders, lossy normalisers).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = str(getattr(tokenizer, "name_or_path", "tokenizer"))
    if backend is None:
        raise ModelError(explain("tokenizer", name, "a fast tokenizer (tokenizer.json)", "save the model with one"))
    spec = json.loads(backend.to_str())
    decode = _piece_decoder(spec, name)
    added = {int(t["id"]): t for t in spec["added_tokens"]}
    # Ids may leave gaps (removed or reserved tokens): the table reaches to the highest id, not to the token count.
    size = max([len(tokenizer) - 1, *spec["model"]["vocab"].values(), *added]) + 1
    table: list[bytes | None] = [None] * size
    for piece, index in spec["model"]["vocab"].items():
        if index not in added:
            table[index] = decode(piece)
    for index, token in added.items():
        if not token["special"]:
            table[index] = token["content"].encode()
    special = frozenset(i for i, t in added.items() if t["special"]) | eos_ids
    for i in special:
        if i < size:
            table[i] = None
    result = TokenBytes(tuple(table), special, eos_ids)
    for text in (_PROBE, " " + _PROBE):
        got = result.join(tokenizer.encode(text, add_special_tokens=False))
        if got != text.encode():
            at = next((i for i, (a, b) in enumerate(zip(got, text.encode(), strict=False)) if a != b), 0)
            raise ModelError(
                explain(
                    "tokenizer",
                    name,
                    f"ids whose bytes give the encoded text back (differs at byte {at})",
                    "this tokenizer normalises or inserts text; use one without, it cannot be aligned byte by byte",
                )
            )
    return result


def _piece_decoder(spec: dict[str, Any], name: str) -> Any:
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

        def sentence_piece(piece: str) -> bytes:
            match = _BYTE_FALLBACK.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()

        return sentence_piece
    raise ModelError(
        explain(
            "tokenizer",
            name,
            "byte-level BPE or BPE with byte fallback",
            f"model type {spec['model']['type']!r} with decoder {sorted(map(str, kinds))} has no exact bytes per id",
        )
    )
