"""What the run needs of a model folder's tokenizer: render a chat, encode, decode, and the bytes of every id.

How tokens of two vocabularies correspond is `distill`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tandem.config import TextMarkers
from slime_tandem.errors import ModelError, TokenizerMismatchError
from slime_tandem.models.chat import Chat, Template, end_ids
from slime_tandem.models.hf import language_config, load_tokenizer, read_json_object, read_model_config
from slime_tandem.models.template_probe import LIMITS, MOST_CHARACTERS, is_bounded
from slime_tandem.tokens.speller import Speller
from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes
from slime_tandem.types import Message


def _check_bounded(folder: Path, hf: Any) -> None:
    """Raise ModelError for a chat template that does not come to an end, before it is rendered in this process."""
    templates = hf.chat_template.values() if isinstance(hf.chat_template, Mapping) else [hf.chat_template]
    variables = tuple(sorted((k, v) for k, v in hf.special_tokens_map.items() if isinstance(v, str)))
    if not all(is_bounded(str(template), variables) for template in templates):
        raise ModelError(
            "chat template",
            str(folder),
            f"a template that renders a few short turns within {LIMITS.timeout_s:g} s, {LIMITS.memory_mib} MiB and "
            f"{MOST_CHARACTERS} characters",
            "mend chat_template.jinja or tokenizer_config.json",
        )


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer with its byte table; `tokens.eos_ids` come from the model folder.

    `template_kwargs`: variables of the chat template, where `chat` is told no others. Load with `load`. Ids are the model's
    own; nothing here ever re-tokenises a sampled response.
    """

    folder: Path
    tokens: TokenBytes
    hf: Any
    text_markers: TextMarkers = "escape"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, compare=False)
    _chats: dict[str, Chat] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        trust_remote_code: bool = False,
        text_markers: TextMarkers = "escape",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ModelTokenizer:
        """Raises ModelError for a folder without a usable tokenizer, chat template or end-of-turn token."""
        hf = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        if not hf.chat_template:
            raise ModelError("model folder", str(folder), "a chat template in its tokenizer", "add chat_template.jinja")
        _check_bounded(folder, hf)
        # A broken template is refused now, not in the middle of a run.
        kwargs = dict(template_kwargs or {})
        ends = end_ids(Template(hf, str(folder), kwargs))
        tokenizer = cls(folder, build_token_bytes(hf, eos_ids_of(folder, hf, ends)), hf, text_markers, kwargs)
        _ = tokenizer.end_of_turn
        return tokenizer

    def chat(self, template_kwargs: Mapping[str, Any] | None = None) -> Chat:
        """The chat template with these variables set (None: the tokenizer's own); probed once.

        Raises ModelError as `Template` and `turns.probe`.
        """
        template_kwargs = self.template_kwargs if template_kwargs is None else template_kwargs
        key = json.dumps(template_kwargs, sort_keys=True, default=repr)
        if key not in self._chats:
            template = Template(self.hf, str(self.folder), template_kwargs)
            self._chats[key] = Chat(template, self.tokens, self.text_markers)
        return self._chats[key]

    def render(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Prompt ids of the chat template, with the generation prompt; `template_kwargs` are variables of the template.

        Raises ModelError as `Chat.render`.
        """
        return self.chat(template_kwargs).render(messages, tools)

    def bridge(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """What the chat template puts from the end of an assistant turn over `messages` to the begin of the next one.

        Raises ModelError as `Chat.bridge`.
        """
        return self.chat(template_kwargs).bridge(messages)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no special token or leading space is added, and no special token is recognised inside."""
        return self.chat().encode(text)

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
    def unlisted_ends(self) -> frozenset[int]:
        """Ids that the chat template ends turns with and the model folder does not name: other servers write on there."""
        return end_ids(self.chat().template) - _named_ends(self.folder, self.hf)

    @property
    def end_of_turn(self) -> int:
        """The id that closes a turn by the chat template; raises ModelError as `Chat.end_of_turn`."""
        return self.chat().end_of_turn


def _named_ends(folder: Path, hf: Any) -> frozenset[int]:
    try:
        return eos_ids_of(folder, hf)
    except ModelError:
        return frozenset()


def eos_ids_of(folder: Path, hf: Any, written: frozenset[int] = frozenset()) -> frozenset[int]:
    """Ids that end a turn: those `written` by the chat template, and those that generation_config.json names.

    The tokenizer's `eos_token` only where there is neither. Raises ModelError if there is none.
    """
    path = folder / "generation_config.json"
    eos = read_json_object(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = sorted(written) or hf.eos_token_id
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
    return frozenset(ids) | written


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
            _added_by_transformers(tokenizer, over)
            or "use the tokenizer that belongs to this model, or resize the model's embeddings to it and save both",
        )


def _added_by_transformers(tokenizer: ModelTokenizer, ids: Sequence[int]) -> str | None:
    """The remedy for special tokens that no file of the folder has, and the class of this model type adds; None for others.

    transformers 5 gives a tokenizer the class of its model, whatever class it was saved by, and that class its own defaults: a
    qwen2 with other special tokens gets `<|endoftext|>` for the unknown token that it does not name.
    """
    try:
        kept = (tokenizer.folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    added = [tokenizer.hf.convert_ids_to_tokens(i) for i in ids]
    roles = [role for role, token in tokenizer.hf.special_tokens_map.items() if token in added]
    if not roles or any(json.dumps(token, ensure_ascii=False) in kept for token in added):
        return None
    names = " and ".join(f'"{role}"' for role in roles)
    return (
        f"no file there has it: transformers' {type(tokenizer.hf).__name__} adds it. Name a token of yours for {names} in "
        "tokenizer_config.json, e.g. the end of turn"
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
            "use a junior of the senior's model family, or set tandem.junior_tokenizer=any (engine.mode=two_servers)",
        )
