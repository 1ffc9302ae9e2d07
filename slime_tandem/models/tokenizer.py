"""What the run needs of a model folder's tokenizer: render a chat, encode, decode, and the bytes of every id.

How tokens of two vocabularies correspond is `distill`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tandem.errors import ModelError, TokenizerMismatchError
from slime_tandem.models.hf import language_config, load_tokenizer, read_json_object, read_model_config
from slime_tandem.tokens.speller import Speller
from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes, encode_exact
from slime_tandem.types import Message

_MARK = "\u2063turn\u2063"
"""Stands for an assistant's turn in `bridge`; no template strips or writes it."""

_OURS = frozenset(
    {
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "padding",
        "truncation",
    }
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Parameters of `apply_chat_template` that are no variables of a template."""


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer with its byte table; `tokens.eos_ids` come from the model folder.

    Load with `load`. Ids are the model's own; nothing here ever re-tokenises a sampled response.
    """

    folder: Path
    tokens: TokenBytes
    hf: Any

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> ModelTokenizer:
        """Raises ModelError for a folder without a usable tokenizer, chat template or end-of-turn token."""
        hf = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        if not hf.chat_template:
            raise ModelError("model folder", str(folder), "a chat template in its tokenizer", "add chat_template.jinja")
        tokenizer = cls(folder, build_token_bytes(hf, eos_ids_of(folder, hf)), hf)
        tokenizer.render([Message("user", "probe")])  # a broken template is refused now, not in the middle of a run
        return tokenizer

    def render(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Prompt ids of the chat template, with the generation prompt; `template_kwargs` are variables of the template.

        Raises ModelError if the template is broken or refuses these messages (some know no system role).
        """
        return list(self.hf.encode(self._template(messages, template_kwargs), add_special_tokens=False))

    def bridge(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """What the chat template puts from the end of an assistant turn over `messages` to the begin of the next one.

        Rendered behind a made-up turn, so that a template that rewrites earlier turns (drops their thinking) changes
        nothing. Raises ModelError as `render`, and for a template that does not write an assistant's turn out.
        """
        around = [Message("user", "probe"), Message("assistant", _MARK), *messages]
        text = self._template(around, template_kwargs)
        if text.count(_MARK) != 1:
            raise ModelError(
                "chat template",
                str(self.folder),
                "an assistant's turn written out once",
                "use another template, or insert text without its messages",
            )
        return list(self.hf.encode(text.partition(_MARK)[2], add_special_tokens=False))

    def _template(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None) -> str:
        turns = [m.as_dict() for m in messages]
        taken = sorted(_OURS & (template_kwargs or {}).keys())
        if taken:
            raise ModelError(
                "template_kwargs", taken, "variables of the chat template", "remove these, they are set by the caller"
            )
        try:
            return str(
                self.hf.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True, **(template_kwargs or {})
                )
            )
        except Exception as error:  # a template is a program: it raises what it likes
            why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            roles = ", ".join(m.role for m in messages)
            raise ModelError(
                "chat template",
                str(self.folder),
                f"a template that renders messages of these roles: {roles} ({why})",
                "mend chat_template.jinja or tokenizer_config.json, or leave these roles out of the prompts",
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no special token or leading space is added, and no special token is recognised inside."""
        return encode_exact(
            self.tokens, lambda t: self.hf.encode(t, add_special_tokens=False, split_special_tokens=True), text
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 show as U+FFFD, special tokens add nothing."""
        return self.tokens.join(ids).decode("utf-8", "replace")

    def show(self, token: int) -> str:
        """One token for the eye: its text, or the name of a special token."""
        data = self.tokens.of(token)
        return data.decode("utf-8", "replace") if data is not None else str(self.hf.convert_ids_to_tokens(token))

    def speller(self) -> Speller:
        """What `rollout.junior_text` needs to write bytes in this vocabulary."""
        special = self.tokens.special - self.tokens.eos_ids
        names = {str(self.hf.convert_ids_to_tokens(i)): i for i in special if i < len(self.tokens.table)}
        return Speller(self.tokens, self.encode, self.end_of_turn, names)

    @property
    def end_of_turn(self) -> int:
        """The end-of-turn id that the chat template itself writes, where there are several."""
        eos = self.hf.eos_token_id
        return eos if eos in self.tokens.eos_ids else min(self.tokens.eos_ids)


def eos_ids_of(folder: Path, hf: Any) -> frozenset[int]:
    """Ids that end a turn, from generation_config.json, else the tokenizer; raises ModelError if there is none."""
    path = folder / "generation_config.json"
    eos = read_json_object(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = hf.eos_token_id
    if eos is None:
        raise ModelError(
            "model folder", str(folder), "an end-of-turn token", "set eos_token_id in generation_config.json"
        )
    ids = eos if isinstance(eos, list) else [eos]
    size = len(hf)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < size:
            raise ModelError(
                "eos_token_id", i, f"ids of {folder}'s tokenizer, 0 to {size - 1}", "mend generation_config.json"
            )
    return frozenset(ids)


def require_rows(tokenizer: ModelTokenizer, *, special: bool = True) -> None:
    """Raise ModelError for a tokenizer with an id that the model of its folder (`vocab_size` in config.json) has no row for.

    `special=False`: special tokens other than ends of turn do not count. Some published tokenizers have an image or padding
    token behind the last row, which no text becomes; a model that is only asked to score text never meets it.
    """
    tokens, folder = tokenizer.tokens, tokenizer.folder
    rows = language_config(read_model_config(folder)).get("vocab_size") if (folder / "config.json").exists() else None
    if not isinstance(rows, int):  # a folder with nothing but a tokenizer, or a config of another form
        return
    spelt = {i for i, data in enumerate(tokens.table) if data is not None}
    over = sorted(i for i in spelt | tokens.eos_ids | (tokens.special if special else frozenset()) if i >= rows)
    if over:
        raise ModelError(
            f"tokenizer of {folder}",
            f"{len(over)} ids beyond the model, the first {over[0]} ({tokenizer.show(over[0])})",
            f"ids below vocab_size={rows}, the rows of the model's vocabulary",
            "use the tokenizer that belongs to this model, or resize the model's embeddings to it and save both",
        )


def require_same_tokenizer(senior: ModelTokenizer, junior: ModelTokenizer) -> None:
    """Raise TokenizerMismatchError, naming the first difference, unless both models share every id and end of turn."""
    a, b = senior.tokens, junior.tokens
    difference: str | None = None
    if len(a.table) != len(b.table):
        difference = f"{len(a.table)} against {len(b.table)} ids"
    elif a.table != b.table:
        i = next(i for i, (x, y) in enumerate(zip(a.table, b.table, strict=True)) if x != y)
        difference = f"id {i} is {senior.show(i)!r} against {junior.show(i)!r}"
    elif a.eos_ids != b.eos_ids:
        difference = f"end-of-turn ids {sorted(a.eos_ids)} against {sorted(b.eos_ids)}"
    elif a.special != b.special:
        difference = f"special ids differ: {sorted(a.special ^ b.special)[:5]}"
    if difference:
        raise TokenizerMismatchError(
            "models.junior",
            str(junior.folder),
            f"the senior's tokenizer ({senior.folder}); {difference}",
            "use a junior of the senior's model family",
        )
