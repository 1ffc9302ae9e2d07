"""What is said of a first step whose rewards are all equal: the cause that was there."""

from __future__ import annotations

from typing import Any

import pytest

from slime_tandem.config import TaskSpec
from slime_tandem.tasks.first_look import Look, why_equal
from slime_tandem.types import Message, Prompt

FILE: dict[str, Any] = {"family": "jsonl", "path": "p"}


def look(text: str, label: str | None = "4", reward: float = 0.0, *, cut: bool = False) -> Look:
    return Look(Prompt("p", (Message("user", "2 + 2 ="),), label, "t", {"spec": 0}), text, reward, cut)


@pytest.mark.parametrize(
    ("spec", "one", "found", "remedy"),
    [
        (FILE, look("4"), "4 of 4 responses have no answer (<answer> or", "answer_format=last_number, by which 4 of 4"),
        (FILE, look("#### 4"), "have no answer", "answer_format=hash"),
        (FILE, look("who knows"), "have no answer", "tasks[].instruction, e.g. 'End with <answer>"),
        (FILE, look("thinking", cut=True), "4 of 4 were cut", "sampling.max_new_tokens"),
        (FILE, look("<answer>5</answer>"), "4 of 4 responses have an answer", "compare"),
        (FILE, look("4", None), "no prompt has a label", "objective.reward_coef=0"),
        ({**FILE, "answer_format": "boxed"}, look("4"), "no answer (boxed)", "answer_format=last_number"),
        ({**FILE, "reward": "mine:f"}, look("4"), "mine:f gives no other", "try it"),
        ({"family": "chain_sum"}, look("4"), "no answer", "let the prompts ask for it, e.g."),
        (FILE, look("<answer>4</answer>", reward=1.0), "all 4 rewards are 1: every response is right", "harder"),
    ],
)
def test_the_likeliest_cause(spec: dict[str, Any], one: Look, found: str, remedy: str) -> None:
    cause = why_equal([TaskSpec(**spec)], [one] * 4)
    assert cause is not None
    assert found in cause.found
    assert remedy in cause.remedy
    assert len(cause.examples) == 3
    assert "2 + 2 =" in cause.examples[0]


def test_rewards_that_differ_and_one_alone_say_nothing() -> None:
    assert why_equal([TaskSpec(**FILE)], [look("4"), look("4", reward=1.0)]) is None
    assert why_equal([TaskSpec(**FILE)], [look("4")]) is None


def test_what_a_terminal_would_obey_is_shown_by_number() -> None:
    cause = why_equal([TaskSpec(**FILE)], [look("\x1b[2J\u202e")] * 2)
    assert cause is not None
    assert "\x1b" not in cause.examples[0]
    assert "\u202e" not in cause.examples[0]
