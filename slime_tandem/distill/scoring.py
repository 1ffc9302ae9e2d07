"""A teacher scores what the policy sampled: render, ask the engine, align to the student's positions.

The teacher reads the raw messages through its own chat template and the response as text through its own tokenizer; its
log-probs are those of its full distribution at temperature 1 (SGLang scores inputs that way, slime #2085, #2319). An answer
that is short, missing a value or not finite fails that sample with a reason; the caller decides what a failed sample means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_tandem.distill.alignment import align_strict, readable_text
from slime_tandem.distill.token_bytes import TokenBytes
from slime_tandem.engines.protocol import Engine, GenerateRequest, GenerateResult, same_ids
from slime_tandem.errors import TeacherScoreError, explain
from slime_tandem.types import AlignedScores, Message, TandemSample


@dataclass(frozen=True)
class Teacher:
    """A scorer with a tokenizer of its own.

    `render(messages)` gives the prompt ids of its chat template with the generation prompt; `encode(text)` the ids of
    plain text without special tokens; `end_of_turn` the id that closes its turn; `max_batch` sequences per HTTP request;
    `max_tokens` prompt and response tokens that the engine takes together, None if that is not known.
    """

    engine: Engine
    tokens: TokenBytes
    render: Callable[[Sequence[Message]], list[int]]
    encode: Callable[[str], list[int]]
    end_of_turn: int
    max_batch: int = 128
    max_tokens: int | None = None

    async def score(
        self, samples: Sequence[TandemSample], student: TokenBytes
    ) -> list[AlignedScores | TeacherScoreError]:
        """One entry per sample, in order: aligned scores, or why there are none.

        A sample longer than `max_tokens` is not sent: the engine would refuse the whole batch for it. Raises EngineError
        kinds only when the engine itself cannot be reached or refuses the request.
        """
        plans = [self._plan(sample, student) for sample in samples]
        too_long = {i: error for i, (request, _) in enumerate(plans) if (error := self._too_long(request)) is not None}
        sent = [i for i in range(len(plans)) if i not in too_long]
        out: dict[int, AlignedScores | TeacherScoreError] = {**too_long}
        for start in range(0, len(sent), self.max_batch):
            part = sent[start : start + self.max_batch]
            results = await self.engine.generate([plans[i][0] for i in part])
            for i, result in zip(part, results, strict=True):
                response = plans[i][1]
                try:
                    log_probs = response_log_probs(result, response)
                    out[i] = align_strict(samples[i].response_ids, student, response, self.tokens, log_probs)
                except TeacherScoreError as error:
                    out[i] = error
        return [out[i] for i in range(len(plans))]

    def _too_long(self, request: GenerateRequest) -> TeacherScoreError | None:
        n = len(request.input_ids)
        if self.max_tokens is None or n <= self.max_tokens:
            return None
        return TeacherScoreError(
            explain(
                f"teacher request {request.rid}",
                f"{n} tokens",
                f"at most {self.max_tokens}, the teacher's context or its server's cache",
                "lower sampling.max_new_tokens, shorten the prompts, raise engine.cache_tokens, or take a teacher with a "
                "longer context",
            )
        )

    def _plan(self, sample: TandemSample, student: TokenBytes) -> tuple[GenerateRequest, list[int]]:
        text, _, _ = readable_text(student.join(sample.response_ids))
        response = self.encode(text)
        if sample.response_ids and sample.response_ids[-1] in student.eos_ids:
            response.append(self.end_of_turn)
        prompt = self.render(sample.prompt.messages)
        request = GenerateRequest(
            rid=f"score-{sample.key.seed}-{sample.key.rollout_id}-{sample.key.sample_index}",
            input_ids=(*prompt, *response),
            max_new_tokens=0,
            logprob_start_len=len(prompt) - 1,
        )
        return request, response


def response_log_probs(result: GenerateResult, response: Sequence[int], role: str = "teacher") -> list[float]:
    """The last `len(response)` input log-probs of an answer [Rt], nats.

    Taken from the end, because engines differ in whether the entry at `logprob_start_len` itself is returned. Raises
    TeacherScoreError for a short answer, other ids than sent, or a value that is no log-prob (None, NaN, inf, positive);
    `role` names the scorer in it.
    """
    n = len(response)
    if n == 0:
        return []
    values, ids = result.input_log_probs[-n:], result.input_ids[-n:]
    if len(values) < n or not same_ids(ids, response):
        raise TeacherScoreError(
            explain(
                f"{role} answer {result.rid}",
                f"{len(result.input_log_probs)} input log-probs",
                f"one for each of the {n} response tokens, with the ids that were sent",
                f"check the {role}'s server or router (some drop log-prob fields: sglang #10764, #10766)",
            )
        )
    out: list[float] = []
    for position, value in enumerate(values):
        if value is None or not math.isfinite(value) or value > 1e-4:
            raise TeacherScoreError(
                explain(
                    f"{role} answer {result.rid}, response position {position}",
                    value,
                    "a finite log-probability of at most 0",
                    f"the {role}'s server is faulty or gives the token no probability at all",
                )
            )
        out.append(min(value, 0.0))
    return out
