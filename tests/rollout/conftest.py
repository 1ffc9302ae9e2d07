"""Text that tokenizers find hard, and real vocabularies (`scripts/fetch_vocabularies.py` gets them)."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import strategies as st
from vocabularies import FILES, Vocabulary, load

FRAGMENTS = [
    "the quick brown fox", " jumps, over the lazy dog.", "\n", "\n\n", ".\n\n", " ", "    ", "\t", "\r\n", "one two  three   ",
    "你好,世界", "今天天气很好。我们去公园吧!", "こんにちは、世界", "안녕하세요 세계", "。", "，", "…", "?!",
    "שלום עולם", "مرحبا بالعالم، كيف حالك؟", "привет мир", "नमस्ते दुनिया", "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪🇯🇵", "🚀🚀", "cafe\u0301", "\u00e9\u00e8", "\u200f\u202e", "\ufeff", "\ufffd", "\x00", "𝔘𝔫𝔦",
    "def f(x):\n    if x:\n        return x + 1\n", "for (int i = 0; i < n; ++i) { a[i] *= 2; }\n\n",
    "<div class=\"a\">\n\t</div>",
    "1234567890", "3.14159", "12 + 34 = 46", "0x7f", "２０２６", "<|im_end|>", "<think>", "</s>", "<0x0A>",
]  # fmt: skip
# U+2581 is how SentencePiece writes a space: text that has one cannot come back from it.
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(LETTERS, max_size=6), max_size=10).map("".join)
NAMES = sorted(FILES)


@pytest.fixture(scope="session", params=NAMES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    """Each real vocabulary in turn."""
    return load(request.param)


@pytest.fixture(scope="session")
def hard_texts() -> st.SearchStrategy[str]:
    """Text of emoji, CJK, right-to-left script, code, digits, blank lines and odd characters."""
    return texts


@pytest.fixture(scope="session")
def hard_ids() -> object:
    """`hard_ids(vocabulary)`: ids of a model gone astray: encoded text with ids taken out, put in and special ones among them.

    Cutting ids out of multi-byte characters gives broken UTF-8; random ids give segmentations no encoder would.
    """

    @cache
    def ids_of(name: str) -> st.SearchStrategy[list[int]]:
        vocabulary = load(name)
        V = len(vocabulary.tokens.table)
        single = [i for i, data in enumerate(vocabulary.tokens.table) if data is not None and len(data) == 1]
        some = st.integers(0, V - 1) | st.sampled_from(single) | st.sampled_from(sorted(vocabulary.tokens.special))
        astray = st.lists(some, max_size=12)
        return st.builds(
            lambda text, keep, more: [t for t, k in zip(vocabulary.encode(text), keep, strict=False) if k] + more,
            texts,
            st.lists(st.booleans(), min_size=1, max_size=60),
            astray,
        )

    return lambda vocabulary: ids_of(vocabulary.name)
