"""Which tokens carry the teacher's signal: budgets over scores. Pure, linear in tokens.

A selector ranks valid tokens and keeps ceil(ratio * their number), at least one, over the whole rollout batch or per
response. Ties are broken by a hash of (seed, rollout, response, position), never by position: clipped scores tie the top
5% of tokens, and a rule that then prefers early ones selects the beginnings of responses (TIP's and TA-OPD's published
code does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from slime_tandem.distill.teachability import TokenScores
from slime_tandem.errors import DataError, explain
from slime_tandem.types import BoolArray, FloatArray

Selector = Literal[
    "full", "dlearn_high", "ca_softor", "entropy", "tip", "divergence", "random", "compatibility", "dincompat_high",
    "q3", "q3_highc", "q3_lowc", "q3_dlearn_high", "q3_dlearn_low", "q3_dincompat_high", "split_budget_ca",
]  # fmt: skip
ALIASES: dict[str, Selector] = {
    "pure_opd": "full",
    "teachability": "dlearn_high",
    "teachability_entropy": "ca_softor",
    "entropy": "entropy",
    "tip": "tip",
    "divergence": "divergence",
    "random": "random",
}
"""Names of methods in launch scripts."""
Budget = Literal["batch", "sequence"]

Keys = Sequence[npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """Names tokens [N] for good: `sequence` numbers their responses, `position` is that in the response."""

    sequence: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def draws(self, seed: int, rollout_id: int) -> npt.NDArray[np.uint64]:
        """A pseudo-random number per token: the same for the same token, whatever the order of the batch."""
        x = _mix(np.uint64(seed % 2**64) ^ _mix(np.full(1, rollout_id % 2**64, dtype=np.uint64)))
        x = _mix(x ^ self.sequence.astype(np.uint64))
        return _mix(x ^ self.position.astype(np.uint64))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def resolve_selector(name: str) -> Selector:
    """A selector by its own name or a script alias; raises DataError for another.

    >>> resolve_selector("teachability"), resolve_selector("q3")
    ('dlearn_high', 'q3')
    """
    known = get_args(Selector)
    if name in known:
        return name  # type: ignore[return-value]
    if name in ALIASES:
        return ALIASES[name]
    raise DataError(explain("selector", name, f"one of {', '.join([*known, *ALIASES])}", "choose one of these"))


def select(
    scores: TokenScores,
    keys: TokenKeys,
    selector: Selector,
    ratio: float,
    *,
    seed: int,
    rollout_id: int,
    budget: Budget = "batch",
    min_keep_per_sample: int = 1,
    gamma: float = 0.5,
) -> BoolArray:
    """[N]: True for the tokens that carry the signal. Invalid tokens never do.

    `ratio` in (0, 1] of the valid tokens, rounded up; `min_keep_per_sample` then adds the best by ca_softor where a
    response has fewer. `gamma`: share of entropy in `split_budget_ca`. Draws depend on (seed, rollout_id, token) alone. Raises
    DataError for a ratio outside (0, 1].
    """
    if not 0.0 < ratio <= 1.0:
        raise DataError(explain("ratio", ratio, "a number above 0 and at most 1", "0.05 to 0.2 are usual"))
    valid = scores.valid
    if selector == "full" or ratio == 1.0 or not valid.any():
        return valid.copy()
    draws = keys.draws(seed, rollout_id)
    chosen = np.zeros(len(valid), dtype=np.bool_)
    for group in _groups(valid, keys.sequence, budget):
        n = max(1, math.ceil(ratio * len(group) - 1e-9))
        chosen[_choose(scores, draws, selector, group, n, gamma)] = True
    if min_keep_per_sample > 0:
        _keep_some(chosen, scores, keys, draws, min_keep_per_sample)
    return chosen


def _groups(valid: BoolArray, sequence: npt.NDArray[np.int64], budget: Budget) -> list[npt.NDArray[np.intp]]:
    index = np.flatnonzero(valid)
    if budget == "batch":
        return [index]
    order = index[np.argsort(sequence[index], kind="stable")]
    cuts = np.flatnonzero(np.diff(sequence[order])) + 1
    return np.split(order, cuts)


def _choose(
    scores: TokenScores,
    draws: npt.NDArray[np.uint64],
    selector: Selector,
    group: npt.NDArray[np.intp],
    n: int,
    gamma: float,
) -> npt.NDArray[np.intp]:
    H, D, C = scores.H, scores.D, scores.C
    both = H.unclipped + D.unclipped
    # (score, what orders its ties), best first.
    ranked: dict[str, tuple[FloatArray, FloatArray]] = {
        "entropy": (H.clipped, H.unclipped),
        "divergence": (D.clipped, D.unclipped),
        "tip": (scores.tip, both),
        "compatibility": (C.clipped, C.unclipped),
        "ca_softor": (scores.ca_softor, both),
        "dlearn_high": (scores.dlearn, D.unclipped),
        "dincompat_high": (scores.dincompat, D.unclipped),
    }
    if selector == "random":
        return group[_top([draws[group]], n)]
    if selector in ranked:
        return group[_top([ranked[selector][0][group], ranked[selector][1][group], draws[group]], n)]
    if selector == "split_budget_ca":
        return _split(scores, draws, group, n, gamma)
    q3 = group[_low_h_high_d(scores)[group]]
    score, ties = {
        "q3": ((1.0 - H.clipped) * scores.dlearn, D.unclipped),
        "q3_highc": (C.clipped, C.unclipped),
        "q3_lowc": (-C.clipped, -C.unclipped),
        "q3_dlearn_high": (scores.dlearn, D.unclipped),
        "q3_dlearn_low": (-scores.dlearn, -D.unclipped),
        "q3_dincompat_high": (scores.dincompat, D.unclipped),
    }[selector]
    return q3[_top([score[q3], ties[q3], draws[q3]], min(n, len(q3)))]


def _low_h_high_d(scores: TokenScores) -> BoolArray:
    """Sure students that the teacher contradicts: H below and D at or above the medians of valid tokens."""
    h, d = (np.median(x.unclipped[scores.valid]) for x in (scores.H, scores.D))
    return np.asarray((scores.H.unclipped < h) & (scores.D.unclipped >= d) & scores.valid)


def _split(
    scores: TokenScores, draws: npt.NDArray[np.uint64], group: npt.NDArray[np.intp], n: int, gamma: float
) -> npt.NDArray[np.intp]:
    """A share `gamma` of the budget by entropy, the rest by learnable disagreement of sure students."""
    n_h = min(n, round(n * gamma))
    by_h = group[_top([scores.H.clipped[group], scores.H.unclipped[group], draws[group]], n_h)]
    rest = np.setdiff1d(group, by_h, assume_unique=True)
    score = (1.0 - scores.H.clipped) * scores.dlearn
    by_d = rest[_top([score[rest], scores.D.unclipped[rest], draws[rest]], n - n_h)]
    return np.concatenate([by_h, by_d])


def _top(keys: Keys, n: int) -> npt.NDArray[np.intp]:
    """Indices of the n largest by the first key, ties by the next; linear, no sort of the whole batch."""
    first = keys[0]
    if n <= 0:
        return np.zeros(0, dtype=np.intp)
    if n >= len(first):
        return np.arange(len(first))
    least = np.partition(first, len(first) - n)[len(first) - n]
    above, tied = np.flatnonzero(first > least), np.flatnonzero(first == least)
    wanted = n - len(above)
    if wanted < len(tied):
        tied = tied[_top([k[tied] for k in keys[1:]], wanted)] if len(keys) > 1 else tied[:wanted]
    return np.concatenate([above, tied])


def _keep_some(
    chosen: BoolArray, scores: TokenScores, keys: TokenKeys, draws: npt.NDArray[np.uint64], least: int
) -> None:
    """Give each response with a valid token at least `least` of them, the best by ca_softor first."""
    valid = np.flatnonzero(scores.valid)
    _, group = np.unique(keys.sequence[valid], return_inverse=True)
    have = np.bincount(group, chosen[valid])
    poor = have[group] < least
    if not poor.any():
        return
    open_ = valid[poor & ~chosen[valid]]
    number = group[poor & ~chosen[valid]]
    ties = scores.H.unclipped + scores.D.unclipped
    order = np.lexsort((draws[open_], ties[open_], scores.ca_softor[open_], -number))[::-1]
    number, open_ = number[order], open_[order]
    first = np.concatenate(([0], np.flatnonzero(np.diff(number)) + 1))
    rank = np.arange(len(number)) - np.repeat(first, np.diff(np.append(first, len(number))))
    chosen[open_[rank < least - have[number]]] = True


def selection_metrics(chosen: BoolArray, scores: TokenScores, keys: TokenKeys) -> dict[str, float | None]:
    """What was selected: share of valid tokens, means of H, D and C over them, and mean relative position (0.5: evenly
    spread)."""
    n = int(scores.valid.sum())
    kept = np.flatnonzero(chosen)
    out: dict[str, float | None] = {"selection/keep_ratio": len(kept) / n if n else None}
    for name, values in (("H", scores.H), ("D", scores.D), ("C", scores.C)):
        out[f"selection/{name}_mean"] = float(values.clipped[kept].mean()) if len(kept) else None
    length = np.zeros(int(keys.sequence.max(initial=-1)) + 1)
    np.maximum.at(length, keys.sequence, keys.position + 1)
    relative = keys.position / np.maximum(length[keys.sequence] - 1, 1)
    out["selection/position_mean"] = float(relative[kept].mean()) if len(kept) else None
    return out


def overlap(a: BoolArray, b: BoolArray) -> float | None:
    """Shared over all selected tokens of two masks (Jaccard); None if neither selects any."""
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else None
