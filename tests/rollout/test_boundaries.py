"""Where runs end: the tables on decoded bytes, and the pattern that makes a server stop there."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_tandem.config import BoundaryClass, TandemConfig
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.rollout.boundaries import (
    BoundaryRecord,
    boundary_ids,
    resolve_boundaries,
    stop_regex,
)
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.strategies import PUNCTUATION
from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes

from ..waiting import PATIENCE_S

TABLE = [b"a", b" b", b" ", b"\n", b"\n\n", b".\n\n", b"\n\nx", b"\n\n ", b"c d", b"", None, b" \n\n", b"\t"]
SPECIAL = {11}


def test_word_boundaries_begin_with_a_space() -> None:
    assert boundary_ids("word", TABLE, SPECIAL) == {1, 2}


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (("newline",), {3, 4, 5, 6, 7}),  # anywhere in the token: the token that breaks the line ends the run
        (("punctuation",), {13, 14, 15}),  # at its end, and whole
        (("space", "newline"), {1, 2, 3, 4, 5, 6, 7}),
        (("punctuation", "space", "newline"), {1, 2, 3, 4, 5, 6, 7, 13, 14, 15}),
    ],
)
def test_word_boundaries_by_class(classes: tuple[BoundaryClass, ...], expected: set[int]) -> None:
    table = [*TABLE, b"a.", "好。".encode(), b"?", b".a", "。".encode()[1:], b"\r"]
    assert boundary_ids("word", table, SPECIAL, classes=classes) == expected
    assert resolve_boundaries(TandemConfig(boundary_classes=classes), table, SPECIAL) == expected


def test_every_mark_of_punctuation_counts() -> None:
    marks = [m.encode() for m in PUNCTUATION]
    assert set(".,;:!?。，；：！？") <= set(PUNCTUATION)
    assert boundary_ids("word", marks, (), classes=("punctuation",)) == set(range(len(marks)))


def test_classes_matter_to_word_alone() -> None:
    for strategy in ("sentence", "bernoulli", "chunk", "alternating"):
        plain = boundary_ids(strategy, TABLE, SPECIAL)  # type: ignore[arg-type]
        assert boundary_ids(strategy, TABLE, SPECIAL, classes=("newline",)) == plain  # type: ignore[arg-type]
        assert stop_regex(strategy, 2, classes=("newline",)) == stop_regex(strategy, 2)  # type: ignore[arg-type]


def test_a_class_without_a_token_is_refused_by_name() -> None:
    config = TandemConfig(boundary_classes=("space", "punctuation", "newline"))
    with pytest.raises(
        ConfigError, match=r"tandem\.boundary_classes=\['punctuation', 'newline'\]: expected classes of wh"
    ):
        resolve_boundaries(config, [b" a", b"b"], ())


def test_sentence_boundaries_end_in_a_blank_line() -> None:
    assert boundary_ids("sentence", TABLE, SPECIAL) == {4, 5}


@pytest.mark.parametrize("strategy", ["bernoulli", "chunk", "alternating"])
def test_counting_strategies_have_no_table_and_no_pattern(strategy: str) -> None:
    assert boundary_ids(strategy, TABLE, SPECIAL) == frozenset()  # type: ignore[arg-type]
    assert stop_regex(strategy, 3) is None  # type: ignore[arg-type]


def test_the_tables_of_a_real_byte_level_tokenizer() -> None:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Split("\n\n", "merged_with_previous")
    tok.pre_tokenizer = pre_tokenizers.Sequence([tok.pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|eos|>", " <|odd|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tok.train_from_iterator(["the cat sat on the mat.\n\nthe dog ate the cat.\n\n  indented\tline \n"] * 20, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|eos|>")
    table = build_token_bytes(hf, frozenset({hf.eos_token_id}))
    vocab = tok.get_vocab()
    word = boundary_ids("word", table.table, table.special)
    assert word == {i for piece, i in vocab.items() if piece.startswith("\u0120")}, "the paper's set: the BPE marker"
    assert len(word) > 5
    sentence = boundary_ids("sentence", table.table, table.special)
    assert sentence == {i for piece, i in vocab.items() if piece.endswith("\u010a\u010a")}
    assert sentence
    assert not (word | sentence) & table.special


def test_configured_ids_replace_the_table_and_are_checked() -> None:
    assert resolve_boundaries(TandemConfig(boundary_token_ids=(0, 3)), TABLE, SPECIAL) == {0, 3}
    assert resolve_boundaries(TandemConfig(boundary_token_ids=()), TABLE, SPECIAL) == frozenset()
    for wrong in (13, -1):
        with pytest.raises(ConfigError, match=rf"tandem\.boundary_token_ids=\[{wrong}\]: expected ids in \[0, 13\)"):
            resolve_boundaries(TandemConfig(boundary_token_ids=(0, wrong)), TABLE, SPECIAL)


@pytest.mark.parametrize("strategy", ["word", "sentence"])
def test_a_vocabulary_without_any_boundary_is_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match=rf"tandem\.selection_strategy='{strategy}'.*Remedy: set tandem\.boundary"):
        resolve_boundaries(TandemConfig(selection_strategy=strategy), [b"a", b"b", None], ())
    alone = TandemConfig(selection_strategy=strategy, enabled=False)
    assert resolve_boundaries(alone, [b"a", b"b", None], ()) == frozenset(), "no matter to a senior alone"


def nth_mark_end(text: str, mark: str, n: int) -> int | None:
    """Where the n-th mark ends, marks counted from the left without overlap."""
    at = 0
    for _ in range(n):
        at = text.find(mark, at)
        if at < 0:
            return None
        at += len(mark)
    return at


@pytest.mark.parametrize(("strategy", "mark"), [("word", " "), ("sentence", "\n\n")])
@given(text=st.text(alphabet=" a\n\r\té\ufffd", max_size=30), runs=st.integers(1, 6))
def test_the_pattern_is_found_just_when_so_many_runs_have_ended(strategy: str, mark: str, text: str, runs: int) -> None:
    pattern = stop_regex(strategy, runs)  # type: ignore[arg-type]
    assert pattern is not None
    first = next((n for n in range(len(text) + 1) if re.search(pattern, text[:n])), None)
    assert first == nth_mark_end(text, mark, runs)


@given(
    text=st.text(alphabet=" a\n.?。…-]^é\ufffd", max_size=30),
    runs=st.integers(1, 6),
    classes=st.sets(st.sampled_from(["space", "newline", "punctuation"]), min_size=1).map(tuple),
)
def test_the_pattern_of_classes_counts_their_marks(text: str, runs: int, classes: tuple[BoundaryClass, ...]) -> None:
    marks = "".join({"space": " ", "newline": "\n", "punctuation": PUNCTUATION}[c] for c in classes)
    pattern = stop_regex("word", runs, classes=classes)
    assert pattern is not None
    assert bool(re.search(pattern, text)) == (sum(c in marks for c in text) >= runs)


EVERY = ("space", "newline", "punctuation")


@pytest.mark.parametrize(
    ("strategy", "classes", "word"),
    [("word", ("space",), " a"), ("word", EVERY, ".a"), ("word", EVERY, "\na"), ("sentence", ("space",), "\n\nab")],
)
def test_a_text_one_boundary_short_is_refused_in_linear_time(
    strategy: str, classes: tuple[BoundaryClass, ...], word: str
) -> None:
    """200,000 boundaries: a pattern that is tried again at each of them would take 2e10 steps, hours instead of moments."""
    pattern = stop_regex(strategy, 200_000, classes=classes)
    code = f"import re; assert not re.search({pattern!r}, {word!r} * 199_999)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# ---- the record that a run keeps ----

TOKENS = TokenBytes(tuple(TABLE), frozenset(SPECIAL), frozenset(SPECIAL))


@pytest.mark.parametrize(
    ("config", "source", "classes", "ids"),
    [
        (TandemConfig(), "bytes", ("space",), {1, 2}),
        (TandemConfig(boundary_classes=("newline", "space")), "bytes", ("newline", "space"), {1, 2, 3, 4, 5, 6, 7}),
        (TandemConfig(selection_strategy="sentence"), "bytes", (), {4, 5}),
        (TandemConfig(boundary_token_ids=(0, 3, 11)), "config", (), {0, 3, 11}),
        (TandemConfig(selection_strategy="chunk"), "none", (), set()),
    ],
)
def test_the_record_says_what_was_resolved_and_how(
    config: TandemConfig, source: str, classes: tuple[str, ...], ids: set[int]
) -> None:
    record = BoundaryRecord.resolve(config, TOKENS)
    assert (record.source, record.classes, record.ids) == (source, classes, ids)
    assert (record.strategy, record.vocab_size) == (config.selection_strategy, 13)
    assert record.fingerprint == TOKENS.fingerprint
    assert record.rule == HandoffRule.from_config(config, ids)
    text = record.to_json()
    assert BoundaryRecord.from_json(text) == record
    assert json.loads(text)["count"] == len(ids)


@given(ids=st.frozensets(st.integers(0, 40)))
def test_any_record_comes_back(ids: frozenset[int]) -> None:
    record = BoundaryRecord("word", (), "config", 41, "0" * 64, ids, 0.5, 32, False)
    assert BoundaryRecord.from_json(record.to_json()) == record


def test_stretches_are_written_short() -> None:
    record = BoundaryRecord("word", (), "config", 99, "0" * 64, frozenset({1, 2, 5, 6, 7, 8, 30}), 0.5, 32, False)
    assert json.loads(record.to_json())["ids"] == [1, 2, [5, 8], 30]


@pytest.mark.parametrize(
    "change",
    [
        {"ids": [1, 2, 3]}, {"ids": [2, 1]}, {"ids": [[1, 2, 3]], "count": 3}, {"ids": [1, 99]}, {"ids": ["1", 2]},
        {"ids": 7}, {"ids": [[1]]}, {"count": 3}, {"strategy": "words"}, {"classes": ["tab"]}, {"source": "guess"},
        {"fingerprint": "ab"}, {"vocab_size": 2}, {"vocab_size": None}, {"cap": 0}, {"cap": True}, {"prob_senior": 1.5},
        {"prob_senior": None}, {"alternates": 1},
    ],
)  # fmt: skip
def test_an_altered_record_is_refused(change: dict[str, object]) -> None:
    tree = json.loads(BoundaryRecord.resolve(TandemConfig(), TOKENS).to_json())
    with pytest.raises(DataError, match=r"run/boundaries\.json"):
        BoundaryRecord.from_json(json.dumps(tree | change), "run/boundaries.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}"])
def test_no_record_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"run/boundaries\.json"):
        BoundaryRecord.from_json(text, "run/boundaries.json")


def test_a_record_of_an_earlier_version_has_a_remedy_of_its_own() -> None:
    tree = json.loads(BoundaryRecord.resolve(TandemConfig(), TOKENS).to_json())
    del tree["cap"]
    with pytest.raises(DataError) as caught:
        BoundaryRecord.from_json(json.dumps(tree))
    assert caught.value.remedy == "go on with the version that wrote it, or start a new run"
