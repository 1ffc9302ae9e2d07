"""Tokenizers from folders and from single files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vocabularies import FETCH, cache_dir

from slime_tandem.errors import ModelError
from slime_tandem.models.text_tokenizer import load_response, load_text_tokenizer, sample_ids

TEXT = "Count 12345 \u4f60\u597d \U0001f680\n\n  end"


def test_a_folder_and_its_tokenizer_file_are_the_same(trio: Any, tmp_path: Path) -> None:
    folder = load_text_tokenizer(str(trio.senior), tmp_path)
    file = load_text_tokenizer(str(trio.senior / "tokenizer.json"), tmp_path)
    assert folder.tokens.table == file.tokens.table
    assert folder.encode(TEXT) == file.encode(TEXT)
    assert folder.tokens.join(folder.encode(TEXT)) == TEXT.encode()
    assert sample_ids(folder, "a")[-1] == folder.end_of_turn
    assert folder.show(folder.end_of_turn) == folder.tokens.names[folder.end_of_turn]


@pytest.mark.parametrize("name", ["tekken.json", "mistral-v3.model", "gemma3.model", "llama3.tokenizer.json"])
def test_files_of_real_vocabularies(name: str, tmp_path: Path) -> None:
    path = cache_dir() / name
    assert path.is_file(), f"fetch the vocabularies once: {FETCH}"
    tokenizer = load_text_tokenizer(str(path), tmp_path)
    assert tokenizer.tokens.join(tokenizer.encode(TEXT)) == TEXT.encode()
    assert tokenizer.end_of_turn in tokenizer.tokens.eos_ids
    if name.startswith("llama3"):
        assert tokenizer.tokens.names[tokenizer.end_of_turn] == "<|eot_id|>", "what ends a turn, not a document"


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ModelError, match=r"expected a tokenizer\.json"):
        load_text_tokenizer(str(tmp_path / "x.json"), tmp_path)
    (tmp_path / "qwen.tiktoken").write_text("")
    with pytest.raises(ModelError, match="a rank file does not say how text is split"):
        load_text_tokenizer(str(tmp_path / "qwen.tiktoken"), tmp_path)
    with pytest.raises(ModelError):
        load_text_tokenizer(str(tmp_path / "nothing"), tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "x.model").write_bytes(b"")
    with pytest.raises(ModelError, match="pip install sentencepiece"):
        load_text_tokenizer(str(tmp_path / "x.model"), tmp_path)


@pytest.mark.parametrize("line", ["", "[1, true]", "{}", '["a"]', "[1.5]"])
def test_a_response_is_a_list_of_ids(line: str) -> None:
    assert load_response("[1, 2]", "FILE") == [1, 2]
    with pytest.raises(ModelError, match=r"FILE=.*expected a JSON list of token ids"):
        load_response(line, "FILE")
