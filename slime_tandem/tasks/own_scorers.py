"""Our own scorers for data sets of reasoning-gym whose scorer hands text to an `eval`, or gives all marks to an answer that is
none (`FOOLED`): nothing is evaluated, all is bounded.

Each gives what the library's gives, but for what is said with it. Arithmetic is exact, by fractions; lists are read as JSON.
Pure functions of (answer, entry of the data set).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]
OwnScorer = Callable[[str, Entry], float]

_LONGEST = 1000
_TOKEN = re.compile(r"\s*(?:([0-9]{1,18})(?![0-9.])|([-+*/()]))")


def arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """(value, numbers used) of an expression of whole numbers, + - * / and parentheses; None for anything else.

    >>> arithmetic("(5 + 1) * 4 / -3"), arithmetic("2 ** 3"), arithmetic("1 / (2 - 2)")
    ((Fraction(-8, 1), [5, 1, 4, 3]), None, None)
    """
    text = text.strip()
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or len(text) > _LONGEST:
            return None
        tokens.append(found[1] or found[2])
        at = found.end()
    try:
        value, end = _sum(tokens, 0, 0)
    except (_NotArithmeticError, ZeroDivisionError):
        return None
    return (value, [int(t) for t in tokens if t.isdigit()]) if end == len(tokens) else None


class _NotArithmeticError(ValueError):
    pass


def _sum(tokens: Sequence[str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        other, end = _product(tokens, at + 1, depth)
        value = value + other if tokens[at] == "+" else value - other
        at = end
    return value, at


def _product(tokens: Sequence[str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _factor(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "*/":
        other, end = _factor(tokens, at + 1, depth)
        value = value * other if tokens[at] == "*" else value / other
        at = end
    return value, at


def _factor(tokens: Sequence[str], at: int, depth: int) -> tuple[Fraction, int]:
    if at >= len(tokens) or depth > 50:
        raise _NotArithmeticError
    token = tokens[at]
    if token in ("+", "-"):
        value, end = _factor(tokens, at + 1, depth + 1)
        return (value if token == "+" else -value), end  # noqa: S105 - a sign
    if token == "(":  # noqa: S105
        value, end = _sum(tokens, at + 1, depth + 1)
        if end >= len(tokens) or tokens[end] != ")":
            raise _NotArithmeticError
        return value, end + 1
    if not token.isdigit():
        raise _NotArithmeticError
    return Fraction(int(token)), at + 1


def countdown(answer: str, entry: Entry) -> float:
    """1.0 for an expression of all the numbers, each once, that is the target, 0.05 for another sum, 0.01 for none.

    Powers and decimals are none; the library takes what is within a hundred-thousandth of the target for the target.
    """
    found = arithmetic(answer)
    if found is None:
        return 0.01
    value, used = found
    about = entry["metadata"]
    return 1.0 if sorted(used) == sorted(about["numbers"]) and value == about["target"] else 0.05


def puzzle24(answer: str, entry: Entry) -> float:
    """1.0 for an expression of the four numbers, each once, that is 24, else 0.01.

    The library takes any four numbers in range, and cuts fractions off.
    """
    found = arithmetic(answer)
    if found is None:
        return 0.01
    value, used = found
    return 1.0 if value == 24 and sorted(used) == sorted(entry["metadata"]["numbers"]) else 0.01


def read_list(text: str) -> list[Any] | None:
    """The list that a text writes, as JSON or with Python's quotes; None for anything else."""
    try:
        found = json.loads(text.replace("'", '"'))
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _rows(answer: str) -> str | None:
    """A board given as a list of lists, as the data sets write boards."""
    rows = read_list(answer)
    if rows is None or not all(isinstance(row, list) for row in rows):
        return None
    return "\n".join(" ".join(map(str, row)) for row in rows)


def n_queens(answer: str, entry: Entry) -> float:
    """1.0 for a board that solves it, 0.5 for one that is given as a list of lists, else 0.0."""
    boards = entry["metadata"]["valid_answers"]
    if answer in boards:
        return 1.0
    return 0.5 if _rows(answer) in boards else 0.0


def binary_matrix(answer: str, entry: Entry) -> float:
    """1.0 for the matrix, 0.1 for it as a list of lists, else 0.0."""
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if _rows(answer) == entry["answer"] else 0.0


def spiral_matrix(answer: str, entry: Entry) -> float:
    """1.0 for the numbers in their order, 0.1 for a list of them, else 0.0."""
    right = entry["answer"].strip()
    if answer.strip() == right:
        return 1.0
    found = read_list(answer)
    return 0.1 if found is not None and " ".join(map(str, found)) == right else 0.0


def string_insertion(answer: str, entry: Entry) -> float:
    """1.0 for the text, 0.1 for a list of its characters, else 0.0."""
    if answer == entry["answer"]:
        return 1.0
    found = read_list(answer)
    joined = found is not None and all(isinstance(c, str) for c in found) and "".join(found) == entry["answer"]
    return 0.1 if joined else 0.0


def number_sorting(answer: str, entry: Entry) -> float:
    """1.0 for a sorted list of as many numbers, each within 1 of the right one, else 0.0."""
    found, right = read_list(answer), read_list(entry["answer"])
    if found is None or right is None or len(found) != len(right):
        return 0.0
    given = [float(x) for x in found]
    down = entry["metadata"]["direction"] != "ascending"
    close = all(abs(a - float(b)) <= 1 for a, b in zip(given, right, strict=True))
    return float(close and given == sorted(given, reverse=down))


def bitwise_arithmetic(answer: str, entry: Entry) -> float:
    """1.0 for the value of the data set's own answer, in base 16, 10, 8 or 2, else 0.0."""
    return float(len(answer) <= _LONGEST and int(answer, 0) == int(entry["answer"], 0))


_REAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,3})?"
_PROBABILITY = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,3}|/0*[1-9][0-9]*)?%?\Z")
_COMPLEX = re.compile(
    rf"(?:(?P<real>[-+]?{_REAL})(?:(?P<imaginary>[-+](?:{_REAL})?)[ij])?|(?P<alone>[-+]?(?:{_REAL})?)[ij])\Z"
)


def complex_arithmetic(answer: str, entry: Entry) -> float:
    """1.0 for the number, less the further away, 0.0 for what is no number.

    To the library `nan` is as near as can be to every number.
    """
    text = answer.replace(" ", "").lower()
    while text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1]
    found = _COMPLEX.match(text) if len(text) <= _LONGEST else None
    if found is None:
        return 0.0
    imaginary = found["imaginary"] if found["alone"] is None else found["alone"]
    if imaginary in ("", "+", "-"):
        imaginary += "1"
    given = complex(float(found["real"] or 0), float(imaginary or 0))
    return math.exp(-abs(given - complex(*entry["metadata"]["result"])))


def coin_flip(answer: str, entry: Entry) -> float:
    """1.0 for the probability, within 0.0001 and a hundredth of it; else the share of its digits that the answer begins with.

    The library takes the share of the shorter of both, so that `0` has all digits of every probability.
    """
    text = answer.replace(" ", "").replace(",", "")
    if len(text) > _LONGEST or _PROBABILITY.match(text) is None:
        return 0.0
    given, right = Fraction(text.rstrip("%")) / (100 if text.endswith("%") else 1), Fraction(entry["answer"])
    if abs(given - right) <= min(Fraction(1, 10_000), right / 100):
        return 1.0
    texts = [f"{float(number):.10g}" for number in (given, right)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return same / (max(map(len, texts)) + 1)


def game_of_life_halting(answer: str, entry: Entry) -> float:
    """1.0 for the right one of True and False, else 0.0.

    The library compares whether there are texts: to it every answer is right.
    """
    return float(answer.strip(" '\"`.").lower() == entry["answer"].lower())


OWN_SCORERS: Mapping[str, OwnScorer] = {
    f.__name__: f
    for f in (
        countdown,
        puzzle24,
        n_queens,
        binary_matrix,
        spiral_matrix,
        string_insertion,
        number_sorting,
        bitwise_arithmetic,
        complex_arithmetic,
        coin_flip,
        game_of_life_halting,
    )
}
"""By the name of the data set."""

FOOLED = frozenset({"complex_arithmetic", "coin_flip", "game_of_life_halting"})
"""Those of them whose scorer in the library evaluates nothing, and gives all marks to an answer that is none."""
