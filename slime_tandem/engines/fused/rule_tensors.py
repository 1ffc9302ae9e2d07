"""The handoff rule (`rollout.handoff`) on tensors: integer operations only, no host value, so a CUDA graph can hold them.

Rows are requests. A request's rule is (akey, threshold, alternate, cap, boundary table), its state (run, start): the ordinal of
the run that the next token belongs to, and the position in the whole sequence where that run began. 32-bit unsigned
arithmetic is done in int64 with masks; a product may wrap, its low 32 bits are right.
"""

from __future__ import annotations

import torch

NO_CAP = 1 << 40
"""A cap that no run reaches."""
_M32 = 0xFFFFFFFF


def mix32(x: torch.Tensor) -> torch.Tensor:
    """`rollout.handoff.mix32` of every entry of an int64 tensor."""
    x = x & _M32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _M32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _M32
    return x ^ (x >> 16)


def writes_senior(
    akey_low: torch.Tensor, akey_high: torch.Tensor, threshold: torch.Tensor, alternate: torch.Tensor, run: torch.Tensor
) -> torch.Tensor:
    """[B] bool: whether run `run` is the senior's. All arguments [B] int64; `alternate` is 0 or 1.

    >>> one = torch.ones(2, dtype=torch.int64)
    >>> writes_senior(one, one, one * 2**32, one * 0, one).tolist(), writes_senior(one, one, one, one, one * 3).tolist()
    ([True, True], [False, False])
    """
    drawn = mix32(akey_low ^ mix32(run + akey_high)) < threshold
    return torch.where(alternate != 0, (run & 1) == 0, drawn)


def advance(
    tables: torch.Tensor,
    table: torch.Tensor,
    cap: torch.Tensor,
    run: torch.Tensor,
    start: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(run, start) after `token` at `position`. `tables` [K, V] bool, the rest [B] int64.

    Doing it twice is the same as doing it once: graph warm-ups and repeated steps change nothing.

    >>> n = lambda *v: torch.tensor(v)
    >>> advance(torch.tensor([[False, True]]), n(0, 0), n(9, 9), n(4, 4), n(3, 3), n(0, 1), n(5, 5))
    (tensor([4, 5]), tensor([3, 6]))
    """
    end = position + 1
    ends = tables[table, token] | (end - start >= cap)
    moved = torch.where(ends, end, start)
    return run + (moved != start), moved


def replay(tokens: torch.Tensor, table: torch.Tensor, cap: int, run: int, run_length: int) -> tuple[int, int]:
    """(run, run length) after all of `tokens` [N], from a state of `run_length` tokens in run `run`.

    `table` [V] bool: after which tokens a run ends, besides after `cap` tokens. In closed form: between two boundaries a
    stretch of L tokens is ceil(L / cap) runs.

    >>> replay(torch.tensor([0, 1, 0, 0, 0]), torch.tensor([False, True]), 2, run=7, run_length=1)
    (10, 1)
    """
    ends = torch.nonzero(table[tokens]).flatten() + 1
    edges = torch.cat([torch.tensor([-run_length]), ends])
    stretches = edges.diff()
    run += int(((stretches + cap - 1) // cap).sum())
    rest = len(tokens) - int(edges[-1])
    return run + rest // cap, rest % cap
