"""Which sequences a model reads in a decode step, and how many of each one's last tokens it computes with that one read.

A model reads a sequence's KV when it writes it; what the other one wrote since then it computes in the same read. What it
has not computed yet is its backlog. After every step the backlogs of all sequences together are at most `Bounds.budget` and
each is shorter than `Bounds.longest`, because sequences with the largest backlogs are caught up early. So the next step
needs at most sequences + budget rows, whatever the authors do: a captured graph has room for every case, and nothing waits
for the host. Tensor operations of fixed shapes only; `step_kernels` does the same in one kernel. It knows no model and no
cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PIECE = 64
"""Tokens of a sequence in the unit of `Step.through`: a whole number of them is what a program of the attention gets."""


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

    def surely_read(self, tokens: int) -> int:
        """How many of the first tokens of a sequence both models have computed behind a step that it had so many in.

        Of a sequence that both may write: of one model's alone the other may have computed nothing.

        >>> Bounds(longest=8).surely_read(100), Bounds(longest=8).surely_read(3)
        (93, 0)
        """
        return max(0, tokens - self.longest + 1)


class Snapshot(NamedTuple):
    """Where tokens lie, as SGLang hands it to a step: of sequence b at `locations[starts[b]] ...` up to `starts[b + 1]`."""

    starts: torch.Tensor
    locations: torch.Tensor


class Step(NamedTuple):
    """One model's part of a step over B sequences in R rows, int64.

    `taken` [B]: how many of the sequence's last tokens the model computes; 0: it does not read it. `end` [B]: the rows up to
    and with the sequence's last one. `through` [B]: pieces of `PIECE` tokens, the last one begun, of the sequences that it
    reads up to and with this one. `widest` [1]: pieces of the longest that it reads. Per row [R]: whose it is (`sequence`; B
    for a row of nobody, whose other entries are 0), the `position` of its token, the KV `location`, the token's id.
    """

    taken: torch.Tensor
    end: torch.Tensor
    through: torch.Tensor
    widest: torch.Tensor
    sequence: torch.Tensor
    position: torch.Tensor
    location: torch.Tensor
    ids: torch.Tensor


def plan(
    writes: torch.Tensor, solo: torch.Tensor, length: torch.Tensor, read: torch.Tensor, bounds: Bounds
) -> torch.Tensor:
    """[B]: `Step.taken` of a model.

    All [B]: `writes` bool, the model writes the next token; `solo` bool, one model alone writes this sequence for ever, and
    the other one need not follow; `length`, tokens so far, the newest among them, which nobody has computed; `read`, how many
    of them the model has computed. It then has computed all of the sequences that it reads; doing a step twice is the same as
    doing it once, except that the newest token is computed again.

    >>> n = lambda *v: torch.tensor(v)
    >>> plan(n(1, 0, 0) > 0, n(0, 0, 0) > 0, n(9, 9, 9), n(7, 8, 7), Bounds(2, 8)).tolist()
    [2, 0, 2]
    """
    pending = (length - read).clamp(min=1)
    must = writes | (~solo & (pending >= bounds.longest))
    left = torch.where(must | solo, 0, pending)
    order = torch.argsort(left, descending=True, stable=True)
    largest = left[order]
    before = largest.cumsum(0) - largest
    early = torch.zeros_like(must)
    early[order] = (largest > 0) & (left.sum() - before > bounds.budget)
    return torch.where(must | early, pending, 0)


def lay_out(
    taken: torch.Tensor, length: torch.Tensor, snapshot: Snapshot, ids_at: torch.Tensor, bounds: Bounds
) -> Step:
    """The step in which `taken` [B] of sequences of `length` [B] are computed; `ids_at`: the id at every KV location.

    >>> n = lambda *v: torch.tensor(v)
    >>> ids_at = n(0, 10, 20, 30, 40, 50, 60, 70)
    >>> step = lay_out(n(2, 0, 1), n(2, 1, 1), Snapshot(n(0, 2, 3, 4), n(7, 5, 3, 6)), ids_at, Bounds(1))
    >>> step.sequence.tolist(), step.position.tolist(), step.location.tolist(), step.ids.tolist()
    ([0, 0, 2, 3], [0, 1, 0, 0], [7, 5, 6, 0], [70, 50, 60, 0])
    >>> step.through.tolist(), step.widest.tolist()
    ([1, 1, 2], [1])
    """
    end = taken.cumsum(0)
    row = torch.arange(bounds.rows(len(length)), device=length.device)
    sequence = torch.searchsorted(end, row, right=True)
    live = sequence < len(length)
    of = sequence.clamp(max=len(length) - 1)
    position = torch.where(live, length[of] - end[of] + row, 0)
    location = torch.where(live, snapshot.locations[snapshot.starts[of] + position], 0)
    ids = torch.where(live, ids_at[location], 0).long()
    pieces = torch.where(taken > 0, (length + PIECE - 1) // PIECE, 0)
    return Step(taken, end, pieces.cumsum(0), pieces.max().unsqueeze(0), sequence, position, location, ids)
