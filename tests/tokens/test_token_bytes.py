"""Every id's exact bytes: byte-level and SentencePiece-style tokenizers, what is reported, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_tandem.errors import ModelError
from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes, encode_exact

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
no_function_reset = settings(deadline=None, max_examples=150)


def build(hf: Any) -> TokenBytes:
    return build_token_bytes(hf, frozenset({hf.eos_token_id}))


def encode(hf: Any, text: str) -> list[int]:
    return list(hf.encode(text, add_special_tokens=False, split_special_tokens=True))


@pytest.fixture(scope="session")
def tables(english: Any, mixed: Any, gemma: Any) -> dict[str, tuple[Any, TokenBytes]]:
    return {name: (hf, build(hf)) for name, hf in [("english", english), ("mixed", mixed), ("gemma", gemma)]}


@no_function_reset
@given(text=texts)
@pytest.mark.parametrize("name", ["english", "mixed", "gemma"])
def test_encoded_text_comes_back_byte_for_byte(tables: Any, name: str, text: str) -> None:
    hf, table = tables[name]
    text = text.replace("\u2581", "_") if name == "gemma" else text
    assert table.join(encode(hf, text)) == text.encode()


@no_function_reset
@given(data=st.data())
@pytest.mark.parametrize("name", ["english", "mixed", "gemma"])
def test_arbitrary_ids_decode_to_what_the_tokenizer_says(tables: Any, name: str, data: Any) -> None:
    """Ids that no encoder would give (lone bytes, odd splits) mean what the tokenizer's own decoder makes of them."""
    hf, table = tables[name]
    plain = [i for i, b in enumerate(table.table) if b is not None and i not in hf.added_tokens_decoder]
    ids = data.draw(st.lists(st.sampled_from(plain), max_size=20))
    want = hf.decode(ids, clean_up_tokenization_spaces=False)
    if name == "gemma":  # its decoder writes one U+FFFD per byte of a broken stretch; compare where the bytes are text
        try:
            assert table.join(ids).decode() == want
        except UnicodeDecodeError:
            assert "\ufffd" in want
    else:
        assert table.join(ids).decode("utf-8", "replace") == want


@pytest.mark.parametrize("name", ["english", "mixed"])
def test_special_tokens_have_a_role_and_added_tokens_have_text(tables: Any, name: str) -> None:
    hf, table = tables[name]
    assert table.eos_ids == {hf.eos_token_id}
    assert table.special == {hf.eos_token_id, hf.pad_token_id}
    assert [table.of(i) for i in table.special] == [None, None]
    assert table.of(hf.convert_tokens_to_ids("<think>")) == b"<think>"
    # Letters of the byte alphabet are bytes to the decoder, in an added token as in any other.
    nee = hf.convert_tokens_to_ids("n\u00e9e")
    assert (table.of(nee), hf.decode([nee])) == (b"n\xe9e", "n\ufffde")
    assert len(table.table) == len(hf)


def test_byte_fallback_ids_are_single_bytes(tables: Any) -> None:
    hf, table = tables["gemma"]
    assert [table.of(hf.convert_tokens_to_ids(f"<0x{b:02X}>")) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert table.special == set(hf.convert_tokens_to_ids(["<unk>", "<s>", "</s>"]))
    assert table.of(hf.convert_tokens_to_ids("\u2581the")) == b" the"


def test_every_byte_has_an_id_of_its_own_in_a_byte_level_table(tables: Any) -> None:
    _, table = tables["english"]
    assert {bytes([b]) for b in range(256)} <= set(table.table)


def test_ids_outside_the_table_have_no_bytes(tables: Any) -> None:
    _, table = tables["english"]
    V = len(table.table)
    assert [table.of(i) for i in (-1, V, V + 1000)] == [None, None, None], "padded embedding rows can be sampled"
    assert table.join([V, 300, -5]) == table.join([300])


def test_extra_end_of_turn_ids_are_special_even_if_the_tokenizer_calls_them_plain(english: Any) -> None:
    think = english.convert_tokens_to_ids("<think>")
    table = build_token_bytes(english, frozenset({english.eos_token_id, think, 151645}))
    assert {think, 151645} <= table.special
    assert table.of(think) is None
    assert len(table.table) == len(english), "an id of a padded row does not make the table longer"


def byte_tokenizer(vocab: dict[str, int] | None = None) -> Tokenizer:
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = Tokenizer(models.BPE(vocab=alphabet | (vocab or {}), merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    return tok


def wrap(tok: Tokenizer) -> PreTrainedTokenizerFast:
    tok.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>")


def test_gaps_between_the_ids_are_undefined_ids() -> None:
    hf = wrap(byte_tokenizer({"ab": 400}))
    table = build(hf)
    assert len(table.table) > len(hf)
    assert table.of(400) == b"ab"
    assert table.of(300) is None


def test_a_piece_outside_the_byte_alphabet_stands_for_its_own_text() -> None:
    """As in the ByteLevel decoder of `tokenizers`: such pieces sit unused in some published vocabularies."""
    hf = wrap(byte_tokenizer({"\u4f60 x": 256}))
    assert build(hf).of(256) == "\u4f60 x".encode() == hf.decode([256]).encode()


# ---- what encoding does to text, where ids have exact bytes all the same ----


@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
def test_a_leading_space_that_the_tokenizer_inserts_is_reported(make_sentence_piece: Any, prepend: str) -> None:
    """Llama-2 (Prepend) and Mistral (Metaspace): the ids hold a space that the text does not."""
    hf = make_sentence_piece(prepend=prepend)
    table = build(hf)
    assert table.inserts_leading_space
    assert table.normalises is None
    assert table.join(encode(hf, "the fox")) == b" the fox"
    assert table.table == build(make_sentence_piece()).table, "the ids stand for what they always stood for"


@no_function_reset
@given(text=texts)
@pytest.mark.parametrize("prepend", ["normalizer", "metaspace"])
def test_encode_exact_gives_the_text_without_the_inserted_space(
    make_sentence_piece: Any, prepend: str, text: str
) -> None:
    hf, text = make_sentence_piece(prepend=prepend), text.replace("\u2581", "_")
    table = build(hf)
    assert table.join(encode_exact(table, lambda t: encode(hf, t), text)) == text.encode()
    assert table.join(encode_exact(table, lambda t: encode(hf, t), " " + text)) == b" " + text.encode()


def test_encode_exact_is_encode_where_no_space_is_inserted(tables: Any) -> None:
    hf, table = tables["english"]
    assert encode_exact(table, lambda t: encode(hf, t), "the fox") == encode(hf, "the fox")


def test_where_the_space_cannot_be_cut_off_it_stays_to_be_seen() -> None:
    """A token that holds the character and what follows: nothing can be cut off, and the bytes say so."""
    pieces = [b" ", b"\x02x", b"x", b"\x02"]
    table = TokenBytes(tuple(pieces), frozenset(), frozenset(), inserts_leading_space=True)
    ids = encode_exact(table, lambda text: [0, 1] if text == "\x02x" else [0, 2], "x")
    assert table.join(ids) == b" x"


def test_a_prefix_space_option_is_reported() -> None:
    tok = byte_tokenizer()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert build(wrap(tok)).inserts_leading_space


def test_nfc_is_reported() -> None:
    """Qwen's tokenizer.json composes characters first; text that is composed already, as nearly all is, stays exact."""
    tok = byte_tokenizer()
    assert build(wrap(byte_tokenizer())).normalises is None
    tok.normalizer = normalizers.NFC()
    hf = wrap(tok)
    table = build(hf)
    assert (table.normalises, table.inserts_leading_space) == ("NFC", False)
    assert table.join(encode(hf, "cafe\u0301")) == "caf\u00e9".encode()


def test_bytes_without_an_id_are_reported(tables: Any) -> None:
    assert tables["english"][1].missing_bytes == frozenset()
    assert TokenBytes((b"ab", b"c", None), frozenset(), frozenset()).missing_bytes == set(range(256)) - {ord("c")}


def test_roles_come_from_surfaces_and_ends_of_turn(english: Any) -> None:
    table = build(english)
    think = english.convert_tokens_to_ids("<think>")
    assert table.roles == {
        "eos": (english.eos_token_id,),
        "pad": (english.pad_token_id,),
        "turn_end": (english.eos_token_id,),
        "think_start": (think,),
    }
    assert table.names[think] == "<think>"
    text = TokenBytes((b"<s>", None), frozenset({1}), frozenset(), {0: "<s>", 1: "<bos>"})
    assert text.roles == {"bos": (1,)}, "text that looks like a marker begins no sequence"


def test_the_fingerprint_tells_tables_apart(tables: Any) -> None:
    prints = {table.fingerprint for _, table in tables.values()}
    assert len(prints) == 3
    split = [((b"ab", b""), (b"a", b"b")), ((b"", None), (None, b"")), ((b"",), (None,)), ((), (None,))]
    for a, b in split:
        one, other = (TokenBytes(t, frozenset(), frozenset()).fingerprint for t in (a, b))
        assert one != other
    _, table = tables["english"]
    assert TokenBytes(table.table, frozenset(), frozenset({3})).fingerprint == table.fingerprint


# ---- what is refused, each with a reason ----


NORMALIZERS = {
    "NFKC": normalizers.NFKC(),
    "NFD": normalizers.NFD(),
    "Lowercase": normalizers.Lowercase(),
    "StripAccents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "Strip left": normalizers.Strip(left=True, right=False),
    "Strip right": normalizers.Strip(left=False, right=True),
    "line ends": normalizers.Replace("\r\n", "\n"),
    "collapse": normalizers.Replace(Regex(" +"), " "),
    "Prepend": normalizers.Prepend("x"),
    "NFC and line ends": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\r\n", "\n")]),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_that_changes_text_is_refused(name: str) -> None:
    tok = byte_tokenizer()
    build(wrap(byte_tokenizer()))  # without it, the same tokenizer is fine
    tok.normalizer = NORMALIZERS[name]
    with pytest.raises(ModelError, match="this tokenizer normalises or inserts text"):
        build(wrap(tok))


def test_an_incomplete_byte_alphabet_is_refused() -> None:
    tok = Tokenizer(models.BPE(vocab={"R": 0, "o": 1}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    with pytest.raises(ModelError, match="differs at byte 2"):
        build(wrap(tok))


@pytest.mark.parametrize(
    ("model", "decoder", "named"),
    [
        (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), decoders.WordPiece(), "WordPiece"),
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0), decoders.Metaspace(), "Unigram"),
        (models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), None, "WordLevel"),
        (models.BPE({"a": 0}, []), decoders.BPEDecoder(), "BPEDecoder"),
        (models.BPE({"a": 0}, []), None, "None"),
    ],
)
def test_models_without_exact_bytes_are_refused(model: Any, decoder: Any, named: str) -> None:
    tok = Tokenizer(model)
    if decoder is not None:
        tok.decoder = decoder
    with pytest.raises(ModelError, match=rf"byte-level BPE or BPE with byte fallback.*{named}"):
        build(wrap(tok))


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        name_or_path = "models/slow"

    with pytest.raises(ModelError, match=r"tokenizer='models/slow': expected a fast tokenizer"):
        build_token_bytes(Slow(), frozenset())


def test_split_special_tokens_keeps_a_spelt_out_special_token_text(tables: Any) -> None:
    """What a response spells out letter by letter is text to the teacher too, not a control token."""
    hf, table = tables["english"]
    ids = encode(hf, "a<|im_end|>b")
    assert hf.eos_token_id not in ids
    assert table.join(ids) == b"a<|im_end|>b"
    assert hf.eos_token_id in hf.encode("a<|im_end|>b", add_special_tokens=False), "the default would not"


def test_an_added_token_that_swallows_spaces_shows_in_the_bytes(english: Any) -> None:
    """`rstrip` tokens eat the spaces behind them; the table cannot know, the alignment notices (test_alignment)."""
    tok = byte_tokenizer()
    tok.add_tokens([AddedToken("<eat>", rstrip=True, special=False)])
    hf = wrap(tok)
    assert build(hf).join(encode(hf, "<eat>   x")) == b"<eat>x"
