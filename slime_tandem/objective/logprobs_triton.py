"""Log-probs of sampled tokens on the GPU, truncation and backward included: three Triton kernels. `objective.logprobs`
calls them.

A row of 150,000 logits fits neither registers nor shared memory, so the time is that of reading it from memory. It is
read once:
  scan    reads all logits; leaves the greatest logit of every group of 64 neighbours, and max, sum-exp and entropy sum of parts
  select  per row, from these: the threshold. A token among the k best lies in a group whose maximum is at least the k-th
          greatest maximum, so only such groups (about k of 2,374) are read again; top-p then works inside what is left
  grad    writes the gradient; groups whose maximum is below the threshold are zero and need not be read
Thresholds are found by bisection over the logits' bit patterns in numerical order, hence exact, and equal logits stay
or go together
(`objective.truncation` has the same rule). Nothing is sorted and no order of additions depends on the scheduler.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime_tandem.objective.truncation import Truncation

_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that are the same in every value that was widened from this type."""
_LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """Sizes, in logits (`group`) and groups: what one program of `scan` reads, what `select` reads at once (`wide_`:
    for more than a few best tokens), what one program of `grad` writes, in steps of what; warps of each.

    The defaults are what an H100 was fastest with (scripts/benchmarks/objective_gpu.py --blocks).
    """

    group: int = 64
    part: int = 128
    scan_warps: int = 4
    window: int = 32
    select_warps: int = 2
    wide_window: int = 128
    wide_warps: int = 16
    grad_part: int = 64
    grad_step: int = 16
    grad_warps: int = 2


BLOCKS = Blocks()
_FEW = 64
"""`top_k` up to which `select` has few groups to read."""


class RowState(NamedTuple):
    """What the backward needs beside the logits.

    `group_max` [T, groups] in the logits' type; float32 [T]: `peak` greatest logit, `threshold` least kept logit,
    `log2_mass` log2 of the
    kept sum of exp((logit - peak) / temperature).
    """

    group_max: Tensor
    peak: Tensor
    threshold: Tensor
    log2_mass: Tensor


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Integers in the order of the floats; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _least_key(x, SHIFT: tl.constexpr):
    """The least key of a value that is at least `x`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return tl.where(key < 0, key >> SHIFT, (key + ((1 << SHIFT) - 1)) >> SHIFT)


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float of a key."""
    low = tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = ((key << SHIFT) | low).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scan(
    x,
    stride,
    group_max,
    part_max,
    part_sum,
    part_dot,
    V,
    n_groups,
    n_parts,
    scale,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row, part = pid // n_parts, pid % n_parts
    groups = part * PART + tl.arange(0, PART)
    cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = tl.load(x + row * stride + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
    best = tl.max(v, axis=1)
    tl.store(group_max + row * n_groups + groups, best, mask=groups < n_groups)
    top = tl.max(best, axis=0)
    d = (v - tl.where(top == -float("inf"), 0.0, top)) * scale
    e = tl.exp2(d)
    tl.store(part_max + pid, top)
    tl.store(part_sum + pid, tl.sum(e))
    tl.store(part_dot + pid, tl.sum(e * tl.maximum(d, -200.0)))


@triton.jit
def _above(
    x_row,
    chosen,
    n_chosen,
    key,
    V,
    peak,
    scale,
    COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    W: tl.constexpr,
):
    """Number (COUNT) or mass of the logits in the chosen groups whose key is at least `key`."""
    total = tl.zeros([W], tl.float32)
    for start in range(0, n_chosen, W):
        at = start + tl.arange(0, W)
        group = tl.load(chosen + at, mask=at < n_chosen, other=0)
        cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        there = (at < n_chosen)[:, None] & (cols < V)
        v = tl.load(x_row + cols, mask=there, other=-float("inf")).to(tl.float32)
        kept = there & (_key(v, SHIFT) >= key.to(tl.int32))
        if COUNT:
            total += tl.sum(kept.to(tl.float32), axis=1)
        else:
            total += tl.sum(tl.where(kept, tl.exp2((v - peak) * scale), 0.0), axis=1)
    return tl.sum(total, axis=0)


@triton.jit
def _choose(group_keys, groups, there, key, chosen):
    """Write down the groups whose maximum has at least this key; their number."""
    wanted = there & (group_keys >= key.to(tl.int32))
    place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # nobody may still read the list of before
    tl.store(chosen + place, groups, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def _select(
    x, stride, tokens, replayed, group_max, part_max, part_sum, part_dot, chosen,
    log_probs, entropies, peaks, thresholds, log2_masses,
    V, n_groups, n_parts, scale, top_k, top_p, log2_min_p,
    CUT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, TOP_P_ALONE: tl.constexpr,
    SOME: tl.constexpr,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    m = tl.load(part_max + row * n_parts + part, mask=part < n_parts, other=-float("inf"))
    s = tl.load(part_sum + row * n_parts + part, mask=part < n_parts, other=0.0)
    u = tl.load(part_dot + row * n_parts + part, mask=part < n_parts, other=0.0)
    peak = tl.max(m, axis=0)
    f = tl.exp2((m - peak) * scale)
    mass = tl.sum(s * f, axis=0)
    dot = tl.sum(tl.where(f > 0.0, f * (u + (m - peak) * scale * s), 0.0), axis=0)
    tl.store(entropies + row, (tl.log2(mass) - dot / mass) * 0.6931471805599453)
    x_row = x + row * stride
    token = tl.load(tokens + row)
    # An id outside the vocabulary makes the row NaN: to refuse it would be to wait for the device.
    label = tl.load(x_row + token, mask=(token >= 0) & (token < V), other=float("nan")).to(tl.float32)
    threshold = float("-inf")
    kept_mass = mass
    if CUT:
        groups = tl.arange(0, GROUPS)
        there = groups < n_groups
        best = tl.load(group_max + row * n_groups + groups, mask=there, other=-float("inf")).to(tl.float32)
        group_keys = _key(best, SHIFT)
        chosen += row * n_groups
        highest = _key(peak, SHIFT).to(tl.int64)
        low = tl.minimum(highest, -2139095041 >> SHIFT)  # the key of -inf
        if MIN_P:
            low = tl.minimum(highest, _least_key(peak + log2_min_p / scale, SHIFT))
        if TOP_P_ALONE:
            # What lies below this value holds less than 1 - top_p even if all V tokens stood right under it.
            low = tl.minimum(highest, _least_key(peak + tl.log2((1.0 - top_p) * 0.99 * mass / V) / scale, SHIFT))
        if TOP_K:
            # As many groups have their maximum at `low` or above: the k-th greatest logit is not below it.
            high = highest
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                if tl.sum((there & (group_keys >= middle.to(tl.int32))).to(tl.int32), axis=0) >= top_k:
                    low = middle
                else:
                    high = middle - 1
        n_chosen = _choose(group_keys, groups, there, low, chosen)
        if TOP_K:
            high = highest
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                if _above(x_row, chosen, n_chosen, middle, V, peak, scale, True, SHIFT, GROUP, W) >= top_k:
                    low = middle
                else:
                    high = middle - 1
        kept_mass = _above(x_row, chosen, n_chosen, low, V, peak, scale, False, SHIFT, GROUP, W)
        if TOP_P:
            needed = kept_mass * top_p
            if TOP_P_ALONE:
                needed = mass * top_p
            many = n_chosen > W
            high = highest
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                if many:
                    n_chosen = _choose(group_keys, groups, there, middle, chosen)
                held = _above(x_row, chosen, n_chosen, middle, V, peak, scale, False, SHIFT, GROUP, W)
                if held >= needed:
                    low = middle
                    kept_mass = held
                else:
                    high = middle - 1
        threshold = _value(low, SHIFT)
        if SOME:
            full = tl.load(replayed + row) == 0
            threshold = tl.where(full, -float("inf"), threshold)
            kept_mass = tl.where(full, mass, kept_mass)
        kept_mass += tl.where(label < threshold, tl.exp2((label - peak) * scale), 0.0)
    log2_mass = tl.log2(kept_mass) + (
        mass - mass
    )  # a NaN or infinity anywhere in the row is shown, never truncated away
    tl.store(peaks + row, peak)
    tl.store(thresholds + row, threshold)
    tl.store(log2_masses + row, log2_mass)
    tl.store(log_probs + row, ((label - peak) * scale - log2_mass) * 0.6931471805599453)


@triton.jit
def _grad(
    x, stride, out, out_stride, tokens, group_max, peaks, thresholds, log2_masses, grads,
    V, n_groups, n_parts, scale, inverse, GROUP: tl.constexpr, PART: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    row, part = pid // n_parts, pid % n_parts
    g = tl.load(grads + row).to(tl.float32) * inverse
    label = tl.load(tokens + row)
    peak = tl.load(peaks + row)
    threshold = tl.load(thresholds + row)
    log2_mass = tl.load(log2_masses + row)
    for start in range(part * PART, part * PART + PART, SUB):
        groups = start + tl.arange(0, SUB)
        best = tl.load(group_max + row * n_groups + groups, mask=groups < n_groups, other=-float("inf")).to(tl.float32)
        slope = tl.zeros([SUB], tl.float32) + g
        wanted = ((best >= threshold) | (groups == label // GROUP)) & (groups < n_groups) & (slope != 0.0)
        cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        if tl.max(wanted.to(tl.int32), axis=0) == 0:
            zeros = tl.zeros([SUB, GROUP], tl.float32).to(out.dtype.element_ty)
            tl.store(out + row * out_stride + cols, zeros, mask=cols < V)
        else:
            v = tl.load(x + row * stride + cols, mask=wanted[:, None] & (cols < V), other=-float("inf")).to(tl.float32)
            mine = cols == label
            kept = wanted[:, None] & ((v >= threshold) | mine)
            p = tl.exp2((v - peak) * scale - log2_mass)
            d = tl.where(kept, (tl.where(mine, 1.0, 0.0) - p) * g, 0.0)
            tl.store(out + row * out_stride + cols, d, mask=cols < V)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def forward(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    truncation: Truncation,
    replayed: Tensor | None = None,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, RowState]:
    """(log-probs [T], entropies [T] of the full distribution, state) in nats, float32, of logits [T, V] at tokens [T].

    `logits` bfloat16, float16 or float32 with a last stride of 1; `replayed` [T] bool: rows to truncate, None for all.
    Peak memory beside
    the results: 3/64 of bfloat16 logits.
    """
    blocks = blocks or BLOCKS
    tokens = tokens.contiguous()  # the kernels step over neighbours
    T, V = logits.shape
    n_groups = -(-V // blocks.group)
    n_parts = -(-n_groups // blocks.part)
    scale = _LOG2_E / temperature
    group_max = logits.new_empty(T, n_groups)
    part_max, part_sum, part_dot = torch.empty(3, T, n_parts, dtype=torch.float32, device=logits.device)
    log_probs, entropies, peak, threshold, log2_mass = torch.empty(5, T, dtype=torch.float32, device=logits.device)
    state = RowState(group_max, peak, threshold, log2_mass)
    if not T:
        return log_probs, entropies, state
    _scan[(T * n_parts,)](
        logits, logits.stride(0), group_max, part_max, part_sum, part_dot, V, n_groups, n_parts, scale,
        GROUP=blocks.group, PART=blocks.part, num_warps=blocks.scan_warps,
    )  # fmt: skip
    top_k, top_p, min_p = (0 < truncation.top_k < V), truncation.top_p < 1.0, truncation.min_p > 0.0
    cut = top_k or top_p or min_p
    few = top_k and truncation.top_k <= _FEW
    chosen = torch.empty(T, n_groups, dtype=torch.int32, device=logits.device) if cut else group_max
    _select[(T,)](
        logits, logits.stride(0), tokens, tokens if replayed is None else replayed.to(torch.int8).contiguous(),
        group_max, part_max, part_sum, part_dot, chosen,
        log_probs, entropies, peak, threshold, log2_mass,
        V, n_groups, n_parts, scale, truncation.top_k, truncation.top_p, math.log2(truncation.min_p or 1.0),
        CUT=cut, TOP_K=top_k, TOP_P=top_p, MIN_P=min_p, TOP_P_ALONE=top_p and not (top_k or min_p),
        SOME=replayed is not None,
        SHIFT=_KEY_SHIFT[logits.dtype], GROUP=blocks.group, W=blocks.window if few else blocks.wide_window,
        GROUPS=_power_of_two(n_groups), PARTS=_power_of_two(n_parts),
        num_warps=blocks.select_warps if few else blocks.wide_warps,
    )  # fmt: skip
    return log_probs, entropies, state


def backward(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    state: RowState,
    grads: Tensor,
    out: Tensor,
    blocks: Blocks | None = None,
) -> None:
    """Write d(sum of `grads` [T] * log-probs) / d logits into `out` [T, V], which may be `logits`; zeros where `grads` is 0."""
    blocks = blocks or BLOCKS
    tokens, grads = tokens.contiguous(), grads.contiguous()
    T, V = logits.shape
    n_groups = state.group_max.shape[1]
    n_parts = -(-n_groups // blocks.grad_part)
    if T:
        _grad[(T * n_parts,)](
            logits, logits.stride(0), out, out.stride(0), tokens,
            state.group_max, state.peak, state.threshold, state.log2_mass, grads,
            V, n_groups, n_parts, _LOG2_E / temperature, 1.0 / temperature,
            GROUP=blocks.group, PART=blocks.grad_part, SUB=blocks.grad_step, num_warps=blocks.grad_warps,
        )  # fmt: skip
