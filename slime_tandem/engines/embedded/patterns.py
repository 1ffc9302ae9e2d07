r"""Stop patterns in linear time: Python's reading of a pattern, matched by RE2.

Python's own matcher can take time that doubles with every character, and holds the interpreter meanwhile: `(a+)+$b`. RE2
reads patterns a little differently (`\w` is ASCII, `$` the very end), so a pattern is parsed by Python's parser, as SGLang
0.5.15 does (`sampling_params.py`, get_max_seq_length), and each of its parts is written anew for RE2. What RE2 cannot do in
linear time (look-around, back-references, possessive and atomic groups) or cannot say (Unicode word boundaries) is refused,
never read as something else. Whether and where a pattern is first found is all that is asked. It knows no request.
"""

from __future__ import annotations

import io
import re
import sys
import threading
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import re2

_parser: Any = re._parser  # type: ignore[attr-defined]
_MOST_CHARACTERS = 2000
_MOST_COPIES = 20
"""RE2 repeats at most 1000 times; more is written as so many copies."""
_MOST_WRITTEN = 2**20
"""Characters of a pattern as RE2 gets it: each `\\w` of Unicode takes thousands, and repetitions in one another multiply."""
_OPTIONS = re2.Options()
_OPTIONS.max_mem = 2**23
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True
_PARSING = threading.Lock()
"""The filters of warnings are the whole process's."""
_SURROGATES = range(0xD800, 0xE000)
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d", "CATEGORY_NOT_DIGIT": r"\D", "CATEGORY_SPACE": r"\s", "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w", "CATEGORY_NOT_WORD": r"\W",
}  # fmt: skip
_PLACES = {"AT_BEGINNING_STRING": r"\A", "AT_END_STRING": r"\z"}
_MULTILINE_PLACES = {"AT_BEGINNING": "(?m:^)", "AT_END": "(?m:$)"}
_ASCII_PLACES = {"AT_BOUNDARY": r"\b"}


class PatternError(ValueError):
    """Why a pattern cannot be matched in bounded time; the message is a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern; `pattern` is what the user wrote.

    >>> compile_pattern(r"\\d+ (apples|pears)").find("I ate 12 pears")
    6
    """

    pattern: str
    _matcher: Any

    def find(self, text: str) -> int:
        """Where the first match in `text` begins, -1 for none. Time grows with the text's length, not faster."""
        data = text.encode("utf-8", "replace")
        match = self._matcher.search(data)
        return -1 if match is None else len(data[: match.start()].decode())


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> Pattern:
    """The pattern, ready to be found. Raises PatternError for one that is no pattern, too large, or not of linear time."""
    if len(pattern) > _MOST_CHARACTERS:
        raise PatternError(f"at most {_MOST_CHARACTERS} characters")
    try:
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what may mean something else in a later Python
            tree = _parser.parse(pattern)
        written = _sequence(tree, tree.state.flags, last=True)
        return Pattern(pattern, re2.compile(written.encode("ascii"), _OPTIONS))
    except re2.error as error:
        raise PatternError(f"what RE2 takes: {error.args[0].decode('utf-8', 'replace')[:100]}") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(str(error)) from None


def _sequence(parts: Iterable[tuple[Any, Any]], flags: int, *, last: bool) -> str:
    items, written = list(parts), io.StringIO()
    for i, (kind, value) in enumerate(items):
        written.write(_item(str(kind), value, flags, last and i == len(items) - 1))
        _require_short(written.tell())
    return written.getvalue()


def _require_short(written: int) -> None:
    if written > _MOST_WRITTEN:
        raise PatternError("a smaller one: its classes and repetitions, written out, take too much room")


def _item(kind: str, value: Any, flags: int, last: bool) -> str:
    """One node of Python's parse tree, for RE2. `last`: nothing of the pattern comes behind it."""
    match kind:
        case "LITERAL":
            return _set((("LITERAL", value),), flags)
        case "NOT_LITERAL":
            return _set((("NEGATE", None), ("LITERAL", value)), flags)
        case "IN":
            return _set(tuple((str(name), inside) for name, inside in value), flags)
        case "ANY":
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        case "AT":
            return _place(str(value), flags, last)
        case "BRANCH":
            return f"(?:{'|'.join(_sequence(branch, flags, last=last) for branch in value[1])})"
        case "SUBPATTERN":
            _, added, removed, inside = value
            return f"(?:{_sequence(inside, (flags | added) & ~removed, last=last)})"
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, inside = value
            return _repeat(f"(?:{_sequence(inside, flags, last=False)})", low, high)
    names = {"ASSERT": "look-ahead or look-behind", "ASSERT_NOT": "look-ahead or look-behind"}
    raise PatternError(f"a pattern without {names.get(kind, kind.lower())}, which needs more than linear time")


def _place(name: str, flags: int, last: bool) -> str:
    if flags & re.MULTILINE and name in _MULTILINE_PLACES:
        return _MULTILINE_PLACES[name]
    if name == "AT_BEGINNING":
        return r"\A"
    if name == "AT_END":  # Python: the end, or before a line feed that ends the text
        if not last:
            raise PatternError("`$` at the end of the pattern alone; write \\Z for the end of the text")
        return r"\n?\z"
    if name == "AT_NON_BOUNDARY":  # RE2: also between the bytes of a character; Python: in the empty text from 3.14 on
        raise PatternError("a pattern without \\B")
    if name in _ASCII_PLACES and not flags & re.ASCII:
        raise PatternError("word boundaries of ASCII alone; write (?a:\\b)")
    return _PLACES.get(name) or _ASCII_PLACES[name]


def _repeat(one: str, low: int, high: Any) -> str:
    """`one` at least `low` and at most `high` times."""
    endless = high is _parser.MAXREPEAT
    optional = 0 if endless else high - low
    if low // 1000 + optional // 1000 > _MOST_COPIES:
        raise PatternError(f"at most {1000 * _MOST_COPIES} repetitions")
    copies = [f"{{{n}}}" for n in _thousands(low)] + [f"{{0,{n}}}" for n in _thousands(optional)]
    _require_short(len(one) * len(copies))
    return "".join(one + times for times in copies) + (f"{one}*" if endless else "") or "(?:)"


def _thousands(count: int) -> list[int]:
    return [1000] * (count // 1000) + ([count % 1000] if count % 1000 else [])


@lru_cache(maxsize=1024)
def _set(members: tuple[tuple[str, Any], ...], flags: int) -> str:
    negated, ranges, written = "", list[tuple[int, int]](), ""
    for kind, value in members:
        match kind:
            case "NEGATE":
                negated = "^"
            case "LITERAL":
                ranges.append((value, value))
                written += f"\\U{value:08x}"
            case "RANGE":
                ranges.append(value)
                written += f"\\U{value[0]:08x}-\\U{value[1]:08x}"
            case category:
                assert category == "CATEGORY"
                escape = _CATEGORIES[str(value)]
                ranges += _category(escape, flags & re.ASCII)
                written += escape
    if flags & re.IGNORECASE:
        ranges = _ignoring_case(ranges, f"[{written}]", flags & re.ASCII)
    # No text holds half of a surrogate pair; RE2 knows none either.
    kept = [(a, b) for a, b in ranges if a not in _SURROGATES or b not in _SURROGATES]
    if not kept:
        return "(?s:.)" if negated else r"[^\x00-\x{10ffff}]"
    inside = "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in kept)
    return f"[{negated}{inside}]"


def _ignoring_case(ranges: list[tuple[int, int]], written: str, ascii_alone: int) -> list[tuple[int, int]]:
    """The same set where case is ignored, `written` as Python's. RE2 folds more than Python: `(?ia:s)` is no long s to it."""
    # Python is asked of what has case alone; it reads no other character differently.
    found = {ord(m[0]) for m in re.finditer(written, _cased(), re.IGNORECASE | ascii_alone)}
    kept, there = list[tuple[int, int]](), set[int]()
    at = _cased_points()
    for a, b in ranges:
        for cut in at[bisect_left(at, a) : bisect_right(at, b)]:
            there.add(cut)
            if cut not in found:
                if a < cut:
                    kept.append((a, cut - 1))
                a = cut + 1
        if a <= b:
            kept.append((a, b))
    return kept + [(c, c) for c in sorted(found - there)]


@cache
def _cased() -> str:
    """Every character that another one may stand for where case is ignored."""
    every = map(chr, range(sys.maxunicode + 1))
    return "".join(c for c in every if c.lower() != c or c.upper() != c)


@cache
def _cased_points() -> tuple[int, ...]:
    """The code points of these, in order."""
    return tuple(map(ord, _cased()))


@cache
def _category(escape: str, ascii_alone: int) -> list[tuple[int, int]]:
    """The code points that `escape` stands for, as Python has them."""
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    return [(m.start(), m.end() - 1) for m in re.finditer(f"{escape}+", every, ascii_alone)]
