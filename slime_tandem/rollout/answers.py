"""Whether an engine's answer can be used: its log-probs, its authors, its scores. Pure; each raises EngineError or gives back.

What a usable answer is taken for is the writer's to say (`rollout.writer`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime_tandem.errors import DataError, EngineError
from slime_tandem.protocol import GenerateResult, same_ids
from slime_tandem.rollout.handoff import HandoffRule, OpenRun
from slime_tandem.types import JUNIOR, SENIOR, SampleKey, TandemSample

ROLE = {SENIOR: "senior", JUNIOR: "junior"}
_DROPPED_FIELDS = "look at that server's log (some routers drop log-prob fields: sglang #10764, #10766)"


def check_log_probs(author: int, result: GenerateResult) -> None:
    """One finite log-prob for every token of the answer."""
    n, values = len(result.output_ids), result.output_log_probs
    if len(values) == n and all(map(math.isfinite, values)):
        return
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    what = f"{len(values)} for {n} tokens" if bad is None else f"{values[bad]} at token {bad}"
    raise EngineError(
        f"{ROLE[author]} output log-probs of {result.rid}", what, "one finite log-prob per token", _DROPPED_FIELDS
    )


def check_not_empty(author: int, result: GenerateResult, taken: int) -> None:
    """At least one token was `taken`: asking again would go on for ever."""
    if taken == 0:
        raise EngineError(
            f"{ROLE[author]} answer to {result.rid}",
            f"{len(result.output_ids)} tokens, finish reason {result.finish_reason!r}",
            "at least one token",
            "look at that server's log",
        )


def proven_authors(result: GenerateResult, open_run: OpenRun, key: SampleKey, written: int) -> list[int]:
    """The authors [n] that a fused engine reports, proven equal to the rule's for every token.

    `open_run`: where the response of sample `key` stands, with `written` tokens.
    """
    n = len(result.output_ids)
    if len(result.authors) != n or len(result.senior_log_probs) != n:
        raise EngineError(
            f"fused answer to {result.rid}",
            f"{len(result.authors)} authors and {len(result.senior_log_probs)} senior log-probs for {n} tokens",
            "one of each per token",
            "check that the server was started by `slime-tandem serve --fused`",
        )
    expected, runs = open_run.authors_of(result.output_ids)
    reported = list(result.authors)
    if reported != (due := expected.tolist()):
        i = next(i for i, (a, b) in enumerate(zip(reported, due, strict=True)) if a != b)
        raise EngineError(
            f"author of response token {written + i} of {key}, author key {open_run.akey:016x}, run {runs[i]}",
            reported[i],
            f"{due[i]}, what the rule prescribes",
            "report this with the engine's version and log: the sample was rejected",
        )
    return reported


def scores_of(result: GenerateResult, ids: Sequence[int], first: int) -> list[float]:
    """The input log-probs (nats) of the last tokens that the engine was given, which must be `ids`.

    `first`: place of `ids[0]` in the response, for messages.
    """
    n = len(ids)
    values = result.input_log_probs[-n:]
    if not same_ids(result.input_ids[-n:], ids):
        raise EngineError(
            f"senior input log-probs of {result.rid}",
            f"{len(result.input_log_probs)} values of ids {result.input_ids[-n:][:40]}",
            f"one for each of the last {n} response tokens, {list(ids[:40])}",
            _DROPPED_FIELDS,
        )
    scores: list[float] = []
    for i, value in enumerate(values, start=first):
        if value is None or not math.isfinite(value):
            raise EngineError(
                f"senior input log-prob of {result.rid} at response token {i}",
                value,
                "a finite log-prob",
                "look at that server's log",
            )
        scores.append(value)
    return scores


def check_resumable(sample: TandemSample, rule: HandoffRule) -> None:
    """An aborted sample whose authors are those of this rule; raises DataError for any other."""
    if sample.finish_reason != "abort":
        raise DataError(
            f"TandemSample.finish_reason of {sample.key}", sample.finish_reason, "abort", "resume aborted ones only"
        )
    again = rule.authorship(
        sample.key, sample.response_ids, inserted=sample.inserted, fallback_starts=sample.fallback_starts
    )
    if again != sample.authorship_mask:
        at = next(i for i, (a, b) in enumerate(zip(again, sample.authorship_mask, strict=True)) if a != b)
        raise DataError(
            f"TandemSample.authorship_mask of {sample.key}",
            f"{sample.authorship_mask[at]} at token {at}",
            f"{again[at]}, what the rule prescribes",
            "resume with the tandem settings that the sample was written under",
        )
