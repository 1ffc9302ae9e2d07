"""Stop patterns: found where Python's `re` finds them, in bounded time; what cannot be is refused and never read otherwise."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.engines.embedded import patterns
from slime_tandem.engines.embedded.patterns import PatternError, compile_pattern
from slime_tandem.strategies import Mark

LETTERS = st.sampled_from(
    ["a", "b", "é", "ſ", "K", "k", "s", "S", "1", "٣", "_", " ", "\n", "\x1c", "\u2028", "日", "😀", "-"]
)
TEXTS = st.text(LETTERS, max_size=12)
ATOMS = st.sampled_from(
    [
        *(
            "a",
            "b",
            "é",
            "k",
            "s",
            "1",
            " ",
            ".",
            r"\d",
            r"\D",
            r"\w",
            r"\W",
            r"\s",
            r"\S",
            "[ab]",
            "[^a]",
            r"[^\W\d_]",
        ),
        *(r"[\Da]", "日", r"[a-é]", r"\n", r"\u0061", r"\x31", "\\.", "^", r"\A", "(?:)", "[😀-😁]", "(?s:.)"),
        *("(?m:^a$)", r"(?a:\w)", "(?-i:k)", "{", "{}", "a{e}", "]", r"(?a:\b)"),
    ]
)


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    times = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "{0}"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, times).map(lambda two: f"({two[0]}){two[1]}"),
    )


PATTERNS = st.tuples(
    st.sampled_from(["", "(?i)", "(?s)", "(?m)", "(?x)"]),
    st.recursive(ATOMS, joined, max_leaves=6),
    st.sampled_from(["", "", "$", r"\Z"]),
).map("".join)


@given(pattern=PATTERNS, text=TEXTS)
def test_it_is_found_where_python_finds_it(pattern: str, text: str) -> None:
    wanted = re.search(pattern, text)
    assert compile_pattern(pattern).find(text) == (-1 if wanted is None else wanted.start())


@pytest.mark.parametrize("low", [0, 2, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("more", [0, 1, 1500])
def test_more_than_a_thousand_repetitions(low: int, more: int) -> None:
    pattern = compile_pattern(rf"\A(?:a){{{low},{low + more}}}\Z")
    for count in {max(0, low - 1), low, low + more, low + more + 1}:
        assert (pattern.find("a" * count) == 0) is (low <= count <= low + more)
    assert (compile_pattern(rf"(?:a){{{low},}}b").find("a" * low + "b") == 0) is True


def test_the_patterns_of_the_handoff_rule() -> None:
    for characters in (" ", " \n", " \n.,;:!?。，；：！？、…"):
        for runs in (1, 2, 50, 3000):
            found = compile_pattern(Mark.of(characters).regex(runs))
            text = "word. " * runs
            assert found.find(text) >= 0
            assert found.find(text[: runs - 1].replace(" ", "x").replace(".", "x")) == -1


REFUSED = {
    r"(?=a)": "look", r"(?!a)": "look", r"(?<=a)b": "look", r"(?<!a)b": "look", r"(a)\1": "groupref",
    "(?P<n>a)(?P=n)": "groupref", "(a)?(?(1)b|c)": "groupref", "a++": "possessive", "(?>a)": "atomic", r"\bfoo": "ASCII",
    r"a$b": "end of the pattern", r"(?:a$)*": "end of the pattern", "a{99999999999999999999}": "repetition number is too large",
    "(((a{1000}){1000}){1000}){1000}": "RE2", "a{0,4000000000}": "repetitions", "(": "unterminated", "[": "unterminated",
    "(" * 900 + ")" * 900: "recursion", "x" * 2001: "2000 characters", "(?:a{500}|b){500}": "RE2", r"\p{L}": "escape",
    r"\B": "without", r"(?a:\B)": "without", r"(?a:1\Bé)": "without",
    "*": "nothing to repeat", "(?V1)a": "unknown|missing|bad", "(?R)": "unknown",
}  # fmt: skip


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_no_pattern_of_linear_time_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=REFUSED[pattern]):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"(?s)(?:.+)+\u0001", r"(a+)+\Z", "(?:a|aa)+b", "(.*)*x", r"(?:\w+\s?)*\x01", "(a*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$"],
)  # fmt: skip
def test_patterns_that_double_their_time_with_every_character_do_not(pattern: str) -> None:
    """Each of these keeps Python's matcher busy for longer than the universe, or nearly; here they return."""
    assert compile_pattern(pattern).find("a" * 20_000 + "!") in (-1, 0)


def test_half_of_a_surrogate_pair_is_in_no_text() -> None:
    for pattern in ("\ud800", "[\ud800]", "[\ud800a]", "[\ud7ff-\ue000]"):
        assert compile_pattern(pattern).find("xyz") == -1
    assert compile_pattern("[\ud800a]").find("xa") == 1
    assert compile_pattern("[^\ud800]").find("x") == 0


@pytest.mark.parametrize(
    "pattern",
    ["(" * 7 + "a" + "{20000})" * 7, r"(?i)" + r"\w" * 900, r"\w" * 900, r"(?:\w{20000}){0,20000}", r"[\w\W]" * 300],
    ids=["repetitions in one another", "classes, case ignored", "classes", "a repeated class", "both sides"],
)
def test_what_would_be_huge_when_written_out_is_refused_before_it_is(pattern: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PatternError, match="too much room"):
            compile_pattern(pattern)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_a_class_that_stands_often_is_worked_out_once() -> None:
    """For each cased character every range was looked at: one pattern of 200 characters took seconds."""
    seen = compile_pattern(r"(?i)\w-\w")
    assert (seen.find("ſ-K"), seen.find("- -")) == (0, -1)
    before = patterns._set.cache_info()
    compile_pattern(r"(?i)" + r"\w" * 20)
    after = patterns._set.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (0, 20)
