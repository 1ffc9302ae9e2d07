"""Decode attention over the sequences that a model reads, for several of each one's last tokens at once: two Triton kernels.

SGLang's own decode kernel takes one query a sequence and reads every sequence. Here sequence b has `taken[b]` query rows, none
of them being the usual case, and costs nothing then; its keys and values are read once per KV head for all its rows. They
lie in the pool already, those of the rows themselves among them, so one rule covers what came before and what is caught up
on: a row sees the positions up to its own. It knows no model and no SGLang.
  read    a part of one sequence for one KV head: partial sums, and the log of their weight
  merge   the parts of one row and head
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slime_tandem.engines.fused.catch_up import Snapshot, Step

_LEAST_PART = 128
"""Tokens below which a sequence is not split further."""
_TILE = 16
"""Query rows (tokens times query heads of a KV head) of the usual read; the matrix units take no fewer."""


class Tuning(NamedTuple):
    """Tokens at once, warps and pipeline stages of `read`; how many programs with work the card should have.

    The defaults are what an H200 was fastest with (scripts/benchmarks/ragged_attention.py).
    """

    block: int = 64
    warps: int = 2
    stages: int = 3
    programs: int = 1536


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


def most_parts(sequences: int, kv_heads: int, tuning: Tuning = TUNING) -> int:
    """Into how many parts a sequence may be split in a step over so many sequences: a power of two from 4 to 32."""
    wanted = triton.cdiv(2 * tuning.programs, sequences * kv_heads)
    return int(min(32, max(4, triton.next_power_of_2(wanted))))


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
    most = most_parts(sequences, kv_heads, tuning)
    sums, weights = workspace.of(rows, heads, most)
    out = q.new_empty(q.shape)
    group = heads // kv_heads
    _read[(sequences, kv_heads, most)](
        q, k, v, snapshot.starts, snapshot.locations, step.taken, step.end, step.readers, sums, weights, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), sums.stride(0), sums.stride(1),
        sums.stride(2), weights.stride(0), weights.stride(1),
        GROUP=group, TILE=max(_TILE, triton.next_power_of_2(group)), WIDE=max(_TILE, triton.next_power_of_2(group * longest)),
        BLOCK=tuning.block, SIZE=size, PROGRAMS=tuning.programs, LEAST=_LEAST_PART, num_warps=tuning.warps,
        num_stages=tuning.stages,
    )  # fmt: skip
    _merge[(rows, heads)](
        sums, weights, out, snapshot.starts, step.sequence, step.readers, sequences, kv_heads,
        sums.stride(0), sums.stride(1), sums.stride(2), weights.stride(0), weights.stride(1), out.stride(0), out.stride(1),
        SIZE=size, MOST=most, BLOCK=tuning.block, PROGRAMS=tuning.programs, LEAST=_LEAST_PART, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _part(length, readers, kv_heads, most, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, LEAST: tl.constexpr):
    """Tokens of one part of a sequence, so that the parts of the sequences that are read fill the card."""
    parts = tl.cdiv(PROGRAMS, readers.to(tl.int32) * kv_heads)
    each = tl.cdiv(length, tl.minimum(parts, most))
    return tl.maximum(tl.cdiv(each, BLOCK) * BLOCK, LEAST)


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


# The same code for every batch size: each would be compiled while its graph is captured.
@triton.jit(do_not_specialize=["sw", "swh"])
def _read(
    Q, K, V, STARTS, LOCATIONS, TAKEN, END, READERS, SUMS, WEIGHTS, scale,
    sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(TAKEN + b).to(tl.int32)
    if count == 0:
        return
    begin = tl.load(STARTS + b).to(tl.int64)
    length = (tl.load(STARTS + b + 1) - begin).to(tl.int32)
    each = _part(length, tl.load(READERS), tl.num_programs(1), tl.num_programs(2), BLOCK, PROGRAMS, LEAST)
    start = part * each
    if start >= length:
        return
    stop = tl.minimum(start + each, length)
    first = (tl.load(END + b) - count).to(tl.int32)
    scale = scale * 1.4426950408889634  # exp2 instead of exp
    if count * GROUP <= TILE:
        _rows_over_part(
            Q, K, V, LOCATIONS + begin, SUMS, WEIGHTS, scale, first, count, head, part, start, stop, length,
            sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh, GROUP, TILE, BLOCK, SIZE,
        )  # fmt: skip
    else:
        _rows_over_part(
            Q, K, V, LOCATIONS + begin, SUMS, WEIGHTS, scale, first, count, head, part, start, stop, length,
            sq, sqh, sk, skh, sv, svh, ss, ssh, ssp, sw, swh, GROUP, WIDE, BLOCK, SIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "sw", "swh"])
def _merge(
    SUMS, WEIGHTS, OUT, STARTS, SEQUENCE, READERS, sequences, kv_heads, ss, ssh, ssp, sw, swh, so, soh,
    SIZE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, SIZE)
    to = OUT + row * so + h * soh + d
    b = tl.load(SEQUENCE + row)
    if b >= sequences:  # zeros, so that nothing behind meets what was left in memory
        tl.store(to, tl.zeros([SIZE], OUT.dtype.element_ty))
        return
    length = (tl.load(STARTS + b + 1) - tl.load(STARTS + b)).to(tl.int32)
    each = _part(length, tl.load(READERS), kv_heads, MOST, BLOCK, PROGRAMS, LEAST)
    part = tl.arange(0, MOST)
    w = tl.load(WEIGHTS + row * sw + h * swh + part, mask=part * each < length, other=-1e30)
    share = tl.where(w > -1e29, tl.exp2(w - tl.max(w, 0)), 0.0)
    sums = tl.load(SUMS + row * ss + h * ssh + part[:, None] * ssp + d[None, :], mask=(share > 0)[:, None], other=0.0)
    tl.store(to, (tl.sum(sums * share[:, None], 0) / tl.sum(share, 0)).to(OUT.dtype.element_ty))
