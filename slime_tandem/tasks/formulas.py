r"""Whether two formulas are equal, by math-verify; called in a worker (`pool`) alone, for it has no bound of its own.

math-verify reads LaTeX by a grammar and builds trees, but hands numbers and some arguments of functions to sympy as text, which
sympy evaluates as Python (`parse_expr`). While a formula is read here, sympy's reader takes numbers alone. math-verify's reader
of plain expressions, which is nothing but `parse_expr`, is not asked. Decimals are exact fractions, not rounded to six digits.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from slime_tandem.errors import ConfigError


def require_math_verify(field: str, value: object) -> None:
    """Raise ConfigError, naming the setting `field`, where math-verify is not installed: labels need it."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            field,
            value,
            "labels that can be compared without math-verify, which is not installed",
            "pip install math-verify, or set tasks[].answer to number, text or choice",
        )


_WORDS = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|pi)(?![A-Za-z])"
)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_PRIMES = re.compile(r"([A-Za-z])('+)")
_TRANSPOSE = re.compile(r"(?<!matrix\})\^\s*(?:\{\s*(?:T|\\top)\s*\}|T(?![A-Za-z])|\\top(?![A-Za-z]))")
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(|\\sqrt\s*\(")


def as_latex(text: str) -> str:
    r"""A formula as LaTeX, if it was typed as on a keyboard.

    >>> as_latex("2*sqrt(x+1) + sin(x)**2")
    '2\\cdot \\sqrt{x+1} + \\sin(x)^2'
    """
    text = _WORDS.sub(r"\\\1", text.replace("**", "^").replace("*", r"\cdot "))
    while found := _ROOT.search(text):
        depth, end = 1, found.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = f"{text[: found.start()]}\\sqrt{{{text[found.end() : end - 1]}}}{text[end:]}"
    text = re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)
    # math-verify reads past both: to it y' is y, and a transposed matrix is the matrix.
    text = _PRIMES.sub(lambda found: f"{found[1]}_{{prime{len(found[2])}}}", text)
    return _TRANSPOSE.sub("^{T_{op}}", text)


def _cases_apart(label: str, answer: str) -> tuple[str, str]:
    r"""Both with another letter for a capital that stands beside its small letter in one of them: math-verify makes all small.

    >>> _cases_apart(r"\frac{M}{m}", "1"), _cases_apart("R^2", "r^2")
    (('\\frac{a}{m}', '1'), ('R^2', 'r^2'))
    """
    used = [{found[1] for found in _LETTER.finditer(text) if found[1]} for text in (label, answer)]
    twice = {letter for letters in used for letter in letters if letter.isupper() and letter.lower() in letters}
    free = [c for c in "abchjkmnpqsuvwxyz" if not {c, c.upper()} & (used[0] | used[1])]
    names = dict(zip(sorted(twice), free, strict=False))

    def renamed(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    return _LETTER.sub(renamed, label), _LETTER.sub(renamed, answer)


def prepare() -> None:
    """Import what comparing takes: seconds, on a slow disk."""
    _math_verify()


def formulas_equal(label: str, answer: str) -> bool:
    """Whether math-verify finds two formulas equal. An answer that it cannot read is not; takes any time."""
    parse, verify = _math_verify()
    left, right = _cases_apart(as_latex(label), as_latex(answer))
    if "'" in left + right:
        return False
    with text_is_numbers():
        gold, given = parse(left), parse(right)
        if gold is None or given is None:
            return False
        if _says_nothing(gold) or _says_nothing(given):
            return bool(gold == given)
        if all(getattr(e, "is_number", False) and getattr(e, "is_finite", False) for e in (gold, given)):
            return _same_value(gold, given)
        return bool(verify(gold, given))


def _says_nothing(formula: Any) -> bool:
    """Whether it is an equation or inequality that holds always or never: to math-verify all of these are equal."""
    from sympy import Expr, simplify
    from sympy.core.relational import Relational

    if not isinstance(formula, Relational) or not all(isinstance(side, Expr) for side in formula.args):
        return False
    return bool(simplify(formula.lhs - formula.rhs).is_number)


def _same_value(a: Any, b: Any) -> bool:
    """Two constants, to 30 digits; one that was rounded to a float's digits is as good as its value."""
    difference = (a - b).doit().evalf(30, chop=False)
    size = max(abs(a.doit().evalf(30)), abs(b.doit().evalf(30)))
    return bool(abs(difference) <= size * 10**-14)


@contextmanager
def text_is_numbers() -> Iterator[None]:
    """Within it, what sympy is given as text is a number or refused; its own reader is an `eval`."""
    from sympy.parsing import sympy_parser

    before = sympy_parser.parse_expr
    sympy_parser.parse_expr = _number
    try:
        yield
    finally:
        sympy_parser.parse_expr = before


def _number(text: str, *_: Any, **__: Any) -> Any:
    from sympy import Rational

    if _NUMBER.fullmatch(text.strip()) is None:
        raise SyntaxError("not a number")  # what sympy expects of its reader
    return Rational(text.strip())


@cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    import sympy.physics.units  # noqa: F401 - asked for in the middle of a comparison, and made of text
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        # Both warn at every call without a time-out of their own; below the level of errors they have nothing else to say.
        logging.getLogger(name).setLevel(logging.ERROR)
    # Its list of units takes words and letters out of formulas; a unit is a part of an answer here (`labels`).
    normalise = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    reader = [LatexExtractionConfig(normalization_config=normalise)]

    def read(text: str) -> Any:
        found = parse(
            f"\\boxed{{{text}}}", reader, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
        )
        return found[0] if found else None

    return read, lambda gold, given: verify(gold, given, timeout_seconds=None, raise_on_error=True)
