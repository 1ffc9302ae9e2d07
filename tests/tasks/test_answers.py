"""The answer in a response, and whether it is the label."""

from __future__ import annotations

import pytest

from slime_tandem.config import TaskSpec
from slime_tandem.errors import DataError
from slime_tandem.tasks.answers import extract_answer, label_reward
from slime_tandem.types import Prompt


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", None),
        ("the answer is 4", None),
        ("<answer>4", None),
        ("<answer></answer>", ""),
        ("<answer>3</answer> no <answer>\n4 </answer>!", "4"),
        ("<answer><answer>4</answer>", "4"),
        ("\\boxed{3} and \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<answer>5</answer> \\boxed{6}", "5"),
        ("\\boxed{3", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_the_reward_by_label() -> None:
    prompt = Prompt("p", (), "1/2", "t")
    for text, value in (
        ("<answer>0.5</answer>", 1.0),
        ("\\boxed{\\frac{1}{2}}", 1.0),
        ("1/2", 0.0),
        ("<answer>2</answer>", 0.0),
    ):
        assert label_reward(prompt, text) == value
    with pytest.raises(DataError, match="label of prompt p=None: expected the right answer"):
        label_reward(Prompt("p", (), None, "t"), "<answer>2</answer>")


@pytest.mark.parametrize(
    ("answer_format", "text", "found"),
    [
        ("tags", "<answer>1</answer> \\boxed{2}", "1"),
        ("tags", "\\boxed{2}", None),
        ("boxed", "<answer>1</answer> \\boxed{2}", "2"),
        ("hash", "#### 3\nso\n#### 4 \nbye", "4"),
        ("hash", "4", None),
        ("hash", "####", None),
        ("last_number", "5 apples cost $1,234.50, so", "1,234.50"),
        ("last_number", "3-1 is 2, not -7.", "-7"),
        ("last_number", "it is 3/4", "3/4"),
        ("last_number", "none", None),
        ("last_line", "a\n b \n\n", "b"),
        ("last_line", " \n", None),
        ("choice", "The answer is (B). A good one, I think", "B"),
        ("choice", "A", "A"),
        ("choice", "BAD", None),
        ("regex:answer: (\\w+)", "answer: x, answer: y", "y"),
        ("regex:[0-9]+", "1 and 23.", "23"),
        ("regex:[0-9]+", "none", None),
        ("regex:(a+)+$", "a" * 50_000 + "b", None),  # RE2: no search without end
    ],
)
def test_formats_of_answers(answer_format: str, text: str, found: str | None) -> None:
    assert extract_answer(text, answer_format) == found
    label = found or "1"
    assert label_reward(Prompt("p", (), label, "t"), text, None, answer_format) == float(found is not None)


def test_formats_that_are_refused() -> None:
    for value, says in {"box": "one of tags", "regex:(": "RE2", "regex:(a)(b)": "one group at most, not 2"}.items():
        with pytest.raises(ValueError, match=says):
            TaskSpec(family="jsonl", path="p", answer_format=value)
    with pytest.raises(ValueError, match="`answer_format` is of the reward `label`"):
        TaskSpec(family="chain_sum", answer_format="boxed")
