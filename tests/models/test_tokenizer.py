"""Checks of a tokenizer against its model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_tandem.errors import ModelError
from slime_tandem.models.tokenizer import ModelTokenizer, require_rows
from slime_tandem.tokens.token_bytes import TokenBytes


def tokenizer(folder: Path, rows: object, eos: int = 0) -> ModelTokenizer:
    """Ids 0 (special), 1 and 2 (text), 3 (special), of a model with `rows` rows."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows} if rows is not None else {}))
    tokens = TokenBytes((None, b"a", b"b", None), special=frozenset({0, 3}), eos_ids=frozenset({eos}))
    return ModelTokenizer(folder, tokens, SimpleNamespace(convert_ids_to_tokens=lambda i: f"<{i}>"))


@pytest.mark.parametrize(
    ("rows", "eos", "special", "first"),
    [
        (4, 0, True, None),
        (5, 0, True, None),  # padded rows
        (3, 0, True, "1 ids beyond the model, the first 3 (<3>)"),
        (3, 0, False, None),  # an image token that no text becomes
        (3, 3, False, "the first 3 (<3>)"),  # the end of turn
        (2, 0, False, "1 ids beyond the model, the first 2 (b)"),
        (2, 0, True, "2 ids beyond the model, the first 2 (b)"),
        (None, 0, True, None),  # a config that does not tell
    ],
)
def test_every_id_needs_a_row(tmp_path: Path, rows: int | None, eos: int, special: bool, first: str | None) -> None:
    given = tokenizer(tmp_path, rows, eos)
    if first is None:
        require_rows(given, special=special)
        return
    with pytest.raises(ModelError) as caught:
        require_rows(given, special=special)
    assert first in str(caught.value)
    assert f"expected ids below vocab_size={rows}" in str(caught.value)


def test_a_folder_with_nothing_but_a_tokenizer_has_no_rows_to_compare(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, 1)
    (tmp_path / "config.json").unlink()
    require_rows(given)
