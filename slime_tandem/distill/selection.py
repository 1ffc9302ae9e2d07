"""Which tokens carry the teacher's signal: budgets over scores. Pure, linear in tokens.

A selector is a function of scores that ranks the tokens (`Ranker`); built-in ones and a user's own, `module:attribute`, come
through one table. Of the valid tokens ceil(ratio * their number) are kept, at least one, over the whole rollout batch or per
response. Ties are broken by a hash of (seed, rollout, response, position), never by position: clipped scores tie the top
5% of tokens, and a rule that then prefers early ones selects the beginnings of responses (TIP's and TA-OPD's published
code does). What the scores mean is `teachability.py`'s.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import numpy as np
import numpy.typing as npt

from slime_tandem.config import SELECTOR_ALIASES, Budget, Selector
from slime_tandem.distill.teachability import Normalised, TokenScores
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.extensions import find, is_own
from slime_tandem.types import BoolArray, FloatArray

__all__ = [
    "ALIASES",
    "COMPARED",
    "RANKERS",
    "SELECTION_METRICS",
    "Budget",
    "Ranker",
    "Ranking",
    "Selector",
    "TokenKeys",
    "find_ranker",
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


@dataclass(frozen=True, slots=True)
class Ranking:
    """An order of tokens [N], the best first: by `score`, ties by `ties`, then by the token's hash.

    `score` None: by the hash alone. `among` [N]: the tokens that may be chosen at all, None: every valid one. `share`: the part
    of the budget that goes by this ranking, where a selector gives several; the last takes what is left.
    """

    score: FloatArray | None
    ties: FloatArray | None = None
    among: BoolArray | None = None
    share: float = 1.0


Ranker = Callable[[TokenScores, float], FloatArray | Ranking | Sequence[Ranking]]
"""What a selector is: (scores of all tokens [N], `opd.selection.gamma`) -> a score per token [N], the largest is kept first; or
a `Ranking`; or several. A pure function: equal scores get equal answers. What it says of invalid tokens does not count."""


def _joint(s: TokenScores) -> FloatArray:
    return np.asarray(s.H.unclipped + s.D.unclipped)


def _sure(s: TokenScores) -> FloatArray:
    """Learnable disagreement of a sure student."""
    return np.asarray((1.0 - s.H.clipped) * s.dlearn)


def _low_h_high_d(s: TokenScores) -> BoolArray:
    """Sure students that the teacher contradicts: H below and D at or above the medians of valid tokens."""
    h, d = (np.median(x.unclipped[s.valid]) for x in (s.H, s.D))
    return np.asarray((s.H.unclipped < h) & (s.D.unclipped >= d) & s.valid)


def _split_budget(s: TokenScores, gamma: float) -> Sequence[Ranking]:
    """A share `gamma` of the budget by entropy, the rest by learnable disagreement of sure students."""
    return Ranking(s.H.clipped, s.H.unclipped, share=gamma), Ranking(_sure(s), s.D.unclipped)


RANKERS: Mapping[str, Ranker] = {
    "random": lambda s, _: Ranking(None),
    "entropy": lambda s, _: Ranking(s.H.clipped, s.H.unclipped),
    "divergence": lambda s, _: Ranking(s.D.clipped, s.D.unclipped),
    "compatibility": lambda s, _: Ranking(s.C.clipped, s.C.unclipped),
    "tip": lambda s, _: Ranking(s.tip, _joint(s)),
    "ca_softor": lambda s, _: Ranking(s.ca_softor, _joint(s)),
    "dlearn_high": lambda s, _: Ranking(s.dlearn, s.D.unclipped),
    "dincompat_high": lambda s, _: Ranking(s.dincompat, s.D.unclipped),
    "q3": lambda s, _: Ranking(_sure(s), s.D.unclipped, _low_h_high_d(s)),
    "q3_highc": lambda s, _: Ranking(s.C.clipped, s.C.unclipped, _low_h_high_d(s)),
    "q3_lowc": lambda s, _: Ranking(-s.C.clipped, -s.C.unclipped, _low_h_high_d(s)),
    "q3_dlearn_high": lambda s, _: Ranking(s.dlearn, s.D.unclipped, _low_h_high_d(s)),
    "q3_dlearn_low": lambda s, _: Ranking(-s.dlearn, -s.D.unclipped, _low_h_high_d(s)),
    "q3_dincompat_high": lambda s, _: Ranking(s.dincompat, s.D.unclipped, _low_h_high_d(s)),
    "split_budget_ca": _split_budget,
}
"""Built-in selectors by name; `full` selects nothing, it keeps every valid token."""


def find_ranker(name: str) -> Ranker:
    """The function of a selector; raises ConfigError for a user's own that cannot be imported, or fails on a small example."""
    found = find(name, RANKERS, "opd.selection.selector")
    if is_own(name):
        h, d, c = (Normalised(x, x) for x in (np.linspace(0.0, 1.0, 4), np.linspace(1.0, 0.0, 4), np.full(4, 0.5)))
        valid = np.array([True, True, False, True])
        try:
            _rankings(found(TokenScores(h, d, c, valid), 0.5), valid, name)
        except (Exception, SystemExit) as error:  # the user's code, or our refusal of what it answers
            why = " ".join(f"{type(error).__name__}: {error}".split())
            expected = f"a function of (scores, gamma) to a value per token; on four tokens: {why}"
            raise ConfigError("opd.selection.selector", name, expected, "mend it (docs/extending.md)") from error
    return found


def resolve_selector(name: str) -> str:
    """A selector by its own name, a script alias or `module:attribute`; raises DataError for another.

    >>> resolve_selector("teachability"), resolve_selector("q3")
    ('dlearn_high', 'q3')
    """
    known = get_args(Selector)
    if name in known or is_own(name):
        return name
    if name in ALIASES:
        return ALIASES[name]
    raise DataError("selector", name, f"one of {', '.join([*known, *ALIASES])}", "choose one of these")


def select(
    scores: TokenScores,
    keys: TokenKeys,
    selector: str,
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
    response has fewer. `selector`: a name in `RANKERS`, `full`, or a user's own; `gamma` is given to it. Draws depend on
    (seed, rollout_id, token) alone. Raises DataError for a ratio outside (0, 1] and for a ranking that is none, ConfigError as
    `find_ranker`.
    """
    if not 0.0 < ratio <= 1.0:
        raise DataError("ratio", ratio, "a number above 0 and at most 1", "0.05 to 0.2 are usual")
    valid = scores.valid
    if selector == "full" or ratio == 1.0 or not valid.any():
        return valid.copy()
    draws = _Draws(keys, seed, rollout_id)
    rankings = _rankings(find_ranker(selector)(scores, gamma), scores.valid, selector)
    chosen = np.zeros(len(valid), dtype=np.bool_)
    for group in _groups(valid, keys.sequence, budget):
        n = max(1, math.ceil(ratio * len(group) - 1e-9))
        chosen[_choose(rankings, draws, group, n)] = True
    if min_keep_per_sample > 0:
        (best,) = _rankings(RANKERS["ca_softor"](scores, gamma), valid, "ca_softor")
        _keep_some(chosen, valid, keys, _ordered(best, draws), min_keep_per_sample)
    return chosen


def _rankings(answer: object, valid: BoolArray, selector: str) -> list[Ranking]:
    """What a ranker answered, checked: raises DataError, naming the selector."""

    def refused(value: object, expected: str) -> DataError:
        return DataError(f"answer of selector {selector}", value, expected, "mend the function (docs/extending.md)")

    if inspect.iscoroutine(answer):
        answer.close()
    found = [answer] if isinstance(answer, (np.ndarray, Ranking)) else answer
    if not isinstance(found, Sequence) or not found:
        raise refused(answer, "an array [N], a Ranking, or several of these")
    out = []
    for one in found:
        ranking = Ranking(one) if isinstance(one, np.ndarray) else one
        if not isinstance(ranking, Ranking):
            raise refused(one, "an array [N] or a Ranking")
        for name, values in (("score", ranking.score), ("ties", ranking.ties), ("among", ranking.among)):
            if values is None:
                continue
            if not isinstance(values, np.ndarray) or values.shape != valid.shape or values.dtype.kind not in "fiub":
                raise refused(values, f"{name} as an array of numbers [{len(valid)}], one per token")
            if np.isnan(values[valid]).any():
                raise refused("NaN", f"{name} without NaN at the valid tokens")
        out.append(ranking)
    return out


@dataclass(frozen=True, slots=True)
class _Draws:
    """The tokens' pseudo-random numbers, made where they are needed."""

    keys: TokenKeys
    seed: int
    rollout_id: int

    def __getitem__(self, index: Index) -> npt.NDArray[np.uint64]:
        keys = TokenKeys(self.keys.sequence[index], self.keys.position[index])
        return keys.draws(self.seed, self.rollout_id)


def _ordered(ranking: Ranking, draws: _Draws) -> list[Key]:
    """The keys of one ranking, best first: its score, its own ties, then the draws."""
    if ranking.score is None:
        return [draws]
    return [ranking.score, draws] if ranking.ties is None else [ranking.score, ranking.ties, draws]


def _groups(valid: BoolArray, sequence: npt.NDArray[np.int64], budget: Budget) -> list[Index]:
    index = np.flatnonzero(valid)
    if budget == "batch":
        return [index]
    order = index[np.argsort(sequence[index], kind="stable")]
    cuts = np.flatnonzero(np.diff(sequence[order])) + 1
    return np.split(order, cuts)


def _choose(rankings: Sequence[Ranking], draws: _Draws, group: Index, n: int) -> Index:
    """`n` tokens of `group`, fewer where too few may be chosen; each ranking takes its share from what is left."""
    taken: list[Index] = []
    left = n
    for number, ranking in enumerate(rankings, start=1):
        mine = left if number == len(rankings) else min(left, round(n * ranking.share))
        open_ = group if ranking.among is None else group[ranking.among[group]]
        best = _top(_ordered(ranking, draws), open_, mine)
        taken.append(best)
        if number < len(rankings):
            left -= len(best)
            group = np.setdiff1d(group, best, assume_unique=True)
    return np.concatenate(taken)


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


def _keep_some(chosen: BoolArray, able: BoolArray, keys: TokenKeys, best: Sequence[Key], least: int) -> None:
    """Give each response with a valid (`able`) token at least `least` of them, the `best` first."""
    valid = np.flatnonzero(able)
    _, group = np.unique(keys.sequence[valid], return_inverse=True)
    have = np.bincount(group, chosen[valid])
    poor = have[group] < least
    if not poor.any():
        return
    open_ = valid[poor & ~chosen[valid]]
    number = group[poor & ~chosen[valid]]
    order = np.lexsort((*(key[open_] for key in reversed(best)), -number))[::-1]
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
