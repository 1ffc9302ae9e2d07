"""What a model thinks of a text: log-probs of given tokens, of its full distribution at temperature 1.

Asked as a request that generates nothing (`max_new_tokens=0`), so they do not depend on how the text was sampled: output
log-probs would be those at the sampling temperature. What the log-probs are worth is `figures.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slime_tandem.distill.teacher import response_log_probs
from slime_tandem.protocol import Engine, GenerateRequest
from slime_tandem.tokens.reading import readable_text
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import BoolArray, FloatArray, Message, TandemSample

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A response as a reader meets it: the ids of its prompt and of the response, which of these are text [R], its bytes."""

    prompt_ids: Tokens
    response_ids: Tokens
    is_text: BoolArray
    text_bytes: int


def own_reading(sample: TandemSample, tokens: TokenBytes) -> Reading:
    """The ids that were sampled, for a reader with the senior's tokenizer. End of turn and special tokens are no text.

    >>> from slime_tandem.types import Prompt, SampleKey
    >>> table = TokenBytes((b"a", b" b", None), special=frozenset({2}), eos_ids=frozenset({2}))
    >>> key, prompt = SampleKey(0, 0, 0), Prompt("p", (), None, "t")
    >>> s = TandemSample(key, 0, prompt, (0,), (1, 2), (1, 1), (-1.0, -1.0), "stop", " b", ())
    >>> r = own_reading(s, table)
    >>> r.response_ids, r.is_text.tolist(), r.text_bytes
    ((1, 2), [True, False], 2)
    """
    pieces = [len(tokens.of(t) or b"") for t in sample.response_ids]
    return Reading(sample.prompt_ids, sample.response_ids, np.array(pieces, np.int64) > 0, sum(pieces))


def foreign_reading(
    sample: TandemSample,
    tokens: TokenBytes,
    render: Callable[[Sequence[Message]], list[int]],
    encode: Callable[[str], list[int]],
) -> Reading:
    """The text in the ids of a reader with another tokenizer: `render` its chat template, `encode` plain text.

    Bytes that are no UTF-8 are read as U+FFFD, as everywhere where text crosses tokenizers.
    """
    text, _, _ = readable_text(tokens.join(sample.response_ids))
    ids = tuple(encode(text))
    return Reading(tuple(render(sample.prompt.messages)), ids, np.ones(len(ids), np.bool_), len(text.encode()))


async def log_probs_of(engine: Engine, readings: Sequence[Reading], *, role: str, max_batch: int) -> list[FloatArray]:
    """Log-probs [R] (nats, temperature 1, full distribution) of every reading's response ids, in order.

    `max_batch` sequences travel per HTTP request. Raises EngineError kinds; TeacherScoreError, naming `role`, for an
    answer that is short, of other ids, or holds a value that is no log-prob.
    """
    out = [np.zeros(0) for _ in readings]
    asked = [i for i, r in enumerate(readings) if r.response_ids]
    for at in range(0, len(asked), max_batch):
        part = asked[at : at + max_batch]
        requests = [
            GenerateRequest(
                rid=f"eval-{role}-{i}",
                input_ids=readings[i].prompt_ids + readings[i].response_ids,
                max_new_tokens=0,
                logprob_start_len=len(readings[i].prompt_ids) - 1,
            )
            for i in part
        ]
        for i, result in zip(part, await engine.generate(requests), strict=True):
            out[i] = response_log_probs(result, readings[i].response_ids, role)
    return out
