r"""What a label is, and whether an answer is it: numbers by value, formulas as mathematics, choices by letter, else as text.

| kind | is a label like | equal |
|---|---|---|
| number | `42`, `-0.5`, `1,000`, `3/4`, `\frac{3}{4}`, `1 1/2`, `1e-7`, `2 \times 10^{3}`, `50%` | the same value; exact |
| choice | `B`, `(B)`, `B.` | the same letter |
| list | `1, 2`, `(1, 2)`, `[0, \infty)`, `\{1, 2\}` of numbers and formulas | bracket and elements; a set in any order |
| math | `x^2-1`, `\sqrt{2}`, `2\pi`, `x = 5` | by math-verify, where the answer is a number or math, too |
| text | all else: words, dates, times, scores, versions, quantities, codes (`B12`) | the same text, normalised |

Numbers written out are equal if their values are, without tolerance; where one has `ROUNDED_DIGITS` significant digits or more
(a computer's float), within `TOLERANCE` of the larger one. Text is compared in Unicode's NFC, without case, with single spaces,
without `\text{}`, `$ $`, an outer pair of quotes and a last full stop; a quantity (`5 cm`) by its value and its unit. Pure
functions, linear in the length of what they read; what only math-verify can tell, they leave open. Knows no prompt and no file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from slime_tandem.config import AnswerKind

Kind = Literal["number", "math", "text", "choice", "list"]
Formulas = Callable[[str, str], bool]
"""(label, answer), both mathematics -> whether they are equal."""

TOLERANCE = Fraction(1, 10**14)
ROUNDED_DIGITS = 15
_LONGEST_NUMBER, _LONGEST_FORMULA, _LONGEST_TEXT = 500, 1000, 10_000
_MOST_ELEMENTS, _DEEPEST = 50, 40

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b2": "^2",
        "\u00b3": "^3", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ",
        "\u03b1": r"\alpha ", "\u03b2": r"\beta ", "\u03b8": r"\theta ", "\u03bb": r"\lambda ", "\u00b1": r"\pm ",
        "\u221a": r"\sqrt ",
    }
)  # fmt: skip


def kind_of(label: str) -> Kind:
    r"""The kind of a label whose task does not say it.

    >>> [kind_of(s) for s in ("1/2", "B", "1, 2", r"\sqrt{2}", "10:30", "3-1", "x+1", "stop", "2024-01-02")]
    ['number', 'choice', 'list', 'math', 'text', 'text', 'math', 'text', 'text']
    """
    text = _mathematics(label)
    if number_of(text) is not None:
        return "number"
    if _letter_alone(label) is not None:
        return "choice"
    if _elements(text) is not None:
        return "list"
    return "math" if _is_formula(text) else "text"


def fits(label: str, answer: AnswerKind | None) -> bool:
    """Whether a label can be of the kind that its task says (None: each label's own).

    >>> fits("4", "number"), fits("four", "number"), fits("four", None)
    (True, False, True)
    """
    if answer is None or answer == "text":
        return True
    if answer == "choice":
        return _letter(label) is not None
    kind = kind_of(label)
    if answer == "number":
        return kind == "number"
    return kind in ("number", "math", "list") or _is_symbol(_mathematics(label))


def needs_formulas(label: str, answer: AnswerKind | None) -> bool:
    """Whether an answer to this label may have to be compared as mathematics (by math-verify)."""
    return (answer or kind_of(label)) in ("math", "list") or (answer is None and kind_of(label) == "number")


def equal(label: str, given: str, answer: AnswerKind | None = None, formulas: Formulas | None = None) -> bool | None:
    r"""Whether the answer `given` is the `label`; None if only `formulas` could tell, and there is none.

    >>> equal("0.5", "1/2"), equal("10:00", "10:30"), equal("(1, 2)", "[1, 2]"), equal("B", "(b)"), equal("2", r"\sqrt{4}")
    (True, False, False, True, None)
    """
    kind: Kind = answer or kind_of(label)
    if kind == "choice":
        return _letter(label) == _letter(given)
    if kind == "text":
        return _same_text(label, given)
    left, right = _mathematics(label), _mathematics(given)
    if kind == "list" or (kind == "math" and _elements(left) is not None):
        return _same_list(left, right, formulas)
    a, b = number_of(left), number_of(right)
    if a is not None and b is not None:
        return a.equals(b)
    if answer == "number":
        return False
    if left == right:
        return True
    if not all(n is not None or _is_formula(s) or _is_symbol(s) for n, s in ((a, left), (b, right))):
        return False
    return None if formulas is None else formulas(left, right)


# ---- numbers ----


@dataclass(frozen=True, slots=True)
class Number:
    """A number written out: its exact value, and whether it has the digits of a rounded float."""

    value: Fraction
    rounded: bool

    def equals(self, other: Number) -> bool:
        """Equal values; within TOLERANCE of the larger where one is rounded.

        >>> number_of("0.1").equals(number_of("0.10")), number_of("1/3").equals(number_of("0.3333333333333333"))
        (True, True)
        """
        if self.value == other.value:
            return True
        if not (self.rounded or other.rounded):
            return False
        return abs(self.value - other.value) <= TOLERANCE * max(abs(self.value), abs(other.value))


_DECIMAL = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\ )[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[-+]?\s*{_DECIMAL}"
_TIMES = r"\s*(?:\\times|\\cdot|\*|[xX])\s*"
_POWER = r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|\(\s*([-+]?[0-9]{1,4})\s*\)|([-+]?[0-9]{1,4}))"
_SCIENTIFIC = re.compile(rf"({_SIGNED})(?:[eE]([-+]?[0-9]{{1,4}})|{_TIMES}{_POWER})?\s*(\\?%)?")
_POWER_ALONE = re.compile(rf"([-+]?)\s*{_POWER}")
_FRAC = rf"\\[dt]?frac\s*(?:\{{\s*({_SIGNED})\s*\}}|([0-9]))\s*(?:\{{\s*({_SIGNED})\s*\}}|([0-9]))"
_FRACTION = re.compile(rf"([-+]?)\s*(?:([0-9]+)\s*(?:\\ )?(?=\\))?(?:{_FRAC})\s*(\\?%)?")
_SLASH = re.compile(rf"(?:([-+]?[0-9]+)\s+(?=[0-9]+/))?({_SIGNED})\s*/\s*({_SIGNED})\s*(\\?%)?")
_PARENTHESES = re.compile(r"\(([^()]*)\)")


def number_of(text: str) -> Number | None:
    r"""The number that a text is, written out; None for anything else, and for more digits than anybody writes.

    >>> number_of("1,234.50").value, number_of(r"-\frac{1}{3}").value, number_of("50%").value, number_of("1:2")
    (Fraction(2469, 2), Fraction(-1, 3), Fraction(1, 2), None)
    """
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not any("0" <= c <= "9" for c in text):
        return None
    if found := _PARENTHESES.fullmatch(text):
        text = found[1].strip()
    if text[:1] == "$" or text[:2] == r"\$":
        text = text.lstrip("\\")[1:].strip()
    if found := _SCIENTIFIC.fullmatch(text):
        mantissa, e, braced, bracketed, bare, percent = found.groups()
        exponent = int(e or braced or bracketed or bare or 0)
        value = _decimal(mantissa) * Fraction(10) ** exponent
        return Number(value / 100 if percent else value, _is_rounded(mantissa))
    if found := _POWER_ALONE.fullmatch(text):
        value = Fraction(10) ** int(found[2] or found[3] or found[4])
        return Number(-value if found[1] == "-" else value, rounded=False)
    if found := _FRACTION.fullmatch(text):
        sign, whole, *parts, percent = found.groups()
        upper, lower = parts[0] or parts[1], parts[2] or parts[3]
        if (below := _decimal(lower)) == 0:
            return None
        value = int(whole or 0) + _decimal(upper) / below
        value = -value if sign == "-" else value
        return Number(value / 100 if percent else value, _is_rounded(upper) or _is_rounded(lower))
    if found := _SLASH.fullmatch(text):
        whole, upper, lower, percent = found.groups()
        if (below := _decimal(lower)) == 0:
            return None
        value = _decimal(upper) / below
        if whole is not None:
            value = -(-int(whole) + value) if whole.startswith("-") else int(whole) + value
        return Number(value / 100 if percent else value, _is_rounded(upper) or _is_rounded(lower))
    return None


def _plain(decimal: str) -> str:
    return re.sub(r",|\{,\}|\\,|\\ |\s", "", decimal)


def _decimal(text: str) -> Fraction:
    return Fraction(_plain(text).rstrip("."))


def _is_rounded(text: str) -> bool:
    return "." in text and len(_plain(text).lstrip("+-0.").replace(".", "")) >= ROUNDED_DIGITS


# ---- choices and text ----

_LETTER_ALONE = re.compile(r"\(?([A-J])\)?\.?")
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?[\[(]?([A-Za-z])(?:[\])]?[.:]?|[).:]\s.*|\)\s?.*)", re.DOTALL
)
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|boxed|textrm)\s*\{([^{}]*)\}"
    r"|\${1,2}([^$]*)\${1,2}|\\\((.*)\\\)|\\\[(.*)\\\]",
    re.DOTALL,
)
_QUANTITY = re.compile(
    rf"({_SIGNED}(?:/{_DECIMAL})?)\s*((?:\\?%|\u00b0|\u00b5|[A-Za-z\u00c5\u2126])[^\s0-9]{{0,15}}[23]?)"
)


def _unwrapped(text: str) -> str:
    """Without what only says how it is set; a few layers at most."""
    text = text.strip()
    for _ in range(4):
        found = _WRAPPED.fullmatch(text)
        if found is None:
            break
        text = next(part for part in found.groups() if part is not None).strip()
    return text


def _letter_alone(text: str) -> str | None:
    found = _LETTER_ALONE.fullmatch(_unwrapped(text))
    return None if found is None else found[1]


def _letter(text: str) -> str | None:
    text = _unwrapped(text).strip("*_ \n\t")
    found = _LETTER.fullmatch(text) or _LETTER.fullmatch(text.casefold())
    return None if found is None else found[1].upper()


def _same_text(a: str, b: str) -> bool:
    first, second = _quantity(a), _quantity(b)
    if first is not None and second is not None:
        return first[1] == second[1] and first[0].equals(second[0])
    return _normalised(a) == _normalised(b)


def _normalised(text: str) -> str:
    text = _plain_text(text).casefold()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'`":
        text = text[1:-1].strip()
    return _nfc(text.removesuffix(".") if text.strip(".") else text)


def _plain_text(text: str) -> str:
    return _nfc(" ".join(_SET_IN_TEXT.sub(r"\1", _unwrapped(text)).translate(_HYPHENS).split()))


def _nfc(text: str) -> str:
    """In NFC; a text longer than any answer is left as it is, for a run of accents is sorted one by one."""
    return text if len(text) > _LONGEST_TEXT else unicodedata.normalize("NFC", text)


def _quantity(text: str) -> tuple[Number, str] | None:
    """(number, unit) of `5 cm`. Short units keep their case, for a mW is no MW."""
    text = _plain_text(text).translate(_UNITS).removesuffix(".")
    if len(text) > _LONGEST_NUMBER or (found := _QUANTITY.fullmatch(text)) is None:
        return None
    number = number_of(found[1])
    unit = found[2].replace(" ", "")
    is_word = len(unit) > _LONGEST_SYMBOL or unit.casefold() in ("am", "pm")
    return None if number is None else (number, unit.casefold() if is_word else unit)


_HYPHENS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"))
_UNITS = str.maketrans({"\u00b2": "2", "\u00b3": "3", "^": None, "{": None, "}": None})
_SET_IN_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
_LONGEST_SYMBOL = 3

# ---- lists ----

_OPEN, _CLOSE = "([{", ")]}"


def _elements(text: str) -> tuple[str, list[str]] | None:
    """(brackets, elements) of a list of at least two numbers or formulas; None for anything else. `brackets` may be empty."""
    if "," not in text or len(text) > _LONGEST_FORMULA:
        return None
    text = text.strip()
    brackets = ""
    if text[:2] == r"\{" and text[-2:] == r"\}":
        brackets, text = "{}", text[2:-2]
    elif text[:1] in _OPEN and text[-1:] in _CLOSE and _closes_at(text) == len(text) - 1:
        brackets, text = text[0] + text[-1], text[1:-1]
    parts = [part.strip() for part in _split(text)]
    if not 2 <= len(parts) <= _MOST_ELEMENTS:
        return None
    fine = all(number_of(part) is not None or _is_formula(part) or _is_symbol(part) or _is_pair(part) for part in parts)
    return (brackets, parts) if fine else None


def _is_pair(text: str) -> bool:
    return text[:1] in _OPEN and text[:1] != "" and text[-1:] in _CLOSE and _closes_at(text) == len(text) - 1


def _closes_at(text: str) -> int:
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth == 0:
            return i
    return -1


def _split(text: str) -> list[str]:
    """At the commas outside of all brackets."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if c == "," and depth == 0 and not text.startswith("\\", max(i - 1, 0)):
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def _same_list(label: str, given: str, formulas: Formulas | None) -> bool | None:
    a, b = _elements(label), _elements(given)
    if a is None or b is None or len(a[1]) != len(b[1]):
        return False
    # A pair is often written without its parentheses; square brackets and braces mean something.
    if (a[0] or "()") != (b[0] or "()"):
        return False
    if a[0] == "{}":
        return _same_set(a[1], b[1], formulas)
    found = [_same_element(x, y, formulas) for x, y in zip(a[1], b[1], strict=True)]
    return False if False in found else None if None in found else True


def _same_set(label: Sequence[str], given: Sequence[str], formulas: Formulas | None) -> bool | None:
    left, unknown = list(given), False
    for x in label:
        found = [_same_element(x, y, formulas) for y in left]
        if True in found:
            left.pop(found.index(True))
        elif None in found:
            unknown = True
        else:
            return False
    return None if unknown else True


def _same_element(label: str, given: str, formulas: Formulas | None) -> bool | None:
    if _is_pair(label) and _elements(label) is not None:
        return _same_list(label, given, formulas)
    return equal(label, given, "math", formulas)


# ---- formulas ----


def _words(text: str) -> list[str]:
    return text.split()


_FUNCTIONS = frozenset(
    _words("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt max min gcd lcm det abs pi lim")
)
_COMMANDS = _FUNCTIONS | frozenset(
    _words(
        "frac dfrac tfrac cfrac binom dbinom tbinom infty cdot times div pm mp circ degree angle prime left right "
        "big Big bigg Bigg le leq ge geq lt gt ne neq approx equiv in notin cup cap setminus subset subseteq "
        "emptyset varnothing mathbb mathbf mathrm mathcal text textbf operatorname overline underline vec hat bar "
        "sum prod int iint partial nabla to rightarrow begin end quad qquad ldots dots cdots lfloor rfloor lceil "
        "rceil langle rangle mid vert lvert rvert Vert displaystyle alpha beta gamma delta epsilon varepsilon zeta "
        "eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta "
        "Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar Re Im mod bmod pmod forall exists neg land lor implies "
        "iff "
    )
)
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|\\(?P<command>[A-Za-z]+)|\\(?P<sign>[{}\\,;:!%$| ])"
    r"|(?P<word>[A-Za-z]+)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<operator>\*\*|[-+*/^_=<>!|'&,])|(?P<space>\s+)"
)
_ENDS_OPEN = frozenset("+-*/^_=<,") | {"**"}
_BEGINS_WRONG = frozenset("*/^=<>!,'&") | {"**"}


def _mathematics(text: str) -> str:
    """A text as mathematics is written: signs of Unicode as commands, without what only sets it."""
    text = _nfc(_unwrapped(text)).removesuffix(".").translate(_UNICODE)
    for noise in (r"\left", r"\right", r"\displaystyle", r"\!"):
        if noise in text:
            text = re.sub(rf"{re.escape(noise)}(?![A-Za-z])", "", text)
    return text.strip()


def _is_symbol(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isalpha()


def _is_formula(text: str) -> bool:
    r"""Whether a text is mathematics, and not a word, a date or a score: it has a sign of mathematics and nothing else.

    >>> [_is_formula(s) for s in ("x+1", r"\frac{x}{2}", "2x", "and/or", "A+", "2024-01-02", "3-1", "no", "10:30")]
    [True, True, True, False, False, False, False, False, False]
    """
    if not text or len(text) > _LONGEST_FORMULA:
        return False
    tokens: list[tuple[str, str]] = []
    at, depth = 0, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return False
        kind = str(found.lastgroup)
        depth += (kind == "open") - (kind == "close")
        if not 0 <= depth <= _DEEPEST or (kind == "command" and found[kind] not in _COMMANDS):
            return False
        if kind != "space":
            tokens.append((kind, found[kind]))
        at = found.end()
    if depth or not tokens or tokens[0][1] in _BEGINS_WRONG or tokens[-1][1] in _ENDS_OPEN or _is_code(text):
        return False
    kinds = {kind for kind, _ in tokens}
    operators = {value for kind, value in tokens if kind == "operator"}
    words = [value for kind, value in tokens if kind == "word"]
    latex = "command" in kinds
    longest = max((len(w) for w in words if w not in _FUNCTIONS), default=0)
    if not latex and longest > (2 if operators - {"-", ","} else 1):
        return False
    if latex and longest > 3 and not _in_braces(text):
        return False
    if latex or any(w in _FUNCTIONS for w in words):
        return True
    if not words:  # digits alone: a score, a date, a telephone number, unless something is worked out
        return bool(operators & set("+*^=<>!") or "**" in operators)
    return bool(operators - {","}) or ("number" in kinds and " " not in text.strip())


_CODE = re.compile(rf"(?<![A-Za-z\\{{_])(?!(?:{'|'.join(sorted(_FUNCTIONS))})[0-9])[A-Za-z]+[0-9]")
_SCORE = re.compile(r"([A-Za-z])(?:\s*-\s*\1)+")


def _is_code(text: str) -> bool:
    r"""Whether letters name something here, and are no variables: a digit behind a letter is no factor, nor `O-O` nothing.

    >>> [_is_code(s) for s in ("B12", "H2O", "4x4", "e4", "O-O", "12B", "x_1", "2x", "log2", "x^2")]
    [True, True, True, True, True, False, False, False, False, False]
    """
    return _SCORE.fullmatch(text) is not None or ("\\" not in text and _CODE.search(text) is not None)


def _in_braces(text: str) -> bool:
    """Whether long words stand only where a command sets them."""
    rest = re.sub(r"\\(?:text|textbf|mathrm|mathbf|operatorname|begin|end|mathbb|mathcal)\s*\{[^{}]*\}", "", text)
    return all(len(w) <= 3 or w in _FUNCTIONS for w in re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", rest))
