"""Whether the junior can go on from what the senior began: it finishes the senior's own answers from a prefix, alone.

A policy that helps its partner leaves a beginning from which the partner gets further than from nothing. The prefix is the
first half of the ids that the senior sampled, never re-tokenised; the junior goes on under the same sampling, draws and length
cap to its end of turn. It judges nothing, and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_tandem.config import SamplingConfig
from slime_tandem.errors import EngineError
from slime_tandem.protocol import Engine, GenerateRequest
from slime_tandem.rollout.handoff import sampling_seed
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import TandemSample


def first_half(sample: TandemSample) -> tuple[int, ...]:
    """The first half of the response's ids, rounded down: an answer of one token leaves nothing."""
    return sample.response_ids[: len(sample.response_ids) // 2]


async def finished(
    engine: Engine,
    samples: Sequence[TandemSample],
    prefixes: Sequence[Sequence[int]],
    tokens: TokenBytes,
    sampling: SamplingConfig,
    max_batch: int,
) -> list[str]:
    """The texts of prefix and continuation, in order; `tokens` are the engine's, which are the senior's as well.

    `prefixes` [N]: response ids that stand already. `max_batch` sequences travel per HTTP request. Text is cut at the first
    stop string, as in a rollout. Raises EngineError kinds, also for a continuation that was aborted.
    """
    out = []
    for at in range(0, len(samples), max_batch):
        part = list(zip(samples[at : at + max_batch], prefixes[at : at + max_batch], strict=True))
        requests = [
            GenerateRequest(
                rid=f"transfer-{at + i}",
                input_ids=(*sample.prompt_ids, *prefix),
                max_new_tokens=sampling.max_new_tokens - len(prefix),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=tuple(sorted(tokens.eos_ids)),
                stop=sampling.stop,
                sampling_seed=sampling_seed(sample.key),
            )
            for i, (sample, prefix) in enumerate(part)
        ]
        for result, (sample, prefix) in zip(await engine.generate(requests), part, strict=True):
            if result.finish_reason == "abort":
                raise EngineError(
                    f"continuation of {sample.key}", "abort", "an answer of the junior", "look at its server's log"
                )
            out.append(_text((*prefix, *result.output_ids), tokens, sampling.stop))
    return out


def _text(ids: Sequence[int], tokens: TokenBytes, stops: Sequence[str]) -> str:
    text = tokens.join(ids).decode("utf-8", "replace")
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
