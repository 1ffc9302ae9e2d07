"""A prefill by FlashInfer against a plain softmax; `test_flashinfer_prefill.py` runs this, on a GPU with the real one.

PYTHONPATH=. python tests/engines/fused/flashinfer_cases.py
"""

from __future__ import annotations

import math
import sys

import torch

from slime_tandem.engines.fused.flashinfer_prefill import TUNING, Heads, Prefill, Tuning, located


def plain(heads: Heads, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, H, D] float64: the last n of a sequence's tokens, whose keys and values are [N, KV heads, D]."""
    n, total = len(q), len(keys)
    unseen = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n).logical_not_()
    out = []
    for h, group in enumerate(q.view(n, heads.kv, -1, heads.size).unbind(1)):  # by KV head: long ones take gigabytes
        scores = torch.einsum("ngd,md->gnm", group.double(), keys[:, h].double()).mul_(heads.scale)
        weights = scores.masked_fill_(unseen, -math.inf).softmax(-1)
        out.append(torch.einsum("gnm,md->ngd", weights, values[:, h].double()))
    return torch.stack(out, 1).reshape(n, heads.query, heads.size)


def worst(
    layouts: list[Heads],
    new: list[int],
    cached: list[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    tuning: Tuning = TUNING,
) -> float:
    """Largest difference of a batch's attention from a plain softmax, over the layouts; two layers each."""
    random, drawn = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=drawn, device=device).to(dtype)  # noqa: E731
    prefill = Prefill(layouts, dtype, device, tuning)
    slots = len(new) + 3
    table = torch.randperm(slots * (max(cached) + 1), generator=random).view(slots, -1).to(device)
    slot = torch.randperm(slots, generator=random)[: len(new)].to(device)
    prefill.plan(new, cached, located(table, slot, cached))
    largest = 0.0
    for heads in layouts * 2:
        q = draw(sum(new), heads.query, heads.size)
        k, v = draw(sum(new), heads.kv, heads.size), draw(sum(new), heads.kv, heads.size)
        pool = draw(table.numel(), heads.kv, heads.size), draw(table.numel(), heads.kv, heads.size)
        out = prefill.attend(q, k, v, pool, heads.scale)
        row = 0
        for b, (n, m) in enumerate(zip(new, cached, strict=True)):
            rows, where = slice(row, row + n), table[slot[b], :m]
            keys, values = torch.cat([pool[0][where], k[rows]]), torch.cat([pool[1][where], v[rows]])
            error = (out[rows].double() - plain(heads, q[rows], keys, values)).abs().nan_to_num(nan=math.inf)
            largest = max(largest, float(error.max()))
            row += n
    return largest


CASES = [
    ([5], [0]),
    ([1], [7]),
    ([3, 1, 4], [0, 0, 0]),
    ([3, 1, 4], [6, 2, 9]),
    ([3, 1, 4, 2], [6, 0, 9, 0]),  # one without a prefix between two that have one, and one behind them
    ([2, 5], [0, 3]),
    ([1, 1, 6], [4, 8, 0]),  # running requests in a mixed batch
]


def on_a_gpu(*, every_size: bool = False) -> None:
    """Layouts as those of a 4B with a 0.6B on one GPU, on two, and others; prompts of thousands of tokens.

    `every_size`: heads of 64 and 256 too, for which FlashInfer compiles kernels of their own.
    """
    device = torch.device("cuda", 0)
    large = [([6000, 2192], [0, 0]), ([3808, 4384], [2192, 0]), ([17] * 70, [40, 0] * 35), ([4000], [28_000])]
    pair = [(32, 8), (16, 8)]
    runs = [(TUNING, layouts, 128) for layouts in (pair, [(16, 4), (8, 4)], [(8, 1), (2, 1)], [(64, 8), (28, 4)])]
    runs += [(Tuning("fa2", "fa2"), pair, 128), (Tuning("auto", "auto"), pair, 128)]
    runs += [(TUNING, pair, 64), (TUNING, pair, 256)] if every_size else []
    for tuning, layouts, size in runs:
        heads = [Heads(query, kv, size, size**-0.5) for query, kv in layouts]
        found = {
            str(case): worst(heads, *case, dtype=torch.bfloat16, device=device, tuning=tuning)
            for case in (*CASES, *large)
        }
        print(f"{layouts} of {size}, {tuning}: largest difference {max(found.values()):.4f}", flush=True)
        assert max(found.values()) < 2e-2, found


if __name__ == "__main__":
    on_a_gpu(every_size="--every-size" in sys.argv)
    print("all cases hold")
