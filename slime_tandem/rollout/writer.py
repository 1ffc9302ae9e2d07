"""One co-written response in the making: senior and junior write it in turns, on two engines. No I/O.

`TandemWriter` says which engine to ask for what, and takes the answer; `rollout.drive` does the asking. One request covers a
chain of runs by the same author. Tokens that an engine wrote past a handoff are dropped and counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Self, TypedDict, Unpack

from slime_tandem.config import BoundaryClass, SamplingConfig
from slime_tandem.errors import DataError, EngineError
from slime_tandem.protocol import GenerateRequest, GenerateResult, Handoff, same_ids, table_fingerprint
from slime_tandem.rollout.boundaries import stop_regex
from slime_tandem.rollout.handoff import HandoffRule, author_key, sampling_seed
from slime_tandem.rollout.junior_text import JuniorText
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, AuthorRun, FinishReason, Message, Prompt, SampleKey, TandemSample

ROLE = {SENIOR: "senior", JUNIOR: "junior"}
_MAX_STOP_IDS = 64
"""A user's own boundary table up to this size travels with each request; a larger one is cut here, not by the server."""
_TOKENS_WITHOUT_STOP = 16
"""Tokens per request where the server cannot stop at the boundary: mean runs are shorter, what is past a handoff is dropped."""


def handoff_of(rule: HandoffRule, akey: int, run: int = 0, run_length: int = 0) -> Handoff:
    """The rule in the form in which a fused engine takes it, for a response whose open run is `run` with `run_length` tokens.

    >>> handoff = handoff_of(HandoffRule("chunk", 0.5, 32, 16, frozenset({1})), akey=7)
    >>> handoff.alternate, handoff.cap, handoff.table
    (True, 16, '')
    """
    return Handoff(
        akey=akey,
        threshold=round(rule.prob_senior * 2**32),
        alternate=rule.alternates,
        cap=rule.run_cap,
        table=table_fingerprint(rule.boundary) if rule.fixed_run_length is None else "",
        run=run,
        run_length=run_length,
    )


class WriterOptions(TypedDict, total=False):
    """The optional arguments of `TandemWriter`, which explains them."""

    custom_boundary: bool
    boundary_classes: tuple[BoundaryClass, ...]
    score_junior: bool
    junior_text: JuniorText | None
    refuse_fallback: bool
    tokens_per_request: int | None
    fused: bool


class TandemWriter:
    """One response in the making.

    Ask `next_request()` who writes next and what to send, give the answer to `accept()`, until `done`; then `sample()`.
    Every token is checked against the authorship rule as it arrives.

    `tokens`: the senior's vocabulary. `custom_boundary`: the rule's boundary ids are a user's own and need not show in
    the text. `score_junior`: also collect the senior's log-probs of the junior's tokens; they come with the senior's next
    request, and cost one request of their own for a junior run at the end. `junior_text`: needed where the junior has
    another tokenizer. `refuse_fallback`: a junior run without an exact form in the senior's vocabulary is an error
    instead of the senior's to write. `tokens_per_request`: ask for no more at once (a lockstep round then waits for no
    long run). `fused`: one engine holds both models and writes the rest of the response in one request; who wrote what is
    recomputed here, and the senior's log-probs come along where the temperature is 1.

    >>> rule = HandoffRule("word", 1.0, 32, 16, frozenset())
    >>> tokens = TokenBytes((None, b"a", b" b"), special=frozenset({0}), eos_ids=frozenset({0}))
    >>> prompt, sampling = Prompt("p", (), None, "t"), SamplingConfig(max_new_tokens=8)
    >>> w = TandemWriter(SampleKey(0, 0, 0), 0, prompt, (1, 2), rule, sampling, tokens)
    >>> author, request = w.next_request()
    >>> author, request.input_ids, request.max_new_tokens
    (1, (1, 2), 8)
    >>> w.accept(GenerateResult(request.rid, (2, 0), (-0.5, -0.1), "stop", "v0"))
    >>> w.done, w.sample().authorship_mask, w.sample().finish_reason, w.sample().text
    (True, (1, 1), 'stop', ' b')
    """

    def __init__(
        self,
        key: SampleKey,
        group_id: int,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        rule: HandoffRule,
        sampling: SamplingConfig,
        tokens: TokenBytes,
        *,
        custom_boundary: bool = False,
        boundary_classes: tuple[BoundaryClass, ...] = ("space",),
        score_junior: bool = False,
        junior_text: JuniorText | None = None,
        refuse_fallback: bool = False,
        tokens_per_request: int | None = None,
        fused: bool = False,
    ) -> None:
        if not prompt_ids:
            raise DataError(
                f"prompt_ids of prompt {prompt.prompt_id!r}", "[]", "at least one token", "check the template"
            )
        self.key, self.group_id, self.prompt = key, group_id, prompt
        self.prompt_ids = tuple(prompt_ids)
        self.rule, self.sampling, self.tokens = rule, sampling, tokens
        self._custom_boundary, self._classes = custom_boundary, boundary_classes
        assert not (fused and junior_text is not None), "two tokenizers need two engines"
        self._fused = fused
        self._score_junior = score_junior or (fused and sampling.temperature == 1.0)
        self._junior_text = junior_text
        self._refuse_fallback = refuse_fallback
        self._tokens_per_request = tokens_per_request
        self._stops = [stop.encode() for stop in sampling.stop]
        self._akey = author_key(key)
        self._seed = sampling_seed(key)
        self._run, self._run_length = 0, 0
        self._asked: int | None = None
        self.response_ids: list[int] = []
        self._authors: list[int] = []
        self._log_probs: list[float] = []
        self._kept_ids: list[tuple[int, ...]] = []
        self._senior_log_probs: list[float | None] = []
        self._scored = 0  # response tokens before this one have their senior log-prob
        self._runs: list[AuthorRun] = []
        self._inserted: list[tuple[int, int]] = []
        self._messages: list[tuple[Message, ...]] = []
        self._fallback_starts: list[int] = []
        self._fallen = False  # the senior writes the rest of this run of the junior's
        self._turn = bytearray()  # text of the current turn, for stop strings that cross a handoff
        self._cut = 0  # bytes at the end of the text that belong to a stop string
        self._discarded = 0
        self._requests = 0
        self._finish: FinishReason | None = None

    @classmethod
    def resume(
        cls,
        sample: TandemSample,
        rule: HandoffRule,
        sampling: SamplingConfig,
        tokens: TokenBytes,
        **options: Unpack[WriterOptions],
    ) -> Self:
        """Go on with an aborted sample: the same authors follow, the length cap counts what is there. `options` as for a
        new one.

        The senior's log-probs of what is there are asked for again, under the weights served now. Raises DataError for a
        sample that was finished, or whose authorship is not the one of this rule (it was written under other settings).
        """
        writer = cls(sample.key, sample.group_id, sample.prompt, sample.prompt_ids, rule, sampling, tokens, **options)
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
        writer._fallback_starts = list(sample.fallback_starts)
        starts = dict(sample.inserted)
        turns = iter(sample.inserted_messages or [()] * len(sample.inserted))
        i = 0
        while i < len(sample.response_ids):
            writer._fallen = writer._fallen or i in sample.fallback_starts
            if i in starts:
                writer._finish = None
                writer._insert(sample.response_ids[i : starts[i]], next(turns))
                i = starts[i]
            else:
                kept = sample.kept_ids[i] if sample.kept_ids else ()
                writer._append(sample.response_ids[i], sample.log_probs[i], kept)
                i += 1
        writer._fallen = writer._fallen or i in sample.fallback_starts
        if writer._fused and writer._fallen:
            raise DataError(
                f"TandemSample.fallback_starts of {sample.key}",
                sample.fallback_starts,
                "no open run that the senior writes in the junior's place, which a fused engine knows nothing of",
                "resume on two servers, as it was begun",
            )
        if writer._finish is None and i >= sampling.max_new_tokens:
            writer._finish = "length"  # the text between two turns filled it; only the last scores were cut off
        writer._runs = list(sample.runs)
        writer._discarded, writer._requests = sample.discarded_tokens, sample.requests
        writer._scored = 0
        if writer._score_junior:
            writer._senior_log_probs = [None] * len(sample.response_ids)
        return writer

    @property
    def done(self) -> bool:
        """True when no further request is needed."""
        return self._finish is not None and not self._needs_last_score

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the response ended; None while it is being written."""
        return self._finish

    @property
    def chat(self) -> list[Message]:
        """The chat since the prompt: each turn of the models as the assistant's, and the messages between turns."""
        out, at = [], 0
        for (start, stop), messages in zip(self._inserted, self._messages, strict=True):
            out += [Message("assistant", self._text(at, start, 0)), *messages]
            at = stop
        return [*out, Message("assistant", self._text(at, len(self.response_ids), self._cut))]

    def _text(self, start: int, stop: int, cut: int) -> str:
        """Text of response tokens, without the last `cut` bytes."""
        data = self.tokens.join(self.response_ids[start:stop])
        return data[: len(data) - cut].decode("utf-8", "replace")

    @property
    def _needs_last_score(self) -> bool:
        return self._score_junior and self._finish != "abort" and self._scored < len(self.response_ids)

    def _author(self) -> int:
        return SENIOR if self._fallen else self.rule.author(self._akey, self._run)

    def next_request(self) -> tuple[int, GenerateRequest]:
        """(author, request) for the chain of runs that the next author writes.

        Raises EngineError where the response has no exact form in the junior's vocabulary and `refuse_fallback` is set.
        """
        assert not self.done, "the response is finished"
        if self._finish is not None:
            return self._request(SENIOR, self.prompt_ids + tuple(self.response_ids), 0, (), None)
        if self._fused:
            left = self.sampling.max_new_tokens - len(self.response_ids)
            budget = min(left, self._tokens_per_request or left)
            stop_ids = tuple(sorted(self.tokens.eos_ids))
            return self._request(SENIOR, self.prompt_ids + tuple(self.response_ids), budget, stop_ids, None)
        author = self._author()
        context: tuple[int, ...] | None = None
        if author == JUNIOR and self._junior_text is not None:
            context = self._junior_text.context(self.response_ids)
            if context is None:
                self._fall_back("the senior's text", "junior's")
                author = SENIOR
        if context is None:
            context = self.prompt_ids + tuple(self.response_ids)
        budget = self.sampling.max_new_tokens - len(self.response_ids)
        pattern: str | None = None
        stop_ids = tuple(sorted(self._eos_ids(author)))
        runs = 1 if self._fallen else self.rule.runs_until_change(self._akey, self._run, budget)
        if runs is not None:
            if self.rule.run_cap is not None:
                budget = min(budget, runs * self.rule.run_cap - self._run_length)
            if not self._custom_boundary:
                pattern = stop_regex(self.rule.strategy, runs, classes=self._classes)
            elif len(self.rule.boundary) <= _MAX_STOP_IDS and (author == SENIOR or self._junior_text is None):
                stop_ids += tuple(sorted(self.rule.boundary))
            else:
                budget = min(budget, _TOKENS_WITHOUT_STOP)
        if self._tokens_per_request is not None:
            budget = min(budget, self._tokens_per_request)
        return self._request(author, context, budget, stop_ids, pattern)

    def _request(
        self, author: int, context: tuple[int, ...], budget: int, stop_ids: tuple[int, ...], pattern: str | None
    ) -> tuple[int, GenerateRequest]:
        self._asked = author
        score = author == SENIOR and self._score_junior and self._scored < len(self.response_ids)
        s = self.sampling
        name = f"{self.key.seed}-{self.key.rollout_id}-{self.key.sample_index}"
        return author, GenerateRequest(
            rid=f"{name}-{self._requests}",
            input_ids=context,
            max_new_tokens=budget,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            stop_token_ids=stop_ids,
            stop=s.stop,
            stop_regex=(pattern,) if pattern else (),
            sampling_seed=self._seed,
            # One position early: engines differ in whether they report the first one.
            logprob_start_len=len(self.prompt_ids) + self._scored - 1 if score else -1,
            conversation=name,
            handoff=handoff_of(self.rule, self._akey, self._run, self._run_length) if self._fused and budget else None,
            truncated_logprobs=author == SENIOR and s.asks_kept_ids and budget > 0,
        )

    def accept(self, result: GenerateResult) -> None:
        """Take over the tokens that the asked author was entitled to write; drop and count the rest.

        Raises EngineError for an answer without a usable token, which would make the loop ask for ever, and for one
        whose log-probs are missing or not finite. The writer is then as it was, except that the request counts.
        """
        assert self._asked is not None, "next_request() comes first"
        author, self._asked = self._asked, None
        self._requests += 1
        start = len(self.response_ids)
        _check_log_probs(author, result)
        fused_authors = self._check_authors(result) if self._fused and self._finish is None else None
        if author == SENIOR and self._score_junior and self._scored < start and result.finish_reason != "abort":
            self._take_scores(result, start)
        if self._finish is not None:  # this was the request for the last scores alone
            self._finish = "abort" if result.finish_reason == "abort" else self._finish
            return
        ids, log_probs, complete = result.output_ids, result.output_log_probs, True
        if author == JUNIOR and self._junior_text is not None:
            translation = self._junior_text.translate(ids, log_probs)
            ids, log_probs, complete = translation.ids, translation.log_probs, translation.complete
        authors = [author] * len(ids) if fused_authors is None else fused_authors
        kept_ids = result.kept_ids if author == SENIOR and result.kept_ids else [()] * len(ids)
        for token, log_prob, kept, written_by in zip(ids, log_probs, kept_ids, authors, strict=True):
            if self._finish is not None or self._author() != written_by:
                self._discarded += 1
                continue
            self._append(token, log_prob, kept)
        stop = len(self.response_ids)
        if author == SENIOR and self._score_junior and self._scored == start:
            given = result.senior_log_probs if self._fused else self._log_probs[start:stop]
            self._senior_log_probs[start:stop] = given[: stop - start]
            self._scored = stop
        at = start
        for written_by, group in itertools.groupby(self._authors[start:stop]):
            end = at + len(list(group))
            self._runs.append(AuthorRun(written_by, at, end, result.weight_version))
            at = end
        if author == JUNIOR and self._junior_text is not None:
            self._junior_text.commit(self.response_ids[start:stop], result.output_ids)
        if result.finish_reason == "abort":
            self._finish = self._finish or "abort"
        elif stop == start and not complete:
            self._fall_back("the junior's text", "senior's")
        elif stop == start:
            raise EngineError(
                f"{ROLE[author]} answer to {result.rid}",
                f"{len(result.output_ids)} tokens, finish reason {result.finish_reason!r}",
                "at least one token",
                "look at that server's log",
            )

    def _check_authors(self, result: GenerateResult) -> list[int]:
        """The authors that a fused engine reports, proven equal to the rule's; EngineError for the first one that is not."""
        run, length = self._run, self._run_length
        n = len(result.output_ids)
        if len(result.authors) != n or len(result.senior_log_probs) != n:
            raise EngineError(
                f"fused answer to {result.rid}",
                f"{len(result.authors)} authors and {len(result.senior_log_probs)} senior log-probs for {n} tokens",
                "one of each per token",
                "check that the server was started by `slime-tandem serve --fused`",
            )
        for i, (token, author) in enumerate(zip(result.output_ids, result.authors, strict=True)):
            due = self.rule.author(self._akey, run)
            if author != due:
                raise EngineError(
                    f"author of response token {len(self.response_ids) + i} of {self.key}, "
                    f"author key {self._akey:016x}, run {run}",
                    author,
                    f"{due}, what the rule prescribes",
                    "report this with the engine's version and log: the sample was rejected",
                )
            length += 1
            if self.rule.ends_run(token, length):
                run, length = run + 1, 0
        return list(result.authors)

    def insert(self, ids: Sequence[int], messages: Sequence[Message] = ()) -> None:
        """Go on after a finished turn with text that nobody sampled (a tool's output), in the senior's ids.

        `messages`: the chat turns that the text shows, for teachers with another template (give them with every text, or
        never). The next run starts after it. The length cap counts it; a text that does not fit is cut there.
        """
        assert self._finish == "stop", "text is inserted between turns"
        self._finish = None
        self._insert(ids[: self.sampling.max_new_tokens - len(self.response_ids)], messages)
        if len(self.response_ids) >= self.sampling.max_new_tokens:
            self._finish = "length"

    def _insert(self, ids: Sequence[int], messages: Sequence[Message] = ()) -> None:
        start = len(self.response_ids)
        if not ids:
            return
        self._inserted.append((start, start + len(ids)))
        self._messages.append(tuple(messages))
        self.response_ids += ids
        self._authors += [0] * len(ids)
        self._log_probs += [0.0] * len(ids)
        self._kept_ids += [()] * len(ids)
        self._senior_log_probs += [None] * len(ids)
        self._run, self._run_length = self._run + (self._run_length > 0), 0
        self._fallen = False
        self._turn.clear()
        self._cut = 0

    def _append(self, token: int, log_prob: float, kept: tuple[int, ...]) -> None:
        author = self._author()
        self.response_ids.append(token)
        self._authors.append(author)
        self._log_probs.append(log_prob)
        self._kept_ids.append(kept)
        self._senior_log_probs.append(None)
        self._run_length += 1
        data = self.tokens.of(token) or b""
        self._turn += data
        if token in self.tokens.eos_ids:
            self._finish = "stop"
        elif found := self._stop_string(len(data)):
            self._finish, self._cut = "stop", found
        elif len(self.response_ids) >= self.sampling.max_new_tokens:
            self._finish = "length"
        if self.rule.ends_run(token, self._run_length):
            self._run, self._run_length = self._run + 1, 0
            self._fallen = False

    def _stop_string(self, added: int) -> int:
        """Bytes from the first stop string that the last `added` bytes completed to the end; 0: none."""
        size = len(self._turn)
        found = [at for s in self._stops if (at := self._turn.find(s, max(0, size - added - len(s) + 1))) >= 0]
        return size - min(found) if found else 0

    def _fall_back(self, what: str, whose: str) -> None:
        if self._refuse_fallback:
            raise EngineError(
                f"run {self._run} of sample {self.key}",
                what,
                f"text with an exact form in the {whose} vocabulary",
                "set tandem.on_unexpressible=senior, or use a junior of the senior's family",
            )
        self._fallback_starts.append(len(self.response_ids))
        self._fallen = True

    def _take_scores(self, result: GenerateResult, stop: int) -> None:
        """Fill the senior's log-probs of response tokens `_scored .. stop` from the input log-probs of an answer."""
        n = stop - self._scored
        values = result.input_log_probs[-n:]
        if not same_ids(result.input_ids[-n:], self.response_ids[self._scored : stop]):
            raise EngineError(
                f"senior input log-probs of {result.rid}",
                f"{len(result.input_log_probs)} values of ids {result.input_ids[-n:][:40]}",
                f"one for each of the last {n} response tokens, {self.response_ids[self._scored : stop][:40]}",
                "look at that server's log (some routers drop log-prob fields: sglang #10764, #10766)",
            )
        for i, value in enumerate(values, start=self._scored):
            if value is None or not math.isfinite(value):
                raise EngineError(
                    f"senior input log-prob of {result.rid} at response token {i}",
                    value,
                    "a finite log-prob",
                    "look at that server's log",
                )
        # A senior token keeps the value that it was sampled with.
        for i, value in enumerate(values, start=self._scored):
            self._senior_log_probs[i] = self._log_probs[i] if self._authors[i] == SENIOR else value
        for first, end in self._inserted:
            self._senior_log_probs[first:end] = [0.0] * (end - first)
        self._scored = stop

    def _eos_ids(self, author: int) -> frozenset[int]:
        if author == JUNIOR and self._junior_text is not None:
            return self._junior_text.junior.tokens.eos_ids
        return self.tokens.eos_ids

    def sample(self) -> TandemSample:
        """The finished response. The recorded authorship is proven equal to the recomputed one."""
        assert self.done, "the response is not finished"
        assert self._finish is not None
        inserted, fallback = tuple(self._inserted), tuple(self._fallback_starts)
        authors = self.rule.authorship(self.key, self.response_ids, inserted=inserted, fallback_starts=fallback)
        assert authors == tuple(self._authors)
        scores: tuple[float, ...] = ()
        if self._score_junior and self._finish != "abort":
            scores = tuple(value for value in self._senior_log_probs if value is not None)
        return TandemSample(
            key=self.key,
            group_id=self.group_id,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.response_ids),
            authorship_mask=tuple(self._authors),
            log_probs=tuple(self._log_probs),
            finish_reason=self._finish,
            text="".join(m.content for m in self.chat if m.role == "assistant"),
            runs=tuple(self._runs),
            discarded_tokens=self._discarded,
            requests=self._requests,
            inserted=inserted,
            inserted_messages=tuple(self._messages) if any(self._messages) else (),
            senior_log_probs=scores,
            fallback_starts=fallback,
            kept_ids=tuple(self._kept_ids) if self.sampling.asks_kept_ids else (),
        )


def _check_log_probs(author: int, result: GenerateResult) -> None:
    n, values = len(result.output_ids), result.output_log_probs
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if len(values) == n and bad is None:
        return
    what = f"{len(values)} for {n} tokens" if bad is None else f"{values[bad]} at token {bad}"
    raise EngineError(
        f"{ROLE[author]} output log-probs of {result.rid}",
        what,
        "one finite log-prob per token",
        "look at that server's log (some routers drop log-prob fields: sglang #10764, #10766)",
    )
