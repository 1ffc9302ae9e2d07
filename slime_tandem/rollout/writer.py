"""One co-written response in the making: senior and junior write it in turns, on two engines. No I/O.

`TandemWriter` says which engine to ask for what, and takes the answer; `rollout.drive` does the asking. One request covers a
chain of runs by the same author. Tokens that an engine wrote past a handoff are dropped and counted.
What is kept of a response is `rollout.transcript`'s; whether an answer can be used is for `rollout.answers` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from slime_tandem.config import SamplingConfig
from slime_tandem.errors import DataError, EngineError
from slime_tandem.protocol import GenerateRequest, GenerateResult, Handoff, IdText, table_fingerprint
from slime_tandem.rollout.answers import (
    check_log_probs,
    check_not_empty,
    check_resumable,
    proven_authors,
    scores_of,
)
from slime_tandem.rollout.handoff import HandoffRule, OpenRun, author_key, sampling_seed
from slime_tandem.rollout.junior_text import JuniorText
from slime_tandem.rollout.transcript import Inserted, Transcript, pieces
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, FinishReason, Message, Prompt, SampleKey, TandemSample

_MAX_STOP_IDS = 64
"""Boundary ids that do not show in the text travel with each request up to this number; else the answer is cut here."""
_AT_ONCE = 32
"""Answers from this length on are taken as a whole: arrays cost more than a few tokens one by one."""
_TOKENS_WITHOUT_STOP = 16
"""Tokens per request where the server cannot stop at the boundary: mean runs are shorter, what is past a handoff is dropped."""


def handoff_of(rule: HandoffRule, akey: int, run: int = 0, run_length: int = 0) -> Handoff:
    """The rule in the form in which a fused engine takes it, for a response whose open run is `run` with `run_length` tokens.

    >>> handoff = handoff_of(HandoffRule.of("chunk", 0.5, 32, 16, {1}), akey=7)
    >>> handoff.alternate, handoff.cap, handoff.table
    (True, 16, '')
    """
    return Handoff(
        akey=akey,
        threshold=round(rule.prob_senior * 2**32),
        alternate=rule.alternates,
        cap=rule.cap,
        table=table_fingerprint(rule.boundary),
        run=run,
        run_length=run_length,
    )


@dataclass(frozen=True)
class WriterOptions:
    """How a response is written: all that does not name the sample."""

    rule: HandoffRule
    """Who writes which run."""
    sampling: SamplingConfig
    """How tokens are sampled, and the cap of the response."""
    tokens: TokenBytes
    """The senior's vocabulary."""
    score_junior: bool = False
    """Also collect the senior's log-probs of the junior's tokens. They come with the senior's next request, and cost one
    request of their own for a junior run at the end: on two servers, and on a fused engine where the senior has not read it."""
    junior_text: JuniorText | None = None
    """The junior's view of this one response, needed where the junior has another tokenizer."""
    refuse_fallback: bool = False
    """A junior run without an exact form in the senior's vocabulary is an error instead of the senior's to write."""
    tokens_per_request: int | None = None
    """Ask for no more at once (a lockstep round then waits for no long run); None: for all that the author may write."""
    fused: bool = False
    """One engine holds both models and writes the rest of the response in one request. Who wrote what is recomputed here, and
    the senior's log-probs come along where the temperature is 1, all or, without `score_junior`, perhaps none."""

    def __post_init__(self) -> None:
        assert not (self.fused and self.junior_text is not None), "two tokenizers need two engines"

    @property
    def scores_junior(self) -> bool:
        """Whether the senior's log-probs of all tokens are collected: they were asked for, or may come for nothing."""
        return self.score_junior or (self.fused and self.sampling.temperature == 1.0)


class TandemWriter:
    """One response in the making.

    Ask `next_request()` who writes next and what to send, give the answer to `accept()`, until `done`; then `sample()`.
    The authors of an answer are checked against the rule as it arrives.

    >>> tokens = TokenBytes((None, b"a", b" b"), special=frozenset({0}), eos_ids=frozenset({0}))
    >>> rule = HandoffRule.of("word", 1.0, 32, 16, boundary={2})
    >>> options = WriterOptions(rule, SamplingConfig(max_new_tokens=8), tokens)
    >>> w = TandemWriter(SampleKey(0, 0, 0), 0, Prompt("p", (), None, "t"), (1, 2), options)
    >>> author, request = w.next_request()
    >>> author, request.input_ids, request.max_new_tokens
    (1, (1, 2), 8)
    >>> w.accept(GenerateResult(request.rid, (2, 0), (-0.5, -0.1), "stop", "v0"))
    >>> w.done, w.sample().authorship_mask, w.sample().finish_reason, w.sample().text
    (True, (1, 1), 'stop', ' b')
    """

    def __init__(
        self, key: SampleKey, group_id: int, prompt: Prompt, prompt_ids: Sequence[int], options: WriterOptions
    ) -> None:
        if not prompt_ids:
            raise DataError(
                f"prompt_ids of prompt {prompt.prompt_id!r}", "[]", "at least one token", "check the template"
            )
        self.key, self.group_id, self.prompt, self.prompt_ids = key, group_id, prompt, tuple(prompt_ids)
        self.options = options
        self.transcript = Transcript(key, group_id, prompt, self.prompt_ids)
        self._open = OpenRun(options.rule, author_key(key))
        self._seed = sampling_seed(key)
        self._stops = [stop.encode() for stop in options.sampling.stop]
        self._turn = bytearray()  # text of the current turn, for stop strings, if any, that cross a handoff
        self._cut = 0  # bytes at the end of the text that belong to a stop string
        self._asked: int | None = None
        self._finish: FinishReason | None = None

    @classmethod
    def resume(cls, sample: TandemSample, options: WriterOptions) -> Self:
        """Go on with an aborted sample: the same authors follow, the length cap counts what is there.

        The senior's log-probs of what is there are asked for again, under the weights served now. Raises DataError for a
        sample that was finished, or whose authorship is not the one of this rule (it was written under other settings).
        """
        writer = cls(sample.key, sample.group_id, sample.prompt, sample.prompt_ids, options)
        check_resumable(sample, options.rule)
        writer._rewrite(sample)
        if options.fused and writer._open.fallen:
            raise DataError(
                f"TandemSample.fallback_starts of {sample.key}",
                sample.fallback_starts,
                "no open run that the senior writes in the junior's place, which a fused engine knows nothing of",
                "resume on two servers, as it was begun",
            )
        if writer._finish is None and len(writer.transcript) >= options.sampling.max_new_tokens:
            writer._finish = "length"  # the text between two turns filled it; only the last scores were cut off
        return writer

    def _rewrite(self, sample: TandemSample) -> None:
        """Write what an aborted sample holds once more."""
        t = self.transcript
        for piece in pieces(sample):
            self._open.fallen = self._open.fallen or len(t) in sample.fallback_starts
            if isinstance(piece, Inserted):
                self._finish = None
                self._insert(piece.ids, piece.messages)
            else:
                self._append(piece.token, piece.log_prob, piece.kept)
        self._open.fallen = self._open.fallen or len(t) in sample.fallback_starts
        t.runs, t.fallback_starts = list(sample.runs), list(sample.fallback_starts)
        t.discarded, t.requests = sample.discarded_tokens, sample.requests

    @property
    def done(self) -> bool:
        """True when no further request is needed."""
        return self._finish is not None and not self._needs_last_score

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the response ended; None while it is being written."""
        return self._finish

    @property
    def response_ids(self) -> list[int]:
        """What has been written so far, in the senior's vocabulary."""
        return self.transcript.ids

    @property
    def chat(self) -> list[Message]:
        """The chat since the prompt: each turn of the models as the assistant's, and the messages between turns."""
        return self.transcript.chat(self.options.tokens, self._cut)

    @property
    def _needs_last_score(self) -> bool:
        return self.options.score_junior and self._finish != "abort" and self._lacks_scores

    @property
    def _lacks_scores(self) -> bool:
        return self.options.scores_junior and self.transcript.scored < len(self.transcript)

    # ---- asking ----

    def next_request(self) -> tuple[int, GenerateRequest]:
        """(author, request) for the chain of runs that the next author writes.

        Raises EngineError where the response has no exact form in the junior's vocabulary and `refuse_fallback` is set.
        """
        assert not self.done, "the response is finished"
        if self._finish is not None:
            return self._request(SENIOR, self.transcript.context, 0)
        left = self.options.sampling.max_new_tokens - len(self.transcript)
        most = min(left, self.options.tokens_per_request or left)
        if self.options.fused:
            return self._request(SENIOR, self.transcript.context, most, tuple(sorted(self.options.tokens.eos_ids)))
        author, context = self._due()
        budget, stop_ids, pattern = self._until_handoff(author, left)
        stop_ids = tuple(sorted(self._eos_ids(author))) + stop_ids
        return self._request(author, context, min(budget, most), stop_ids, pattern)

    def _due(self) -> tuple[int, tuple[int, ...] | IdText]:
        """Who writes next, and the context in that author's own ids."""
        junior_text = self.options.junior_text
        if self._open.author == JUNIOR and junior_text is not None:
            t = self.transcript
            context = junior_text.context(t.ids, t.inserted, t.messages)
            if context is not None:
                return JUNIOR, context
            self._fall_back("the senior's text", "junior's")
        return self._open.author, self.transcript.context

    def _until_handoff(self, author: int, left: int) -> tuple[int, tuple[int, ...], str | None]:
        """(most tokens, stop ids, stop pattern) so that a server writes up to the next handoff, as near as it can."""
        rule = self.options.rule
        runs = self._open.runs_until_change(left)
        if runs is None:
            return left, (), None
        budget = left if rule.cap is None else min(left, runs * rule.cap - self._open.length)
        if rule.mark is not None:
            return budget, (), rule.mark.regex(runs)
        if len(rule.boundary) <= _MAX_STOP_IDS and (author == SENIOR or self.options.junior_text is None):
            return budget, tuple(sorted(rule.boundary)), None
        return (min(budget, _TOKENS_WITHOUT_STOP) if rule.boundary else budget), (), None

    def _request(
        self,
        author: int,
        context: tuple[int, ...] | IdText,
        budget: int,
        stop_ids: tuple[int, ...] = (),
        pattern: str | None = None,
    ) -> tuple[int, GenerateRequest]:
        self._asked = author
        s, t, at = self.options.sampling, self.transcript, self._open
        score = author == SENIOR and self._lacks_scores
        fused = self.options.fused and budget > 0
        name = self.key.name
        return author, GenerateRequest(
            rid=f"{name}-{t.requests}",
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
            logprob_start_len=len(self.prompt_ids) + t.scored - 1 if score else -1,
            conversation=name,
            handoff=handoff_of(at.rule, at.akey, at.run, at.length) if fused else None,
            truncated_logprobs=author == SENIOR and s.asks_kept_ids and budget > 0,
        )

    def _eos_ids(self, author: int) -> frozenset[int]:
        if author == JUNIOR and self.options.junior_text is not None:
            return self.options.junior_text.junior.tokens.eos_ids
        return self.options.tokens.eos_ids

    # ---- taking answers ----

    def accept(self, result: GenerateResult) -> None:
        """Take over the tokens that the asked author was entitled to write; drop and count the rest.

        Raises EngineError for an answer without a usable token, which would make the loop ask for ever, and for one
        whose log-probs are missing or not finite. The writer is then as it was, except that the request counts.
        """
        assert self._asked is not None, "next_request() comes first"
        author, self._asked = self._asked, None
        t = self.transcript
        t.requests += 1
        start = len(t)
        check_log_probs(author, result)
        authors = [author] * len(result.output_ids)
        if self.options.fused and self._finish is None:
            authors = proven_authors(result, self._open, self.key, start)
        if author == SENIOR and self._lacks_scores and result.finish_reason != "abort":
            t.score_read(scores_of(result, t.ids[t.scored :], t.scored))
        if self._finish is not None:  # this was the request for the last scores alone
            self._finish = "abort" if result.finish_reason == "abort" else self._finish
            return
        complete = self._take(author, result, authors)
        if author == SENIOR and self.options.scores_junior and t.scored == start:
            values: Sequence[float | None] = result.senior_log_probs if self.options.fused else t.log_probs[start:]
            known: list[float] = []
            for value in values[: len(t) - start]:
                if value is None:  # what comes behind it may be there, and is asked for again with it
                    break
                known.append(value)
            t.score(known)
        t.close_runs(start, result.weight_version)
        if author == JUNIOR and self.options.junior_text is not None:
            self.options.junior_text.commit(t.ids[start:], result.output_ids)
        if result.finish_reason == "abort":
            self._finish = self._finish or "abort"
        elif len(t) == start and not complete:
            self._fall_back("the junior's text", "senior's")
        else:
            check_not_empty(author, result, len(t) - start)

    def _take(self, author: int, result: GenerateResult, authors: Sequence[int]) -> bool:
        """Append what the rule lets stand, count the rest; False where the junior's answer has no exact form to its end."""
        ids, log_probs, complete = result.output_ids, result.output_log_probs, True
        if author == JUNIOR and self.options.junior_text is not None:
            translation = self.options.junior_text.translate(ids, log_probs)
            ids, log_probs, complete = translation.ids, translation.log_probs, translation.complete
            authors = [author] * len(ids)
        kept_ids = result.kept_ids if author == SENIOR and result.kept_ids else [()] * len(ids)
        if len(ids) >= _AT_ONCE:
            n = 0 if self._finish else self._extend(ids, log_probs, kept_ids, authors)
            self.transcript.discarded += len(ids) - n
            return complete
        for token, log_prob, kept, written_by in zip(ids, log_probs, kept_ids, authors, strict=True):
            if self._finish is None and self._open.author == written_by:
                self._append(token, log_prob, kept)
            else:
                self.transcript.discarded += 1
        return complete

    def insert(self, ids: Sequence[int], messages: Sequence[Message] = ()) -> None:
        """Go on after a finished turn with text that nobody sampled (a tool's output), in the senior's ids.

        `messages`: the chat turns that the text shows, for teachers with another template (give them with every text, or
        never). The next run starts after it. The length cap counts it; a text that does not fit is cut there.
        """
        assert self._finish == "stop", "text is inserted between turns"
        self._finish = None
        cap = self.options.sampling.max_new_tokens
        self._insert(ids[: cap - len(self.transcript)], messages)
        if len(self.transcript) >= cap:
            self._finish = "length"

    def _insert(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        if ids:
            self.transcript.insert(ids, messages)
            self._open.interrupt()
            self._turn.clear()
            self._cut = 0

    def _append(self, token: int, log_prob: float, kept: tuple[int, ...]) -> None:
        """Add the next author's token, and see whether turn, response or run end with it."""
        self.transcript.append(token, self._open.author, log_prob, kept)
        data = (self.options.tokens.of(token) or b"") if self._stops else b""
        self._turn += data
        if token in self.options.tokens.eos_ids:
            self._finish = "stop"
        elif found := self._stop_string(len(data)):
            self._finish, self._cut = "stop", found
        elif len(self.transcript) >= self.options.sampling.max_new_tokens:
            self._finish = "length"
        self._open.advance(token)

    def _extend(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        kept: Sequence[tuple[int, ...]],
        authors: Sequence[int],
    ) -> int:
        """`_append` of all that the rule lets stand; how many these are."""
        due, _ = self._open.authors_of(ids)
        n = min(len(ids), self.options.sampling.max_new_tokens - len(self.transcript))
        strangers = np.flatnonzero(due[:n] != np.asarray(authors[:n]))
        n = int(strangers[0]) if len(strangers) else n
        end = next((i for i, token in enumerate(ids[:n]) if token in self.options.tokens.eos_ids), None)
        n = n if end is None else end + 1
        cut = 0
        if self._stops:
            data = [self.options.tokens.of(token) or b"" for token in ids[:n]]
            size = len(self._turn)
            self._turn += b"".join(data)
            at = [self._turn.find(s, max(0, size - len(s) + 1)) + len(s) for s in self._stops]
            if ends := [e for e, s in zip(at, self._stops, strict=True) if e >= len(s)]:
                sizes = size + np.cumsum([len(d) for d in data])
                stopped = int(np.searchsorted(sizes, min(ends)))  # the first token with which a stop string is whole
                if stopped != end:  # an end of turn is seen first
                    n, end = stopped + 1, None
                    del self._turn[int(sizes[stopped]) :]
                    cut = self._stop_string(len(data[stopped]))
        self.transcript.extend(ids[:n], due[:n].tolist(), log_probs[:n], kept[:n])
        if end is not None:
            self._finish = "stop"
        elif cut:
            self._finish, self._cut = "stop", cut
        elif len(self.transcript) >= self.options.sampling.max_new_tokens:
            self._finish = "length"
        self._open.advance_all(ids[:n])
        return n

    def _stop_string(self, added: int) -> int:
        """Bytes from the first stop string that the last `added` bytes completed to the end; 0: none."""
        size = len(self._turn)
        found = [at for s in self._stops if (at := self._turn.find(s, max(0, size - added - len(s) + 1))) >= 0]
        return size - min(found) if found else 0

    def _fall_back(self, what: str, whose: str) -> None:
        if self.options.refuse_fallback:
            raise EngineError(
                f"run {self._open.run} of sample {self.key}",
                what,
                f"text with an exact form in the {whose} vocabulary",
                "set tandem.on_unexpressible=senior, or use a junior of the senior's family",
            )
        self.transcript.fallback_starts.append(len(self.transcript))
        self._open.fallen = True

    def part(self) -> TandemSample:
        """What is there of a response that is still written, as an aborted one: for who reads along, not to be trained on."""
        return self.transcript.sample("abort", "", scores=False, kept=False)

    def sample(self) -> TandemSample:
        """The finished response. The recorded authorship is proven equal to the recomputed one."""
        assert self.done, "the response is not finished"
        assert self._finish is not None
        sample = self.transcript.sample(
            self._finish,
            "".join(m.content for m in self.chat if m.role == "assistant"),
            scores=self.options.scores_junior and self._finish != "abort" and not self._lacks_scores,
            kept=self.options.sampling.asks_kept_ids,
        )
        assert sample.authorship_mask == self.options.rule.authorship(
            self.key, sample.response_ids, inserted=sample.inserted, fallback_starts=sample.fallback_starts
        )
        return sample
