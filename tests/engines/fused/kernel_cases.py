"""The kernels of the fused engine against plain tensor operations; `test_kernels.py` runs this where there is triton."""

from __future__ import annotations

import math
import os
import sys

if len(sys.argv) > 1:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from slime_tandem.engines.fused import ragged_attention as kernels
from slime_tandem.engines.fused import step_kernels
from slime_tandem.engines.fused.catch_up import Bounds, Snapshot, lay_out, plan

INTERPRETED = "TRITON_INTERPRET" in os.environ
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def check(
    heads: int, kv_heads: int, lengths: list[int], counts: list[int], *, programs: int = kernels.TUNING.programs,
    size: int = 16, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Every row against a plain softmax over the positions that it sees, rows of nobody zero."""
    name = (heads, kv_heads, lengths, counts, programs, size, dtype)
    random = torch.Generator().manual_seed(len(lengths) + sum(counts))
    total, rows = sum(lengths), Bounds().rows(len(lengths))
    k, v = (torch.randn(total + 9, kv_heads, size, generator=random).to(DEVICE, dtype) for _ in range(2))
    locations = (torch.randperm(total, generator=random) + 9).to(DEVICE)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    snapshot, length = Snapshot(starts, locations), torch.tensor(lengths, device=DEVICE)
    ids_at = torch.zeros(total + 9, device=DEVICE)
    step = lay_out(torch.tensor(counts, device=DEVICE), length, snapshot, ids_at, Bounds())
    q = torch.randn(rows, heads, size, generator=random).to(DEVICE, dtype)
    tuning = kernels.TUNING._replace(programs=programs)
    most = kernels.most_parts(len(lengths), kernels.shares_of(DEVICE, kv_heads, tuning))
    workspace = kernels.Workspace(rows * (heads + 1) * most, size, DEVICE)  # another model has more heads
    for left in workspace.of(rows, heads, most):
        left.fill_(torch.nan)
    scale = 1 / math.sqrt(size)
    out = kernels.attend(q, k, v, snapshot, step, Bounds().longest, scale, workspace, tuning)
    want = torch.zeros(rows, heads, size, dtype=torch.float64, device=DEVICE)
    row = 0
    for b, (n, d) in enumerate(zip(lengths, counts, strict=True)):
        for j in range(d):
            where = locations[starts[b] : starts[b] + n - d + j + 1]
            group = q[row].double().view(kv_heads, heads // kv_heads, size)
            weights = torch.softmax(torch.einsum("hgd,nhd->hgn", group, k[where].double()) * scale, -1)
            want[row] = torch.einsum("hgn,nhd->hgd", weights, v[where].double()).reshape(heads, size)
            row += 1
    worst = (out.double() - want).abs().max().item()
    assert worst < (1e-5 if dtype == torch.float32 else 2e-2), (worst, name)


def check_plan(sequences: int, bounds: Bounds, seed: int) -> None:
    """A few steps of a random decode in both ways: the same rows, and the same tokens read behind them."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda low, high, n: torch.randint(low, high, (n,), generator=random).to(DEVICE)  # noqa: E731
    most = 60
    slot = torch.randperm(2 * sequences + 1, generator=random)[:sequences].to(DEVICE) + 1
    length = draw(1, 40, sequences)
    solo, ids_at = draw(0, 4, sequences) == 0, draw(1, 1000, sequences * most)
    ids_at[0] = 0
    read = torch.zeros(2 * sequences + 2, dtype=torch.int64, device=DEVICE)
    read[slot] = length
    own, writes = read.clone(), draw(0, 2, sequences) == 0
    for _ in range(9):
        length = length + 1
        writes = torch.where((draw(0, 3, sequences) == 0) & ~solo, ~writes, writes)
        starts = torch.cat([length.new_zeros(1), length.cumsum(0)]).to(torch.int32)
        snapshot = Snapshot(starts, (torch.randperm(sequences * most - 1, generator=random) + 1).to(DEVICE))
        taken = plan(writes, solo, length, read[slot], bounds)
        want = lay_out(taken, length, snapshot, ids_at, bounds)
        read[slot] = torch.where(taken > 0, length, read[slot])
        got = step_kernels.plan(writes, solo, length, slot, own, snapshot, ids_at.to(torch.int32), bounds)
        for name, a, b in zip(want._fields, want, got, strict=True):
            assert torch.equal(a, b), (name, sequences, bounds, seed, a, b)
        assert torch.equal(read, own)


def check_mass(rows: int, size: int, dtype: torch.dtype, scaled: bool) -> None:
    random = torch.Generator().manual_seed(size)
    logits = (torch.randn(rows, size, generator=random) * 5).to(DEVICE, dtype)
    temperature = torch.rand(rows, generator=random).to(DEVICE) + 0.5 if scaled else None
    exact = logits.double() if temperature is None else logits.double() / temperature.unsqueeze(1)
    torch.testing.assert_close(
        step_kernels.mass(logits, temperature).double(), exact.logsumexp(1), rtol=1e-6, atol=2e-5
    )


assert [kernels.most_parts(n, 66) for n in (48, 1, 512)] == [32, 32, 4]
# An H200's programs have 227 KiB, an RTX 4090's 99: enough for two buffers of two-byte values, not of four-byte ones.
assert [kernels.stages_in(kib * 1024, 128, width) for kib in (227, 99) for width in (2, 4)] == [5, 5, 5, 3]
for seed in range(2):
    check_plan(1, Bounds(3, 4), seed)
    check_plan(5, Bounds(2, 3), seed)
    check_plan(5, Bounds(0, 1), seed)
    check_plan(40, Bounds(), seed)
    check_plan(33 if INTERPRETED else 300, Bounds(20, 8), seed)
for size in (5, 304, 9000 if INTERPRETED else 151_936):
    for scaled in (False, True):
        check_mass(3, size, torch.float32, scaled)
        check_mass(3, size, torch.bfloat16, scaled)
for heads, kv_heads in ((2, 2), (8, 2), (7, 1), (32, 1)):
    check(heads, kv_heads, [1, 40, 200, 17, 9], [1, 0, 8, 3, 5])
check(4, 2, [8, 130, 1], [8, 0, 0])  # all of a sequence are rows of this step: a part of it sees nothing for its first
for kv_heads in (8, 4, 3, 2, 1):  # of a CPU's eight programs a head gets 1, 2, 2, 4 or 8
    for programs in (1, 3):
        check(
            2 * kv_heads, kv_heads, [260, 270], [8, 1], programs=programs
        )  # parts that begin at the rows' own positions
        check(2 * kv_heads, kv_heads, [129, 5, 66, 700, 1], [2, 0, 8, 1, 1], programs=programs)
check(4, 2, [130] * 70, [*[0] * 66, 3, 0, 0, 1])  # more that are not read than are looked at at once
check(2, 1, [3000, 5, 9], [1, 1, 1], programs=8)  # more shares than a sequence may have parts
check(4, 2, [70] * 3, [0] * 3)
check(4, 2, [6], [0])
check(4, 2, [3, 200], [1, 1], size=32)
if not INTERPRETED:
    for heads, kv_heads, size, dtype in (
        *((h, 8, 128, torch.bfloat16) for h in (8, 16, 32, 64)),
        (28, 4, 64, torch.bfloat16),
        (32, 8, 128, torch.float32),
    ):
        lengths = [40000, 1, 8, 127, 128, 129, 2048, 6300, 517]
        check(heads, kv_heads, lengths, [8, 1, 8, 0, 4, 5, 1, 3, 0], size=size, dtype=dtype)
        check(heads, kv_heads, lengths, [1] * 9, size=size, dtype=dtype)
        check(heads, kv_heads, lengths * 20, [0, 1, 0, 0, 0, 2, 1, 0, 8] * 20, size=size, dtype=dtype)
print("all cases hold")
