"""What has been written of one response, token by token, and the sample it becomes. Knows no engine and no rule.

Every list that has an entry per token grows in `append`, `extend` and `insert` alone, so that they stay equally long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slime_tandem.protocol import IdText
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import SENIOR, AuthorRun, FinishReason, Message, Prompt, SampleKey, TandemSample


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token of the response that an author sampled, as `Transcript.append` takes it."""

    token: int
    author: int
    log_prob: float
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inserted:
    """Text between two turns that nobody sampled, as `Transcript.insert` takes it."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]


@dataclass
class Transcript:
    """One response in the making. Lists are per response token [R] unless said.

    `ids`: in the senior's vocabulary. `authors`: SENIOR or JUNIOR, 0 in inserted text. `log_probs`: nats, of the token under
    its author's model, 0.0 in inserted text. `kept_ids`: what truncated sampling drew from, () for all. `senior_log_probs`:
    nats, None where not known yet; tokens before `scored` have theirs. `inserted`: spans `[start, stop)` that nobody sampled,
    with their `messages`, one entry per span. `runs`: consecutive tokens of one author from one answer. `fallback_starts`:
    where the senior began to write a run of the junior's. `discarded`: tokens that were answered and not taken; `requests`:
    answers that came.

    >>> t = Transcript(SampleKey(0, 0, 0), 4, Prompt("p", (), None, "t"), (1, 2))
    >>> t.append(5, SENIOR, -0.5); t.close_runs(0, "v1")
    >>> t.insert((8, 9))
    >>> t.append(6, 0, -0.25); t.close_runs(3, "v1")
    >>> sample = t.sample("stop", "text", scores=False, kept=False)
    >>> sample.response_ids, sample.loss_mask, sample.inserted
    ((5, 8, 9, 6), (1, 0, 0, 1), ((1, 3),))
    >>> [(run.author, run.start, run.stop) for run in sample.runs]
    [(1, 0, 1), (0, 3, 4)]
    """

    key: SampleKey
    group_id: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    authors: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept_ids: list[tuple[int, ...]] = field(default_factory=list)
    senior_log_probs: list[float | None] = field(default_factory=list)
    scored: int = 0
    inserted: list[tuple[int, int]] = field(default_factory=list)
    messages: list[tuple[Message, ...]] = field(default_factory=list)
    runs: list[AuthorRun] = field(default_factory=list)
    fallback_starts: list[int] = field(default_factory=list)
    discarded: int = 0
    requests: int = 0
    _context: IdText | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> IdText:
        """Prompt and response so far, in the senior's ids; of a response in many requests only what is new is written out."""
        if self._context is None:
            self._context = IdText(self.prompt_ids)
        written = len(self._context) - len(self.prompt_ids)
        self._context.extend(self.ids[written:])
        return self._context.prefix(len(self.prompt_ids) + len(self.ids))

    def append(self, token: int, author: int, log_prob: float, kept: tuple[int, ...] = ()) -> None:
        """Add a sampled token."""
        self.ids.append(token)
        self.authors.append(author)
        self.log_probs.append(log_prob)
        self.kept_ids.append(kept)
        self.senior_log_probs.append(None)

    def extend(
        self, ids: Sequence[int], authors: Sequence[int], log_probs: Sequence[float], kept: Sequence[tuple[int, ...]]
    ) -> None:
        """`append` of each [n]."""
        assert len(ids) == len(authors) == len(log_probs) == len(kept)
        self.ids += ids
        self.authors += authors
        self.log_probs += log_probs
        self.kept_ids += kept
        self.senior_log_probs += [None] * len(ids)

    def insert(self, ids: Sequence[int], messages: Sequence[Message] = ()) -> None:
        """Add text that nobody sampled, which shows these messages; nothing for no ids."""
        if not ids:
            return
        n = len(ids)
        self.inserted.append((len(self), len(self) + n))
        self.messages.append(tuple(messages))
        self.ids += ids
        self.authors += [0] * n
        self.log_probs += [0.0] * n
        self.kept_ids += [()] * n
        self.senior_log_probs += [None] * n

    def close_runs(self, start: int, weight_version: str) -> None:
        """Name the runs of the tokens from `start` on, all of them sampled, which one answer brought."""
        at = start
        for author, group in itertools.groupby(self.authors[start:]):
            stop = at + len(list(group))
            self.runs.append(AuthorRun(author, at, stop, weight_version))
            at = stop

    def score(self, values: Sequence[float]) -> None:
        """The senior's log-probs (nats) of the next tokens that have none yet; those in inserted text become 0."""
        self.senior_log_probs[self.scored : self.scored + len(values)] = values
        self.scored += len(values)
        for start, stop in self.inserted:
            if stop <= self.scored:
                self.senior_log_probs[start:stop] = [0.0] * (stop - start)

    def score_read(self, values: Sequence[float]) -> None:
        """`score` with what the senior said when it read the tokens again; its own keep the value they were sampled with."""
        stop = self.scored + len(values)
        own, authors = self.log_probs[self.scored : stop], self.authors[self.scored : stop]
        self.score([lp if a == SENIOR else v for v, lp, a in zip(values, own, authors, strict=True)])

    def chat(self, tokens: TokenBytes, cut: int) -> list[Message]:
        """The chat since the prompt: each turn of the models as the assistant's, and the messages between turns.

        `cut`: bytes at the end of the last turn that do not belong to its text.
        """
        out, at = [], 0
        for (start, stop), messages in zip(self.inserted, self.messages, strict=True):
            out += [Message("assistant", self._text(tokens, at, start, 0)), *messages]
            at = stop
        return [*out, Message("assistant", self._text(tokens, at, len(self), cut))]

    def _text(self, tokens: TokenBytes, start: int, stop: int, cut: int) -> str:
        data = tokens.join(self.ids[start:stop])
        return data[: len(data) - cut].decode("utf-8", "replace")

    def sample(self, finish_reason: FinishReason, text: str, *, scores: bool, kept: bool) -> TandemSample:
        """The finished response; with the senior's log-probs (`scores`) and the kept ids (`kept`) where they were asked for."""
        return TandemSample(
            key=self.key,
            group_id=self.group_id,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.ids),
            authorship_mask=tuple(self.authors),
            log_probs=tuple(self.log_probs),
            finish_reason=finish_reason,
            text=text,
            runs=tuple(self.runs),
            discarded_tokens=self.discarded,
            requests=self.requests,
            inserted=tuple(self.inserted),
            inserted_messages=tuple(self.messages) if any(self.messages) else (),
            senior_log_probs=tuple(v for v in self.senior_log_probs if v is not None) if scores else (),
            fallback_starts=tuple(self.fallback_starts),
            kept_ids=tuple(self.kept_ids) if kept else (),
        )


def pieces(sample: TandemSample) -> Iterator[Sampled | Inserted]:
    """What a sample was made of, in order: each appended again gives its transcript."""
    spans = dict(sample.inserted)
    messages = iter(sample.inserted_messages or [()] * len(sample.inserted))
    i = 0
    while i < len(sample.response_ids):
        if i in spans:
            yield Inserted(sample.response_ids[i : spans[i]], next(messages))
            i = spans[i]
        else:
            kept = sample.kept_ids[i] if sample.kept_ids else ()
            yield Sampled(sample.response_ids[i], sample.authorship_mask[i], sample.log_probs[i], kept)
            i += 1
