"""Boundaries and authorship on the vocabularies of real models, with text that tokenizers find hard."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vocabularies import FETCH, FILES, Vocabulary, load

from slime_tandem.config import BoundaryClass, TandemConfig
from slime_tandem.errors import ConfigError
from slime_tandem.rollout.boundaries import BoundaryRecord, boundary_ids, resolve_boundaries, stop_regex
from slime_tandem.rollout.handoff import HandoffRule, author_key
from slime_tandem.rollout.junior_text import JuniorText
from slime_tandem.strategies import PUNCTUATION, STRATEGIES
from slime_tandem.tokens.speller import Speller
from slime_tandem.tokens.token_bytes import encode_exact
from slime_tandem.types import JUNIOR, SENIOR, SampleKey

CLASSES: list[tuple[BoundaryClass, ...]] = [
    names for n in (1, 2, 3) for names in itertools.combinations(get_args(BoundaryClass), n)
]
few = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
keys = st.builds(SampleKey, st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**6))


@cache
def table_of(name: str, strategy: str, classes: tuple[BoundaryClass, ...]) -> frozenset[int]:
    tokens = load(name).tokens
    return boundary_ids(strategy, tokens.table, tokens.special, classes=classes)


HardIds = Callable[[Vocabulary], st.SearchStrategy[list[int]]]


@few
@given(data=st.data())
def test_the_bytes_of_encoded_text_are_the_text(
    vocabulary: Vocabulary, hard_texts: st.SearchStrategy[str], data: st.DataObject
) -> None:
    text, tokens = data.draw(hard_texts), vocabulary.tokens
    space = b" " if tokens.inserts_leading_space and text else b""
    # SmolLM2 has no id for some bytes (`missing_bytes`); its encoder leaves these out, and nothing else.
    written = bytes(b for b in text.encode() if b not in tokens.missing_bytes)
    assert tokens.join(vocabulary.encode(text)) == space + written
    assert tokens.join(encode_exact(tokens, vocabulary.encode, text)) == written


@few
@given(data=st.data())
def test_any_ids_mean_what_their_own_library_says(
    vocabulary: Vocabulary, hard_ids: HardIds, data: st.DataObject
) -> None:
    tokens = vocabulary.tokens
    ids = [i for i in data.draw(hard_ids(vocabulary)) if tokens.of(i) is not None]
    ours, theirs = tokens.join(ids), vocabulary.decode(ids)
    if isinstance(theirs, bytes):
        assert ours == theirs
    elif vocabulary.name in ("gemma3", "mistral-v1", "mistral-v3"):
        # SentencePiece writes one U+FFFD per byte of a broken stretch, and takes off the space that it would insert.
        strip = tokens.inserts_leading_space and ids and (tokens.of(ids[0]) or b"").startswith(b" ")
        if b"\xef\xbf\xbd" not in ours:
            try:
                assert ours.decode()[bool(strip) :] == theirs
            except UnicodeDecodeError:
                assert "\ufffd" in theirs
    else:
        assert ours.decode("utf-8", "replace") == theirs


SIZES = {
    "qwen": (151851, 0), "llama3": (128256, 0), "llama3-tiktoken": (128256, 0), "mistral-v1": (32000, 0),
    "mistral-v3": (32768, 0), "tekken": (131072, 0), "o200k": (200019, 19), "cl100k": (100277, 16), "gpt2": (50257, 0),
    "gemma3": (262144, 0), "smollm2": (49152, 0), "deepseek": (129280, 0),
}  # fmt: skip


def test_every_id_has_bytes_or_a_role_or_is_undefined(vocabulary: Vocabulary) -> None:
    """The rank files of o200k and cl100k leave ids free."""
    tokens = vocabulary.tokens
    undefined = sum(b is None for i, b in enumerate(tokens.table) if i not in tokens.special)
    assert (len(tokens.table), undefined) == SIZES[vocabulary.name]
    assert all(tokens.of(i) is None for i in tokens.special)
    assert tokens.special == {i for i in tokens.names if tokens.of(i) is None}
    assert tokens.eos_ids <= set(tokens.roles["eos"])


def test_one_vocabulary_lacks_some_bytes(vocabulary: Vocabulary) -> None:
    """SmolLM2: six control characters, and lead bytes of planes without assigned characters or of no character."""
    lacks = (
        {4, 6, 19, 20, 22, 29, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)} if vocabulary.name == "smollm2" else set()
    )
    assert vocabulary.tokens.missing_bytes == lacks


def test_both_files_of_llama_3_give_one_table() -> None:
    a, b = load("llama3").tokens, load("llama3-tiktoken").tokens
    assert a.table[:128000] == b.table[:128000]
    assert a.special == b.special
    assert a.fingerprint == b.fingerprint
    assert a.fingerprint != load("qwen").tokens.fingerprint


# ---- boundary tables, against what each tokenizer itself calls a leading space ----

PAPER = {
    "qwen": 53021, "llama3": 57875, "llama3-tiktoken": 57875, "mistral-v1": 15763, "mistral-v3": 15763, "tekken": 74417,
    "o200k": 106529, "cl100k": 44610, "gpt2": 33135, "gemma3": 137542, "smollm2": 31985, "deepseek": 51172,
}  # fmt: skip


def test_the_papers_set_has_the_papers_size(vocabulary: Vocabulary) -> None:
    """53,021 ids of Qwen's vocabulary, as the reference sampler reports; the others are counts by the same rule."""
    record = BoundaryRecord.resolve(TandemConfig(), vocabulary.tokens)
    assert len(record.ids) == PAPER[vocabulary.name]
    assert record.fingerprint == vocabulary.tokens.fingerprint
    assert BoundaryRecord.from_json(record.to_json()) == record


def test_the_papers_set_is_the_leading_space_marker() -> None:
    import json

    from sentencepiece import SentencePieceProcessor
    from vocabularies import cache_dir

    for name in ("llama3", "gpt2", "smollm2", "deepseek"):
        spec = json.loads((cache_dir() / FILES[name]).read_text(encoding="utf-8"))
        tokens = load(name).tokens
        marked = {i for piece, i in spec["model"]["vocab"].items() if piece.startswith("\u0120")}
        assert boundary_ids("word", tokens.table, tokens.special) == marked - tokens.special
    for name in ("mistral-v1", "mistral-v3", "gemma3"):
        processor = SentencePieceProcessor(model_file=str(cache_dir() / FILES[name]))
        tokens = load(name).tokens
        marked = {i for i in range(len(processor)) if processor.id_to_piece(i).startswith("\u2581")}
        # The byte token of a space begins with one too, though it has no marker.
        assert boundary_ids("word", tokens.table, tokens.special) == marked | {processor.piece_to_id("<0x20>")}


def test_classes_add_up_and_never_take_a_special_token(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.tokens
    alone = {c: boundary_ids("word", tokens.table, tokens.special, classes=(c,)) for c in get_args(BoundaryClass)}
    for names in CLASSES:
        ids = table_of(vocabulary.name, "word", names)
        assert ids == frozenset().union(*(alone[n] for n in names))
        assert not ids & tokens.special
    every = get_args(BoundaryClass)
    config = TandemConfig(boundary_classes=every)
    assert resolve_boundaries(config, tokens.table, tokens.special) == table_of(vocabulary.name, "word", every)
    for i in list(alone["punctuation"])[:200]:
        assert (tokens.of(i) or b"").decode("utf-8", "ignore")[-1] in PUNCTUATION
    assert alone["newline"] >= boundary_ids("sentence", tokens.table, tokens.special)


def test_sentence_is_refused_where_no_token_holds_a_blank_line() -> None:
    """Mistral's SentencePiece vocabularies write a blank line as two tokens of one line feed each."""
    config = TandemConfig(selection_strategy="sentence")
    for name in FILES:
        tokens = load(name).tokens
        if name in ("mistral-v1", "mistral-v3"):
            with pytest.raises(
                ConfigError, match=r"tandem\.selection_strategy='sentence': expected a strategy for which"
            ):
                resolve_boundaries(config, tokens.table, tokens.special)
        else:
            assert resolve_boundaries(config, tokens.table, tokens.special)


# ---- authorship ----


def rule_for(
    vocabulary: Vocabulary, strategy: str, classes: tuple[BoundaryClass, ...], prob: float, gap: int, chunk: int
) -> HandoffRule:
    return HandoffRule.of(strategy, prob, gap, chunk, table_of(vocabulary.name, strategy, classes))


def run_lengths(
    pieces: list[bytes], strategy: str, classes: tuple[BoundaryClass, ...], gap: int, chunk: int
) -> list[int]:
    """Where runs end, read off the bytes alone, by the words of the documentation."""
    lengths, n = [], 0
    for piece in pieces:
        n += 1
        text = piece.decode("latin-1")
        ends = {
            "word": ("space" in classes and text[:1] == " ")
            or ("newline" in classes and "\n" in text)
            or ("punctuation" in classes and any(piece.endswith(mark.encode()) for mark in PUNCTUATION))
            or n == gap,
            "sentence": text[-2:] == "\n\n",
            "chunk": n == chunk,
            "bernoulli": True,
            "alternating": True,
        }[strategy]
        if ends:
            lengths.append(n)
            n = 0
    return [*lengths, n] if n else lengths


def in_requests(rule: HandoffRule, key: SampleKey, ids: list[int], cuts: list[int]) -> tuple[int, ...]:
    """The mask as a rollout finds it, whose answers end wherever `cuts` says: only (run, length) is carried on."""
    run, length, mask = 0, 0, []
    bounds = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    for start, stop in itertools.pairwise(bounds):
        for token in ids[start:stop]:
            mask.append(rule.author(author_key(key), run))
            length += 1
            if rule.ends_run(token, length):
                run, length = run + 1, 0
    return tuple(mask)


@few
@given(data=st.data(), key=keys, prob=st.floats(0, 1), gap=st.integers(1, 40), chunk=st.integers(1, 9))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_authorship_follows_the_byte_rule_however_the_response_is_cut(
    vocabulary: Vocabulary,
    hard_ids: HardIds,
    strategy: str,
    data: st.DataObject,
    key: SampleKey,
    prob: float,
    gap: int,
    chunk: int,
) -> None:
    classes = data.draw(st.sampled_from(CLASSES))
    ids = data.draw(hard_ids(vocabulary))
    rule = rule_for(vocabulary, strategy, classes, prob, gap, chunk)
    lengths = run_lengths([vocabulary.tokens.of(i) or b"" for i in ids], strategy, classes, gap, chunk)
    expected = tuple(rule.author(author_key(key), k) for k, n in enumerate(lengths) for _ in range(n))
    assert rule.authorship(key, ids) == expected
    assert rule.authorship(key, ids) == expected, "the same again"
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assert in_requests(rule, key, ids, cuts) == expected
    assert rule.authorship(key, ids[: len(ids) // 2]) == expected[: len(ids) // 2]


@pytest.mark.parametrize("strategy", ["word", "bernoulli", "sentence"])
@pytest.mark.parametrize(("prob", "author"), [(0.0, JUNIOR), (1.0, SENIOR)])
def test_at_probability_0_or_1_one_author_writes_all(
    vocabulary: Vocabulary, strategy: str, prob: float, author: int
) -> None:
    rule = rule_for(vocabulary, strategy, ("space",), prob, 4, 4)
    ids = vocabulary.encode("Some words here.\n\nAnd 你好 more, on two lines\n") * 20
    assert {a for seed in range(20) for a in rule.authorship(SampleKey(seed, 0, 0), ids)} == {author}


@few
@given(gap=st.integers(1, 40), key=keys)
def test_text_without_spaces_is_governed_by_the_cap(vocabulary: Vocabulary, gap: int, key: SampleKey) -> None:
    ids = encode_exact(vocabulary.tokens, vocabulary.encode, "今天天气很好我们去公园吧如果明天下雨就在家里读书" * 8)
    assert len(ids) > 100
    rule = rule_for(vocabulary, "word", ("space",), 0.5, gap, 1)
    authors = [rule.author(author_key(key), k) for k in range(len(ids))]
    assert rule.authorship(key, ids) == tuple(authors[i // gap] for i in range(len(ids)))


# ---- the pattern that makes a server stop ----


def shown(vocabulary: Vocabulary, ids: list[int]) -> str:
    """What a server's detokeniser makes of the ids (it skips special tokens)."""
    plain = [i for i in ids if vocabulary.tokens.of(i) is not None]
    text = vocabulary.decode(plain)
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


@few
@given(data=st.data(), runs=st.integers(1, 5))
@pytest.mark.parametrize("strategy", ["word", "sentence"])
def test_the_pattern_never_lets_a_server_write_past_the_last_boundary(
    vocabulary: Vocabulary, hard_ids: HardIds, strategy: str, data: st.DataObject, runs: int
) -> None:
    classes = data.draw(st.sampled_from(CLASSES))
    ids = data.draw(hard_ids(vocabulary))
    tokens = vocabulary.tokens
    boundary = table_of(vocabulary.name, strategy, classes)
    pattern = stop_regex(strategy, runs, classes=classes)
    assert pattern is not None
    ends = [n + 1 for n, i in enumerate(ids) if i in boundary]
    if len(ends) >= runs:
        head = ids[: ends[runs - 1]]
        assert re.search(pattern, tokens.join(head).decode("utf-8", "replace"))
        # SentencePiece's own decoder takes the first space off an answer where its encoder would insert one.
        if not tokens.inserts_leading_space:
            assert re.search(pattern, shown(vocabulary, head))
    for n in range(min(len(ids), 40)):
        # Never without a cause: before it is found, so many marks are not yet in the text.
        text = tokens.join(ids[:n]).decode("utf-8", "replace")
        marks = text.count("\n\n") if strategy == "sentence" else sum(text.count(m) for m in marks_of(classes))
        assert bool(re.search(pattern, text)) == (marks >= runs)


def marks_of(classes: tuple[BoundaryClass, ...]) -> str:
    return "".join({"space": " ", "newline": "\n", "punctuation": PUNCTUATION}[c] for c in classes)


def test_a_missing_vocabulary_names_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("SLIME_TANDEM_VOCABULARIES", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(FETCH)):
        load.__wrapped__("qwen")


@cache
def speller_of(name: str) -> Speller:
    vocabulary = load(name)
    tokens = vocabulary.tokens
    return Speller(
        tokens, lambda text: encode_exact(tokens, vocabulary.encode, text), min(tokens.eos_ids or tokens.special)
    )


PAIRS = [("qwen", "llama3"), ("llama3", "qwen"), ("qwen", "gemma3"), ("mistral-v3", "o200k"), ("gpt2", "mistral-v1"),
         ("deepseek", "smollm2"), ("smollm2", "tekken")]  # fmt: skip


@pytest.mark.parametrize(("junior", "senior"), PAIRS)
@few
@given(data=st.data())
def test_a_juniors_text_is_spelt_exactly_in_the_seniors_vocabulary_or_not_at_all(
    hard_ids: HardIds, junior: str, senior: str, data: st.DataObject
) -> None:
    """Also broken UTF-8 and segmentations that no encoder would give; what the senior has no bytes for is never
    approximated."""
    mine, theirs = speller_of(junior), speller_of(senior)
    ids = [i for i in data.draw(hard_ids(load(junior))) if mine.tokens.of(i) is not None]
    found = JuniorText(mine, theirs, (0,)).translate(ids, [-0.5] * len(ids))
    written = mine.tokens.join(ids)
    if found.complete:
        assert theirs.tokens.join(found.ids) == written
        assert all(theirs.tokens.of(i) is not None for i in found.ids)
        assert sum(found.log_probs) == pytest.approx(-0.5 * len(ids) if found.ids else 0.0)
    else:
        assert found.ids == ()
        assert set(written) & set(theirs.tokens.missing_bytes), "only a byte without an id stands in the way"
