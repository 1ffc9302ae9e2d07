"""Who writes next: a pure function of (settings, seed, rollout id, sample index, tokens). No I/O, no torch.

A response is a chain of *runs*. Run k has one author; where it ends depends on the text (a boundary token, a cap), who
writes it does not: the author of run k is drawn from a counter-based hash of (seed, rollout id, sample index, k). So the
whole schedule of authors is known before the first token, a server can be asked for all neighbouring runs of one author
in a single request, and anybody can recompute the authorship of a finished response from its tokens.

Where a run may end is a strategy's to say (`slime_tandem.strategies`). With `schedule="alternate"` the authors alternate,
senior first, instead of being drawn: the paper's handoff evaluation is `sentence` so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slime_tandem.config import AuthorSchedule, TandemConfig
from slime_tandem.strategies import Mark, find_strategy
from slime_tandem.types import JUNIOR, SENIOR, IntArray, SampleKey

_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF
_AUTHOR_STREAM = 0x7461_6E64_656D_0001
_SAMPLING_STREAM = 0x7461_6E64_656D_0002


def mix32(x: int) -> int:
    """A 32-bit bijective mixer (two multiplications: cheap in a GPU kernel); constants of C. Wellons' `lowbias32`."""
    x &= _M32
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _M32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _M32
    return x ^ (x >> 16)


def _mix32_all(x: IntArray) -> IntArray:
    """`mix32` of every entry, all in [0, 2^32)."""
    y = x.astype(np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        y = ((y ^ (y >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(_M32)
    return (y ^ (y >> np.uint64(16))).astype(np.int64)


def _mix64(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _stream(key: SampleKey, stream: int) -> int:
    h = stream
    for part in (key.seed, key.rollout_id, key.sample_index):
        h = _mix64(h ^ _mix64(part & _M64))
    return h


def author_key(key: SampleKey) -> int:
    """64-bit key of a sample's author draws."""
    return _stream(key, _AUTHOR_STREAM)


def sampling_seed(key: SampleKey) -> int:
    """Seed of a sample's token draws, in [0, 2^31): independent of the author draws, equal for both engines.

    The engine keys each draw by (this seed, absolute position), so a retried or resumed request gives the same token.
    """
    return _stream(key, _SAMPLING_STREAM) >> 33


@dataclass(frozen=True, slots=True)
class HandoffRule:
    """What decides authorship, with the strategy resolved for one tokenizer: numbers alone, no code.

    `strategy`: its name, for messages. `prob_senior`: probability that a run is the senior's. `boundary`: ids after which a
    run ends. `cap`: the most tokens of a run, None: no cap. `alternates`: the authors take turns, senior first, instead of
    being drawn. `mark`: how boundaries show in the text, for servers that can stop there; None: they need not show. It
    decides no author.

    >>> rule = HandoffRule.of("word", prob_senior=0.5, max_gap_tokens=32, chunk_size=16, boundary={1})
    >>> key = SampleKey(seed=7, rollout_id=0, sample_index=3)
    >>> rule.authorship(key, [5, 6, 1, 5, 1, 5])  # runs: [5 6 1] [5 1] [5]
    (1, 1, 1, 1, 1, 0)
    >>> HandoffRule.of("word", 0.5, 32, 16, {1}, schedule="alternate").authorship(key, [5, 6, 1, 5, 1, 5])
    (1, 1, 1, 0, 0, 1)
    """

    strategy: str
    prob_senior: float
    boundary: frozenset[int]
    cap: int | None
    alternates: bool
    mark: Mark | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        strategy: str,
        prob_senior: float,
        max_gap_tokens: int,
        chunk_size: int,
        boundary: Iterable[int],
        schedule: AuthorSchedule = "draw",
        classes: Iterable[str] = ("space",),
    ) -> HandoffRule:
        """The rule of a strategy, built in or a user's own, with the settings that it may read and its ids of a tokenizer.

        Raises ConfigError for a name that stands for no strategy.
        """
        record = find_strategy(strategy)
        settings = {"max_gap_tokens": max_gap_tokens, "chunk_size": chunk_size}
        return cls(
            strategy=strategy,
            prob_senior=prob_senior,
            boundary=frozenset(boundary) if record.by_text else frozenset(),
            cap=settings[record.cap] if isinstance(record.cap, str) else record.cap,
            alternates=record.alternates or schedule == "alternate",
            mark=record.marks(classes),
        )

    @classmethod
    def from_config(cls, config: TandemConfig, boundary: Iterable[int]) -> HandoffRule:
        """`config.enabled=False` is the rule in which the senior writes everything.

        `boundary`: `tandem.boundary_token_ids`, which need not show in the text, or else the strategy's own ids.
        """
        rule = cls.of(
            config.selection_strategy if config.enabled else "word",
            config.prob_senior if config.enabled else 1.0,
            config.max_gap_tokens,
            config.chunk_size,
            boundary,
            config.author_schedule if config.enabled else "draw",
            config.boundary_classes,
        )
        return rule if config.boundary_token_ids is None else replace(rule, mark=None)

    def author(self, akey: int, run: int) -> int:
        """Author of run `run` (0, 1, ...) for a sample whose `author_key` is `akey`."""
        if self.alternates:
            return JUNIOR if run % 2 else SENIOR
        u = mix32((akey & _M32) ^ mix32((run + (akey >> 32)) & _M32))
        return SENIOR if u < round(self.prob_senior * 2**32) else JUNIOR

    def ends_run(self, token: int, length: int) -> bool:
        """True when a run that now holds `length` tokens, the last being `token`, is over."""
        return token in self.boundary or (self.cap is not None and length >= self.cap)

    def runs_until_change(self, akey: int, run: int, limit: int) -> int | None:
        """How many runs from `run` on share its author; None when more than `limit` do (nothing can change before)."""
        first = self.author(akey, run)
        for n in range(1, limit + 1):
            if self.author(akey, run + n) != first:
                return n
        return None

    def runs_of(self, tokens: Sequence[int], run: int, length: int) -> tuple[IntArray, int, int]:
        """(run of each token [n], the open run after them, its length), where run `run` holds `length` tokens before them.

        >>> runs, run, length = HandoffRule.of("word", 0.5, 3, 16, {1}).runs_of([5, 1, 5, 5, 5, 5], 4, 1)
        >>> runs.tolist(), run, length
        ([4, 4, 5, 5, 5, 6], 6, 1)
        """
        n = len(tokens)
        ends = np.fromiter(map(self.boundary.__contains__, tokens), np.bool_, n)
        # Stretches between boundaries; a cap cuts each into runs of `cap` tokens, the first one counts what is there already.
        stretch = np.concatenate(([0], np.cumsum(ends)))
        first = np.concatenate(([-length], np.flatnonzero(ends) + 1))
        within = np.arange(n + 1) - first[stretch]
        cut, left = (np.zeros_like(within), within) if self.cap is None else np.divmod(within, self.cap)
        closed = np.concatenate(([run], 1 + cut[:-1][ends])).cumsum()
        runs = closed[stretch] + cut
        return runs[:n], int(runs[n]), int(left[n])

    def authors(self, akey: int, runs: IntArray) -> IntArray:
        """`author` of each of `runs` [n], ascending; every run is drawn once."""
        if not len(runs):
            return np.zeros(0, dtype=np.int64)
        first = int(runs[0])
        numbers = np.arange(first, int(runs[-1]) + 1)
        if self.alternates:
            drawn = np.where(numbers % 2, JUNIOR, SENIOR)
        else:
            u = _mix32_all((akey & _M32) ^ _mix32_all((numbers + (akey >> 32)) & _M32))
            drawn = np.where(u < round(self.prob_senior * 2**32), SENIOR, JUNIOR)
        return drawn[runs - first]

    def authorship(
        self,
        key: SampleKey,
        tokens: Sequence[int],
        *,
        inserted: Iterable[tuple[int, int]] = (),
        fallback_starts: Collection[int] = (),
    ) -> tuple[int, ...]:
        """The authorship_mask [R] of a response: 1 senior, 0 junior. Shares `ends_run` and `author` with the rollout.

        `inserted` spans `[start, stop)` hold text that nobody sampled: 0 there, and the next run starts after them.
        From each of `fallback_starts` (`TandemSample.fallback_starts`) to its run's end the senior wrote in the junior's place.
        """
        ids = list(tokens)
        akey, run, length, starts = author_key(key), 0, 0, set(fallback_starts)
        mask = np.zeros(len(ids), dtype=np.int64)
        sampled = np.ones(len(ids), dtype=np.bool_)
        for start, stop in inserted:
            sampled[start:stop] = False
        edges = np.flatnonzero(np.diff(sampled, prepend=False, append=False)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            run, length = run + (length > 0), 0
            runs, run, length = self.runs_of(ids[start:stop], run, length)
            piece = self.authors(akey, runs)
            for at in (at for at in starts if start <= at < stop):
                piece[at - start :][runs[at - start :] == runs[at - start]] = SENIOR
            mask[start:stop] = piece
        return tuple(mask.tolist())


@dataclass(slots=True)
class OpenRun:
    """The run that the next token of a response belongs to: its ordinal `run` and the `length` it has.

    `fallen`: the senior writes it in the junior's place. `akey`: the sample's `author_key`.

    >>> at = OpenRun(HandoffRule.of("word", 0.5, 2, 16, {1}), akey=0)
    >>> for token in (5, 6, 1): at.advance(token)
    >>> at.run, at.length
    (2, 0)
    """

    rule: HandoffRule
    akey: int
    run: int = 0
    length: int = 0
    fallen: bool = False

    @property
    def author(self) -> int:
        """Who writes the next token."""
        return SENIOR if self.fallen else self.rule.author(self.akey, self.run)

    def runs_until_change(self, limit: int) -> int | None:
        """`HandoffRule.runs_until_change` from here; one run where the senior stands in for the junior."""
        return 1 if self.fallen else self.rule.runs_until_change(self.akey, self.run, limit)

    def advance(self, token: int) -> None:
        """After a token of this run."""
        self.length += 1
        if self.rule.ends_run(token, self.length):
            self._next()

    def authors_of(self, tokens: Sequence[int]) -> tuple[IntArray, IntArray]:
        """(authors, runs) [n] of the tokens that follow; the place stays."""
        runs, _, _ = self.rule.runs_of(tokens, self.run, self.length)
        authors = self.rule.authors(self.akey, runs)
        if self.fallen:
            authors[runs == self.run] = SENIOR
        return authors, runs

    def advance_all(self, tokens: Sequence[int]) -> None:
        """`advance` by each of `tokens`."""
        _, run, self.length = self.rule.runs_of(tokens, self.run, self.length)
        self.run, self.fallen = run, self.fallen and run == self.run

    def interrupt(self) -> None:
        """After text that nobody sampled: what follows is a new run."""
        if self.length:
            self._next()
        self.fallen = False

    def copy(self) -> OpenRun:
        """Another one at the same place."""
        return replace(self)

    def _next(self) -> None:
        self.run, self.length, self.fallen = self.run + 1, 0, False
