"""The attention of a catch-up step on a GPU: milliseconds a layer, against the time in which memory could bring the bytes.

    PYTHONPATH=. python scripts/benchmarks/ragged_attention.py [--tune] [--cells 48@6272 16@8192] [--out FILE]

Needs torch and triton. Head layouts of Qwen3-4B (32 query heads) and 0.6B (16), both with 8 KV heads of 128, bfloat16. `all`:
every sequence is read for one row, as in every step of an engine that does not catch up; `planned`: what `catch_up.plan` lets
one model read where two write words in turns (the mean of some of its steps). With `--tune` blocks, warps, stages and the
number of programs are searched; else the defaults are timed. Correctness: tests/engines/fused/kernel_cases.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from slime_tandem.engines.fused import ragged_attention as kernels
from slime_tandem.engines.fused.catch_up import Bounds, Snapshot, lay_out, plan

KV_HEADS, SIZE, BANDWIDTH = 8, 128, 4.3e12
SEARCHED = tuple(itertools.product((32, 64, 128), (2, 4), (3, 5, 7)))
PROGRAMS = (2, 3, 4, 5, 6, 8)
RUN_ENDS, CAP = 0.35, 32
"""How often a token ends a word, and the longest run: the paper's rule on Qwen's vocabulary."""


def planned(sequences: int, steps: int, bounds: Bounds) -> list[list[int]]:
    """Rows per sequence in the last `steps` steps of a long decode, each word by either model alike."""
    random = torch.Generator().manual_seed(0)
    draw = lambda: torch.rand(sequences, generator=random)  # noqa: E731
    solo, length, run = (torch.zeros(sequences, dtype=torch.int64) for _ in range(3))
    read, writes = length.clone(), draw() < 0.5
    counts = []
    for _ in range(200 + steps):
        length = length + 1
        taken = plan(writes, solo > 0, length, read, bounds)
        read = torch.where(taken > 0, length, read)
        counts.append(taken.tolist())
        run += 1
        ends = (draw() < RUN_ENDS) | (run >= CAP)
        writes, run = torch.where(ends, draw() < 0.5, writes), torch.where(ends, 0, run)
    return counts[-steps:]


class Layer:
    """Keys and values of one layer, and what one step's launch takes beside them."""

    def __init__(self, sequences: int, context: int, heads: int) -> None:
        total = sequences * context
        self.k, self.v = (torch.randn(total, KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        starts = torch.arange(0, total + 1, context, device="cuda", dtype=torch.int32)
        self.snapshot = Snapshot(starts, torch.randperm(total, device="cuda"))
        self.bounds = Bounds()
        rows = self.bounds.rows(sequences)
        self.q = torch.randn(rows, heads, SIZE, device="cuda", dtype=torch.bfloat16)
        self.workspace = kernels.Workspace(rows * heads * 32, SIZE, self.q.device)

    def time(self, counts: list[int], tuning: kernels.Tuning, repeats: int = 10) -> float:
        taken = torch.tensor(counts, device="cuda")
        length = self.snapshot.starts.diff().long()
        step = lay_out(taken, length, self.snapshot, torch.zeros(len(self.k), device="cuda"), self.bounds)

        def launch() -> None:
            kernels.attend(
                self.q, self.k, self.v, self.snapshot, step, self.bounds.longest, SIZE**-0.5, self.workspace, tuning
            )  # fmt: skip

        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                launch()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 4


def compiled(case: tuple[int, int, int, int]) -> None:
    """Fills Triton's cache for one setting, in a process of its own."""
    heads, *setting = case
    Layer(2, 256, heads).time([1, 8], kernels.Tuning(*setting), repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument(
        "--cells", nargs="+", default=["16@2048", "16@8192", "16@32768", "48@6272", "64@2048", "64@512"]
    )
    parser.add_argument("--heads", nargs="+", type=int, default=[32, 16])
    parser.add_argument("--steps", type=int, default=6, help="planned steps to average over")
    parser.add_argument("--out", help="also write all timings to this file, one JSON line each")
    args = parser.parse_args()
    settings = SEARCHED if args.tune else [kernels.TUNING[:3]]
    if args.tune:
        with ProcessPoolExecutor(8, get_context("spawn")) as pool:
            list(pool.map(compiled, [(heads, *setting) for heads in args.heads for setting in settings]))
    lines, found = [], {}
    for heads, cell in itertools.product(args.heads, args.cells):
        sequences, context = map(int, cell.split("@"))
        layer = Layer(sequences, context, heads)
        steps = planned(sequences, args.steps, layer.bounds)
        share = sum(c > 0 for s in steps for c in s) / sequences / len(steps)
        floor = sequences * context * KV_HEADS * SIZE * 4 / BANDWIDTH * 1e3
        for setting, programs in itertools.product(settings, PROGRAMS if args.tune else [kernels.TUNING.programs]):
            tuning = kernels.Tuning(*setting, programs)
            everyone = layer.time([1] * sequences, tuning)
            half = statistics.mean(layer.time(s, tuning) for s in steps[: 2 if args.tune else None])
            row = {"heads": heads, "cell": cell, **tuning._asdict(), "all": everyone, "planned": half, "read": share}
            found[heads, cell, tuning] = (everyone, half, floor, share)
            lines.append(json.dumps(row))
        del layer
        torch.cuda.empty_cache()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(
        "| query heads | sequences x context | all, ms | memory's time | planned, ms | memory's time | read | setting |"
    )
    print("|---|---|---|---|---|---|---|---|")
    keys = sorted({key[:2] for key in found}, key=str)
    for key in keys:
        tuning = min((t for *k, t in found if tuple(k) == key), key=lambda t: found[(*key, t)][1])
        everyone, half, floor, share = found[(*key, tuning)]
        print(
            f"| {key[0]} | {key[1]} | {everyone:.3f} | {floor:.3f} | {half:.3f} | {floor * share:.3f} | {share:.2f} "
            f"| {tuple(tuning)} |"
        )
    if args.tune:  # one setting for all: the geometric mean over cells of its time over the cell's best
        means = {}
        for tuning in dict.fromkeys(t for *_, t in found):
            over = [found[(*k, tuning)][1] / min(v[1] for kk, v in found.items() if kk[:2] == k) for k in keys]
            means[tuning] = statistics.geometric_mean(over), max(over)
        for tuning, (mean, worst) in sorted(means.items(), key=lambda item: item[1])[:8]:
            print(f"{tuple(tuning)}: {mean:.3f} of each cell's best, at worst {worst:.3f}")


if __name__ == "__main__":
    main()
