"""Group-relative advantages. Pure.

GRPO (arXiv 2402.03300): several responses per prompt, the advantage of one is its reward minus the mean of its own group,
never of the batch. Groups are given by explicit ids, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from slime_tandem.errors import DataError, explain
from slime_tandem.types import FloatArray


def group_advantages(
    rewards: Sequence[float], group_ids: Sequence[int], scale: Literal["none", "std"] = "none"
) -> tuple[FloatArray, float]:
    """(advantages [N], share of groups whose rewards are all equal up to rounding). Advantages sum to zero in every group.

    `scale="std"` divides by the group's population standard deviation (a group without variance stays at 0).
    Raises DataError for rewards that are not finite.

    >>> advantages, flat = group_advantages([1, 1, 1, 9, 5, 5], [0, 0, 0, 0, 7, 7])
    >>> advantages.tolist(), flat
    ([-2.0, -2.0, -2.0, 6.0, 0.0, 0.0], 0.5)
    """
    r = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(r).all():
        i = int(np.flatnonzero(~np.isfinite(r))[0])
        raise DataError(explain(f"rewards[{i}]", rewards[i], "a finite number", "mend the reward function"))
    _, inverse, counts = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
    if len(inverse) != len(r):
        raise DataError(explain("group_ids", len(inverse), f"one per reward ({len(r)})", "pass both per sample"))
    if not len(r):
        return r, 0.0
    centred = r - (np.bincount(inverse, r) / counts)[inverse]
    variance = np.bincount(inverse, centred**2) / counts
    size = np.zeros(len(counts))
    np.maximum.at(size, inverse, np.abs(r))
    flat = np.sqrt(variance) <= 1e-12 * size
    centred[flat[inverse]] = 0.0  # rounding of the mean must not become a signal
    if scale == "std":
        centred /= np.where(flat, 1.0, np.sqrt(variance))[inverse]
    return centred, float(flat.mean())
