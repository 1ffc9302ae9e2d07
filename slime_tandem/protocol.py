"""The records of SGLang's native HTTP API that we use: what a request holds and what an answer gives back.

Field names and meanings follow `python/sglang/srt/managers/io_struct.py` (`GenerateReqInput`) and
`sampling/sampling_params.py` of SGLang 0.5.15.post1. Log-probs are nats; ids belong to the served model's tokenizer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol, Self, overload, runtime_checkable

import numpy as np

from slime_tandem.types import BoolArray, FinishReason, FloatArray, IntArray

TopLogProbs = tuple[tuple[float, int], ...]
"""One position's candidates as (log-prob, id), best first."""


@dataclass(frozen=True, eq=False)
class IdsAt:
    """Some ids at each of n positions, in arrays: those of position i are `ids[starts[i]:starts[i + 1]]`.

    `ids` [N] int64, `starts` [n + 1] int64.

    >>> at = IdsAt.of([[7], [], [5, 6]])
    >>> len(at), at.counts.tolist(), at.part(1, 3).ids.tolist(), at.rows.tolist()
    (3, [1, 0, 2], [5, 6], [0, 2, 2])
    """

    ids: IntArray
    starts: IntArray

    @classmethod
    def of(cls, rows: Sequence[Collection[int]]) -> IdsAt:
        """From a collection for each position; sets in ascending order."""
        ordered = [sorted(row) if isinstance(row, (set, frozenset)) else row for row in rows]
        flat = np.fromiter(itertools.chain.from_iterable(ordered), np.int64)
        return IdsAt(flat, _starts([len(row) for row in ordered]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> IntArray:
        """[n]: how many ids each position has."""
        return np.diff(self.starts)

    @cached_property
    def rows(self) -> IntArray:
        """[N]: the position of each id."""
        return np.repeat(np.arange(len(self)), self.counts)

    def part(self, start: int, stop: int) -> Self:
        """Positions `[start, stop)`, without copies."""
        a, b = int(self.starts[start]), int(self.starts[stop])
        return self._cut(a, b, self.starts[start : stop + 1] - a)

    def _cut(self, a: int, b: int, starts: IntArray) -> Self:
        return type(self)(self.ids[a:b], starts)

    @cached_property
    def _sorted(self) -> tuple[IntArray, IntArray]:
        """(keys in order, entry of each): a key is a position and an id in one number."""
        keys = _keys(self.rows, self.ids)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def find(self, rows: IntArray, ids: IntArray) -> IntArray:
        """Entries of `ids` at positions `rows` (any shape): places in `self.ids`, -1 where it is not there. The last of equals.

        >>> IdsAt.of([[7], [5, 6]]).find(np.array([1, 0]), np.array([6, 6])).tolist()
        [2, -1]
        """
        keys, order = self._sorted
        wanted = _keys(rows, ids)
        if not len(keys):
            return np.full(wanted.shape, -1, dtype=np.int64)
        place = np.searchsorted(keys, wanted, side="right") - 1
        found: IntArray = np.where((place >= 0) & (keys[place] == wanted), order[place], -1)
        return found


_ID_BITS = 32


def _keys(rows: IntArray, ids: IntArray) -> IntArray:
    keys: IntArray = (rows << _ID_BITS) | (ids & (2**_ID_BITS - 1))
    return keys


def _starts(counts: Sequence[int] | IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


@dataclass(frozen=True, eq=False)
class CandidateLists(IdsAt, Sequence["TopLogProbs | None"]):
    """Candidates of n positions in arrays: `IdsAt` with `values` [N], nats. As a sequence: `TopLogProbs`, None for no entries.

    >>> lists = CandidateLists.of([None, ((-0.1, 9), (-2.5, 4))])
    >>> list(lists), lists.last(1).maps()
    ([None, ((-0.1, 9), (-2.5, 4))], [{9: -0.1, 4: -2.5}])
    >>> lists == (None, ((-0.1, 9), (-2.5, 4)))
    True
    """

    values: FloatArray

    @classmethod
    def of(cls, rows: Iterable[TopLogProbs | Mapping[int, float] | None]) -> CandidateLists:  # type: ignore[override]
        """From the entries of each position, as tuples or {id: log-prob}; lists in arrays as they are.

        A value None becomes NaN: whether a value is one is for who uses it to say.
        """
        if isinstance(rows, CandidateLists):
            return rows
        tuples = [tuple((v, t) for t, v in r.items()) if isinstance(r, Mapping) else r or () for r in rows]
        flat = list(itertools.chain.from_iterable(tuples))
        values = np.array([np.nan if value is None else value for value, _ in flat], dtype=np.float64)
        return cls(np.array([i for _, i in flat], dtype=np.int64), _starts([len(r) for r in tuples]), values)

    def _cut(self, a: int, b: int, starts: IntArray) -> Self:
        return type(self)(self.ids[a:b], starts, self.values[a:b])

    def last(self, n: int) -> Self:
        """The last `n` positions, or as many as there are."""
        return self.part(max(0, len(self) - n), len(self))

    @overload
    def __getitem__(self, at: int) -> TopLogProbs | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[TopLogProbs | None]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        a, b = self.starts[at % len(self)], self.starts[at % len(self) + 1]
        return tuple(zip(self.values[a:b].tolist(), self.ids[a:b].tolist(), strict=True)) or None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def maps(self) -> list[dict[int, float]]:
        """{id: log-prob} of each position."""
        return [{t: v for v, t in row or ()} for row in self]

    def merged(self, other: CandidateLists) -> CandidateLists:
        """The entries of both at each position; of an id that both have, the other's."""
        own = self.find(other.rows, other.ids)
        kept: BoolArray = np.ones(len(self.ids), np.bool_)
        kept[own[own >= 0]] = False
        rows = np.concatenate((self.rows[kept], other.rows))
        order = np.argsort(rows, kind="stable")
        ids = np.concatenate((self.ids[kept], other.ids))[order]
        values = np.concatenate((self.values[kept], other.values))[order]
        return CandidateLists(ids, _starts(np.bincount(rows, minlength=len(self))), values)


class IdText(Sequence[int]):
    """Ids that are sent again and again with more or less of their end: prefixes share the ids and their JSON text.

    The whole only ever grows (`extend`); a prefix stays what it is.

    >>> whole = IdText([5, 67, 890])
    >>> part = whole.prefix(2)
    >>> whole.extend([4])
    >>> b"".join(part.json), part, len(whole), part.shares(whole), IdText([5, 67]).shares(whole)
    (b'[5,67]', (5, 67), 4, True, False)
    """

    __slots__ = ("_count", "_ends", "_ids", "_text")

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._text = bytearray()
        self._ends = array("q")  # of each id in the text; a comma stands behind each but the last
        self._count = 0
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add ids at the end of the whole."""
        assert self._count == len(self._ids), "a prefix does not grow"
        if not len(ids):
            return
        if self._text:
            self._text += b","
        if len(ids) <= _FEW:  # what a handoff brings: arrays would cost more than the ids
            texts = [b"%d" % token for token in ids]
            end = len(self._text) - 1
            for text in texts:
                end += len(text) + 1
                self._ends.append(end)
            self._text += b",".join(texts)
        else:
            digits = np.searchsorted(_TENS, np.asarray(ids, dtype=np.int64), side="right") + 2
            self._ends.frombytes((np.cumsum(digits) - 1 + len(self._text)).astype(np.int64).tobytes())
            self._text += json.dumps(list(ids), separators=(",", ":")).encode()[1:-1]
        self._ids += ids
        self._count = len(self._ids)

    def prefix(self, count: int) -> IdText:
        """The first `count` ids."""
        assert 0 <= count <= len(self._ids)
        out = object.__new__(IdText)
        out._ids, out._text, out._ends, out._count = self._ids, self._text, self._ends, count
        return out

    def shares(self, other: object) -> bool:
        """Whether both are prefixes of one whole, so that the shorter one begins the longer one."""
        return isinstance(other, IdText) and other._ids is self._ids

    @property
    def json(self) -> tuple[bytes, memoryview, bytes]:
        """The list as JSON, in pieces for a `join`, which must come before the whole grows."""
        return b"[", memoryview(self._text)[: self._ends[self._count - 1] if self._count else 0], b"]"

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._count)
            return tuple(self._ids[start : max(stop, 0) : step]) if step > 0 else tuple(self)[at]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        return self._ids[at % self._count]

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._ids, self._count)

    def __add__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*self, *other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


_FEW = 32
_TENS = 10 ** np.arange(1, 18, dtype=np.int64)


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

    @property
    def one_writes(self) -> bool:
        """Whether one model alone writes all of it.

        >>> [Handoff(1, threshold, False, None, "").one_writes for threshold in (0, 1, 2**32)]
        [True, False, True]
        >>> Handoff(1, 0, True, None, "").one_writes
        False
        """
        return not self.alternate and self.threshold in (0, 2**32)


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
    position; an empty list asks for nothing (`Sharing` in slime_hooks/runtime.py says what for). `token_ids_at`: in its
    place, ids of each input position's own, where `PositionEngine.scores_positions` is true. `truncated_logprobs`: the
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
    input_ids: tuple[int, ...] | IdText
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
    token_ids_at: IdsAt | None = None

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
    The four candidate lists have an entry per position; the HTTP client gives them as `CandidateLists`, which are arrays.
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
    output_top_logprobs: Sequence[TopLogProbs | None] = ()
    input_top_logprobs: Sequence[TopLogProbs | None] = ()
    output_token_ids_logprobs: Sequence[TopLogProbs | None] = ()
    input_token_ids_logprobs: Sequence[TopLogProbs | None] = ()
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


@runtime_checkable
class PositionEngine(Engine, Protocol):
    """An engine that may know `GenerateRequest.token_ids_at`."""

    async def scores_positions(self, ids: Sequence[int]) -> bool:
        """Whether its server does; `ids`: four or more of its vocabulary to try it with."""
        ...
