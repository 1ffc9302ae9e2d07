"""The published TA-OPD selection against an independent restatement, on random rollouts: every bit must agree.

    python scripts/benchmarks/selection_reference.py --batches 100000        # about 20 minutes on one core
    python scripts/benchmarks/selection_reference.py --batches 1000 --first 500000

`opd.selection.rules=reference` is compared with `restated` below, a second writing of the published code's rules that shares no
function with the package: it orders by repeated search of the best, builds sets entry by entry, and draws
with numpy's Mersenne Twister in the place of Python's. Of each batch are compared: all raw and normalised scores (as bits) and
the mask of one selector. A batch is made from its number: up to five responses of up to twelve tokens, lists of up to eight
entries that share some ids, masked tokens, ties (coarse values), empty lists, exact masses, every normalisation, compatibility
and selector, ratios, gammas, least per response and draw counters. The last line is JSON: batches, differences, seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from slime_tandem.config import Compatibility, Normalisation, SelectionConfig, Selector
from slime_tandem.distill.opd_mask import opd_mask
from slime_tandem.types import SampleKey, TopLists

SELECTORS = get_args(Selector)
TINY = 1e-12
K = 8


@dataclass(frozen=True)
class Batch:
    """One random rollout and the settings that it is selected by."""

    lists: list[TopLists]
    able: list[np.ndarray]
    settings: SelectionConfig
    counter: int


def make(number: int) -> Batch:
    """The batch of this number; always the same."""
    rng = np.random.default_rng([20260530, number])
    coarse, exact = bool(rng.random() < 0.4), bool(rng.random() < 0.3)
    lists, able = [], []
    for _ in range(int(rng.integers(1, 6))):
        n = int(rng.integers(1, 13))
        ids = np.full((2, n, K), -1, dtype=np.int64)
        values = np.zeros((3, n, K))
        span = int(rng.choice([12, 40, 150_000]))  # small ids meet in a set's table, large ones collide there
        for i in range(n):
            if rng.random() < 0.03:
                continue  # nothing is known of this position
            for side in (0, 1):
                size = int(rng.integers(1, K + 1))
                ids[side, i, :size] = rng.choice(span, size, replace=False)
            if rng.random() < 0.7:  # some entries alike on both sides, at other places
                m = int(rng.integers(1, K + 1))
                ids[1, i, :m] = -1
                mine = rng.permutation(ids[0, i])[:m]
                ids[1, i, :m] = np.where(np.isin(mine, ids[1, i]), -1, mine)
            for row in range(3):
                raw = np.round(rng.exponential(2.0, K), 0 if coarse else 17)
                x = np.sort(raw)[::-1] * -1.0 if row < 2 else -raw
                values[row, i] = x - math.log(sum(math.exp(v) for v in x)) - 0.05 * rng.random()
        first = np.sort(values[:2], axis=2)[:, :, ::-1].astype(np.float32).astype(np.float64)
        cross = (np.minimum(values[2], 0.0), np.zeros((n, K))) if exact else ()
        lists.append(TopLists(ids[0], np.minimum(first[0], 0.0), ids[1], np.minimum(first[1], 0.0), *cross))
        able.append((rng.random(n) < 0.85) & lists[-1].shared)
    selector = str(rng.choice([s for s in SELECTORS if s != "full"]))
    settings = SelectionConfig(
        selector=selector,
        ratio=float(rng.choice([0.05, 0.07, 0.1, 0.3, 1 / 3, 0.5, 0.9, rng.random() * 0.98 + 0.01])),
        min_keep_per_sample=int(rng.integers(0, 4)),
        top_k=K,
        missing_mass="fill",
        compatibility=str(rng.choice(get_args(Compatibility))),  # type: ignore[arg-type]
        prefix_alpha=float(rng.choice([0.9, 0.5])),
        normalisation=str(rng.choice(get_args(Normalisation))),  # type: ignore[arg-type]
        gamma=float(rng.choice([0.5, 0.3, 0.0, 1.0])),
        rules="reference",
        exact_cmass=exact,
        mask_seed=int(rng.choice([42, 0, 2**40 + 7])),
    )
    return Batch(lists, able, settings, int(rng.integers(0, 1000)))


# ---- the restatement ----


def restated(batch: Batch) -> tuple[dict[str, list[float]], list[bool]]:
    """(scores by name, the mask) of all tokens, one response after the other."""
    s, rows = batch.settings, list[dict[str, Any]]()
    for response, (lists, able) in enumerate(zip(batch.lists, batch.able, strict=True)):
        running = None
        for at in range(len(able)):
            student = listed(lists.student_ids[at], lists.student_log_probs[at])
            teacher = listed(lists.teacher_ids[at], lists.teacher_log_probs[at])
            row = position(student, teacher)
            row["mass"] = inside(math_sum([dict(teacher).get(t, 0.0) for t, _ in student]))
            if lists.teacher_on_student is not None and student:
                wanted = dict(listed(lists.student_ids[at], lists.teacher_on_student[at]))
                row["mass"] = inside(math_sum([wanted.get(t, 0.0) for t, _ in student]))
            running = (
                row["mass"] if running is None else s.prefix_alpha * running + (1.0 - s.prefix_alpha) * row["mass"]
            )
            row |= {"prefix": running, "response": response, "at": at, "able": bool(able[at])}
            rows.append(row)
    names = {"mass": "mass", "overlap": "overlap", "bhattacharyya": "bc", "prefix": "prefix"}
    raw = {"h": [r["h"] for r in rows], "d": [r["d"] for r in rows], "c": [r[names[s.compatibility]] for r in rows]}
    raw["dc"] = [d * c for d, c in zip(raw["d"], raw["c"], strict=True)]
    unit = {name: to_unit(values, s.normalisation) for name, values in raw.items()}
    half = {name: interpolated(sorted(unit[name]), 0.5) for name in ("h", "d")}
    for i, row in enumerate(rows):
        h, d, c, dc = (unit[name][i] for name in ("h", "d", "c", "dc"))
        row |= {"H": h, "D": d, "C": c, "DC": dc, "sure": h < half["h"] and d >= half["d"]}
        row |= {"dlearn": d * c, "dincompat": d * (1.0 - c), "tip": h + d - h * d, "soft": h + dc - h * dc}
        row["split"] = (1.0 - h) * dc
    kept = chosen(rows, s, batch.counter)
    shown = {
        name: [float(r[name]) for r in rows]
        for name in ("h", "d", "r", "bc", "overlap", "mass", "prefix", *"HDC", "DC")
    }
    return shown, [i in kept for i in range(len(rows))]


def math_sum(values: list[float]) -> float:
    """The interpreter's own sum of floats, which newer versions compensate."""
    return sum(values)


def inside(x: float) -> float:
    return 0.0 if x < 0.0 else (1.0 if x > 1.0 else x)


def listed(ids: np.ndarray, log_probs: np.ndarray) -> list[tuple[int, float]]:
    return [(int(t), math.exp(float(v))) for t, v in zip(ids, log_probs, strict=True) if t >= 0]


def position(student: list[tuple[int, float]], teacher: list[tuple[int, float]]) -> dict[str, float]:
    p, q = dict(student), dict(teacher)
    seen: set[int] = set()
    for token, _ in student:
        seen.add(token)
    every = seen.copy()  # a copy's table is larger: later entries are read in its order
    for token, _ in teacher:
        every.add(token)
    out = {"h": spread([x for _, x in student]), "overlap": sum(t in q for t in p) / K, "d": 0.0, "r": 0.0, "bc": 0.0}
    order = list(every)
    total_p, total_q = math_sum([p.get(t, 0.0) for t in order]), math_sum([q.get(t, 0.0) for t in order])
    if not order or total_p <= 0 or total_q <= 0:
        return out
    for t in order:
        a, b = p.get(t, 0.0) / total_p, q.get(t, 0.0) / total_q
        a, b = (a if a > TINY else TINY), (b if b > TINY else TINY)
        out["d"] += b * (math.log(b) - math.log(a))
        out["r"] += a * (math.log(a) - math.log(b))
        out["bc"] += math.sqrt(a * b)
    return out


def spread(values: list[float]) -> float:
    values = [x for x in values if x > 0]
    total = math_sum(values)
    if not total > 0:
        return 0.0
    parts = [x / total for x in values]
    return -math_sum([x * math.log(x if x > TINY else TINY) for x in parts]) / math.log(
        2 if len(parts) < 2 else len(parts)
    )


def interpolated(ordered: list[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    below = int(place)
    if place == below:
        return ordered[below]
    return ordered[below] * (1.0 - (place - below)) + ordered[below + 1] * (place - below)


def to_unit(values: list[float], mode: str) -> list[float]:
    ordered = sorted(values)
    ends = {
        "none": (0.0, max(ordered[-1], TINY)),
        "batch_minmax": (ordered[0], ordered[-1]),
        "batch_quantile": (interpolated(ordered, 0.05), interpolated(ordered, 0.95)),
    }
    low, high = ends[mode]
    if abs(high - low) < TINY:
        return [0.0 for _ in values]
    return [inside((x - low) / (high - low)) for x in values]


def first_of(rows: list[dict[str, Any]], places: list[int], name: str, *, least: bool = False) -> int:
    """The place that goes first: most of `name`, the earliest of equals; least of it, the latest of equals; then as listed."""
    best = places[0]
    for i in places[1:]:
        a, b = rows[i], rows[best]
        better = a[name] < b[name] if least else a[name] > b[name]
        earlier = a["at"] > b["at"] if least else a["at"] < b["at"]
        if better or (a[name] == b[name] and earlier):
            best = i
    return best


def take(rows: list[dict[str, Any]], places: list[int], name: str, n: int, *, least: bool = False) -> set[int]:
    left, out = list(places), set[int]()
    while left and len(out) < n:
        one = first_of(rows, left, name, least=least)
        left.remove(one)
        out.add(one)
    return out


def shuffled(places: list[int], seed: int) -> list[int]:
    """Python's shuffle: from the end, each swapped with one before it, drawn by rejection from the generator's top bits."""
    generator = np.random.RandomState(0)
    generator.set_state(("MT19937", mersenne_state(seed), 624))
    out = list(places)
    for last in range(len(out) - 1, 0, -1):
        bits, drawn = (last + 1).bit_length(), last + 1
        while drawn > last:
            drawn = int(generator.randint(0, 2**32, dtype=np.uint32)) >> (32 - bits)
        out[last], out[drawn] = out[drawn], out[last]
    return out


def mersenne_state(seed: int) -> np.ndarray:
    """The 624 words that Matsumoto and Nishimura's `init_by_array` makes of a seed's 32-bit words."""
    words = [seed & 0xFFFFFFFF]
    while seed := seed >> 32:
        words.append(seed & 0xFFFFFFFF)
    m = [19650218]
    for i in range(1, 624):
        m.append((1812433253 * (m[-1] ^ m[-1] >> 30) + i) & 0xFFFFFFFF)
    i = 1
    for n in range(max(624, len(words)) + 623):
        mixed = m[i - 1] ^ m[i - 1] >> 30
        if n < max(624, len(words)):
            m[i] = ((m[i] ^ mixed * 1664525) + words[n % len(words)] + n % len(words)) & 0xFFFFFFFF
        else:
            m[i] = ((m[i] ^ mixed * 1566083941) - i) & 0xFFFFFFFF
        i += 1
        if i == 624:
            m[0], i = m[623], 1
    m[0] = 0x80000000
    return np.array(m, dtype=np.uint32)


COLUMN = {
    "entropy": "H", "divergence": "D", "compatibility": "C", "tip": "tip", "ca_softor": "soft", "dlearn_high": "dlearn",
    "dincompat_high": "dincompat", "q3": "split", "q3_highc": "C", "q3_lowc": "C", "q3_dlearn_high": "dlearn",
    "q3_dlearn_low": "dlearn", "q3_dincompat_high": "dincompat",
}  # fmt: skip


def chosen(rows: list[dict[str, Any]], s: SelectionConfig, counter: int) -> set[int]:
    open_ = [i for i, row in enumerate(rows) if row["able"]]
    if not open_:
        return set()
    n = max(1, math.ceil(len(open_) * s.ratio))
    if s.selector == "random":
        out = set(shuffled(open_, s.mask_seed + counter)[:n])
    elif s.selector == "split_budget_ca":
        half = round(n * s.gamma)
        out = take(rows, open_, "H", half)
        out |= take(rows, [i for i in open_ if i not in out], "split", n - half)
    else:
        among = [i for i in open_ if rows[i]["sure"]] if s.selector.startswith("q3") else open_
        out = take(rows, among, COLUMN[s.selector], n, least=s.selector in ("q3_lowc", "q3_dlearn_low"))
    for response in {rows[i]["response"] for i in open_}:
        mine = [i for i in open_ if rows[i]["response"] == response]
        missing = s.min_keep_per_sample - len(out & set(mine))
        out |= take(rows, [i for i in mine if i not in out], "soft", missing)
    return out


# ---- the comparison ----


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *(x + 0.0 for x in values))


def differences(batch: Batch) -> list[str]:
    """What the package has otherwise than the restatement; nothing, if all is well."""
    shown, kept = restated(batch)
    keys = [SampleKey(3, batch.counter, i) for i in range(len(batch.able))]
    got = opd_mask(keys, batch.able, list(batch.lists), batch.settings, batch.counter)
    mask = [bool(x) for part in got.masks for x in part]
    out = []
    if got.published is None:
        return [] if not any(map(any, batch.able)) else ["no scores"]
    tokens, p = got.published.tokens, got.published
    ours = {
        "h": [t.student_entropy_norm for t in tokens],
        "d": [t.forward for t in tokens],
        "r": [t.reverse for t in tokens],
        "bc": [t.bhattacharyya for t in tokens],
        "overlap": [t.overlap for t in tokens],
        "mass": [t.mass for t in tokens],
        "prefix": [t.prefix for t in tokens],
        "H": list(p.H),
        "D": list(p.D),
        "C": list(p.C),
        "DC": list(p.DC),
    }
    out += [name for name in ours if bits(ours[name]) != bits(shown[name])]
    if mask != kept:
        out.append(f"mask of {batch.settings.selector}")
    return out


def run(first: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """(differences by name, batches by selector) of a range of batches."""
    found, seen = Counter[str](), Counter[str]()
    for number in range(first, first + count):
        batch = make(number)
        seen[batch.settings.selector] += 1
        found.update(differences(batch))
    return found, seen


def main() -> int:
    """Compare, and say what differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    started, step = time.monotonic(), 500
    parts = [
        (at, min(step, args.first + args.batches - at)) for at in range(args.first, args.first + args.batches, step)
    ]
    found, seen = Counter[str](), Counter[str]()
    with ProcessPoolExecutor(args.workers) as pool:
        for a, b in pool.map(run, *zip(*parts, strict=True)):
            found += a
            seen += b
    print(f"{'selector':20} batches")
    for name, count in sorted(seen.items()):
        print(f"{name:20} {count:>7,}")
    result = {
        "batches": args.batches,
        "differences": dict(found),
        "python": sys.version.split()[0],
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
