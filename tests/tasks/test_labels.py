"""What a label is and which answers are it: a table by hand, laws, and texts that are made to be slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import AnswerKind, RewardConfig, TaskSpec
from slime_tandem.tasks.families import quick_of
from slime_tandem.tasks.judging import Judge, Verdict
from slime_tandem.tasks.labels import equal, fits, kind_of, needs_formulas, number_of
from slime_tandem.types import Prompt

ROWS = [line.split("\t") for line in (Path(__file__).parent / "label_pairs.tsv").read_text("utf-8").splitlines()[1:]]
NOT_KNOWN = {("5 km", "5000 m")}
"""Pairs of the table that a reader finds equal and we do not. We find none equal that differ."""


def judge(timeout_s: float = 5.0, answer: AnswerKind | None = None) -> Judge:
    spec = TaskSpec(family="jsonl", path="labels", answer=answer)
    return Judge(spec, "tasks.0", RewardConfig(timeout_s=timeout_s), quick_of(spec, None))


def asked(pairs: list[tuple[str, str]], judge: Judge) -> list[Verdict]:
    return judge.verdicts([(Prompt("p", (), label, "t"), f"<answer>{given}</answer>") for label, given in pairs])


def test_the_table() -> None:
    pairs = [(label, answer) for _, label, answer, _ in ROWS]
    right = {(label, answer) for _, label, answer, said in ROWS if said == "equal"}
    assert len(set(pairs)) >= 200
    assert {said for *_, said in ROWS} == {"equal", "different"}
    # 9^{9^{9}} alone has no end.
    found = dict(zip(pairs, asked(pairs, judge()), strict=True))
    assert {pair for pair, verdict in found.items() if verdict.problem} == {("5", "9^{9^{9}}")}
    ours = {pair for pair, verdict in found.items() if verdict.reward == 1.0}
    assert ours - right == set()
    assert right - ours == NOT_KNOWN


def test_most_answers_need_no_process() -> None:
    quick = [equal(label, answer) for _, label, answer, _ in ROWS]
    for (_, label, answer, said), found in zip(ROWS, quick, strict=True):
        if found is not None and (label, answer) not in NOT_KNOWN:
            assert found is (said == "equal"), (label, answer)
    assert quick.count(None) < len(ROWS) / 2


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("42", "number"), ("-0.5", "number"), ("1,000", "number"), (r"\frac{3}{4}", "number"), ("1 1/2", "number"),
        ("1e-7", "number"), (r"2 \times 10^{3}", "number"), ("50%", "number"), ("B", "choice"), ("(B)", "choice"),
        ("1, 2", "list"), (r"[0, \infty)", "list"), (r"\{1, 2\}", "list"), ("x^2-1", "math"), (r"\sqrt{2}", "math"),
        (r"2\pi", "math"), ("x = 5", "math"), ("10:00", "text"), ("2024-01-02", "text"), ("3-1", "text"), ("1.2.3", "text"),
        ("listen", "text"), ("5 cm", "text"), ("New York", "text"), ("1/0", "text"), ("nan", "text"), ("Infinity", "text"),
        ("7" * 1000, "text"), ("__import__('os')", "text"), ("x" * 5000, "text"), ("\x00", "text"),
    ],
)  # fmt: skip
def test_kinds(label: str, kind: str) -> None:
    assert kind_of(label) == kind
    assert needs_formulas(label, None) == (kind in ("number", "math", "list"))


def test_a_task_may_say_what_its_labels_are() -> None:
    assert equal("3-1", "2", "text") is False
    assert equal("1,5", "1, 5", "text") is False
    assert equal("007", "7", "text") is False
    assert equal("007", "7", "number") is True
    assert equal("4", "2+2", "number") is False, "numbers alone"
    assert equal("4", "2+2", "math") is None
    assert equal("k", "(K)", "choice") is True
    kinds: tuple[AnswerKind, ...] = ("number", "math", "text", "choice")
    for label, fine in {
        "4": {"number", "math", "text"},
        "four": {"text"},
        "x+1": {"math", "text"},
        "B": {"math", "text", "choice"},
        "1, 2": {"math", "text"},
    }.items():
        assert {kind for kind in kinds if fits(label, kind)} == fine, label


def test_numbers_have_no_tolerance_but_that_of_floats() -> None:
    assert equal("0.1", "0.1000000000000000055511151231257827") is True, "what a float of 0.1 is"
    assert equal("0.30000000000000004", "0.3") is True
    assert equal("1e-20", "2e-20") is False
    assert equal("0.12345678901234", "0.12345678901235") is False, "fourteen digits are meant"
    assert equal("100000000000000000001", "100000000000000000002") is False
    assert number_of("1e9999") is not None
    assert number_of("1e10000") is None


@given(st.text(min_size=1))
def test_any_text_is_itself_and_nothing_raises(text: str) -> None:
    same = equal(text, text)
    assert same is not False or kind_of(text) == "number"


@given(
    st.text(alphabet="0123456789.,-+/e ", min_size=1, max_size=12), st.text(alphabet="0123456789.,-+/e ", max_size=12)
)
def test_equality_of_numbers_and_texts_is_symmetric(a: str, b: str) -> None:
    if kind_of(a) == kind_of(b) and kind_of(a) in ("number", "text"):
        assert equal(a, b) == equal(b, a)


@given(st.integers(), st.integers(min_value=1))
def test_a_fraction_is_its_value(p: int, q: int) -> None:
    number = number_of(f"{p}/{q}") if p >= 0 else number_of(rf"\frac{{{p}}}{{{q}}}")
    assert number is not None
    assert (number.value.numerator * q, number.rounded) == (p * number.value.denominator, False)


SLOW = {
    "dollars": "$" * 200_000 + "x",
    "accents": "a" + "\u0323\u0301" * 200_000,
    "brackets": "(" * 200_000,
    "braces": "\\text{" * 200_000,
    "commas": "1," * 200_000,
    "digits": "9" * 1_000_000,
    "spaces": " " * 1_000_000 + "x y" + " " * 1_000_000,
    "answers": "<answer>" * 200_000 + "</answer>",
    "boxes": "\\boxed{" * 200_000,
    "stops": "." * 1_000_000,
    "letters": "A" + ")" * 1_000_000,
    "surrogates": "\ud800" * 100_000,
}


@pytest.mark.parametrize("name", SLOW)
def test_long_texts_are_read_in_linear_time(name: str) -> None:
    """Quadratic time would be hours here, so the suite's own limit is the bound."""
    for label in ("5", "B", "1, 2", "x+1", "stop", "5 cm"):
        assert equal(label, SLOW[name]) is False
    (verdict,) = asked([("stop", SLOW[name])], judge())
    assert verdict.reward == 0.0
