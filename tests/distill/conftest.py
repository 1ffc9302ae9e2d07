"""Small real tokenizers, trained in the test run: two byte-level BPEs that cut text differently, one as Gemma's is made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ENGLISH = ["The quick brown fox jumps over the lazy dog, and 12 + 345 = 357.\n\nThen the fox sat down.  "] * 30
MIXED = ["Der Fuchs springt schnell; \u4f60\u597d\u4e16\u754c \U0001f680 the answer is 17 and 34, so it is.\n"] * 30


def byte_level(corpus: list[str], vocab_size: int, eos: str, *, digits: bool = False) -> PreTrainedTokenizerFast:
    """As Qwen's or Llama-3's: the whole byte alphabet, special and plain added tokens."""
    tok = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tok.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(corpus, trainer)
    tok.add_tokens([AddedToken("<think>", special=False), AddedToken("n\u00e9e", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=eos, pad_token="<|pad|>")


def sentence_piece(*, prepend: str | None = None) -> PreTrainedTokenizerFast:
    """BPE with byte fallback as `tokenizers` writes it.

    `prepend` None: Gemma's way, no leading space; "normalizer": Llama-2's; "metaspace": newer Llama's and Mistral's.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.train_from_iterator(ENGLISH, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].get)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(m) for m in model["merges"]]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend == "normalizer":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    elif prepend == "metaspace":
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tok.normalizer = replace
    tok.decoder = decoders.Sequence(steps)
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def english() -> PreTrainedTokenizerFast:
    return byte_level(ENGLISH, 380, "<|im_end|>")


@pytest.fixture(scope="session")
def mixed() -> PreTrainedTokenizerFast:
    return byte_level(MIXED, 420, "<\uff5cend\u2581of\u2581sentence\uff5c>", digits=True)


@pytest.fixture(scope="session")
def gemma() -> PreTrainedTokenizerFast:
    return sentence_piece()


@pytest.fixture(scope="session")
def make_sentence_piece() -> Any:
    return sentence_piece


@pytest.fixture(scope="session")
def make_byte_level() -> Any:
    return byte_level
