"""Truncated sampling in numbers: which tokens top-k, top-p and min-p leave of a distribution. Pure torch.

The order is that of vLLM's reference: min-p, then top-k, then top-p on the renormalised rest. Each of them keeps what is likely
enough, so together they keep the tokens whose logit is at least a threshold, one number per row:
  min-p   the greatest logit + temperature * log(min_p)
  top-k   the k-th greatest logit
  top-p   the greatest logit such that it and what is above it hold at least top_p of what the other two left
Equal logits stay or go together: a set that depends on the order of equals cannot be found again from logits, nor from shards.
The threshold is one of the logits and found by bisection over their bit patterns in numerical order, hence exact; where the
vocabulary is sharded, a step of the bisection adds one number per row over the ranks, and no rank sees another's logits. It
draws nothing: the engine's sampling does (`engines/embedded/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tandem.errors import DataError

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
Group = dist.ProcessGroup | None
"""The ranks that hold the shards of the vocabulary; None: it is whole."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings of one micro-batch. Raises DataError for a setting outside its range.

    `top_k` -1: whole vocabulary (so does a value above its size); `top_p` in (0, 1], 1: all; `min_p` in [0, 1], 0: all.

    >>> Truncation(top_k=20).active, Truncation().active
    (True, False)
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, fine, expected in (
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (whole vocabulary) or at least 1"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
        ):
            if not fine:
                raise DataError(name, getattr(self, name), expected, "correct the sampling settings")

    @property
    def active(self) -> bool:
        """Whether anything is cut (where the vocabulary has more than `top_k` tokens)."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True)
class KeptIds:
    """The sets that the server sampled from: row t kept `ids[offsets[t]:offsets[t + 1]]`; an empty row was not truncated.

    `ids` [n], `offsets` [T + 1], both int64; ids of the whole vocabulary, also where that is sharded.

    >>> kept = KeptIds.of([[3, 1], [], [2]])
    >>> kept.ids.tolist(), kept.offsets.tolist()
    ([3, 1, 2], [0, 2, 2, 3])
    """

    ids: Tensor
    offsets: Tensor

    @staticmethod
    def of(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> KeptIds:
        """From one list per row."""
        counts = torch.tensor([0, *map(len, rows)], dtype=torch.long)
        ids = torch.tensor([i for row in rows for i in row], dtype=torch.long)
        return KeptIds(ids.to(device), counts.cumsum(0).to(device))

    def mask(self, start: int, stop: int, first: int, size: int) -> Tensor:
        """[stop - start, size] bool: which of the vocabulary's `size` ids from `first` on rows `start:stop` kept."""
        counts = self.offsets.diff()[start:stop]
        ids = self.ids[self.offsets[start] : self.offsets[stop]] - first
        rows = torch.repeat_interleave(torch.arange(stop - start, device=ids.device), counts)
        here = (ids >= 0) & (ids < size)
        out = (counts == 0)[:, None].expand(-1, size).clone()
        out[rows[here], ids[here]] = True
        return out


@dataclass(frozen=True)
class Replay:
    """How the truncation of a micro-batch of T tokens is replayed: by the server's kept ids if there are any, else
    from the logits.

    `replayed` [T] bool: rows that were sampled from a truncated distribution, None for all; the others keep the full one. With
    `kept` an empty row says the same.
    """

    truncation: Truncation
    replayed: Tensor | None = None
    kept: KeptIds | None = None


def all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """`x`, reduced over the group in place."""
    if group is not None:
        dist.all_reduce(x, op, group)
    return x


def thresholds(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    min_p: Tensor | float,
    temperature: Tensor | float = 1.0,
    group: Group = None,
) -> Tensor:
    """The least kept logit of each row [c], in the logits' type, of `logits` [c, V] (of the ranks' shards [c, V / ranks]).

    Settings are scalars or [c]; `top_k` <= 0 or at least the size of the vocabulary keeps all. A row without a finite
    maximum gives a
    meaningless number. Memory: a few times `logits` in float32.

    >>> thresholds(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log(), 3, 0.6, 0.0).exp()
    tensor([0.3000])
    """
    dtype = wide_type(logits.dtype)
    device, rows = logits.device, logits.shape[:1]
    k = torch.as_tensor(top_k, device=device).expand(rows)
    p, m, t = (
        torch.as_tensor(v, dtype=torch.float64, device=device).expand(rows).to(dtype)
        for v in (top_p, min_p, temperature)
    )
    keys, wide = _keys(logits), logits.to(dtype)
    peak = all_reduce(wide.amax(-1), dist.ReduceOp.MAX, group)
    high = _keys(peak.to(logits.dtype)).long()
    floor = torch.where(m > 0, peak + t * m.log(), -torch.inf)
    least = torch.where(wide >= floor[:, None], keys.long(), high[:, None]).amin(-1)
    low = all_reduce(least, dist.ReduceOp.MIN, group)

    def above(key: Tensor, weights: Tensor | None) -> Tensor:
        """[c]: number, or mass, of the logits that have at least this key."""
        there = keys >= key.to(keys.dtype)[:, None]
        held = there.sum(-1) if weights is None else torch.where(there, weights, 0.0).sum(-1)
        return all_reduce(held, dist.ReduceOp.SUM, group)

    if bool((k > 0).any()):
        low = torch.where(k > 0, _greatest(lambda key: above(key, None) >= k, low, high), low)
    if bool((p < 1).any()):
        weights = ((wide - peak[:, None]) / t[:, None]).exp_()
        needed = p * above(low, weights)
        low = torch.where(p < 1, _greatest(lambda key: above(key, weights) >= needed, low, high), low)
    return _values(low, logits.dtype)


def kept_mask(
    logits: Tensor, top_k: Tensor | int, top_p: Tensor | float, min_p: Tensor | float, temperature: Tensor | float = 1.0
) -> Tensor:
    """[c, V] bool: what a truncation leaves of `logits` [c, V]; arguments as for `thresholds`.

    >>> kept_mask(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log(), 3, 0.8, 0.0)
    tensor([[False,  True,  True,  True]])
    """
    return logits >= thresholds(logits, top_k, top_p, min_p, temperature)[:, None]


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which logits of this type are computed with: float64 stays, all else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _greatest(enough: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The greatest key [c] in [low, high] that is `enough`; `low` where none is. What is enough stays so further down."""
    while bool((low < high).any()):
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without the overflow of a sum
        good = enough(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, torch.maximum(low, middle - 1))
    return low


def _keys(x: Tensor) -> Tensor:
    """Integers in the order of the floats `x`, as wide as these; -0.0 gets the key of 0.0."""
    bits = (x + 0.0).view(_BITS[x.dtype])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _values(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of keys."""
    bits = keys.to(_BITS[dtype])
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).view(dtype)
