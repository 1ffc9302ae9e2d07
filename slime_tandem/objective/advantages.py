"""Group-relative advantages, and what rewards look like per task. Pure.

GRPO (arXiv 2402.03300): several responses per prompt, the advantage of one is its reward compared with its own group, never
with the batch. Groups are given by explicit ids, in any order. Baselines: the group's mean; the mean of the others
(leave-one-out, arXiv 2402.14740), which is the same times n / (n - 1); the median, which one outlier does not move. It knows no
tokens: one number per response in, one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_tandem.config import AdvantageScale, Baseline
from slime_tandem.errors import DataError
from slime_tandem.types import FloatArray, IntArray

_MAD_TO_STD, _MEAN_AD_TO_STD = 1.4826, 1.2533
"""Both deviations times these are the std of a normal distribution."""
REWARD_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS = 10


def group_advantages(
    rewards: Sequence[float] | FloatArray,
    group_ids: Sequence[int],
    scale: AdvantageScale = "none",
    baseline: Baseline = "mean",
) -> tuple[FloatArray, float]:
    """(advantages [N], share of groups whose rewards are all equal up to rounding: these have advantage 0).

    Advantages sum to zero in every group, but with the median as baseline. `scale` divides by the group's population standard
    deviation, or its median absolute deviation times 1.4826; where more than half of a group are equal and this is 0, by the
    mean absolute deviation from the median times 1.2533 (Iglewicz and Hoaglin, 1993). A group of one has nobody to be compared
    with: advantage 0. Raises DataError for rewards that are not finite.

    >>> advantages, flat = group_advantages([1, 1, 1, 9, 5, 5], [0, 0, 0, 0, 7, 7])
    >>> advantages.tolist(), flat
    ([-2.0, -2.0, -2.0, 6.0, 0.0, 0.0], 0.5)
    """
    r = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(r).all():
        i = int(np.flatnonzero(~np.isfinite(r))[0])
        raise DataError(f"rewards[{i}]", rewards[i], "a finite number", "mend the reward function")
    numbers = {g: i for i, g in enumerate(dict.fromkeys(group_ids))}  # numpy would round ids of 64 bits to floats
    inverse = np.array([numbers[g] for g in group_ids], dtype=np.int64)
    if len(inverse) != len(r):
        raise DataError("group_ids", len(inverse), f"one per reward ({len(r)})", "pass both per sample")
    if not len(r):
        return r, 0.0
    counts = np.bincount(inverse)
    size = np.zeros(len(counts))
    np.maximum.at(size, inverse, np.abs(r))
    # In units of a power of two per group, which rounds nothing: squares and sums stay in the number range.
    exponent = np.frexp(size)[1]
    r, size = np.ldexp(r, -exponent[inverse]), np.ldexp(size, -exponent)
    centred = r - (np.bincount(inverse, r) / counts)[inverse]
    variance = np.bincount(inverse, centred**2) / counts
    flat = np.sqrt(variance) <= 1e-12 * size
    if baseline == "leave_one_out":
        centred *= (counts / np.maximum(counts - 1, 1))[inverse]
    elif baseline == "median":
        centred = r - _medians(r, inverse, len(counts))[inverse]
    centred[flat[inverse]] = 0.0  # rounding of the mean must not become a signal
    if scale == "none":
        centred = np.ldexp(centred, exponent[inverse])
    else:
        spread = np.sqrt(variance) if scale == "std" else _robust_spread(r, inverse, len(counts))
        centred /= np.where(flat, 1.0, spread)[inverse]
    return centred, float(flat.mean())


def clip_advantages(advantages: FloatArray, limit: float | None) -> tuple[FloatArray, float]:
    """(advantages clamped to +- `limit`, share that this changed); as they are for None.

    >>> clipped, share = clip_advantages(np.array([-2.0, 6.0]), 3.0)
    >>> clipped.tolist(), share
    ([-2.0, 3.0], 0.5)
    """
    if limit is None or not len(advantages):
        return advantages, 0.0
    return advantages.clip(-limit, limit), float((np.abs(advantages) > limit).mean())


def reward_histograms(rewards: Sequence[float], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """One record per task tag, in order: `task`, `samples`, `mean`, `min`, `max`, quantiles `p05` ... `p95`, and a histogram:
    `counts` in ten equal bins between `edges`.

    >>> [(h["task"], h["mean"], h["counts"][0]) for h in reward_histograms([0, 1, 0], ["sum", "sum", "gcd"])]
    [('gcd', 0.0, 0), ('sum', 0.5, 1)]
    """
    r, names = np.asarray(rewards, dtype=np.float64), np.asarray(tasks)
    out: list[dict[str, Any]] = []
    for task in sorted(set(tasks)):
        mine = r[names == task]
        counts, edges = np.histogram(mine, bins=_BINS)
        record = {"task": task, "samples": len(mine), "mean": mine.mean(), "min": mine.min(), "max": mine.max()}
        record |= reward_quantiles(mine)
        out.append(
            {k: float(v) if isinstance(v, np.floating) else v for k, v in record.items()}
            | {"edges": edges.tolist(), "counts": counts.tolist()}
        )
    return out


def reward_quantiles(rewards: Sequence[float] | FloatArray) -> dict[str, float | None]:
    """Quantiles p05, p25, p50, p75, p95, interpolated; None without a reward.

    >>> reward_quantiles([0.0, 1.0])["p25"]
    0.25
    """
    names = [f"p{round(100 * q):02d}" for q in REWARD_QUANTILES]
    if not len(rewards):
        return dict.fromkeys(names)
    values = np.quantile(np.asarray(rewards, dtype=np.float64), REWARD_QUANTILES)
    return dict(zip(names, map(float, values), strict=True))


def _medians(values: FloatArray, inverse: IntArray, groups: int) -> FloatArray:
    return np.array([np.median(values[inverse == g]) for g in range(groups)])


def _robust_spread(r: FloatArray, inverse: IntArray, groups: int) -> FloatArray:
    """[groups] MAD as a std, where it is 0 the mean absolute deviation as one."""
    distance = np.abs(r - _medians(r, inverse, groups)[inverse])
    mad = _medians(distance, inverse, groups)
    mean = np.bincount(inverse, distance) / np.bincount(inverse)
    return np.where(mad > 1e-12 * mean, _MAD_TO_STD * mad, _MEAN_AD_TO_STD * mean)
