"""The co-writing loop: senior and junior write one response in turns, on two engines.

`TandemWriter` is the loop without I/O: it says which engine to ask for what, and takes the answer. Two drivers feed it:
`write_one` for a single sample as its own task, and `write_lockstep`, which asks each engine once per round with a batch
of all samples that wait for it. Lockstep fixes which sequences an engine computes together, so a run repeats bit for bit.

One request covers a chain of runs by the same author. Tokens that an engine wrote past a handoff are dropped and counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from slime_tandem.config import SamplingConfig
from slime_tandem.engines.protocol import Engine, GenerateRequest, GenerateResult
from slime_tandem.errors import EngineError, WeightVersionError, explain
from slime_tandem.rollout.boundaries import stop_regex
from slime_tandem.rollout.handoff import HandoffRule, author_key, sampling_seed
from slime_tandem.types import JUNIOR, SENIOR, AuthorRun, FinishReason, Prompt, SampleKey, TandemSample

ROLE = {SENIOR: "senior", JUNIOR: "junior"}


class TandemWriter:
    """One response in the making.

    Ask `next_request()` who writes next and what to send, give the answer to `accept()`, until `done`; then `sample()`.
    Every token is checked against the authorship rule as it arrives.

    >>> rule = HandoffRule("word", 1.0, 32, 16, frozenset())
    >>> w = TandemWriter(SampleKey(0, 0, 0), 0, Prompt("p", (), None, "t"), (1, 2), rule, SamplingConfig(max_new_tokens=8),
    ...                  eos_ids=frozenset({0}), decode=str)
    >>> author, request = w.next_request()
    >>> author, request.input_ids, request.max_new_tokens
    (1, (1, 2), 8)
    >>> w.accept(GenerateResult(request.rid, (7, 0), (-0.5, -0.1), "stop", "v0"))
    >>> w.done, w.sample().authorship_mask, w.sample().finish_reason
    (True, (1, 1), 'stop')
    """

    def __init__(
        self,
        key: SampleKey,
        group_id: int,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        rule: HandoffRule,
        sampling: SamplingConfig,
        *,
        eos_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        custom_boundary: bool = False,
    ) -> None:
        self.key, self.group_id, self.prompt = key, group_id, prompt
        self.prompt_ids = tuple(prompt_ids)
        self.rule, self.sampling, self.eos_ids = rule, sampling, eos_ids
        self._decode = decode
        # A user's own boundary ids need not show in the text: the server then stops on the ids themselves.
        self._stop_on_ids = tuple(sorted(rule.boundary)) if custom_boundary else None
        self._akey = author_key(key)
        self._seed = sampling_seed(key)
        self._run, self._run_length = 0, 0
        self._asked: int | None = None
        self.response_ids: list[int] = []
        self._authors: list[int] = []
        self._log_probs: list[float] = []
        self._runs: list[AuthorRun] = []
        self._discarded = 0
        self._requests = 0
        self._finish: FinishReason | None = None

    @property
    def done(self) -> bool:
        """True when no further request is needed."""
        return self._finish is not None

    def next_request(self) -> tuple[int, GenerateRequest]:
        """(author, request) for the chain of runs that the next author writes."""
        assert not self.done, "the response is finished"
        author = self.rule.author(self._akey, self._run)
        budget = self.sampling.max_new_tokens - len(self.response_ids)
        pattern: str | None = None
        stop_ids = tuple(sorted(self.eos_ids))
        runs = self.rule.runs_until_change(self._akey, self._run, budget)
        if runs is not None:
            if self.rule.run_cap is not None:
                budget = min(budget, runs * self.rule.run_cap - self._run_length)
            if self._stop_on_ids is not None:
                stop_ids += self._stop_on_ids
            else:
                pattern = stop_regex(self.rule.strategy, runs)
        self._asked = author
        s = self.sampling
        return author, GenerateRequest(
            rid=f"{self.key.seed}-{self.key.rollout_id}-{self.key.sample_index}-{self._requests}",
            input_ids=self.prompt_ids + tuple(self.response_ids),
            max_new_tokens=budget,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            stop_token_ids=stop_ids,
            stop_regex=(pattern,) if pattern else (),
            sampling_seed=self._seed,
        )

    def accept(self, result: GenerateResult) -> None:
        """Take over the tokens that the asked author was entitled to write; drop and count the rest.

        Raises EngineError for an answer without a usable token, which would make the loop ask for ever, and for one
        whose log-probs are missing or not finite.
        """
        assert self._asked is not None, "next_request() comes first"
        author, self._asked = self._asked, None
        self._requests += 1
        start = len(self.response_ids)
        _check_log_probs(author, result)
        for token, log_prob in zip(result.output_ids, result.output_log_probs, strict=True):
            if self.done or self.rule.author(self._akey, self._run) != author:
                self._discarded += 1
                continue
            self.response_ids.append(token)
            self._authors.append(author)
            self._log_probs.append(log_prob)
            self._run_length += 1
            if token in self.eos_ids:
                self._finish = "stop"
            elif len(self.response_ids) >= self.sampling.max_new_tokens:
                self._finish = "length"
            if self.rule.ends_run(token, self._run_length):
                self._run, self._run_length = self._run + 1, 0
        stop = len(self.response_ids)
        if stop > start:
            self._runs.append(AuthorRun(author, start, stop, result.weight_version))
        if result.finish_reason == "abort":
            self._finish = self._finish or "abort"
        elif stop == start:
            raise EngineError(
                explain(
                    f"{ROLE[author]} answer to {result.rid}",
                    f"{len(result.output_ids)} tokens, finish reason {result.finish_reason!r}",
                    "at least one token",
                    "look at that server's log",
                )
            )

    def sample(self) -> TandemSample:
        """The finished response. The recorded authorship is proven equal to the recomputed one."""
        assert self._finish is not None, "the response is not finished"
        assert self.rule.authorship(self.key, self.response_ids) == tuple(self._authors)
        body = self.response_ids[:-1] if self._finish == "stop" else self.response_ids
        return TandemSample(
            key=self.key,
            group_id=self.group_id,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.response_ids),
            authorship_mask=tuple(self._authors),
            log_probs=tuple(self._log_probs),
            finish_reason=self._finish,
            text=self._decode(body),
            runs=tuple(self._runs),
            discarded_tokens=self._discarded,
            requests=self._requests,
        )


def _check_log_probs(author: int, result: GenerateResult) -> None:
    n, values = len(result.output_ids), result.output_log_probs
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if len(values) == n and bad is None:
        return
    what = f"{len(values)} for {n} tokens" if bad is None else f"{values[bad]} at token {bad}"
    raise EngineError(
        explain(
            f"{ROLE[author]} output log-probs of {result.rid}",
            what,
            "one finite log-prob per token",
            "look at that server's log (some routers drop log-prob fields: sglang #10764, #10766)",
        )
    )


def _check_version(author: int, result: GenerateResult, expected: str | None) -> None:
    if author == SENIOR and expected is not None and result.weight_version != expected:
        raise WeightVersionError(
            explain(
                "senior weight_version",
                result.weight_version,
                repr(expected),
                "the server was restarted or updated by somebody else; send the weights again",
            )
        )


async def write_one(
    writer: TandemWriter, engines: Mapping[int, Engine], *, senior_version: str | None = None
) -> TandemSample:
    """Write one response, free-running. `engines` maps SENIOR and JUNIOR to an engine.

    Raises EngineError kinds of the engines, WeightVersionError if the senior serves other weights than `senior_version`.
    """
    while not writer.done:
        author, request = writer.next_request()
        (result,) = await engines[author].generate([request])
        _check_version(author, result, senior_version)
        writer.accept(result)
    return writer.sample()


async def write_lockstep(
    writers: Sequence[TandemWriter],
    engines: Mapping[int, Engine],
    *,
    senior_version: str | None = None,
    on_round: Callable[[int], None] | None = None,
) -> list[TandemSample]:
    """Write many responses in rounds: one batched request per engine and round, both engines at the same time.

    `on_round` is called with the number of finished responses. Raises like `write_one`.
    """
    while open_writers := [w for w in writers if not w.done]:
        waiting: dict[int, list[tuple[TandemWriter, GenerateRequest]]] = {SENIOR: [], JUNIOR: []}
        for writer in open_writers:
            author, request = writer.next_request()
            waiting[author].append((writer, request))
        busy = [author for author, items in waiting.items() if items]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {a: group.create_task(engines[a].generate([r for _, r in waiting[a]])) for a in busy}
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        for author, task in tasks.items():
            for (writer, _), result in zip(waiting[author], task.result(), strict=True):
                _check_version(author, result, senior_version)
                writer.accept(result)
        if on_round is not None:
            on_round(sum(w.done for w in writers))
    return [w.sample() for w in writers]
