"""The attention of a prefill on a GPU: milliseconds a layer by FlashInfer and by SGLang's Triton kernel, and how far apart.

    PYTHONPATH=. python scripts/benchmarks/prefill_attention.py [--cells 6000+2192 3808+4384:2192+0 64x128:64x2000] [--out FILE]

Needs torch, FlashInfer and SGLang. A cell is one batch: new tokens of each sequence, behind the colon what is cached of each;
`64x128` is 64 sequences of 128. Head layouts of Qwen3-4B (32 query heads) and 0.6B (16), both with 8 KV heads of 128, bfloat16.
Planning is timed alone: once a batch, for both layouts. Correctness: tests/engines/fused/flashinfer_cases.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

from slime_tandem.engines.fused.flashinfer_prefill import TUNING, Heads, Prefill, Tuning, located

SIZE, DTYPE, DEVICE = 128, torch.bfloat16, torch.device("cuda", 0)
LAYOUTS = [Heads(query, 8, SIZE, SIZE**-0.5) for query in (32, 16)]
TUNINGS = {"FlashInfer": TUNING, "FlashInfer, fa2": Tuning("fa2", "fa2"), "FlashInfer, auto": Tuning("auto", "auto")}


def lengths(text: str) -> list[int]:
    """[3, 3, 5] for 2x3+5."""
    found: list[int] = []
    for part in text.split("+"):
        count, _, length = part.rpartition("x")
        found += [int(length)] * int(count or 1)
    return found


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The median, of the GPU's own time."""
    took = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            took.append(start.elapsed_time(end))
    return statistics.median(took)


def measure(cell: str, repeats: int) -> list[dict[str, Any]]:
    first, _, second = cell.partition(":")
    new = lengths(first)
    cached = lengths(second) if second else [0] * len(new)
    total, most = sum(new), max(map(sum, zip(new, cached, strict=True)))
    table = torch.randperm(len(new) * most, device=DEVICE).view(len(new), most)
    locations = located(table, torch.arange(len(new), device=DEVICE), cached)
    starts = torch.tensor([0, *new], device=DEVICE).cumsum(0).to(torch.int32)
    before = torch.tensor([0, *cached], device=DEVICE).cumsum(0).to(torch.int32)
    engines = {name: Prefill(LAYOUTS, DTYPE, DEVICE, tuning) for name, tuning in TUNINGS.items()}
    rows = []
    for name, prefill in engines.items():
        took = []
        for _ in range(20):
            begin = time.perf_counter()
            prefill.plan(new, cached, locations)
            took.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        rows.append({"cell": cell, "kernel": name, "plan_ms": round(statistics.median(took), 3)})
    for heads in LAYOUTS:
        draw = lambda n, h: torch.randn(n, h, SIZE, device=DEVICE, dtype=DTYPE)  # noqa: E731
        q, k, v = draw(total, heads.query), draw(total, heads.kv), draw(total, heads.kv)
        pool = draw(table.numel(), heads.kv), draw(table.numel(), heads.kv)
        out = torch.empty_like(q)

        def triton(q: Any = q, k: Any = k, v: Any = v, out: Any = out, pool: Any = pool, heads: Heads = heads) -> Any:
            extend_attention_fwd(
                q, k, v, out, *pool, starts, before, locations.long(), None, True, None, max(new), 1.0, 1.0, heads.scale
            )
            return out

        took = {"Triton": milliseconds(triton, repeats)}
        apart = {}
        for name, prefill in engines.items():
            took[name] = milliseconds(lambda p=prefill: p.attend(q, k, v, pool, heads.scale), repeats)  # noqa: B023
            apart[name] = float((prefill.attend(q, k, v, pool, heads.scale) - triton()).abs().max())
        for name, ms in took.items():
            rows.append({"cell": cell, "heads": heads.query, "kernel": name, "ms": round(ms, 4)})
            rows[-1] |= {"from_triton": round(apart[name], 4)} if name in apart else {}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    cells = ["6000+2192", "3808+4384:2192+0", "64x128:64x2000", "16x512"]
    parser.add_argument("--cells", nargs="+", default=cells, metavar="NEW[:CACHED]")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    for cell in args.cells:
        for row in measure(cell, args.repeats):
            print(json.dumps(row), flush=True)
            if args.out:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
