"""Worked sums of two whole numbers: the texts that the built-in models are pre-trained on.

` 7+8 =15 ; 4+3+1 =8 ; <answer>85</answer>` solves 47 + 38: a step for each column from the right, then the answer. Words
carry their leading space, so a handoff at a word start falls just before a column's digits, just before its sum, and after
the mark that closes a step.

Worksheets also hold slips, a wrong digit or sum; what follows builds on it, as in human work. The same steps can be written
in another notation, ` 7&8 :15 | 4&3&1 :8 | <answer>85</answer>`: two styles of one piece of work. It knows no tokenizer and
no model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from random import Random

OTHER_NOTATION = str.maketrans("+=;", "&:|")
"""The signs of the common notation, and those of the other; the answer's tags are the same in both."""
_SPECIAL = re.compile(r"<\|\w+\|>")
"""A special token by its name, as tokens are shown: it has two of the other notation's signs, and is no text."""
Piece = tuple[str, bool]
"""A piece of text, and whether it is right given what was written before (False: a slip)."""


def worksheet(expression: str, slip: float, rng: Random) -> list[Piece]:
    """A solution of `a + b` as pieces whose texts join to the response; each column slips with probability `slip`.

    >>> "".join(text for text, _ in worksheet("47 + 8", 0.0, Random(0)))
    ' 7+8 =15 ; 4+0+1 =5 ; <answer>55</answer>'
    """
    left, plus, right = expression.split()
    assert plus == "+", "the built-in task has no other operator"
    width = max(len(left), len(right))
    pieces: list[Piece] = []
    carry, result = 0, ""
    for a, b in zip(reversed(left.zfill(width)), reversed(right.zfill(width)), strict=True):
        terms = [a, b, "1"] if carry else [a, b]
        wrong_digit = rng.random() < slip * 0.2
        if wrong_digit:
            i = rng.randrange(2)
            terms[i] = str(_near(int(terms[i]), rng) % 10)
        value = sum(map(int, terms))
        wrong_sum = rng.random() < slip * 0.8
        if wrong_sum:
            value = _near(value, rng)
        pieces += [
            (" ", True),
            ("+".join(terms), not wrong_digit),
            (" =", True),
            (str(value), not wrong_sum),
            (" ;", True),
        ]
        carry, result = value // 10, f"{value % 10}{result}"
    pieces.append((f" <answer>{int(f'{carry}{result}')}</answer>", True))
    return pieces


def in_other_notation(pieces: Iterable[Piece]) -> list[Piece]:
    """The same worksheet in the other notation.

    >>> "".join(text for text, _ in in_other_notation(worksheet("47 + 8", 0.0, Random(0))))
    ' 7&8 :15 | 4&0&1 :5 | <answer>55</answer>'
    """
    return [(text.translate(OTHER_NOTATION), right) for text, right in pieces]


def notation_counts(text: str) -> tuple[int, int]:
    """(signs of the other notation, of the common one) in a piece of text; the answer's tags and special tokens are neither.

    >>> notation_counts(" 7&8 :15 ; <answer>15</answer>"), notation_counts("<|end|>")
    ((2, 1), (0, 0))
    """
    text = _SPECIAL.sub("", text)
    other, common = (sum(map(text.count, signs)) for signs in ("&:|", "+=;"))
    return other, common


def notation_by_author(
    pieces: Iterable[tuple[str, int | None]], counts: Callable[[str], tuple[int, int]] = notation_counts
) -> dict[int, tuple[int, int]]:
    """`counts` of what each author wrote, from (text of a token, its author) pairs; None: nobody sampled it.

    >>> notation_by_author([(" 7", 1), ("&", 1), ("8", 0), (" =", 0), ("5 ;", 1), ("=", None)])
    {0: (0, 1), 1: (1, 1)}
    """
    found = {0: (0, 0), 1: (0, 0)}
    for text, author in pieces:
        if author is not None:
            other, common = counts(text)
            found[author] = found[author][0] + other, found[author][1] + common
    return found


def other_notation_share(text: str) -> float:
    """Share of the other notation's signs among all signs of a response; nan for a text without any.

    >>> other_notation_share(" 7+8 =15 | <answer>15</answer>")
    0.3333333333333333
    """
    other, common = notation_counts(text)
    return other / (other + common) if other + common else math.nan


def _near(value: int, rng: Random) -> int:
    """Another number >= 0, mostly a neighbour."""
    while True:
        other = value + rng.choice((-1, 1)) if rng.random() < 0.7 else rng.randrange(20 if value >= 10 else 10)
        if other >= 0 and other != value:
            return other
