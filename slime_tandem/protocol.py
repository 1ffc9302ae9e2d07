"""The records of SGLang's native HTTP API that we use: what a request holds and what an answer gives back.

Field names and meanings follow `python/sglang/srt/managers/io_struct.py` (`GenerateReqInput`) and
`sampling/sampling_params.py` of SGLang 0.5.15.post1. Log-probs are nats; ids belong to the served model's tokenizer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from slime_tandem.types import FinishReason

TopLogProbs = tuple[tuple[float, int], ...]
"""One position's candidates as (log-prob, id), best first."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """The authorship rule of one request in numbers, for an engine that decodes senior and junior together.

    Run k is the senior's if `alternate` and k is even; else if the draw of (`akey`, k) is below `threshold`, in [0, 2^32]
    (`rollout.handoff.HandoffRule.author`). A run ends after a token of the boundary table with fingerprint `table`
    ("": none) or after `cap` tokens (None: no cap). At the end of the request's input the open run is `run` and holds
    `run_length` tokens. `junior_scores`: the request's input log-probs are the junior's instead of the senior's.
    """

    akey: int
    threshold: int
    alternate: bool
    cap: int | None
    table: str
    run: int = 0
    run_length: int = 0
    junior_scores: bool = False


@lru_cache(maxsize=16)
def table_fingerprint(ids: frozenset[int]) -> str:
    """Sixteen hex digits that name a set of boundary ids, "" for the empty set: SHA-256 of the sorted ids as uint32.

    >>> table_fingerprint(frozenset()), table_fingerprint(frozenset({2, 1}))
    ('', '34fb5c825de7ca4a')
    """
    if not ids:
        return ""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *sorted(ids))).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue (or, with `max_new_tokens=0`, only to score).

    `logprob_start_len` is the first position whose token gets an input log-prob (-1: none). A stop token or the token
    that completes a stop string / regex match stays in `output_ids`. `conversation` is not sent: it names the context that
    requests of one response share, for `engines.sessions`. `token_ids_logprob`: ids whose log-probs are wanted at every
    position; an empty list asks for nothing (`Sharing` in slime_hooks/runtime.py says what for). `truncated_logprobs`: the
    output log-probs are those of the truncated, renormalised distribution that the token was drawn from, and the kept ids
    come along; only the embedded server does this (it travels as an entry of SGLang's `custom_params`, which SGLang ignores:
    its answer then lacks them). `input_temperature`: the temperature of the input
    log-probs; 1 is every server's, another travels in `custom_params`, too, and only the embedded server obeys.
    `handoff`: senior and junior write by this rule; only a fused engine (docs/fused.md)
    understands it.

    >>> GenerateRequest("r1", (1, 2, 3), max_new_tokens=4, stop_token_ids=(0,)).sampling_params()["max_new_tokens"]
    4
    """

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    sampling_seed: int | None = None
    return_logprob: bool = True
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] | None = None
    session_params: dict[str, Any] | None = None
    conversation: str | None = None
    handoff: Handoff | None = None
    truncated_logprobs: bool = False
    input_temperature: float = 1.0

    def sampling_params(self) -> dict[str, Any]:
        """The `sampling_params` object of the wire format."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": list(self.stop_token_ids),
            "stop": list(self.stop),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        if self.stop_regex:
            params["stop_regex"] = list(self.stop_regex)
        if self.sampling_seed is not None:
            params["sampling_seed"] = self.sampling_seed
        if self.min_p > 0.0:
            params["min_p"] = self.min_p
        custom: dict[str, Any] = {"truncated_logprobs": True} if self.truncated_logprobs else {}
        if self.input_temperature != 1.0:
            custom["input_temperature"] = self.input_temperature
        if custom:
            params["custom_params"] = custom
        return params


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One answer.

    `output_log_probs` [n] nats, one per output id (empty if not asked for). `input_log_probs` covers positions
    `logprob_start_len ..` of the input; its first entry is None (nothing predicts the first token).
    `served_rid` is the request's name on the wire (the client's repeats have names of their own), by which a session continues.
    `authors` and `senior_log_probs` [n] (nats, at the request's temperature) are there if the request had a `handoff`; of the
    latter some may be None, of tokens of the junior's that the senior has not read.
    `kept_ids` is there, one entry per output id, if `truncated_logprobs` was asked for: the ids that the token was
    drawn from, empty for
    the whole vocabulary. `finish_reason` is stop, length or abort; `matched` is the stop id, string or regex that ended it.
    """

    rid: str
    output_ids: tuple[int, ...]
    output_log_probs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: str
    matched: int | str | None = None
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    input_log_probs: tuple[float | None, ...] = ()
    input_ids: tuple[int, ...] = ()
    output_top_logprobs: tuple[TopLogProbs, ...] = ()
    input_top_logprobs: tuple[TopLogProbs | None, ...] = ()
    output_token_ids_logprobs: tuple[TopLogProbs, ...] = ()
    input_token_ids_logprobs: tuple[TopLogProbs | None, ...] = ()
    served_rid: str = ""
    authors: tuple[int, ...] = ()
    senior_log_probs: tuple[float | None, ...] = ()
    kept_ids: tuple[tuple[int, ...], ...] = ()


def same_ids(reported: Sequence[int], sent: Sequence[int]) -> bool:
    """Whether an answer's input ids are those that were sent; 0 in place of the highest id counts as the same.

    SGLang reports the last id of the vocabulary as 0 (0.5.15.post1,
    managers/scheduler_components/logprob_result_processor.py:53, an off-by-one in the clipping of image placeholders);
    its log-prob is right.

    >>> same_ids([5, 0, 7], [5, 9, 7]), same_ids([5, 0, 7], [5, 6, 7]), same_ids([5], [5, 9])
    (True, False, False)
    """
    if len(reported) != len(sent):
        return False
    if tuple(reported) == tuple(sent):
        return True
    highest = max(sent, default=0)
    return all(a == b or (a == 0 and b == highest) for a, b in zip(reported, sent, strict=True))


class Engine(Protocol):
    """What rollout and scoring need of an engine; `engines.client.EngineClient` is the HTTP one."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Answer all requests, in order; one HTTP request for the whole batch."""
        ...
