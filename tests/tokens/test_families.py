"""Tokenizers as families publish them (Hugging Face's, of real pieces): every id is what the decoder writes, added tokens and
their flags included; and a teacher of each family is given what its own conversation holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vocabularies import FILES, from_sentencepiece, load, with_prefix_space

from slime_tandem.distill.alignment import UNALIGNED_REASONS, Aligner
from slime_tandem.errors import ModelError
from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes, encode_exact, prove

PIECES = {
    "gemma": ("gemma3.model", "replace"),
    "llama2-legacy": ("mistral-v1.model", "prepend"),
    "mistral-v3": ("mistral-v3.model", "first"),
    "metaspace-always": ("mistral-v3.model", "always"),
    "metaspace-never": ("mistral-v3.model", "never"),
}
LEVELS = {"gpt2": False, "gpt2-prefix": True}
FAMILIES = [*PIECES, *LEVELS]
BYTES = [bytes([i]) for i in range(256)]


@cache
def family(name: str) -> tuple[Any, TokenBytes]:
    if name in PIECES:
        file, spaces = PIECES[name]
        hf = from_sentencepiece(file, spaces=spaces, limit=4000)
    else:
        hf = with_prefix_space("gpt2.tokenizer.json", "<|endoftext|>", prefix=LEVELS[name])
    return hf, build_token_bytes(hf, frozenset({hf.eos_token_id}))


def encoder(name: str) -> Any:
    hf, tokens = family(name)
    return lambda text: encode_exact(
        tokens, lambda t: list(hf.encode(t, add_special_tokens=False, split_special_tokens=True)), text
    )


def letters(*names: str) -> TokenBytes:
    """All bytes, and special tokens from id 256 on; the first ends a turn."""
    ids = {256 + i: name for i, name in enumerate(names)}
    return TokenBytes((*BYTES, *(None for _ in names)), frozenset(ids), frozenset({256} if names else ()), ids)


def native(hf: Any, text: str) -> list[int]:
    return list(hf.encode(text, add_special_tokens=False))


# ---- every id ----


@pytest.mark.parametrize("name", FAMILIES)
def test_every_id_is_what_the_decoder_writes_for_it_between_others(name: str) -> None:
    hf, tokens = family(name)
    q = encoder(name)("q")
    shown = 0
    for i, data in enumerate(tokens.table):
        if data is None or (data and not _text(data)):
            continue
        assert hf.backend_tokenizer.decode([*q, i, *q], skip_special_tokens=False) == f"q{data.decode()}q", i
        shown += 1
    assert shown > 3_000
    assert tokens.disproved == frozenset()


def _text(data: bytes) -> bool:
    return data.decode("utf-8", "replace").encode() == data


@pytest.mark.parametrize("name", FILES)
def test_every_id_of_every_real_vocabulary_is_what_its_own_library_writes(name: str) -> None:
    v = load(name)

    def decode(ids: list[int]) -> str:
        out = v.decode(ids)
        return out if isinstance(out, str) else out.decode("utf-8", "replace")

    assert prove(v.tokens, decode, name) == v.tokens


def writing(table: Sequence[bytes | None]) -> Any:
    return lambda ids: b"".join(table[i] or b"" for i in ids).decode("utf-8", "replace")


def test_an_id_that_the_decoder_writes_otherwise_is_masked_and_counted() -> None:
    words = [f"word{i}".encode() for i in range(300)]
    table = [*BYTES, *words]
    tokens = TokenBytes(tuple(table), frozenset(), frozenset())
    assert prove(tokens, writing(table), "t") is tokens
    for i, other in ((300, b"other"), (299, b""), (0xE4, b"\xe5"), (0x9F, b"\x81"), (ord("a"), b"A")):
        proved = prove(tokens, writing([*table[:i], other, *table[i + 1 :]]), "t")
        assert proved.disproved == {i}
        assert (proved.of(i), proved.of(301)) == (None, b"word45")
    with pytest.raises(
        ModelError, match="52 of 556"
    ):  # a byte that completes others, and with it more than one in a hundred
        prove(tokens, writing([*table[:0x80], b"\x81", *table[0x81:]]), "t")


def test_a_decoder_of_another_rule_is_refused() -> None:
    tokens = TokenBytes(tuple(BYTES), frozenset(), frozenset())
    with pytest.raises(
        ModelError, match=r"ids that its decoder writes as their pieces say; \d+ of 256 are not, such as \[\(97"
    ):
        prove(tokens, lambda ids: bytes(ids).decode("utf-8", "replace").upper(), "t")


def test_a_decoder_with_a_step_of_its_own(make_sentence_piece: Any) -> None:
    """It writes a k for each letter of one kind: the ids that hold one are masked, as a teacher's too, and all others hold."""
    hf = make_sentence_piece()
    plain = build_token_bytes(hf, frozenset({2}))

    def holding(letter: str) -> set[int]:
        return {i for i, p in enumerate(plain.table) if p and letter.encode() in p and i not in plain.fallback}

    letter = next(c for c in "vzjqbwg" if 0 < len(holding(c)) < 4)
    steps = [decoders.Replace("\u2581", " "), decoders.Replace(letter, "k"), decoders.ByteFallback(), decoders.Fuse()]
    hf.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokens = prove(plain, lambda ids: str(hf.backend_tokenizer.decode(ids)), "t")
    assert tokens.disproved == holding(letter)
    aligner = Aligner(letters("</s>"), tokens, end_of_turn=2)
    text = list(f"the fox {letter} a hen".encode())
    got = aligner.align(aligner.write(text, lambda t: native(hf, t)))
    unproven = np.flatnonzero(got.reason == UNALIGNED_REASONS.index("unproven")).tolist()
    assert 8 in unproven
    assert set(unproven) <= {7, 8, 9}


# ---- added tokens ----


def test_gemmas_added_tokens_are_text() -> None:
    """Line ends, tabs, spaces, tags of HTML: 165 that its file calls user-defined, as added tokens that are not special."""
    hf, tokens = family("gemma")
    plain = {i: t.content for i, t in hf.added_tokens_decoder.items() if not t.special}
    assert len(plain) == 165
    assert {"\n" * 31, "\t" * 31, "\u2581" * 31, "</s>", "<table>", "[multimodal]"} <= set(plain.values())
    assert not plain.keys() & (tokens.special | tokens.disproved)
    for i, text in plain.items():
        assert tokens.of(i) == text.replace("\u2581", " ").encode()
        assert i in native(hf, f"a{text}a"), text
    assert tokens.roles.get("eos") == (hf.eos_token_id,), "`</s>` is a tag that is closed, no end of a turn"


def test_gemmas_runs_of_spaces_are_spaces() -> None:
    hf, tokens = family("gemma")
    runs = [i for i, t in hf.added_tokens_decoder.items() if set(t.content) == {"\u2581"}]
    assert sorted(len(tokens.of(i) or b"") for i in runs) == list(range(2, 32))
    assert all(set(tokens.of(i) or b"") == {32} for i in runs)
    code = "if x:\n    y"
    ids = native(hf, code)
    assert tokens.join(ids) == code.encode()
    # As student: the teacher reads the spaces. As teacher: it is not refused, and pairs.
    student = Aligner(tokens, letters("</s>"), end_of_turn=256)
    assert bytes(student.write(ids, lambda t: list(t.encode())).ids) == code.encode()
    teacher = Aligner(letters("</s>"), tokens, end_of_turn=1)
    aligned = teacher.align(teacher.write(list(code.encode()), encoder("gemma")))
    assert aligned.teacher_index.tolist()[-1] == len(ids) - 1
    assert set(aligned.reason.tolist()) <= {-1, UNALIGNED_REASONS.index("boundary")}


FLAGS = [dict(zip(("normalized", "lstrip", "rstrip", "single_word", "special"), f, strict=True))
         for f in itertools.product([False, True], repeat=5)]  # fmt: skip


@pytest.mark.parametrize("level", [True, False], ids=["ByteLevel", "SentencePiece"])
def test_added_tokens_of_all_flags(level: bool, make_byte_level: Any, make_sentence_piece: Any) -> None:
    """What the flags do to the text around shows in the ids and masks that place; the id itself is what the decoder writes."""
    text = "the fox <eat>  sat down, <eat> then\u2026"
    for flags in FLAGS:
        hf = make_byte_level(["the fox sat down"], 300, "</s>") if level else make_sentence_piece()
        hf.backend_tokenizer.add_tokens([AddedToken("<eat>", **flags)])
        tokens = build_token_bytes(hf, frozenset({hf.eos_token_id}))
        i = hf.convert_tokens_to_ids("<eat>")
        assert tokens.of(i) == (None if flags["special"] else b"<eat>")
        assert hf.backend_tokenizer.decode([i], skip_special_tokens=False) == "<eat>"
        aligner = Aligner(letters("</s>"), tokens, end_of_turn=hf.eos_token_id)
        ids = list(text.encode())
        aligned = aligner.align(
            aligner.write(ids, lambda t, hf=hf: hf.encode(t, add_special_tokens=False, split_special_tokens=True))
        )
        unproven = {
            k for k, why in enumerate(aligned.reason.tolist()) if UNALIGNED_REASONS[why] == "unproven" and why >= 0
        }
        around = {k for at in (8, 25) for k in range(at - 1, at + 7)}
        assert unproven <= around, flags
        # Behind the normaliser of SentencePiece there are no spaces that could be swallowed.
        sees = level or not flags["normalized"]
        swallows = sees and not flags["special"] and (flags["lstrip"] or flags["rstrip"])
        assert bool(unproven) == swallows, flags


# ---- what encoding puts in front ----


def test_what_encoding_puts_in_front_is_reported() -> None:
    found = {
        name: (t.inserts_leading_space, t.dummy_prefix, t.marks_spaces) for name in FAMILIES for t in [family(name)[1]]
    }
    assert found == {
        "gemma": (False, "no", True),
        "llama2-legacy": (True, "always", True),
        "mistral-v3": (True, "no", True),
        "metaspace-always": (True, "missing", True),
        "metaspace-never": (False, "no", True),
        "gpt2": (False, "no", False),
        "gpt2-prefix": (True, "missing", False),
    }
    files = {name: load(name).tokens for name in ("mistral-v1", "mistral-v3", "gemma3", "tekken")}
    assert {n: (t.inserts_leading_space, t.dummy_prefix, t.marks_spaces) for n, t in files.items()} == {
        "mistral-v1": (True, "always", True),
        "mistral-v3": (True, "always", True),
        "gemma3": (False, "no", True),
        "tekken": (False, "no", False),
    }


def lead_of(tokens: TokenBytes, ids: Sequence[int], content: str) -> str:
    """What stands in front of the content, in the ids of a turn from its opening on."""
    return tokens.join(ids).decode().partition(content)[0]


@pytest.mark.parametrize("opening", ["", " "], ids=["bare", "a space by the template"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_teacher_reads_a_turn_as_its_own_conversation_has_it(name: str, opening: str) -> None:
    """[/INST] (a special token), what the template writes behind it, the content, the end: the ids of the whole text."""
    hf, tokens = family(name)
    end, content = hf.eos_token, "Hello there, x"
    prompt = native(hf, f"q{end}")
    whole = native(hf, f"q{end}{opening}{content}{end}")
    assert whole[: len(prompt)] == prompt
    lead = lead_of(tokens, whole[len(prompt) :], content)
    assert lead == {"always": " " + opening, "missing": " ", "no": opening}[tokens.dummy_prefix]
    aligner = Aligner(letters("</s>"), tokens, end_of_turn=hf.eos_token_id)
    text = aligner.write([*content.encode(), 256], encoder(name), leads={0: (0, lead)} if lead else {})
    assert list(text.ids) == whole[len(prompt) :]
    aligned = aligner.align(text)
    assert aligned.teacher_index.tolist()[-1] == len(text.ids) - 1
    assert {UNALIGNED_REASONS[k] for k in aligned.reason.tolist() if k >= 0} <= {"boundary"}
    # A student whose own turns begin alike writes the very ids.
    same = Aligner(tokens, tokens, end_of_turn=hf.eos_token_id, reuse_ids=False)
    text = same.write(whole[len(prompt) :], encoder(name))
    assert list(text.ids) == whole[len(prompt) :]
    assert same.align(text).teacher_index.tolist() == list(range(len(text.ids)))


@pytest.mark.parametrize("name", ["llama2-legacy", "metaspace-always", "mistral-v3", "gpt2-prefix"])
@pytest.mark.parametrize("behind", ["x and", " x and"])
def test_text_behind_a_special_token_within_a_turn(name: str, behind: str) -> None:
    hf, tokens = family(name)
    end = hf.eos_token
    whole = native(hf, f"q{end}a{end}{behind}{end}")
    prompt = native(hf, f"q{end}")
    lead = lead_of(tokens, whole[len(prompt) :], "a")
    aligner = Aligner(letters("</s>"), tokens, end_of_turn=hf.eos_token_id)
    ids = [*b"a", 256, *behind.encode(), 256]
    text = aligner.write(ids, encoder(name), leads={0: (0, lead)} if lead else {})
    assert list(text.ids) == whole[len(prompt) :]


def test_a_students_own_lead_is_not_content() -> None:
    """Mistral's first token is ' Hello'; a teacher without a space there reads 'Hello', and the token has no partner."""
    hf, tokens = family("llama2-legacy")
    ids = [*native(hf, "</s>Hello there")[1:], hf.eos_token_id]
    assert tokens.join(ids) == b" Hello there"
    aligner = Aligner(tokens, letters("</s>"), end_of_turn=256)
    text = aligner.write(ids, lambda t: list(t.encode()), leads={0: (1, "")})
    assert bytes(text.ids[:-1]) == b"Hello there"
    reasons = [UNALIGNED_REASONS[k] for k in aligner.align(text).reason.tolist() if k >= 0]
    assert reasons[0] == "normalised"
    assert set(reasons[1:]) <= {"boundary"}


@pytest.mark.parametrize("model", ["WordPiece", "Unigram", "WordLevel"])
def test_models_whose_ids_have_no_exact_bytes_are_refused(model: str) -> None:
    made = {
        "WordPiece": models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
        "Unigram": models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0),
        "WordLevel": models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
    }[model]
    tok = Tokenizer(made)
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    with pytest.raises(ModelError, match=f"model type '{model}'"):
        build_token_bytes(PreTrainedTokenizerFast(tokenizer_object=tok), frozenset({0}))
