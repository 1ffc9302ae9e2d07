"""What a catch-up step does beside the models, on a GPU: two Triton kernels in place of some sixty small launches.

plan   `catch_up.plan` and `catch_up.lay_out` in one program
mass   the log of the sum of exps of logits, each read once, in the type they were kept in
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime_tandem.engines.fused.catch_up import PIECE, Bounds, Snapshot, Step

_PARTS = 8
"""Into how many parts `mass` splits a row: a vocabulary is long, and a step has fewer rows than a card has multiprocessors."""
_LOG2_E = tl.constexpr(1.4426950408889634)


def plan(
    writes: torch.Tensor,
    solo: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    read: torch.Tensor,
    snapshot: Snapshot,
    ids_at: torch.Tensor,
    bounds: Bounds,
) -> Step:
    """The step of a model whose `read` [slots] is brought up to date; `writes`, `solo`, `length` and `slot` are [B]."""
    sequences = len(length)
    rows = bounds.rows(sequences)
    per_sequence = torch.empty((3, sequences), dtype=torch.int64, device=length.device)
    per_row = torch.empty((4, rows), dtype=torch.int64, device=length.device)
    widest = torch.empty(1, dtype=torch.int64, device=length.device)
    _plan[(1,)](
        writes.view(torch.uint8), solo.view(torch.uint8), length, slot, read, snapshot.starts, snapshot.locations, ids_at,
        per_sequence, widest, per_row, sequences, rows, bounds.budget,
        LONGEST=bounds.longest, PIECE=PIECE, BLOCK=triton.next_power_of_2(max(sequences, 32)), num_warps=4,
    )  # fmt: skip
    (taken, end, through), (sequence, position, location, ids) = per_sequence.unbind(), per_row.unbind()
    return Step(taken, end, through, widest, sequence, position, location, ids)


def mass(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """[R] float32: log-sum-exp of `logits` [R, V] (contiguous rows), divided by `temperature` [R] before where it is given."""
    rows, size = logits.shape
    parts = torch.empty((rows, _PARTS), dtype=torch.float32, device=logits.device)
    _mass[(rows, _PARTS)](
        logits, logits if temperature is None else temperature, parts, logits.stride(0), size, triton.cdiv(size, _PARTS),
        SCALED=temperature is not None, PARTS=_PARTS, BLOCK=2048, num_warps=4,
    )  # fmt: skip
    return parts.logsumexp(1)


@triton.jit(do_not_specialize=["sequences", "rows", "budget"])
def _plan(
    WRITES, SOLO, LENGTH, SLOT, READ, STARTS, LOCATIONS, IDS_AT, PER_SEQUENCE, WIDEST, PER_ROW, sequences, rows, budget,
    LONGEST: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK)
    there = b < sequences
    slot = tl.load(SLOT + b, mask=there, other=0)
    length = tl.load(LENGTH + b, mask=there, other=1).to(tl.int64)
    solo = tl.load(SOLO + b, mask=there, other=1) != 0
    read = tl.load(READ + slot, mask=there, other=0)
    pending = tl.maximum(length - read, 1)
    must = there & ((tl.load(WRITES + b, mask=there, other=0) != 0) | ((pending >= LONGEST) & (solo == 0)))
    left = tl.where(must | solo, 0, pending)
    remaining = tl.sum(left, 0) - budget
    early = b < 0
    for i in tl.static_range(LONGEST - 1):
        value = LONGEST - 1 - i
        here = left == value
        rank = tl.cumsum(here.to(tl.int64), 0)
        needed = tl.maximum(remaining + value - 1, 0) // value
        early = early | (here & (rank <= needed))
        remaining -= tl.minimum(tl.sum(here.to(tl.int64), 0), needed) * value
    taken = tl.where(must | early, pending, 0)
    end = tl.cumsum(taken, 0)
    tl.store(PER_SEQUENCE + b, taken, mask=there)
    tl.store(PER_SEQUENCE + sequences + b, end, mask=there)
    pieces = tl.where(taken > 0, (length + PIECE - 1) // PIECE, 0)
    tl.store(PER_SEQUENCE + 2 * sequences + b, tl.cumsum(pieces, 0), mask=there)
    tl.store(WIDEST, tl.max(pieces, 0))
    tl.store(READ + slot, length, mask=there & (taken > 0))
    total = tl.sum(taken, 0)
    for at in range(0, rows, BLOCK):
        row = at + b
        nobody = (row >= total) & (row < rows)
        zero = tl.zeros([BLOCK], tl.int64)
        tl.store(PER_ROW + row, zero + sequences, mask=nobody)
        tl.store(PER_ROW + rows + row, zero, mask=nobody)
        tl.store(PER_ROW + 2 * rows + row, zero, mask=nobody)
        tl.store(PER_ROW + 3 * rows + row, zero, mask=nobody)
    start = tl.load(STARTS + b, mask=there, other=0).to(tl.int64)
    for j in tl.static_range(LONGEST):
        row = end - taken + j
        live = (j < taken) & (row < rows)
        position = length - taken + j
        location = tl.load(LOCATIONS + start + position, mask=live, other=0).to(tl.int64)
        tl.store(PER_ROW + row, b.to(tl.int64), mask=live)
        tl.store(PER_ROW + rows + row, position, mask=live)
        tl.store(PER_ROW + 2 * rows + row, location, mask=live)
        tl.store(PER_ROW + 3 * rows + row, tl.load(IDS_AT + location, mask=live, other=0).to(tl.int64), mask=live)


@triton.jit
def _mass(LOGITS, TEMPERATURE, OUT, stride, size, each, SCALED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _LOG2_E
    if SCALED:
        scale = scale / tl.load(TEMPERATURE + row)
    stop = tl.minimum((part + 1) * each, size)
    top = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for at in range(part * each, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row * stride + i, mask=i < stop, other=-float("inf")).to(tl.float32) * scale
        new = tl.maximum(top, x)
        sums = sums * tl.exp2(top - new) + tl.exp2(x - new)
        top = new
    most = tl.max(top, 0)
    tl.store(OUT + row * PARTS + part, (most + tl.log2(tl.sum(sums * tl.exp2(top - most), 0))) / _LOG2_E)
