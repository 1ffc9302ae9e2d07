"""Decode attention over the sequences that a model reads, for several of each one's last tokens at once: two Triton kernels.

SGLang's own decode kernel takes one query a sequence and reads every sequence. Here sequence b has `taken[b]` query rows, none
of them being the usual case, and costs nothing then; its keys and values are read once per KV head for all its rows. They
lie in the pool already, those of the rows themselves among them, so one rule covers what came before and what is caught up
on: a row sees the positions up to its own. It knows no model and no SGLang.
  read    for one KV head a share of all that is read: the sequences are laid end to end and cut into equal shares, as many as
          the card runs at once, so that none waits for another. A share holds parts of one or more sequences; of each part,
          partial sums and the log of their weight
  merge   the parts of one row and head
Cut like this, a card is full whatever the number of sequences read; cut each for itself, they took up to 1.2 times as long
(docs/results/fused.md). The cut is Stream-K's (Osama et al. 2023, section 4).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slime_tandem.engines.fused.catch_up import PIECE, Snapshot, Step

_LEAST = 2
"""Pieces below which a share is not cut further."""
_WINDOW = 32
"""Sequences looked at at once for the next one that is read."""
_TILE = 16
"""Query rows (tokens times query heads of a KV head) of the usual read; the matrix units take no fewer."""
_ONE_TILE = 32
"""Query rows up to which every read is made for as many as any may have: a second kind of read costs more than idle rows."""


class Tuning(NamedTuple):
    """Tokens at once, warps and pipeline stages of `read`; for how many of its programs a multiprocessor has room.

    The defaults are what an H200 was fastest with (scripts/benchmarks/ragged_attention.py).
    """

    block: int = 64
    warps: int = 2
    stages: int = 5
    programs: int = 2


TUNING = Tuning()


class Workspace:
    """Partial results of rows x heads x parts of up to `most` in all, for every layer and model in turn, in float32.

    One step's launches use it one after the other; captured graphs keep its address.
    """

    def __init__(self, most: int, size: int, device: torch.device) -> None:
        self._sums = torch.empty((most, size), dtype=torch.float32, device=device)
        self._weights = torch.empty(most, dtype=torch.float32, device=device)

    def of(self, rows: int, heads: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums [rows, heads, parts, size], and the logs of their weights [rows, heads, parts]."""
        n, shape = rows * heads * parts, (rows, heads, parts)
        return self._sums[:n].view(*shape, -1), self._weights[:n].view(shape)


def most_parts(sequences: int, shares: int) -> int:
    """Into how many parts a sequence may be cut in a step over so many sequences: a power of two from 4 to 32."""
    return int(min(32, max(4, triton.next_power_of_2(triton.cdiv(16 * shares, sequences)))))


def shares_of(device: torch.device, kv_heads: int, tuning: Tuning = TUNING) -> int:
    """Into how many shares the work of one KV head is cut."""
    return max(1, tuning.programs * _multiprocessors(device) // kv_heads)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """A CPU, where Triton's interpreter runs this, has none; what is right there is right with any number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 0
    card = torch.cuda.get_device_properties(device)
    # PyTorch for AMD's cards has the second alone.
    return int(getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block))


def stages_in(room: int, size: int, width: int, tuning: Tuning = TUNING) -> int:
    """The pipeline stages for heads of `size` values of `width` bytes where a program has `room` bytes of shared memory.

    Three are one buffer for a block of keys and values, five two (Triton 3.6).
    """
    buffers, beside = 2 * 2 * tuning.block * size * width, _ONE_TILE * (size + tuning.block) * width
    return tuning.stages if buffers + beside <= room else min(3, tuning.stages)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    snapshot: Snapshot,
    step: Step,
    longest: int,
    scale: float,
    workspace: Workspace,
    tuning: Tuning = TUNING,
) -> torch.Tensor:
    """[R, H, D]: the attention of query rows `q` [R, H, D] over the pool's `k` and `v` [locations, KV heads, D].

    Of sequence b the last `step.taken[b]` tokens, at most `longest`, are rows `step.end[b] - step.taken[b] ..
    step.end[b] - 1`. Rows of nobody come back as zeros.
    """
    rows, heads, size = q.shape
    sequences, kv_heads = len(step.taken), k.shape[1]
    shares = shares_of(q.device, kv_heads, tuning)
    most = most_parts(sequences, shares)
    sums, weights = workspace.of(rows, heads, most)
    out = q.new_empty(q.shape)
    group = heads // kv_heads
    wide = max(_TILE, triton.next_power_of_2(group * longest))
    tile = wide if wide <= _ONE_TILE else max(_TILE, triton.next_power_of_2(group))
    _read[(shares, kv_heads)](
        q, k, v, snapshot.starts, snapshot.locations, step.taken, step.end, step.through, step.widest, sums, weights, scale,
        sequences, most,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), sums.stride(0), sums.stride(1),
        sums.stride(2), weights.stride(0), weights.stride(1),
        GROUP=group, TILE=tile, WIDE=wide, BLOCK=tuning.block, SIZE=size, PIECE=PIECE, LEAST=_LEAST,
        WINDOW=_WINDOW, num_warps=tuning.warps, num_stages=stages_in(_shared_memory(q.device), size, k.element_size(), tuning),
    )  # fmt: skip
    _merge[(rows, heads)](
        sums, weights, out, step.sequence, step.through, step.widest, sequences, shares,
        sums.stride(0), sums.stride(1), sums.stride(2), weights.stride(0), weights.stride(1), out.stride(0), out.stride(1),
        SIZE=size, MOST=most, LEAST=_LEAST, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _used(total, widest, shares, most, LEAST: tl.constexpr):
    """How many shares `total` pieces are cut into: share i gets the pieces from i * total // used on."""
    used = tl.minimum(shares, tl.maximum(total // LEAST, 1))
    # A sequence of n pieces has at most n * used / total + 2 parts.
    return tl.minimum(used, tl.maximum((most - 2) * total // widest, 1))


@triton.jit
def _share(piece, total, used):
    """The share that a piece belongs to."""
    return ((piece + 1) * used - 1) // total


@triton.jit
def _rows_over_part(
    Q, K, V, locations, SUMS, WEIGHTS, scale, first, count, head, part, start, stop, length,
    sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, ROWS)
    token = m // GROUP
    h = head * GROUP + m % GROUP
    live = token < count
    row = first + token
    d = tl.arange(0, SIZE)
    q = tl.load(Q + row[:, None] * sq + h[:, None] * sqh + d[None, :], mask=live[:, None], other=0.0)
    sees = length - count + token  # the last position that a row sees: its own
    top = tl.full([ROWS], -1e30, tl.float32)  # finite: a part may hold nothing that a row sees
    mass = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE], tl.float32)
    for at in tl.range(start, stop, BLOCK):
        position = at + tl.arange(0, BLOCK)
        there = position < stop
        where = tl.load(locations + position, mask=there, other=0).to(tl.int64)
        k = tl.load(K + where[None, :] * sk + head * skh + d[:, None], mask=there[None, :], other=0.0)
        v = tl.load(V + where[:, None] * sv + head * svh + d[None, :], mask=there[:, None], other=0.0)
        seen = there[None, :] & (position[None, :] <= sees[:, None])
        x = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, -1e30)
        new = tl.maximum(top, tl.max(x, 1))
        shrink = tl.exp2(top - new)
        p = tl.where(seen, tl.exp2(x - new[:, None]), 0.0)
        sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        mass = mass * shrink + tl.sum(p, 1)
        top = new
    some = mass > 0
    safe = tl.where(some, mass, 1.0)
    to = row[:, None] * ss + h[:, None] * ssh + part * ssp + d[None, :]
    tl.store(SUMS + to, sums / safe[:, None], mask=(live & some)[:, None])
    tl.store(WEIGHTS + row * sw + h * swh + part, tl.where(some, top + tl.log2(safe), -1e30), mask=live)


@triton.jit
def _next(THROUGH, b, piece, sequences, WINDOW: tl.constexpr):
    """The first sequence from b on that ends behind `piece`: those that are not read end where the one before them does."""
    passed = b * 0 + WINDOW
    while passed == WINDOW:
        near = b + tl.arange(0, WINDOW)
        through = tl.load(THROUGH + near, mask=near < sequences, other=piece + 1)
        passed = tl.sum((through <= piece).to(tl.int32), 0)
        b += passed
    return b


# The same code for every batch size: each would be compiled while its graph is captured.
@triton.jit(do_not_specialize=["sequences", "most", "sw", "swh"])
def _read(
    Q, K, V, STARTS, LOCATIONS, TAKEN, END, THROUGH, WIDEST, SUMS, WEIGHTS, scale, sequences, most,
    sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PIECE: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    total = tl.load(THROUGH + sequences - 1).to(tl.int32)
    if total == 0:
        return
    used = _used(total, tl.load(WIDEST).to(tl.int32), tl.num_programs(0), most, LEAST)
    if i >= used:
        return
    scale = scale * 1.4426950408889634  # exp2 instead of exp
    at, last = i * total // used, (i + 1) * total // used
    b = _next(THROUGH, i * 0, at, sequences, WINDOW)
    while at < last:
        begin = tl.load(STARTS + b).to(tl.int64)
        length = (tl.load(STARTS + b + 1) - begin).to(tl.int32)
        after = tl.load(THROUGH + b).to(tl.int32)
        before = after - tl.cdiv(length, PIECE)
        count = tl.load(TAKEN + b).to(tl.int32)
        first = tl.load(END + b).to(tl.int32) - count
        upto = tl.minimum(after, last)
        part = i - _share(before, total, used)
        start, stop = (at - before) * PIECE, tl.minimum((upto - before) * PIECE, length)
        if TILE == WIDE or count * GROUP <= TILE:
            _rows_over_part(
                Q, K, V, LOCATIONS + begin, SUMS, WEIGHTS, scale, first, count, head, part, start, stop, length,
                sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh, GROUP, TILE, BLOCK, SIZE,
            )  # fmt: skip
        else:
            _rows_over_part(
                Q, K, V, LOCATIONS + begin, SUMS, WEIGHTS, scale, first, count, head, part, start, stop, length,
                sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh, GROUP, WIDE, BLOCK, SIZE,
            )  # fmt: skip
        at = upto
        b = _next(THROUGH, b, at, sequences, WINDOW)


@triton.jit(do_not_specialize=["sequences", "shares", "sw", "swh"])
def _merge(
    SUMS, WEIGHTS, OUT, SEQUENCE, THROUGH, WIDEST, sequences, shares, ss, ssh, ssp, sw, swh, so, soh,
    SIZE: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, SIZE)
    to = OUT + row * so + h * soh + d
    b = tl.load(SEQUENCE + row)
    if b >= sequences:  # zeros, so that nothing behind meets what was left in memory
        tl.store(to, tl.zeros([SIZE], OUT.dtype.element_ty))
        return
    total = tl.load(THROUGH + sequences - 1).to(tl.int32)
    used = _used(total, tl.load(WIDEST).to(tl.int32), shares, MOST, LEAST)
    before = tl.load(THROUGH + b - 1, mask=b > 0, other=0).to(tl.int32)
    parts = _share(tl.load(THROUGH + b).to(tl.int32) - 1, total, used) - _share(before, total, used) + 1
    part = tl.arange(0, MOST)
    w = tl.load(WEIGHTS + row * sw + h * swh + part, mask=part < parts, other=-1e30)
    share = tl.where(w > -1e29, tl.exp2(w - tl.max(w, 0)), 0.0)
    sums = tl.load(SUMS + row * ss + h * ssh + part[:, None] * ssp + d[None, :], mask=(share > 0)[:, None], other=0.0)
    tl.store(to, (tl.sum(sums * share[:, None], 0) / tl.sum(share, 0)).to(OUT.dtype.element_ty))
