"""Which sequences a model reads in a decode step, and how many of each one's last tokens it computes with that one read.

A model reads a sequence's KV when it writes it; what the other one wrote since then it computes in the same read. What it
has not computed yet is its backlog. After every step the backlogs of all sequences together are at most `Bounds.budget` and
each is shorter than `Bounds.longest`, because sequences with the largest backlogs are caught up early. So the next step
needs at most sequences + budget rows, whatever the authors do: a captured graph has room for every case, and nothing waits
for the host. Tensor operations of fixed shapes only; no model, no cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Bounds(NamedTuple):
    """`budget`: tokens, of all sequences together, that a model may leave for later; `longest`: most rows of one sequence.

    >>> Bounds().rows(48), Bounds().rows(2), Bounds(0, 1).rows(48)
    (112, 16, 48)
    """

    budget: int = 64
    longest: int = 8

    def rows(self, sequences: int) -> int:
        """Rows that a step over so many sequences may need, at most."""
        return min(sequences * self.longest, sequences + self.budget)


class Reads(NamedTuple):
    """One model's part of a step over B sequences in R rows, int64.

    `tokens` [B]: how many of the sequence's last tokens the model computes; 0: it does not read it. `end` [B]: the rows up to
    and with the sequence's last one. `sequence` [R]: whose row it is; B for a row of nobody.
    """

    tokens: torch.Tensor
    end: torch.Tensor
    sequence: torch.Tensor


def plan(
    writes: torch.Tensor, solo: torch.Tensor, length: torch.Tensor, read: torch.Tensor, bounds: Bounds
) -> tuple[Reads, torch.Tensor]:
    """(what a model reads in this step, the new `read`).

    All [B]: `writes` bool, the model writes the next token; `solo` bool, one model alone writes this sequence for ever, and
    the other one need not follow; `length`, tokens so far, the newest among them, which nobody has computed; `read`, how many
    of them the model has computed. Doing it twice is the same as doing it once, except that the newest token is then
    computed again by whoever writes.

    >>> n = lambda *v: torch.tensor(v)
    >>> reads, read = plan(n(1, 0, 0) > 0, n(0, 0, 0) > 0, n(9, 9, 9), n(7, 8, 7), Bounds(2, 8))
    >>> reads.tokens.tolist(), reads.end.tolist(), reads.sequence.tolist(), read.tolist()
    ([2, 0, 2], [2, 2, 4], [0, 0, 2, 2, 3], [9, 8, 9])
    """
    pending = (length - read).clamp(min=1)
    must = writes | (~solo & (pending >= bounds.longest))
    left = torch.where(must | solo, 0, pending)
    order = torch.argsort(left, descending=True, stable=True)
    largest = left[order]
    before = largest.cumsum(0) - largest
    early = torch.zeros_like(must)
    early[order] = (largest > 0) & (left.sum() - before > bounds.budget)
    count = torch.where(must | early, pending, 0)
    end = count.cumsum(0)
    row = torch.arange(bounds.rows(len(length)), device=length.device)
    reads = Reads(count, end, torch.searchsorted(end, row, right=True))
    return reads, torch.where(count > 0, length, read)
