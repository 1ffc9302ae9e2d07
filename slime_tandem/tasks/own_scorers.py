"""Our own scorers for data sets of reasoning-gym whose scorer hands text to an `eval`: nothing is evaluated, all is bounded.

Each gives what the library's gives, but for what is said with it. Arithmetic is exact, by fractions; lists are read as JSON.
Pure functions of (answer, entry of the data set).
"""

from __future__ import annotations

import json
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
    )
}
"""By the name of the data set."""
