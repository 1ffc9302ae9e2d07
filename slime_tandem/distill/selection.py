"""Which tokens carry the teacher's signal: budgets over scores. Pure, linear in tokens.

A selector ranks valid tokens and keeps ceil(ratio * their number), at least one, over the whole rollout batch or per
response. Ties are broken by a hash of (seed, rollout, response, position), never by position: clipped scores tie the top
5% of tokens, and a rule that then prefers early ones selects the beginnings of responses (TIP's and TA-OPD's published
code does). What the scores mean is `teachability.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import numpy as np
import numpy.typing as npt

from slime_tandem.config import SELECTOR_ALIASES, Budget, Selector
from slime_tandem.distill.teachability import TokenScores
from slime_tandem.errors import DataError
from slime_tandem.types import BoolArray, FloatArray

__all__ = [
    "ALIASES",
    "COMPARED",
    "SELECTION_METRICS",
    "Budget",
    "Selector",
    "TokenKeys",
    "overlap",
    "resolve_selector",
    "select",
    "selection_metrics",
]

ALIASES: dict[str, Selector] = SELECTOR_ALIASES | {name: name for name in ("entropy", "tip", "divergence", "random")}
"""Names of methods in launch scripts."""

COMPARED: tuple[Selector, ...] = ("dlearn_high", "ca_softor", "entropy", "tip", "divergence", "random")
"""Selectors whose choice is compared with the one that is used."""
POSITION_BINS = 10

Index = npt.NDArray[np.intp]


class Key(Protocol):
    """What tokens are ordered by: values of those that an index names."""

    def __getitem__(self, index: Index, /) -> npt.NDArray[Any]:
        """[n] of the tokens `index` [n]."""
        ...


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
    raise DataError("selector", name, f"one of {', '.join([*known, *ALIASES])}", "choose one of these")


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
    reference: bool = False,
) -> BoolArray:
    """[N]: True for the tokens that carry the signal. Invalid tokens never do.

    `ratio` in (0, 1] of the valid tokens, rounded up; `min_keep_per_sample` then adds the best by ca_softor where a
    response has fewer. `gamma`: share of entropy in `split_budget_ca`. Draws depend on (seed, rollout_id, token) alone.
    `reference`: as the published code has it, clipped scores alone, ties to the earliest position, the same draws in every
    rollout. Raises DataError for a ratio outside (0, 1].
    """
    if not 0.0 < ratio <= 1.0:
        raise DataError("ratio", ratio, "a number above 0 and at most 1", "0.05 to 0.2 are usual")
    valid = scores.valid
    if selector == "full" or ratio == 1.0 or not valid.any():
        return valid.copy()
    rank = _Ranking(scores, _Draws(keys, seed, 0 if reference else rollout_id), keys if reference else None)
    chosen = np.zeros(len(valid), dtype=np.bool_)
    for group in _groups(valid, keys.sequence, budget):
        n = max(1, math.ceil(ratio * len(group) - 1e-9))
        chosen[_choose(scores, rank, selector, group, n, gamma)] = True
    if min_keep_per_sample > 0:
        _keep_some(chosen, scores, keys, rank, min_keep_per_sample)
    return chosen


@dataclass(frozen=True, slots=True)
class _Draws:
    """The tokens' pseudo-random numbers, made where they are needed."""

    keys: TokenKeys
    seed: int
    rollout_id: int

    def __getitem__(self, index: Index) -> npt.NDArray[np.uint64]:
        keys = TokenKeys(self.keys.sequence[index], self.keys.position[index])
        return keys.draws(self.seed, self.rollout_id)


@dataclass(frozen=True, slots=True)
class _Ranking:
    """By a clipped score, ties by what is beyond the clipping, then by draw; `early`: ties to the earliest position instead."""

    scores: TokenScores
    draws: _Draws
    early: TokenKeys | None

    def by(self, score: FloatArray, ties: FloatArray) -> list[Key]:
        """The keys of one ranking, best first."""
        return [score, ties if self.early is None else -self.early.position, self.draws]

    def named(self, name: Selector) -> list[Key]:
        """The keys of a selector that ranks all tokens by one score."""
        s = self.scores
        match name:
            case "random":
                return [self.draws]
            case "entropy":
                return self.by(s.H.clipped, s.H.unclipped)
            case "divergence":
                return self.by(s.D.clipped, s.D.unclipped)
            case "compatibility":
                return self.by(s.C.clipped, s.C.unclipped)
            case "tip":
                return self.by(s.tip, s.H.unclipped + s.D.unclipped)
            case "ca_softor":
                return self.by(s.ca_softor, s.H.unclipped + s.D.unclipped)
            case "dlearn_high":
                return self.by(s.dlearn, s.D.unclipped)
            case "dincompat_high":
                return self.by(s.dincompat, s.D.unclipped)
        raise AssertionError(f"{name} is no ranking of all tokens")


def _groups(valid: BoolArray, sequence: npt.NDArray[np.int64], budget: Budget) -> list[Index]:
    index = np.flatnonzero(valid)
    if budget == "batch":
        return [index]
    order = index[np.argsort(sequence[index], kind="stable")]
    cuts = np.flatnonzero(np.diff(sequence[order])) + 1
    return np.split(order, cuts)


def _choose(scores: TokenScores, rank: _Ranking, selector: Selector, group: Index, n: int, gamma: float) -> Index:
    if selector == "split_budget_ca":
        return _split(scores, rank, group, n, gamma)
    if not selector.startswith("q3"):
        return _top(rank.named(selector), group, n)
    C, D = scores.C, scores.D
    keys = {
        "q3": lambda: rank.by((1.0 - scores.H.clipped) * scores.dlearn, D.unclipped),
        "q3_highc": lambda: rank.by(C.clipped, C.unclipped),
        "q3_lowc": lambda: rank.by(-C.clipped, -C.unclipped),
        "q3_dlearn_high": lambda: rank.by(scores.dlearn, D.unclipped),
        "q3_dlearn_low": lambda: rank.by(-scores.dlearn, -D.unclipped),
        "q3_dincompat_high": lambda: rank.by(scores.dincompat, D.unclipped),
    }[selector]()
    return _top(keys, group[_low_h_high_d(scores)[group]], n)


def _low_h_high_d(scores: TokenScores) -> BoolArray:
    """Sure students that the teacher contradicts: H below and D at or above the medians of valid tokens."""
    h, d = (np.median(x.unclipped[scores.valid]) for x in (scores.H, scores.D))
    return np.asarray((scores.H.unclipped < h) & (scores.D.unclipped >= d) & scores.valid)


def _split(scores: TokenScores, rank: _Ranking, group: Index, n: int, gamma: float) -> Index:
    """A share `gamma` of the budget by entropy, the rest by learnable disagreement of sure students."""
    n_h = min(n, round(n * gamma))
    by_h = _top(rank.named("entropy"), group, n_h)
    rest = np.setdiff1d(group, by_h, assume_unique=True)
    keys = rank.by((1.0 - scores.H.clipped) * scores.dlearn, scores.D.unclipped)
    return np.concatenate([by_h, _top(keys, rest, n - n_h)])


def _top(keys: Sequence[Key], group: Index, n: int) -> Index:
    """The n tokens of `group` with the largest first key, ties by the next; linear, no sort of the whole batch."""
    if n <= 0:
        return group[:0]
    if n >= len(group) or not keys:
        return group[:n]
    first = keys[0][group]
    least = np.partition(first, len(first) - n)[len(first) - n]
    above = group[first > least]
    return np.concatenate([above, _top(keys[1:], group[first == least], n - len(above))])


def _keep_some(chosen: BoolArray, scores: TokenScores, keys: TokenKeys, rank: _Ranking, least: int) -> None:
    """Give each response with a valid token at least `least` of them, the best by ca_softor first."""
    valid = np.flatnonzero(scores.valid)
    _, group = np.unique(keys.sequence[valid], return_inverse=True)
    have = np.bincount(group, chosen[valid])
    poor = have[group] < least
    if not poor.any():
        return
    open_ = valid[poor & ~chosen[valid]]
    number = group[poor & ~chosen[valid]]
    order = np.lexsort((*(key[open_] for key in reversed(rank.named("ca_softor"))), -number))[::-1]
    number, open_ = number[order], open_[order]
    first = np.concatenate(([0], np.flatnonzero(np.diff(number)) + 1))
    place = np.arange(len(number)) - np.repeat(first, np.diff(np.append(first, len(number))))
    chosen[open_[place < least - have[number]]] = True


SELECTION_METRICS = (
    "keep_ratio", "H_mean", "D_mean", "C_mean", "position_mean", *(f"position_{i}" for i in range(POSITION_BINS)),
)  # fmt: skip


def selection_metrics(
    chosen: BoolArray, valid: BoolArray, keys: TokenKeys, scores: TokenScores | None
) -> dict[str, float | None]:
    """What was selected, under `SELECTION_METRICS`: its share of the valid tokens, means of H, D and C over it (None without
    scores), mean relative position (0.5: evenly spread) and the shares of the tenths of responses in it."""
    n = int(valid.sum())
    kept = np.flatnonzero(chosen)
    out: dict[str, float | None] = dict.fromkeys(SELECTION_METRICS)
    out["keep_ratio"] = len(kept) / n if n else None
    if len(kept):
        if scores is not None:
            for name, values in (("H", scores.H), ("D", scores.D), ("C", scores.C)):
                out[f"{name}_mean"] = float(values.clipped[kept].mean())
        _, number = np.unique(keys.sequence, return_inverse=True)
        length = np.zeros(int(number.max()) + 1)
        np.maximum.at(length, number, keys.position + 1)
        length = length[number[kept]]
        out["position_mean"] = float((keys.position[kept] / np.maximum(length - 1, 1)).mean())
        bins = (keys.position[kept] * POSITION_BINS / length).astype(np.int64)
        shares = np.bincount(bins, minlength=POSITION_BINS) / len(kept)
        out |= {f"position_{i}": float(share) for i, share in enumerate(shares)}
    return out


def overlap(a: BoolArray, b: BoolArray) -> float | None:
    """Shared over all selected tokens of two masks (Jaccard); None if neither selects any."""
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else None
