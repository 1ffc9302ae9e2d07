"""Readers of vocabulary files: what they take, against the libraries that made the files, and what they refuse."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import FILES, cache_dir, load

from slime_tandem.distill.alignment import Aligner
from slime_tandem.errors import ModelError
from slime_tandem.tokens.token_bytes import encode_exact
from slime_tandem.tokens.vocabularies import parse_sentencepiece, parse_tekken, parse_tiktoken


def ranks(*more: bytes, skip: int | None = None) -> bytes:
    pieces = [*(bytes([b]) for b in range(256) if b != skip), *more]
    return b"".join(base64.b64encode(piece) + b" %d\n" % i for i, piece in enumerate(pieces))


def tekken(**changes: Any) -> dict[str, Any]:
    vocab = [{"rank": b, "token_bytes": base64.b64encode(bytes([b])).decode()} for b in range(256)]
    vocab += [{"rank": 256, "token_bytes": "IGE="}, {"rank": 257, "token_bytes": "IGI="}]
    config = {"default_vocab_size": 277, "default_num_special_tokens": 20, "pattern": ".", "version": "v3"}
    return {"config": config, "vocab": vocab} | changes


def sentencepiece(change: Callable[[Any], None] = lambda model: None) -> bytes:
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    for piece, kind in [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("\u2581a", 1), ("<0x41>", 4), ("<tool>", 4)]:
        model.pieces.add(piece=piece, score=-1.5, type=kind)
    for b in range(256):
        model.pieces.add(piece=f"<0x{b:02X}>", type=6)
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.remove_extra_whitespaces = False
    change(model)
    return bytes(model.SerializeToString())


# ---- taken ----


def test_a_rank_file_with_special_tokens() -> None:
    table = parse_tiktoken(ranks(b" the") + b"\n", {"<|im_end|>": 259, "<tool_call>": 258}, frozenset({259}))
    assert table.of(256) == b" the"
    assert [table.of(i) for i in (257, 258, 259)] == [None] * 3
    assert table.special == {258, 259}, "257 is a gap, it has no role"
    assert table.roles == {"eos": (259,), "turn_end": (259,), "tool_call_start": (258,)}


def test_tekken_cuts_ranks_past_its_size_off_and_puts_special_tokens_first() -> None:
    table = parse_tekken(json.dumps(tekken()).encode())
    assert (len(table.table), table.of(20), table.of(276)) == (277, b"\x00", b" a")
    assert table.eos_ids == {2}
    assert table.roles["tool_call_start"] == (9,)
    named = tekken(special_tokens=[{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "[THINK]"}])
    table = parse_tekken(json.dumps(named).encode())
    assert (table.names[1], table.names[2], table.eos_ids) == ("[THINK]", "<SPECIAL_2>", frozenset())


def test_a_sentencepiece_model() -> None:
    table = parse_sentencepiece(sentencepiece())
    assert [table.of(i) for i in range(7)] == [None, None, None, b" a", b"<0x41>", b"<tool>", b"\x00"]
    assert table.special == {0, 1, 2}
    assert table.eos_ids == {2}
    assert table.inserts_leading_space, "the default of the format"
    assert not parse_sentencepiece(
        sentencepiece(lambda m: setattr(m.normalizer_spec, "add_dummy_prefix", False))
    ).inserts_leading_space
    assert parse_sentencepiece(sentencepiece(lambda m: setattr(m.trainer_spec, "eos_id", -1))).eos_ids == frozenset()
    assert parse_sentencepiece(sentencepiece(), frozenset({1, 2})).eos_ids == {1, 2}


REAL = ["qwen", "llama3", "smollm2", "gemma3", "mistral-v3", "tekken", "o200k", "deepseek", "gpt2"]
PROSE = [
    "The quick brown fox jumps over 12345 lazy dogs, and then some.\n\n    def f(x):\n                return x == 3.14\n",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f680 caf\u00e9 \u00fcber \uc548\ub155 \u05e9\u05dc\u05d5\u05dd ",
    "-" * 70 + "\x00\t" + " " * 40,
]


@pytest.mark.parametrize(("student", "teacher"), [*zip(REAL, [*REAL[1:], REAL[0]], strict=True)])
def test_the_short_way_of_aligning_agrees_with_the_general_one(student: str, teacher: str) -> None:
    """Text as it comes, cut letter by letter, and at random ids; the whole of what both ways know."""
    s, t = load(student), load(teacher)
    aligner = Aligner(s.tokens, t.tokens, end_of_turn=min(t.tokens.eos_ids))
    rng = random.Random(0)
    written = [i for text in PROSE for i in encode_exact(s.tokens, s.encode, text)]
    spelt = [i for text in PROSE for c in text for i in encode_exact(s.tokens, s.encode, c)]
    odd = [rng.randrange(-1, len(s.tokens.table) + 9) for _ in range(30)]
    for ids in (written, spelt, [*written, min(s.tokens.eos_ids)], [*written, *odd, *spelt], odd):
        text = aligner.write(ids, lambda x: encode_exact(t.tokens, t.encode, x))
        short, general = aligner.align(text), aligner.align_general(text)
        for name in ("teacher_index", "span", "teacher_span", "reason"):
            assert getattr(short, name).tolist() == getattr(general, name).tolist(), name


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v3", "gemma3"])
def test_our_reader_sees_what_sentencepiece_sees(name: str) -> None:
    from sentencepiece import SentencePieceProcessor

    data = (cache_dir() / FILES[name]).read_bytes()
    table, processor = parse_sentencepiece(data), SentencePieceProcessor(model_proto=data)
    assert len(table.table) == len(processor)
    assert table.special == {i for i in range(len(processor)) if processor.is_control(i) or processor.is_unknown(i)}
    assert table.eos_ids == {processor.eos_id()}
    for i in range(0, len(processor), 7):
        if i not in table.special and not processor.is_byte(i):
            assert table.of(i) == processor.id_to_piece(i).replace("\u2581", " ").encode()
    assert [table.of(i) for i in range(len(processor)) if processor.is_byte(i)] == [bytes([b]) for b in range(256)]


def test_the_roles_of_real_vocabularies() -> None:
    roles = {name: load(name).tokens.roles for name in FILES}
    assert roles["qwen"] == {"eos": (151643, 151645), "turn_start": (151644,), "turn_end": (151645,)}
    assert roles["llama3"]["bos"] == (128000,)
    assert roles["llama3"]["turn_end"] == (128009,)
    assert roles["gemma3"]["bos"] == (2,), "the HTML tag <bos> or <s> is text"
    assert roles["gemma3"]["turn_start"] == (105,)
    assert roles["deepseek"]["think_start"] == (128821,)
    assert roles["mistral-v3"]["tool_call_start"] == (5,)
    assert roles["tekken"]["tool_call_start"] == (9,)
    assert roles["smollm2"]["turn_end"] == (2,)
    assert all("eos" in r for r in roles.values())


# ---- refused ----


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"IQ==\n", r"line 1: b'IQ=='.*expected base64 bytes and an id"),
        (ranks() + b"!! 300\n", "line 257"),
        (ranks() + b"IGE= x\n", "line 257"),
        (ranks() + b"IGE= 7\n", r"line 257: id 7'.*an id of its own"),
        (ranks() + b"IGE= -1\n", "an id of its own, at least 0"),
        (ranks(skip=65), r"\[b'A'\]: expected every single byte as a token"),
        (b"", "every single byte"),
    ],
)
def test_a_broken_rank_file(data: bytes, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parse_tiktoken(data, {}, frozenset())


def test_a_special_token_on_a_rank() -> None:
    with pytest.raises(ModelError, match=r"\[255\]: expected special ids beside the ranks"):
        parse_tiktoken(ranks(), {"<|end|>": 255}, frozenset())


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"3", b"\xff", json.dumps(tekken(vocab=[{"rank": 0}])).encode(),
     json.dumps(tekken(config={})).encode(), json.dumps(tekken(special_tokens=3)).encode(),
     json.dumps(tekken(vocab=[{"rank": 0, "token_bytes": "?"}])).encode()],
)  # fmt: skip
def test_a_broken_tekken_file(data: bytes) -> None:
    with pytest.raises(ModelError, match="a Tekken vocabulary"):
        parse_tekken(data)


FLAWS: dict[str, Callable[[Any], None]] = {
    "no byte fallback": lambda m: setattr(m.trainer_spec, "byte_fallback", False),
    "a normaliser that rewrites characters": lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"x"),
    "a normaliser that drops spaces": lambda m: setattr(m.normalizer_spec, "remove_extra_whitespaces", True),
    "spaces that are not escaped": lambda m: setattr(m.normalizer_spec, "escape_whitespaces", False),
    "spaces behind the words": lambda m: setattr(m.trainer_spec, "treat_whitespace_as_suffix", True),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_sentencepiece_model_that_changes_text(flaw: str) -> None:
    with pytest.raises(ModelError, match=rf"\['{flaw}'\]: expected a SentencePiece model whose ids have exact bytes"):
        parse_sentencepiece(sentencepiece(FLAWS[flaw]))


def test_a_byte_that_is_missing_from_the_byte_pieces() -> None:
    with pytest.raises(ModelError, match="no byte fallback"):
        parse_sentencepiece(sentencepiece(lambda m: m.pieces.pop()))


@pytest.mark.parametrize("data", [b"", b"{}", b"\x0a\xff", b"\x0b", b"\x08\x01", b"\xff" * 30, b"\x0a\x02\x0a\xff"])
def test_what_is_no_sentencepiece_model(data: bytes) -> None:
    with pytest.raises(ModelError):
        parse_sentencepiece(data)


@settings(deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_read_but_never_crash(data: st.DataObject) -> None:
    whole = sentencepiece()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + data.draw(st.integers(0, 3)) :]
    for parse in (parse_sentencepiece, parse_tekken, lambda d: parse_tiktoken(d, {}, frozenset())):
        for file in (damaged, data.draw(st.binary(max_size=20))):
            try:
                parse(file)
            except ModelError as error:
                assert "Remedy" in str(error)  # noqa: PT017 (any outcome but another exception is right)
