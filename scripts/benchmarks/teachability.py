"""Speed and memory of token selection on one core: score, normalise, select; linearity; the reference's rules beside ours.

    OMP_NUM_THREADS=1 python scripts/benchmarks/teachability.py                 # about a minute

Lists are made at random: K distinct ids of 150,000 on each side, about 60% of them shared, log-probs of float32 with a steep
head; responses of 2,000 tokens. Every size runs in a process of its own, whose peak memory is the system's figure and holds
the lists themselves (4 log-prob and 2 id arrays, 4 bytes an entry). Times are the least of several repeats: other processes
can only add to them. The published rules (`rules=reference`) are plain Python, for the last bit's sake, and take fewer repeats;
what is compared is where a budget of 5% goes, whose mean position would be half of the length if ties were broken fairly.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from slime_tandem.config import MissingMass, SelectionConfig, Selector
from slime_tandem.distill.published import published_choice, published_scores
from slime_tandem.distill.selection import TokenKeys, select
from slime_tandem.distill.teachability import raw_scores, token_scores
from slime_tandem.types import TopLists

LENGTH, VOCABULARY, SHARED = 2000, 150_000, 0.6
ARRAYS = (
    "student_ids",
    "student_log_probs",
    "teacher_ids",
    "teacher_log_probs",
    "teacher_on_student",
    "student_on_teacher",
)


def make(n: int, k: int, seed: int = 0) -> TopLists:
    """Lists of `n` positions; made in parts, so that making them is no part of the peak."""
    rng = np.random.default_rng(seed)
    out = {a: np.empty((n, k), dtype=np.int32 if a.endswith("ids") else np.float32) for a in ARRAYS}
    for start in range(0, n, 50_000):
        part = slice(start, min(start + 50_000, n))
        size = part.stop - start
        # A stride of its own for each position keeps the 2K ids of a position distinct.
        first, stride = rng.integers(0, VOCABULARY, (size, 1)), rng.integers(1, VOCABULARY // (2 * k), (size, 1))
        ids = (first + stride * np.arange(2 * k)) % VOCABULARY
        out["student_ids"][part] = ids[:, :k]
        out["teacher_ids"][part] = np.where(rng.random((size, k)) < SHARED, ids[:, :k], ids[:, k:])
        for name in ARRAYS:
            if not name.endswith("ids"):
                x = -np.sort(rng.exponential(2.0, (size, k)), axis=1)
                out[name][part] = x - np.log(np.exp(x).sum(1, keepdims=True)) - 0.05
    return TopLists(**out)


def measure(n: int, k: int, rule: MissingMass, selector: Selector, reference: bool, repeat: int) -> dict[str, Any]:
    lists = make(n, k)
    keys = TokenKeys(np.arange(n) // LENGTH, np.arange(n) % LENGTH)
    valid = np.ones(n, dtype=np.bool_)
    best: dict[str, float] = {}
    total = cpu = float("inf")
    for _ in range(repeat):
        used = time.process_time()
        marks = [time.perf_counter()]
        TopLists(*(getattr(lists, a) for a in ARRAYS))
        marks.append(time.perf_counter())
        if reference:
            settings = SelectionConfig(selector=selector, ratio=0.05, top_k=k, missing_mass="fill", rules="reference")
            published = published_scores(lists, keys, settings)
            marks += [time.perf_counter()] * 2
            chosen = published_choice(published, valid, keys, selector, settings, 0)
        else:
            raw = raw_scores(lists, rule)
            marks.append(time.perf_counter())
            scores = token_scores(raw, valid)
            marks.append(time.perf_counter())
            chosen = select(scores, keys, selector, 0.05, seed=0, rollout_id=0)
        marks.append(time.perf_counter())
        spans = dict(zip(("check", "score", "normalise", "select"), np.diff(marks).tolist(), strict=True))
        best = {name: min(span, best.get(name, span)) for name, span in spans.items()}
        total, cpu = min(total, marks[-1] - marks[0]), min(cpu, time.process_time() - used)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**best, "total": total, "cpu": cpu, "peak_mib": peak, "position": float(keys.position[chosen].mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[250_000, 500_000, 1_000_000])
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(**json.loads(args.one))))
        return
    cases: list[tuple[int, MissingMass, Selector, bool]] = [(n, "exact", "dlearn_high", False) for n in args.tokens]
    n = args.tokens[-1]
    cases += [(n, "rest", "dlearn_high", False), (n, "fill", "dlearn_high", False)]
    cases += [(n, rule, s, r) for s in ("tip", "ca_softor") for rule, r in (("exact", False), ("fill", True))]  # type: ignore[misc]
    parts = ("check", "score", "normalise", "select", "total", "cpu")
    print(
        f"| tokens | missing mass | selector | rules | {' | '.join(f'{p}, s' for p in parts)} | peak, MiB | mean position |"
    )
    print("|" + "---|" * (len(parts) + 6))
    for tokens, rule, selector, reference in cases:
        one = {
            "n": tokens,
            "k": args.k,
            "rule": rule,
            "selector": selector,
            "reference": reference,
            "repeat": 1 if reference else args.repeat,
        }
        done = subprocess.run([sys.executable, __file__, "--one", json.dumps(one)], stdout=subprocess.PIPE, check=True)
        got = json.loads(done.stdout)
        row = [f"{tokens:,}", rule, selector, "reference" if reference else "own", *(f"{got[p]:.3f}" for p in parts)]
        print(f"| {' | '.join(row)} | {got['peak_mib']:.0f} | {got['position']:.0f} of {LENGTH} |", flush=True)


if __name__ == "__main__":
    main()
