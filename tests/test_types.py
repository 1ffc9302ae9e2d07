"""The frozen records refuse what does not fit together."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slime_tandem.errors import DataError
from slime_tandem.types import AlignedScores, AuthorRun, Message, Prompt, SampleKey, TandemSample


def sample(**changes: object) -> TandemSample:
    fields: dict[str, object] = {
        "key": SampleKey(0, 0, 0),
        "group_id": 0,
        "prompt": Prompt("p", (Message("user", "hi"),), "1", "t"),
        "prompt_ids": (1,),
        "response_ids": (5, 6, 7),
        "authorship_mask": (1, 0, 1),
        "log_probs": (-0.1, -0.2, -0.3),
        "finish_reason": "stop",
        "text": "x",
        "runs": (AuthorRun(1, 0, 1, "0"),),
    }
    return TandemSample(**(fields | changes))  # type: ignore[arg-type]


def test_counts() -> None:
    assert (sample().senior_tokens, sample().switches) == (2, 2)
    empty = sample(response_ids=(), authorship_mask=(), log_probs=())
    assert (empty.senior_tokens, empty.switches) == (0, 0)


@pytest.mark.parametrize("name", ["authorship_mask", "log_probs"])
@pytest.mark.parametrize("wrong", [(), (1, 1), (1, 1, 1, 1)])
def test_a_missing_or_mis_sized_mask_is_an_error(name: str, wrong: tuple[int, ...]) -> None:
    """A silently missing mask would train plain GRPO."""
    with pytest.raises(DataError, match=rf"TandemSample\.{name}='length {len(wrong)}': expected length 3"):
        sample(**{name: wrong})


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().text = "y"  # type: ignore[misc]


def test_messages_as_chat_templates_take_them() -> None:
    assert Message("user", "hi").as_dict() == {"role": "user", "content": "hi"}


def test_coverage() -> None:
    mask = np.array([True, False, True, True])
    assert AlignedScores(np.zeros(4), mask, {"boundary": 1}).coverage == 0.75
    nothing = np.zeros(0)
    assert AlignedScores(nothing, nothing.astype(bool), {}).coverage == 1.0


@pytest.mark.parametrize(
    ("log_probs", "unaligned"),
    [([0.0, 0.0], {}), ([0.0, 0.0], {"boundary": 2}), ([0.0], {"boundary": 1}), ([np.nan, 0.0], {"boundary": 1})],
)
def test_scores_that_do_not_add_up_are_our_bug(log_probs: list[float], unaligned: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        AlignedScores(np.array(log_probs), np.array([True, False]), unaligned)
