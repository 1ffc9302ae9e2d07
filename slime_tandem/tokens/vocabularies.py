"""Byte tables read straight from vocabulary files: tiktoken ranks, Mistral's Tekken JSON, SentencePiece models. Pure.

Each parser takes the file's bytes and gives a `TokenBytes`, without the library that made the file. A SentencePiece model
says itself what encoding does to text; a rank file does not, so a tokenizer that normalises first (Qwen's own: NFC) is
found with `token_bytes.check_encoding`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping

from slime_tandem.errors import ModelError
from slime_tandem.tokens.token_bytes import TokenBytes, make_token_bytes, sentence_piece

# What Tekken files up to version v7 leave out (mistral-common, tokens/tokenizers/tekken.py: DEPRECATED_SPECIAL_TOKENS).
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip

# sentencepiece_model.proto: ModelProto.SentencePiece.Type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


def _refuse(value: object, expected: str, remedy: str) -> ModelError:
    return ModelError("vocabulary file", value, expected, remedy)


def parse_tiktoken(data: bytes, special: Mapping[str, int], eos_ids: frozenset[int]) -> TokenBytes:
    """A tiktoken rank file (Qwen, Llama-3, o200k, cl100k): lines of `base64(bytes) id`.

    `special` (surface -> id) and `eos_ids` come from the model, the file has none. Raises ModelError for a broken line, an
    id that two tokens share, and a vocabulary without all 256 single bytes (it could not write every text).

    >>> ranks = b"".join(b"%s %d\\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    >>> table = parse_tiktoken(ranks, {"<|endoftext|>": 256}, frozenset({256}))
    >>> table.of(65), table.of(256), table.roles["eos"]
    (b'A', None, (256,))
    """
    pieces: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            index, piece = int(rank), base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            raise _refuse(f"line {number}: {line[:40]!r}", "base64 bytes and an id", "fetch the file again") from None
        if index in pieces or index < 0:
            raise _refuse(f"line {number}: id {index}", "an id of its own, at least 0", "fetch the file again")
        pieces[index] = piece
    return _ranked(pieces, special, eos_ids)


def parse_tekken(data: bytes) -> TokenBytes:
    """Mistral's `tekken.json`: the special tokens come first, then as many ranks as the vocabulary size leaves room for.

    Raises ModelError for a file of another form.
    """
    try:
        tree = json.loads(data)
        config = tree["config"]
        offset = int(config["default_num_special_tokens"])
        room = int(config["default_vocab_size"]) - offset
        ranked = {int(t["rank"]): base64.b64decode(t["token_bytes"], validate=True) for t in tree["vocab"]}
        listed = tree.get("special_tokens")
        names = (
            dict(enumerate(_TEKKEN_SPECIAL))
            if listed is None
            else {int(t["rank"]): str(t["token_str"]) for t in listed}
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error) as error:
        raise _refuse(data[:20], f"a Tekken vocabulary ({error!r})", "use the model's tekken.json") from None
    # Ranks past the vocabulary size belong to no id (mistral-common cuts them off too: _reload_mergeable_ranks).
    pieces = {offset + rank: piece for rank, piece in ranked.items() if rank < room}
    special = {names.get(i, f"<SPECIAL_{i}>"): i for i in range(offset)}
    return _ranked(pieces, special, frozenset({special["</s>"]} if "</s>" in special else ()))


def _ranked(pieces: dict[int, bytes], special: Mapping[str, int], eos_ids: frozenset[int]) -> TokenBytes:
    names = {index: name for name, index in special.items()}
    clash = sorted(pieces.keys() & names.keys())
    if clash:
        raise _refuse(clash[:5], "special ids beside the ranks", "correct the special tokens")
    missing = {bytes([b]) for b in range(256)} - set(pieces.values())
    if missing:
        raise _refuse(
            sorted(missing)[:5], "every single byte as a token", "these bytes are missing: use the whole file"
        )
    return make_token_bytes(pieces, names, frozenset(names), eos_ids)


def parse_sentencepiece(data: bytes, eos_ids: frozenset[int] | None = None) -> TokenBytes:
    """A SentencePiece `tokenizer.model` (Mistral v1 and v3, Llama-2, Gemma); `eos_ids` None: the file's own.

    Raises ModelError for a file of another form, and for models whose ids have no exact bytes: without byte fallback
    (unknown characters vanish), or with a normaliser that rewrites text or drops spaces (NFKC of T5 and others).
    """
    try:
        fields = list(_fields(data))
        trainer = _numbers(b"".join(_messages(fields, 2)))
        normalizer = list(_fields(b"".join(_messages(fields, 3))))
        rewrites = any(_messages(normalizer, 2))
        options = {number: value for number, value in normalizer if isinstance(value, int)}
        messages = list(_messages(fields, 1))
        texts = [b"".join(_messages(list(_fields(message)), 1)).decode() for message in messages]
        kinds = [_numbers(message).get(3, 1) for message in messages]
    except (ValueError, IndexError) as error:
        raise _refuse(data[:20], f"a SentencePiece model ({error})", "use the model's tokenizer.model") from None
    flaws = {
        "no pieces": not texts,
        "no byte fallback": not trainer.get(35, 0) or kinds.count(_BYTE) != 256,
        "a normaliser that rewrites characters": rewrites,
        "a normaliser that drops spaces": bool(options.get(4, 1)),
        "spaces that are not escaped": not options.get(5, 1),
        "spaces behind the words": bool(trainer.get(24, 0)),
    }
    found = [flaw for flaw, there in flaws.items() if there]
    if found:
        raise _refuse(
            found, "a SentencePiece model whose ids have exact bytes", "this one cannot be aligned byte by byte"
        )
    special = frozenset(i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL))
    names = {i: text for i, text in enumerate(texts) if kinds[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    # A user-defined piece that looks like a byte is the text it shows; only pieces of type BYTE are bytes.
    pieces = {
        i: sentence_piece(text) if kinds[i] == _BYTE else text.replace("\u2581", " ").encode()
        for i, text in enumerate(texts)
    }
    if eos_ids is None:
        end = trainer.get(42, 2)  # -1, a model without one, is written as 2^64 - 1
        eos_ids = frozenset({end} & special)
    fallback = frozenset(i for i, kind in enumerate(kinds) if kind == _BYTE)
    space = bool(options.get(3, 1))
    return make_token_bytes(
        pieces,
        names,
        special,
        eos_ids,
        inserts_leading_space=space,
        # Whoever puts text behind a special token has encoded it on its own.
        dummy_prefix="always" if space else "no",
        marks_spaces=True,
        fallback=fallback,
    )


def _messages(fields: list[tuple[int, int | bytes]], number: int) -> Iterator[bytes]:
    for n, value in fields:
        if n == number:
            if not isinstance(value, bytes):
                raise ValueError(f"field {number} holds a number")
            yield value


def _numbers(message: bytes) -> dict[int, int]:
    return {number: value for number, value in _fields(message) if isinstance(value, int)}


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one protobuf message: varints as int, lengths as bytes, fixed widths as raw bytes.

    Raises ValueError or IndexError where the bytes are no message.

    >>> list(_fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
    [(1, 150), (2, b'hi')]
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a varint of more than ten bytes")

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        if at + size > len(data):
            raise ValueError("the file ends in the middle of a field")
        yield number, data[at : at + size]
        at += size
