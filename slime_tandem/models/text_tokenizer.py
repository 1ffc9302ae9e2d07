"""Any tokenizer as bytes and an encoder, from a folder or from one file: what `slime-tandem align` needs, and no more.

  folder           Hugging Face (tokenizer.json and what belongs to it), or builtin:<role>
  *.json           a bare tokenizer.json, or Mistral's tekken.json
  *.model          SentencePiece (needs the package `sentencepiece`)

A tiktoken rank file alone says neither how text is split nor which special tokens there are; convert it to a tokenizer.json.
Ends of turn come from the folder's generation_config.json; a bare file is asked for the names it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tandem.errors import ModelError
from slime_tandem.files import parse_json
from slime_tandem.models.builtin import resolve_model
from slime_tandem.models.chat import Chat
from slime_tandem.models.hf import load_tokenizer, read_json_object
from slime_tandem.models.tokenizer import ModelTokenizer, eos_ids_of
from slime_tandem.tokens.token_bytes import (
    ROLE_NAMES,
    TokenBytes,
    build_token_bytes,
    check_encoding,
    encode_exact,
    prove,
)
from slime_tandem.tokens.vocabularies import parse_sentencepiece, parse_tekken
from slime_tandem.turns import Markup


@dataclass(frozen=True)
class TextTokenizer:
    """`tokens` and `encode` (plain text, no special token added or recognised); `end_of_turn` closes a turn, -1: none known.

    `chat`: the chat template, None: there is none, and ends of turn go by the names that tokens have.
    """

    name: str
    tokens: TokenBytes
    encode: Callable[[str], list[int]]
    end_of_turn: int
    chat: Chat | None = None

    @property
    def markup(self) -> Markup:
        """What is known of its turns."""
        return Markup(end=self.end_of_turn) if self.chat is None else self.chat.markup

    def show(self, token: int) -> str:
        """One token for the eye: its text, or the name of a special token."""
        data = self.tokens.of(token)
        return data.decode("utf-8", "replace") if data is not None else self.tokens.names.get(token, f"<{token}>")


def load_text_tokenizer(name: str, cache_dir: Path, *, trust_remote_code: bool = False) -> TextTokenizer:
    """Load by the kinds in the module's head; raises ModelError for anything else, and for lossy tokenizers."""
    path = Path(name)
    if path.suffix == ".model" and path.is_file():
        return _sentencepiece(path)
    if path.suffix == ".json" and path.is_file():
        tree = read_json_object(path)
        if "config" in tree and "vocab" in tree:
            return _tekken(path, tree)
        return _bare_file(path)
    if path.suffix == ".tiktoken":
        raise ModelError(
            "tokenizer",
            name,
            "a tokenizer.json, tekken.json, *.model or folder",
            "a rank file does not say how text is split; convert it (transformers.convert_slow_tokenizer)",
        )
    folder = resolve_model(name, cache_dir)
    hf = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if hf.chat_template:
        t = ModelTokenizer.load(folder, trust_remote_code=trust_remote_code)
        return TextTokenizer(str(folder), t.tokens, t.encode, t.end_of_turn, t.chat())
    eos = eos_ids_of(folder, hf)
    return _from_hf(str(folder), hf, eos, None)


def _from_hf(name: str, hf: Any, eos: frozenset[int], first: int | None) -> TextTokenizer:
    tokens = build_token_bytes(hf, eos)

    def encode(text: str) -> list[int]:
        return encode_exact(tokens, lambda t: hf.encode(t, add_special_tokens=False, split_special_tokens=True), text)

    return TextTokenizer(name, tokens, encode, first if first in eos and first is not None else min(eos, default=-1))


def _bare_file(path: Path) -> TextTokenizer:
    from transformers import PreTrainedTokenizerFast

    try:
        hf: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions for files it cannot read
        why = f"a tokenizer.json ({' '.join(str(error).split())[:200]})"
        raise ModelError("tokenizer", str(path), why, "name a tokenizer.json or its folder") from None
    added = {i: str(t.content) for i, t in hf.added_tokens_decoder.items()}
    turn = {i for i, name in added.items() if name in ROLE_NAMES["turn_end"] - {"[/INST]"}}
    ends = turn | {i for i, name in added.items() if name in ROLE_NAMES["eos"]}
    return _from_hf(str(path), hf, frozenset(ends), min(turn, default=None))


def _tekken(path: Path, tree: dict[str, Any]) -> TextTokenizer:
    tiktoken = _library("tiktoken", path)
    tokens = parse_tekken(path.read_bytes())
    offset = int(tree["config"]["default_num_special_tokens"])
    ranks = {piece: i - offset for i, piece in enumerate(tokens.table) if piece is not None}
    encoding = tiktoken.Encoding(path.name, pat_str=tree["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        return [i + offset for i in encoding.encode_ordinary(text)]

    return TextTokenizer(str(path), check_encoding(tokens, encode, path.name), encode, min(tokens.eos_ids, default=-1))


def _sentencepiece(path: Path) -> TextTokenizer:
    library = _library("sentencepiece", path)
    data = path.read_bytes()
    tokens = parse_sentencepiece(data)
    processor = library.SentencePieceProcessor(model_proto=data)
    tokens = prove(check_encoding(tokens, processor.encode, path.name), processor.decode, path.name)

    def encode(text: str) -> list[int]:
        return encode_exact(tokens, processor.encode, text)

    return TextTokenizer(str(path), tokens, encode, min(tokens.eos_ids, default=-1))


def _library(name: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModelError(
            "tokenizer", str(path), f"the package {name}, which reads this file", f"pip install {name}"
        ) from None


def sample_ids(tokenizer: TextTokenizer, text: str) -> Sequence[int]:
    """`text` as the tokenizer's own model would write it as one finished turn."""
    if tokenizer.chat is not None:
        return tokenizer.chat.finished(text)
    ids = list(tokenizer.encode(text))
    return ids if tokenizer.end_of_turn < 0 else [*ids, tokenizer.end_of_turn]


def load_response(line: str, where: str) -> list[int]:
    """A JSON list of ids, for responses that no encoder would write; raises ModelError otherwise."""
    try:
        ids = parse_json(line)
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError("not a list of whole numbers")
    except ValueError as error:
        raise ModelError(where, line[:60], f"a JSON list of token ids ({error})", "e.g. [1, 2, 3]") from None
    return ids
