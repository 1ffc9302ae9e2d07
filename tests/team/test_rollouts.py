"""What a rollout does with samples that could not be written."""

from __future__ import annotations

import pytest

from slime_tandem.errors import EngineError
from slime_tandem.team.rollouts import successful
from slime_tandem.types import AuthorRun, FailedSample, Prompt, SampleKey, TandemSample

PROMPT = Prompt("p", (), None, "t")
GOOD = TandemSample(SampleKey(0, 0, 0), 0, PROMPT, (1,), (2,), (1,), (-0.5,), "stop", "x", (AuthorRun(1, 0, 1, "v"),))
BAD = FailedSample(SampleKey(0, 0, 1), 0, PROMPT, "input too long")


def test_a_failed_sample_stops_the_rollout_unless_it_may_be_dropped() -> None:
    assert successful([GOOD], "stop") == [GOOD]
    with pytest.raises(EngineError, match=r"(?s)could not be written='1 of 2'.*sample_index=1.*input too long"):
        successful([GOOD, BAD], "stop")
    assert successful([BAD, GOOD], "drop_sample") == [GOOD]


def test_a_rollout_without_a_single_sample_is_an_error_in_any_case() -> None:
    with pytest.raises(EngineError, match="1 of 1"):
        successful([BAD], "drop_sample")
