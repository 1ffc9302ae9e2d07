"""The tokenizers of tests/distill."""

from ..distill.conftest import english, gemma, make_byte_level, make_sentence_piece, mixed

__all__ = ["english", "gemma", "make_byte_level", "make_sentence_piece", "mixed"]
