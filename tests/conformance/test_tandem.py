"""The tandem loop on two running servers: who wrote what, with which probability, and that it repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.sessions import SessionEngine
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import Engine
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.drive import write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.strategies import STRATEGIES, Mark, Strategy
from slime_tandem.types import JUNIOR, SENIOR, FailedSample, Message, Prompt, SampleKey, TandemSample

TOLERANCE = 1e-4
CAP, SAMPLES = 40, 8
_DIGITS = "0123456789"
after_digit = Strategy(ends_after=lambda data: data[-1:].isdigit(), cap=5)
after_digit_marked = Strategy(ends_after=lambda data: data[-1:].isdigit(), cap=5, mark=Mark.of(_DIGITS))
OWN = (f"{__name__}:after_digit", f"{__name__}:after_digit_marked")
"""A user's own: where its runs end is found from the ids, or the server stops at a pattern."""


def writers(rig: Any, strategy: str, temperature: float = 1.0, **options: Any) -> list[TandemWriter]:
    tokenizer = ModelTokenizer.load(rig.folders["senior"])
    ids = boundary_ids(strategy, tokenizer.tokens.table, tokenizer.tokens.special)
    # Random models write few spaces; a gap of 4 makes words end by the cap too.
    rule = HandoffRule.of(strategy, 0.5, 4, 3, ids)
    made = []
    for i in range(SAMPLES):
        prompt = Prompt(f"p{i}", (Message("user", f"State {i} + {i} ="),), None, "test")
        made.append(
            TandemWriter(
                SampleKey(3, 0, i), i, prompt, tokenizer.render(prompt.messages),
                WriterOptions(rule, SamplingConfig(max_new_tokens=CAP, temperature=temperature), tokenizer.tokens, **options),
            )
        )  # fmt: skip
    return made


def on_both(rig: Any, work: Callable[[Mapping[int, Engine]], Awaitable[list[Any]]]) -> list[TandemSample]:
    async def main() -> list[Any]:
        async with (
            EngineClient(rig.servers["senior"].url, role="senior", api_key=rig.key) as senior,
            EngineClient(rig.servers["junior"].url, role="junior", api_key=rig.key) as junior,
        ):
            for client in (senior, junior):
                await client.flush_cache()
            return await work({SENIOR: senior, JUNIOR: junior})

    samples = asyncio.run(main())
    assert [s.reason for s in samples if isinstance(s, FailedSample)] == []
    return samples


@pytest.mark.parametrize("strategy", [*STRATEGIES, *OWN])
def test_lockstep_rollouts(rig: Any, strategy: str) -> None:
    temperature = 0.8 if strategy == "chunk" else 1.0
    score = strategy in ("word", "bernoulli")
    made = writers(rig, strategy, temperature, score_junior=score)
    samples = on_both(rig, lambda who: write_lockstep(made, who, senior_version="default"))
    assert {a for s in samples for a in s.authorship_mask} == {SENIOR, JUNIOR}
    for writer, s in zip(made, samples, strict=True):
        assert s.authorship_mask == writer.options.rule.authorship(s.key, s.response_ids)
        assert [run.start for run in s.runs] == [0, *(run.stop for run in s.runs[:-1])]
        assert s.runs[-1].stop == len(s.response_ids) == len(s.log_probs)
        assert {run.weight_version for run in s.runs} == {"default"}
        assert s.finish_reason == ("stop" if s.response_ids[-1] in writer.options.tokens.eos_ids else "length")
        assert s.finish_reason == "stop" or len(s.response_ids) == CAP
        # Every token's log-prob is its author's, given the whole text before it.
        ids, n = [*s.prompt_ids, *s.response_ids], len(s.prompt_ids)
        tables = {
            SENIOR: rig.log_probs(ids, temperature),
            JUNIOR: rig.log_probs(ids, temperature, role="junior"),
        }
        want = [tables[a][n - 1 + i, t] for i, (a, t) in enumerate(zip(s.authorship_mask, s.response_ids, strict=True))]
        np.testing.assert_allclose(s.log_probs, want, atol=TOLERANCE, rtol=0)
        if score:  # the senior's view of every token came along with its own next request
            seen = [tables[SENIOR][n - 1 + i, t] for i, t in enumerate(s.response_ids)]
            np.testing.assert_allclose(s.senior_log_probs, seen, atol=TOLERANCE, rtol=0)


def test_sessions_write_the_same_with_less_traffic(rig: Any) -> None:
    """Greedy: SGLang has no seeds on a CPU (docs/sglang.md)."""

    async def kept(who: Mapping[int, Engine]) -> list[Any]:
        async with SessionEngine(who[SENIOR]) as senior, SessionEngine(who[JUNIOR]) as junior:  # type: ignore[arg-type]
            made = writers(rig, "word", 0.0, score_junior=True)
            return list(await write_lockstep(made, {SENIOR: senior, JUNIOR: junior}))

    plain = on_both(rig, lambda who: write_lockstep(writers(rig, "word", 0.0, score_junior=True), who))
    for a, b in zip(plain, on_both(rig, kept), strict=True):
        assert (a.response_ids, a.authorship_mask) == (b.response_ids, b.authorship_mask)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(a.senior_log_probs, b.senior_log_probs, atol=TOLERANCE, rtol=0)


def test_free_running_samples_are_the_lockstep_ones_and_repeat(rig: Any) -> None:
    """Greedy on SGLang, which has no seeds on a CPU (docs/sglang.md)."""
    temperature = 0.0 if rig.kind == "sglang" else 1.0

    async def free(who: Mapping[int, Engine]) -> list[TandemSample]:
        return list(await asyncio.gather(*(write_one(w, who) for w in writers(rig, "word", temperature))))

    together = on_both(rig, lambda who: write_lockstep(writers(rig, "word", temperature), who))
    singly = on_both(rig, free)
    again = on_both(rig, free)
    for a, b, c in zip(together, singly, again, strict=True):
        assert a.response_ids == b.response_ids == c.response_ids
        assert a.authorship_mask == b.authorship_mask
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=TOLERANCE, rtol=0)
