"""Who writes next: a pure function of (settings, seed, rollout id, sample index, tokens). No I/O, no torch.

A response is a chain of *runs*. Run k has one author; where it ends depends on the text (a boundary token, a cap), who
writes it does not: the author of run k is drawn from a counter-based hash of (seed, rollout id, sample index, k). So the
whole schedule of authors is known before the first token, a server can be asked for all neighbouring runs of one author
in a single request, and anybody can recompute the authorship of a finished response from its tokens.

Strategies (Tandem RL, arXiv 2606.28166; the literal values are the paper's):
  word         a run ends after a boundary token (its bytes begin with a space) or after `max_gap_tokens`
  bernoulli    every token is a run
  sentence     a run ends after a token whose bytes end in a blank line
  chunk        `chunk_size` tokens each, authors alternate, senior first
  alternating  one token each, authors alternate, senior first

With `schedule="alternate"` the authors of word, bernoulli and sentence runs alternate too, senior first, instead of being
drawn: the paper's handoff evaluation is `sentence` so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from slime_tandem.config import AuthorSchedule, Strategy, TandemConfig
from slime_tandem.types import JUNIOR, SENIOR, SampleKey

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
    """The settings that decide authorship, with the boundary table resolved for one tokenizer.

    >>> rule = HandoffRule("word", prob_senior=0.5, max_gap_tokens=32, chunk_size=16, boundary=frozenset({1}))
    >>> key = SampleKey(seed=7, rollout_id=0, sample_index=3)
    >>> rule.authorship(key, [5, 6, 1, 5, 1, 5])  # runs: [5 6 1] [5 1] [5]
    (1, 1, 1, 1, 1, 0)
    >>> HandoffRule("word", 0.5, 32, 16, frozenset({1}), schedule="alternate").authorship(key, [5, 6, 1, 5, 1, 5])
    (1, 1, 1, 0, 0, 1)
    """

    strategy: Strategy
    prob_senior: float
    max_gap_tokens: int
    chunk_size: int
    boundary: frozenset[int]
    schedule: AuthorSchedule = "draw"

    @classmethod
    def from_config(cls, config: TandemConfig, boundary: Iterable[int]) -> HandoffRule:
        """`config.enabled=False` is the rule in which the senior writes everything."""
        return cls(
            strategy=config.selection_strategy if config.enabled else "word",
            prob_senior=config.prob_senior if config.enabled else 1.0,
            max_gap_tokens=config.max_gap_tokens,
            chunk_size=config.chunk_size,
            boundary=frozenset(boundary),
            schedule=config.author_schedule if config.enabled else "draw",
        )

    def author(self, akey: int, run: int) -> int:
        """Author of run `run` (0, 1, ...) for a sample whose `author_key` is `akey`."""
        if self.alternates:
            return JUNIOR if run % 2 else SENIOR
        u = mix32((akey & _M32) ^ mix32((run + (akey >> 32)) & _M32))
        return SENIOR if u < round(self.prob_senior * 2**32) else JUNIOR

    def ends_run(self, token: int, length: int) -> bool:
        """True when a run that now holds `length` tokens, the last being `token`, is over."""
        match self.strategy:
            case "word":
                return token in self.boundary or length >= self.max_gap_tokens
            case "sentence":
                return token in self.boundary
            case "chunk":
                return length >= self.chunk_size
            case "bernoulli" | "alternating":
                return True

    @property
    def alternates(self) -> bool:
        """Whether the authors take turns, senior first, instead of being drawn."""
        return self.schedule == "alternate" or self.strategy in ("chunk", "alternating")

    @property
    def fixed_run_length(self) -> int | None:
        """Tokens per run where the text does not decide, else None."""
        if self.strategy == "chunk":
            return self.chunk_size
        return 1 if self.strategy in ("bernoulli", "alternating") else None

    @property
    def run_cap(self) -> int | None:
        """The most tokens that one run can hold; None: no cap."""
        return self.max_gap_tokens if self.strategy == "word" else self.fixed_run_length

    def runs_until_change(self, akey: int, run: int, limit: int) -> int | None:
        """How many runs from `run` on share its author; None when more than `limit` do (nothing can change before)."""
        first = self.author(akey, run)
        for n in range(1, limit + 1):
            if self.author(akey, run + n) != first:
                return n
        return None

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
        akey, run, length, fallen = author_key(key), 0, 0, False
        foreign = {i for start, stop in inserted for i in range(start, stop)}
        mask = []
        for i, token in enumerate(tokens):
            if i in foreign:
                run, length, fallen = run + (length > 0), 0, False
                mask.append(0)
                continue
            fallen = fallen or i in fallback_starts
            mask.append(SENIOR if fallen else self.author(akey, run))
            length += 1
            if self.ends_run(token, length):
                run, length, fallen = run + 1, 0, False
        return tuple(mask)
