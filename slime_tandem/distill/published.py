"""TA-OPD's token selection as its authors published it, bit for bit: `opd.selection.rules=reference`. Pure Python.

Where it differs from `teachability.py` and `selection.py`, it does so on purpose (docs/teachability.md has the table):
  - D fills what a list lacks with 1e-12, and adds up in the order in which a Python set of both lists' ids is read;
  - H, D, C and the product D * C are normalised over all tokens of the rollout, masked ones too; `none` divides by the maximum;
  - q3 compares clipped values with the medians of all tokens;
  - equal scores go to the earliest position, for the least scores to the latest one, then to the earlier response;
  - random shuffles the valid tokens with Python's own generator.
Floating-point numbers are Python's and `math`'s, one token at a time, because another library rounds its last bit in another
way: some 50 microseconds a token. Which tokens may be chosen, and what the mask is for, is `opd_mask.py`'s.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slime_tandem.config import Compatibility, Normalisation, SelectionConfig
from slime_tandem.distill.selection import TokenKeys
from slime_tandem.distill.teachability import Normalised, TokenScores
from slime_tandem.errors import DataError
from slime_tandem.types import BoolArray, TopLists

_FILL = 1e-12
_LOW, _HIGH = 0.05, 0.95
_MOST_EXACT_IDS = 4096
"""Student candidates of one response beyond which exact teacher masses are not asked for there (the published default)."""
Entries = Mapping[int, float]
"""A list of likely tokens: {id: log-prob}, in the order of the server's list."""


@dataclass(frozen=True, slots=True)
class PublishedToken:
    """What two lists say of one position, before normalisation: nats, probabilities, entropies also over ln(entries).

    `mass` is C by mass: the teacher's mass on the student's list, as far as its own list tells (`mass_listed`), or as it is
    where exact values were asked for (`exact`). `prefix` its running mean along the response.
    """

    student_mass: float
    teacher_mass: float
    student_entropy: float
    student_entropy_norm: float
    teacher_entropy: float
    teacher_entropy_norm: float
    forward: float
    reverse: float
    bhattacharyya: float
    overlap: float
    mass_listed: float
    mass: float
    exact: bool
    prefix: float


@dataclass(frozen=True, slots=True)
class PublishedScores:
    """Normalised scores of a rollout's tokens, all in [0, 1]; `q3`: student sure, teacher disagrees, by the medians."""

    tokens: Sequence[PublishedToken]
    H: Sequence[float]
    D: Sequence[float]
    C: Sequence[float]
    DC: Sequence[float]
    high_h: Sequence[bool]
    high_d: Sequence[bool]

    def dlearn(self, i: int) -> float:
        """Normalised divergence times normalised compatibility."""
        return self.D[i] * self.C[i]

    def dincompat(self, i: int) -> float:
        """The rest of the divergence."""
        return self.D[i] * (1.0 - self.C[i])

    def tip(self, i: int) -> float:
        """Soft-or of entropy and divergence."""
        return self.H[i] + self.D[i] - self.H[i] * self.D[i]

    def ca_softor(self, i: int) -> float:
        """Soft-or of entropy and the normalised product."""
        return self.H[i] + self.DC[i] - self.H[i] * self.DC[i]

    def split_ca(self, i: int) -> float:
        """The normalised product of a sure student."""
        return (1.0 - self.H[i]) * self.DC[i]

    def is_q3(self, i: int) -> bool:
        """Low entropy, high divergence."""
        return not self.high_h[i] and self.high_d[i]

    def as_token_scores(self, valid: BoolArray) -> TokenScores:
        """The same as arrays [N], for the metrics."""
        h, d, c = (np.array(x, dtype=np.float64) for x in (self.H, self.D, self.C))
        return TokenScores(Normalised(h, h), Normalised(d, d), Normalised(c, c), valid)


def published_scores(lists: TopLists, keys: TokenKeys, settings: SelectionConfig) -> PublishedScores:
    """Score and normalise all tokens [N] of a rollout, one without lists as zeros, as the published code has them."""
    sequence = keys.sequence.tolist()
    columns = [
        _entries(lists.student_ids, lists.student_log_probs),
        _entries(lists.teacher_ids, lists.teacher_log_probs),
    ]
    exact: list[Entries] = [{} for _ in sequence]
    if settings.exact_cmass and lists.teacher_on_student is not None:
        exact = _within_limit(columns[0], _entries(lists.student_ids, lists.teacher_on_student), sequence)
    tokens: list[PublishedToken] = []
    for i, (student, teacher) in enumerate(zip(*columns, strict=True)):
        before = tokens[-1].prefix if i and sequence[i - 1] == sequence[i] else None
        tokens.append(_token(student, teacher, exact[i], settings, before))
    compatibility = _COMPATIBILITY[settings.compatibility]
    h, d, c = (
        [t.student_entropy_norm for t in tokens],
        [t.forward for t in tokens],
        [compatibility(t) for t in tokens],
    )
    dc = [x * y for x, y in zip(d, c, strict=True)]
    H, D, C, DC = (_normalised(x, settings.normalisation) for x in (h, d, c, dc))
    h_mid, d_mid = _quantile(H, 0.5), _quantile(D, 0.5)
    return PublishedScores(tokens, H, D, C, DC, [x >= h_mid for x in H], [x >= d_mid for x in D])


def published_choice(
    scores: PublishedScores, valid: BoolArray, keys: TokenKeys, selector: str, settings: SelectionConfig, counter: int
) -> BoolArray:
    """[N]: the tokens that `selector` keeps of the valid ones. `counter`: how many banks were written before this rollout.

    Raises DataError for a selector that the published code does not have.
    """
    able = valid.tolist()
    open_ = [i for i, ok in enumerate(able) if ok]
    if selector == "full" or settings.ratio >= 1.0 or not open_:
        return valid.copy()
    position = keys.position.tolist()

    def best(among: Sequence[int], score: Callable[[int], float], n: int, *, least: bool = False) -> list[int]:
        return sorted(among, key=lambda i: (score(i), -position[i]), reverse=not least)[: max(n, 0)]

    budget = max(1, math.ceil(len(open_) * settings.ratio))
    if selector == "random":
        shuffled = list(open_)
        random.Random(settings.mask_seed + counter).shuffle(shuffled)  # noqa: S311 - the published generator
        chosen = set(shuffled[:budget])
    elif selector == "split_budget_ca":
        by_entropy = max(0, min(budget, round(budget * settings.gamma)))
        chosen = set(best(open_, scores.H.__getitem__, by_entropy))
        left = [i for i in open_ if i not in chosen]
        chosen |= set(best(left, scores.split_ca, budget - by_entropy))
    else:
        score = _scores_by(scores).get(selector)
        if score is None:
            known = ", ".join(["full", "random", "split_budget_ca", *_scores_by(scores)])
            raise DataError("selector", selector, f"one of {known} with rules=reference", "set rules=own")
        among = [i for i in open_ if scores.is_q3(i)] if selector.startswith("q3") else open_
        chosen = set(best(among, score, min(budget, len(among)), least=selector in _LEAST))
    groups: dict[int, list[int]] = {}
    for i in open_:
        groups.setdefault(int(keys.sequence[i]), []).append(i)
    for group in groups.values():
        more = settings.min_keep_per_sample - sum(i in chosen for i in group)
        chosen |= set(best([i for i in group if i not in chosen], scores.ca_softor, more))
    out = np.zeros(len(able), dtype=np.bool_)
    out[sorted(chosen)] = True
    return out


_LEAST = ("q3_lowc", "q3_dlearn_low")
_COMPATIBILITY: Mapping[Compatibility, Callable[[PublishedToken], float]] = {
    "mass": lambda t: t.mass,
    "overlap": lambda t: t.overlap,
    "bhattacharyya": lambda t: t.bhattacharyya,
    "prefix": lambda t: t.prefix,
}


def _scores_by(s: PublishedScores) -> dict[str, Callable[[int], float]]:
    return {
        "entropy": s.H.__getitem__,
        "divergence": s.D.__getitem__,
        "tip": s.tip,
        "compatibility": s.C.__getitem__,
        "ca_softor": s.ca_softor,
        "q3": s.split_ca,
        "q3_highc": s.C.__getitem__,
        "q3_lowc": s.C.__getitem__,
        "dlearn_high": s.dlearn,
        "q3_dlearn_high": s.dlearn,
        "q3_dlearn_low": s.dlearn,
        "q3_dincompat_high": s.dincompat,
        "dincompat_high": s.dincompat,
    }


def budget_score(scores: PublishedScores, selector: str, i: int) -> float:
    """What a token's selector gave it, as a bank of tokens shows it: for the least scores 1 minus it, 0 for random."""
    if selector == "split_budget_ca":
        return max(scores.H[i], scores.split_ca(i))
    by = _scores_by(scores).get(selector)
    value = 0.0 if by is None else by(i)
    return 1.0 - value if selector in _LEAST else value


def _entries(ids: np.ndarray, log_probs: np.ndarray) -> list[Entries]:
    """What there is of lists [N, K]."""
    rows = zip(ids.tolist(), log_probs.tolist(), strict=True)
    return [{t: v for t, v in zip(a, b, strict=True) if t >= 0 and math.isfinite(v)} for a, b in rows]


def _within_limit(student: Sequence[Entries], exact: Sequence[Entries], sequence: Sequence[int]) -> list[Entries]:
    """Exact values of the responses that were asked for them."""
    distinct: dict[int, set[int]] = {}
    for entries, number in zip(student, sequence, strict=True):
        distinct.setdefault(number, set()).update(entries)
    return [e if len(distinct[n]) <= _MOST_EXACT_IDS else {} for e, n in zip(exact, sequence, strict=True)]


def _token(
    student: Entries, teacher: Entries, exact: Entries, settings: SelectionConfig, before: float | None
) -> PublishedToken:
    s, t = ({token: math.exp(value) for token, value in side.items()} for side in (student, teacher))
    forward, reverse, bc = _geometry(s, t)
    listed = _bounded(sum(t.get(token, 0.0) for token in s))
    asked = bool(s) and bool(exact)
    mass = listed
    if asked:
        known = {token: math.exp(value) for token, value in exact.items()}
        mass = _bounded(sum(known.get(token, 0.0) for token in s))
    a = settings.prefix_alpha
    return PublishedToken(
        _bounded(sum(s.values())),
        _bounded(sum(t.values())),
        *_entropy(s.values()),
        *_entropy(t.values()),
        forward,
        reverse,
        bc,
        len(s.keys() & t.keys()) / max(settings.top_k, 1),
        listed,
        mass,
        asked,
        mass if before is None else a * before + (1.0 - a) * mass,
    )


def _bounded(x: float) -> float:
    return min(1.0, max(0.0, x))


def _entropy(values: Iterable[float]) -> tuple[float, float]:
    """Of a list renormalised, nats, and over ln(entries, at least 2)."""
    p = [x for x in values if x > 0]
    mass = sum(p)
    if mass <= 0:
        return 0.0, 0.0
    shares = [x / mass for x in p]
    h = -sum(x * math.log(max(x, _FILL)) for x in shares)
    return h, h / math.log(max(len(shares), 2))


def _geometry(s: Mapping[int, float], t: Mapping[int, float]) -> tuple[float, float, float]:
    """KL(teacher || student), KL(student || teacher) and the Bhattacharyya coefficient over both lists' entries."""
    # The order of the sums is that of this very set: one made from a dict, or of two sets, may be read in another order.
    ids_s, ids_t = list(s), list(t)
    either = set(ids_s).union(ids_t)
    mass_s = sum(s.get(token, 0.0) for token in either)
    mass_t = sum(t.get(token, 0.0) for token in either)
    if mass_s <= 0 or mass_t <= 0:
        return 0.0, 0.0, 0.0
    forward = reverse = bc = 0.0
    for token in either:
        p, q = max(s.get(token, 0.0) / mass_s, _FILL), max(t.get(token, 0.0) / mass_t, _FILL)
        forward += q * (math.log(q) - math.log(p))
        reverse += p * (math.log(p) - math.log(q))
        bc += math.sqrt(p * q)
    return forward, reverse, bc


def _normalised(values: Sequence[float], mode: Normalisation) -> list[float]:
    if not values:
        return []
    if mode == "none":
        low, high = 0.0, max(max(values), _FILL)
    elif mode == "batch_minmax":
        low, high = min(values), max(values)
    else:
        low, high = _quantile(values, _LOW), _quantile(values, _HIGH)
    width = high - low
    if abs(width) < _FILL:
        return [0.0] * len(values)
    return [min(1.0, max(0.0, (x - low) / width)) for x in values]


def _quantile(values: Sequence[float], q: float) -> float:
    """By linear interpolation; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = q * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    if low == high:
        return ordered[low]
    share = place - low
    return ordered[low] * (1.0 - share) + ordered[high] * share
