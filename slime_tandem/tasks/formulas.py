r"""Whether two formulas are equal, by math-verify; called in a worker (`pool`) alone, for it has no bound of its own.

math-verify reads LaTeX by a grammar and builds trees. Its other reader, of plain expressions, is sympy's `parse_expr`, which is
an `eval`: it is not asked. Decimals are exact fractions here, not rounded to six digits.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
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
    return re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)


def formulas_equal(label: str, answer: str) -> bool:
    """Whether math-verify finds two formulas equal. An answer that it cannot read is not; takes any time."""
    parse, verify = _math_verify()
    gold, given = parse(as_latex(label)), parse(as_latex(answer))
    if gold is None or given is None:
        return False
    exact = _exact(gold), _exact(given)
    if all(getattr(e, "is_number", False) for e in exact):
        return _same_value(*exact)
    return bool(verify(*exact))


def _same_value(a: Any, b: Any) -> bool:
    difference = (a - b).doit().evalf(30, chop=False)
    size = max(abs(a.doit().evalf(30)), abs(b.doit().evalf(30)))
    return bool(abs(difference) <= size * 10**-14)


def _exact(expression: Any) -> Any:
    """The expression with each decimal as the fraction that was written."""
    from sympy import Basic, Float, Rational

    if not isinstance(expression, Basic):
        return expression
    return expression.xreplace({f: Rational(str(f)) for f in expression.atoms(Float)})


@cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        # Both warn at every call without a time-out of their own; below the level of errors they have nothing else to say.
        logging.getLogger(name).setLevel(logging.ERROR)
    reader = [LatexExtractionConfig()]

    def read(text: str) -> Any:
        found = parse(
            f"\\boxed{{{text}}}", reader, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
        )
        return found[0] if found else None

    return read, lambda gold, given: verify(gold, given, timeout_seconds=None, raise_on_error=True)
