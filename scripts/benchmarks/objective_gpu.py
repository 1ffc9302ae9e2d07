"""Time and memory of log-prob + entropy + backward with a replayed truncation, on one GPU, beside other ways to do it.

    PYTHONPATH=. python scripts/benchmarks/objective_gpu.py            # [8192, 151936] bfloat16, about 3 minutes on an H100
    PYTHONPATH=. python scripts/benchmarks/objective_gpu.py --smoke    # a few tokens, also without a GPU: does it run

Logits: normal with deviation 2, and 30 likely tokens per row, bfloat16; "flat" ones lack the latter. The sampled token is one
of the 20 best. Each figure is the median of several runs after one to warm up, by the device's clock and with the host ahead
of the device, as in training; one line tells what it is when the host waits first. What restores the logits is not timed.
Extra memory is the allocator's peak beyond the logits, labels and incoming gradients. The floor is the logits read once and
their gradient written once, at the rate at which this card copies them. The peers:
  torch    float32 copy, topk for the threshold, log_softmax, autograd
  sort     vLLM's reference: sort, mask by rank and by cumulative probability, scatter back, log_softmax, autograd
  loop     a Python loop over tokens that fills a [T, V] mask, then log_softmax, autograd
Results are checked against float64 on 64 rows first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.truncation import Replay, Truncation

CUT = Truncation(top_k=20, top_p=0.95)
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def make(T: int, V: int, *, flat: bool = False, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, V], labels [T], incoming gradients [T]); made a few rows at a time, to leave no large peak."""
    g = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.empty(T, V, dtype=dtype, device=DEVICE)
    for rows in logits.split(256):
        rows.copy_(torch.randn(rows.shape, generator=g, device=DEVICE) * 2)
        if not flat:
            ids = torch.randint(V, (len(rows), 30), generator=g, device=DEVICE)
            rows.scatter_add_(1, ids, 8 + 3 * torch.randn(ids.shape, generator=g, device=DEVICE).to(dtype))
    best = torch.cat([rows.topk(min(20, V)).indices for rows in logits.split(256)])
    pick = torch.randint(best.shape[1], (T, 1), generator=g, device=DEVICE)
    return logits, best.gather(1, pick)[:, 0], torch.randn(T, generator=g, device=DEVICE)


def finish(x: Tensor, full: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of masked logits `x` and unmasked ones."""
    log_probs = torch.log_softmax(x, -1).gather(1, labels[:, None])[:, 0]
    with torch.no_grad():
        log_p = torch.log_softmax(full, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_probs, entropy


def by_torch(logits: Tensor, labels: Tensor, cut: Truncation = CUT) -> tuple[Tensor, Tensor]:
    full = logits.float()
    with torch.no_grad():
        best = full.topk(cut.top_k).values
        p = best.softmax(-1)
        n = (p.cumsum(-1) - p < cut.top_p).sum(-1, keepdim=True)
        removed = full < best.gather(1, n - 1)
        removed.scatter_(1, labels[:, None], False)
    return finish(full.masked_fill(removed, -torch.inf), full, labels)


def by_sort(logits: Tensor, labels: Tensor, cut: Truncation = CUT) -> tuple[Tensor, Tensor]:
    full = logits.float()
    with torch.no_grad():
        ranked, order = full.sort(dim=-1)
        ranked = ranked.masked_fill(ranked < ranked[:, -cut.top_k, None], -torch.inf)
        low = ranked.softmax(-1).cumsum_(-1) <= 1 - cut.top_p
        low[:, -1] = False
        low |= ranked == -torch.inf
        removed = torch.empty_like(low).scatter_(1, order, low)
        removed.scatter_(1, labels[:, None], False)
        del ranked, order, low
    return finish(full.masked_fill(removed, -torch.inf), full, labels)


def by_loop(logits: Tensor, labels: Tensor, cut: Truncation = CUT) -> tuple[Tensor, Tensor]:
    full = logits.float()
    with torch.no_grad():
        removed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        for t in range(len(labels)):
            best, ids = full[t].topk(cut.top_k)
            p = best.softmax(-1)
            removed[t, ids[p.cumsum(-1) - p < cut.top_p]] = False
            removed[t, labels[t]] = False
    return finish(full.masked_fill(removed, -torch.inf), full, labels)


def ours(logits: Tensor, labels: Tensor, cut: Truncation = CUT, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    return token_log_probs(logits, labels, replay=Replay(cut), in_place=in_place)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_SLEEP = 20_000_000
"""Cycles that the device waits before a measured call, about 10 ms: by then the host has sent the call's work."""


def mark() -> Any:
    """Now, on the device's clock if there is one."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(a: Any, b: Any) -> float:
    """Between two marks, after `synchronize`."""
    return a.elapsed_time(b) / 1e3 if CUDA else b - a


def measure(
    way: Way, data: tuple[Tensor, Tensor, Tensor], runs: int, restore: bool = False, ahead: bool = True
) -> dict[str, float] | None:
    """Median seconds forward and backward, and extra bytes; None: out of memory. `ahead`: the host may run ahead."""
    logits, labels, grads = data
    kept = logits.clone() if restore else None
    logits.requires_grad_()
    forward, backward, extra = [], [], 0
    try:
        for run in range(runs + 1):
            if kept is not None:
                logits.data.copy_(kept)
            synchronize()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                if ahead:
                    torch.cuda._sleep(_SLEEP)
            a = mark()
            log_probs, _ = way(logits, labels)
            b = mark()
            (grad,) = torch.autograd.grad(log_probs, logits, grads)
            c = mark()
            synchronize()
            if CUDA:
                extra = max(extra, torch.cuda.max_memory_allocated() - before)
            del log_probs, grad
            if run or runs == 0:
                forward.append(seconds(a, b))
                backward.append(seconds(b, c))
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    finally:
        logits.requires_grad_(False)
        if kept is not None:
            logits.copy_(kept)
    total = statistics.median(f + b for f, b in zip(forward, backward, strict=True))
    return {
        "forward": statistics.median(forward),
        "backward": statistics.median(backward),
        "total": total,
        "extra": extra,
    }


def check(data: tuple[Tensor, Tensor, Tensor], cut: Truncation) -> str:
    """Greatest differences from float64 on 64 rows."""
    logits, labels, grads = (x[:64].clone() for x in data)
    logits.requires_grad_()
    log_probs, entropy = ours(logits, labels, cut)
    (grad,) = torch.autograd.grad(log_probs, logits, grads)
    exact = logits.detach().double().requires_grad_()
    want, want_entropy = ours(exact, labels, cut)
    (want_grad,) = torch.autograd.grad(want, exact, grads.double())
    kept = int(((grad != 0) != (want_grad != 0)).sum())
    wrong = ((grad - want_grad).abs() / want_grad.abs().clamp(min=1e-3)).max()
    return (
        f"log-probs {(log_probs - want).abs().max():.1e}, entropies {(entropy - want_entropy).abs().max():.1e} nats, "
        f"gradients {wrong:.1e} (relative, bfloat16), kept otherwise: {kept} of {int((want_grad != 0).sum())} tokens"
    )


def copy_rate(logits: Tensor) -> float:
    """Bytes read and written per second when the card copies `logits`."""
    target = torch.empty_like(logits)
    times = []
    for _ in range(8):
        synchronize()
        a = time.perf_counter()
        target.copy_(logits)
        synchronize()
        times.append(time.perf_counter() - a)
    return 2 * logits.nbytes / statistics.median(times[1:])


def row(
    name: str, found: dict[str, float] | None, floor: float, size: int, loop: dict[str, float] | None = None
) -> str:
    if found is None:
        return f"| {name} | out of memory | | | | | |"
    faster = "" if loop is None else f"{loop['total'] / found['total']:.1f}"
    return (
        f"| {name} | {found['total'] / floor:.2f} | {found['extra'] / size:.3f} | {faster} | {found['total'] * 1e3:.2f} | "
        f"{found['forward'] * 1e3:.2f} | {found['backward'] * 1e3:.2f} |"
    )


HEAD = (
    "| {} | time / floor | extra memory / logits | times faster than the loop | ms | forward | backward |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one run")
    parser.add_argument("--blocks", action="store_true", help="also try block sizes of the kernels")
    args = parser.parse_args()
    T, V, runs = (8, 512, 1) if args.smoke else (8192, 151936, 10)
    started = time.monotonic()
    data = make(T, V)
    size = data[0].nbytes
    rate = copy_rate(data[0])
    floor = 2 * size / rate
    lines = [HEAD.format(f"[{T}, {V}] bfloat16, top_k=20, top_p=0.95")]
    print(f"copy rate {rate / 1e12:.2f} TB/s read + written; floor {floor * 1e3:.2f} ms")
    for cut in (CUT, Truncation(), Truncation(top_p=0.95), Truncation(top_k=50, top_p=0.9, min_p=0.02)):
        print(f"float64 check, {cut}: {check(data, cut)}", flush=True)
    tried = try_blocks(data) if args.blocks and CUDA else []
    loop = measure(by_loop, data, 1 if CUDA else 0)
    lines.append(
        row("ours, in place", measure(lambda x, y: ours(x, y, in_place=True), data, runs, True), floor, size, loop)
    )
    lines.append(row("ours, host not ahead", measure(ours, data, runs, ahead=False), floor, size, loop))
    for name, way, n in (("ours", ours, runs), ("torch", by_torch, 3), ("sort", by_sort, 2)):
        lines.append(row(name, measure(way, data, n), floor, size, loop))
        print(lines[-1], flush=True)
    lines.append(row("loop", loop, floor, size, loop))

    lines += ["", HEAD.format("truncation, same logits")]
    cuts = {
        "none": Truncation(),
        "top_k=20": Truncation(top_k=20),
        "top_p=0.95": Truncation(top_p=0.95),
        "min_p=0.05": Truncation(min_p=0.05),
        "top_k=1000, top_p=0.95": Truncation(top_k=1000, top_p=0.95),
        "top_k=20, top_p=0.95, min_p=0.05": Truncation(20, 0.95, 0.05),
    }
    for name, cut in cuts.items():
        lines.append(row(name, measure(lambda x, y, cut=cut: ours(x, y, cut), data, runs), floor, size))
        print(lines[-1], flush=True)
    del data
    flat = make(T, V, flat=True)
    for name in ("none", "top_k=20", "top_p=0.95"):
        found = measure(lambda x, y, cut=cuts[name]: ours(x, y, cut), flat, runs)
        lines.append(row(f"{name}, flat logits", found, floor, size))
        print(lines[-1], flush=True)
    del flat

    lines += ["", HEAD.format("shape, top_k=20, top_p=0.95")]
    shapes = (
        [(4, 256), (8, 1000)]
        if args.smoke
        else [(1024, V), (2048, V), (4096, V), (4096, 32000), (4096, 128256), (4096, 262144)]
    )
    for t, v in shapes:
        part = make(t, v)
        n = part[0].nbytes
        least = 2 * n / copy_rate(part[0])
        slow = measure(by_loop, part, 0)
        lines.append(row(f"[{t}, {v}] ours", measure(ours, part, runs), least, n, slow))
        for name, way in (("torch", by_torch), ("sort", by_sort)):
            lines.append(row(f"[{t}, {v}] {name}", measure(way, part, 2), least, n, slow))
        print("\n".join(lines[-3:]), flush=True)
        del part
    for dtype in (torch.float32,):
        part = make(T // 2, V, dtype=dtype)
        n = part[0].nbytes
        least = 2 * n / copy_rate(part[0])
        lines.append(row(f"[{T // 2}, {V}] {str(dtype)[6:]} ours", measure(ours, part, runs), least, n))
        del part
    card = torch.cuda.get_device_name() if CUDA else "CPU"
    print(
        f"\n{card}, torch {torch.__version__}, {time.monotonic() - started:.0f} s in all; copy rate {rate / 1e12:.2f} TB/s\n"
    )
    print("\n".join(lines + tried))


def try_blocks(data: tuple[Tensor, Tensor, Tensor]) -> list[str]:
    """Find the fastest block sizes one kernel at a time, use them from here on, and tell all that was tried (milliseconds)."""
    from slime_tandem.objective import logprobs_triton as kernels

    best, lines = kernels.Blocks(), [""]
    steps: list[tuple[str, Truncation, list[dict[str, int]]]] = [
        ("forward", Truncation(), [{"part": p, "scan_warps": w} for p in (16, 32, 64, 128) for w in (2, 4, 8)]),
        ("forward", CUT, [{"window": n, "select_warps": w} for n in (16, 32, 64) for w in (1, 2, 4, 8)]),
        (
            "forward",
            Truncation(top_p=0.95),
            [{"wide_window": n, "wide_warps": w} for n in (64, 128, 256) for w in (4, 8, 16)],
        ),
        (
            "backward",
            CUT,
            [
                {"grad_part": p, "grad_step": n, "grad_warps": w}
                for p, n in ((64, 8), (128, 8), (64, 16), (128, 16), (256, 16), (128, 32), (256, 32))
                for w in (2, 4, 8)
            ],
        ),
    ]
    for part, cut, choices in steps:
        found: dict[float, kernels.Blocks] = {}
        for choice in choices:
            kernels.BLOCKS = best._replace(**choice)
            times = measure(lambda x, y, cut=cut: ours(x, y, cut), data, 5)
            assert times is not None
            found[times[part]] = kernels.BLOCKS
            lines.append(f"{cut} {choice}: {part} {times[part] * 1e3:.3f}")
        best = found[min(found)]
    kernels.BLOCKS = best
    return [*lines, str(best)]


if __name__ == "__main__":
    main()
