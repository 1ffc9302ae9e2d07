"""Where runs end: the tables on decoded bytes, and the pattern that makes a server stop there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_tandem.config import TandemConfig
from slime_tandem.distill.token_bytes import build_token_bytes
from slime_tandem.errors import ConfigError
from slime_tandem.rollout.boundaries import boundary_ids, resolve_boundaries, stop_regex

TABLE = [b"a", b" b", b" ", b"\n", b"\n\n", b".\n\n", b"\n\nx", b"\n\n ", b"c d", b"", None, b" \n\n", b"\t"]
SPECIAL = {11}


def test_word_boundaries_begin_with_a_space() -> None:
    assert boundary_ids("word", TABLE, SPECIAL) == {1, 2}


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


@pytest.mark.parametrize(("strategy", "word"), [("word", " a"), ("sentence", "\n\nab")])
def test_a_long_chain_is_refused_without_backtracking(strategy: str, word: str) -> None:
    """One boundary short of a match: a pattern with several ways to match would try 2^299 of them."""
    code = f"import re; assert not re.search({stop_regex(strategy, 300)!r}, {word * 299!r})"  # type: ignore[arg-type]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
