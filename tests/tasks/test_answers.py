"""The answer in a response, and whether it is the label."""

from __future__ import annotations

import pytest

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
