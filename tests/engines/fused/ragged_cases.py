"""The attention kernels of the fused engine against float64; `test_ragged_attention.py` runs this where there is triton."""

from __future__ import annotations

import math
import os
import sys

if len(sys.argv) > 1:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from slime_tandem.engines.fused import ragged_attention as kernels
from slime_tandem.engines.fused.catch_up import Bounds

INTERPRETED = "TRITON_INTERPRET" in os.environ
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def check(
    heads: int, kv_heads: int, lengths: list[int], counts: list[int], *, parts: int | None = None, size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Every row against a plain softmax over the positions that it sees, rows of nobody zero."""
    name = (heads, kv_heads, lengths, counts, parts, size, dtype)
    random = torch.Generator().manual_seed(len(lengths) + sum(counts))
    total, rows = sum(lengths), Bounds().rows(len(lengths))
    k, v = (torch.randn(total + 9, kv_heads, size, generator=random).to(DEVICE, dtype) for _ in range(2))
    locations = (torch.randperm(total, generator=random) + 9).to(DEVICE)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    count = torch.tensor(counts, device=DEVICE)
    end = count.cumsum(0)
    sequence = torch.searchsorted(end, torch.arange(rows, device=DEVICE), right=True)
    q = torch.randn(rows, heads, size, generator=random).to(DEVICE, dtype)
    most = kernels.most_parts(len(lengths), kv_heads)
    workspace = kernels.Workspace(rows * (heads + 1) * most, size, DEVICE)  # another model has more heads
    for left in workspace.of(rows, heads, most):
        left.fill_(torch.nan)
    wanted = kernels.parts_wanted(count, kv_heads) if parts is None else torch.tensor(parts, device=DEVICE)
    scale = 1 / math.sqrt(size)
    out = kernels.attend(
        q, k, v, kernels.Snapshot(starts, locations), count, end, sequence, wanted, Bounds().longest, scale, workspace
    )
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


for heads, kv_heads in ((2, 2), (4, 2), (8, 2), (7, 1), (32, 1)):
    check(heads, kv_heads, [1, 40, 300, 17, 9], [1, 0, 8, 3, 5])
check(4, 2, [8, 130, 1], [8, 0, 0])  # all of a sequence are rows of this step: a part of it sees nothing for its first
check(4, 2, [260, 270], [8, 1], parts=1)
check(4, 2, [260, 270], [8, 1], parts=2)  # the second part begins within the rows' own positions
check(4, 2, [129, 5], [2, 5], parts=32)  # more parts than a sequence has
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
