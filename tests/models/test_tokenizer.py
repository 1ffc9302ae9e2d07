"""Checks of a tokenizer against its model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_tandem.errors import ModelError
from slime_tandem.models.template_probe import is_bounded
from slime_tandem.models.tokenizer import ModelTokenizer, require_rows
from slime_tandem.tasks.pool import Limits
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import Message


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


def test_a_token_that_transformers_adds_is_named_with_its_remedy(tmp_path: Path) -> None:
    """A qwen2 with special tokens of its own, saved by transformers and loaded by it: the remedy is followed to the letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<|im_start|>": 0, "<|im_end|>": 1}
    vocabulary |= {letter: i + 2 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made.save_pretrained(tmp_path)
    rows = len(vocabulary)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": rows, "eos_token_id": 1}))
    with pytest.raises(
        ModelError, match=r"\(<\|endoftext\|>\).*Qwen2Tokenizer adds it.*\"unk_token\" in tokenizer_config"
    ):
        require_rows(ModelTokenizer.load(tmp_path))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unk_token": "<|im_end|>"}))
    require_rows(ModelTokenizer.load(tmp_path))


def test_a_folder_with_nothing_but_a_tokenizer_has_no_rows_to_compare(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, 1)
    (tmp_path / "config.json").unlink()
    require_rows(given)


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
BOMBS = {
    "product": "{{ 'x' * 3000000000 }}",
    "for some roles": PLAIN + "{% if messages[0].role == 'system' %}{{ 'x' * 3000000000 }}{% endif %}",
    "of the prompt": "{{ messages[0].content * 1000000 }}",
    "width": "{{ '%09999999d' | format(1) }}",
    "doubled": "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "for a longer chat": PLAIN + "{% if messages | length > 3 %}{{ 'x' * 3000000000 }}{% endif %}",
    "for tools": PLAIN + "{% if tools %}{{ 'x' * 3000000000 }}{% endif %}",
    "for other words": PLAIN + "{% if messages[0].content != 'probe' %}{{ 'x' * 3000000000 }}{% endif %}",
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_not_end_is_refused(trio: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import slime_tandem.models.tokenizer as module

    hf = module.load_tokenizer(trio.senior)
    hf.chat_template = BOMBS[name]
    monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: hf)
    if name == "loops":  # it would take its ten seconds
        monkeypatch.setattr("slime_tandem.models.template_probe.LIMITS", Limits(0.5, 2048, 1, guarded=False))
    with pytest.raises(ModelError, match="a template that renders a few short turns within"):
        ModelTokenizer.load(trio.senior)


def test_templates_that_refuse_roles_or_mark_what_is_generated_are_bounded() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    marks = (
        "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}{{ bos_token }}"
    )
    for template in (PLAIN, refuses, marks, "{{ 1 / 0 }}", "{% broken"):
        assert is_bounded(template, (("bos_token", "<s>"),)), template


def test_what_a_message_says_is_no_template(trio: Any) -> None:
    student = ModelTokenizer.load(trio.senior)
    text = BOMBS["product"]
    assert text in student.decode(student.render([Message("user", text)]))
