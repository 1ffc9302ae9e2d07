"""How much a teacher's disagreement can teach, token by token (TA-OPD, arXiv 2605.26844). Pure, batched, linear in tokens.

From the K most likely tokens of student and teacher at each position:
  H  entropy of the student's list, renormalised, over ln(number of entries, at least 2): 0 sure, 1 undecided
  D  divergence of teacher and student, nats: forward KL(teacher || student) or reverse
  C  compatibility: whether the student can reach what the teacher wants; by default the teacher's mass on the student's list
and, normalised over the batch's valid tokens to [0, 1] (`normalise`):
  Dlearn = Dn * Cn         disagreement that the student can act on
  Dincompat = Dn * (1 - Cn)
  tip = Hn + Dn - Hn * Dn  soft-or (TIP);  ca_softor = Hn + Dlearn - Hn * Dlearn

What a list does not hold (`MissingMass`):
  exact  log-probs of the other side's candidates were asked for; D and C are over the union of both lists, each side
         renormalised
  rest   shared candidates one by one, all else as one event: a lower bound of the divergence, nothing invented
  fill   1e-12 for what a list lacks, as the reference implementation does: a teacher-only token then costs 27.6 * p nats and
         membership of lists dominates D; for reproduction only

Which tokens are then chosen is `selection.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_tandem.config import Compatibility, MissingMass, Normalisation
from slime_tandem.errors import DataError
from slime_tandem.types import BoolArray, FloatArray, TopLists

__all__ = [
    "Compatibility",
    "MissingMass",
    "Normalisation",
    "Normalised",
    "RawScores",
    "TokenScores",
    "TopLists",
    "normalise",
    "raw_scores",
    "token_scores",
]

_CHUNK = 2048
"""Positions worked on at once: what is computed of them stays in the processor's cache."""
_LEAST = math.log(1e-30)
"""Log-probs are cut off here: an exact score of 0 has -inf, and the divergence stays finite."""
_FILL = math.log(1e-12)
_LEAST_REST = 1e-6
Block = npt.NDArray[np.float32]
"""[K, n]: entry by entry, so that every operation runs along many positions."""
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class RawScores:
    """Scores [N] before normalisation: entropies in [0, 1], divergences in nats, compatibility in [0, 1]."""

    entropy: FloatArray
    teacher_entropy: FloatArray
    divergence: FloatArray
    reverse_divergence: FloatArray
    compatibility: FloatArray


def raw_scores(
    lists: TopLists,
    rule: MissingMass,
    compatibility: Compatibility = "mass",
    sequence: npt.NDArray[np.integer] | None = None,
    prefix_alpha: float = 0.9,
) -> RawScores:
    """H of both sides, D both ways, C.

    C: `mass` the teacher's mass on the student's list; `overlap` shared entries over K; `bhattacharyya` the sum of
    sqrt(p_student * p_teacher) over the events that D compares; `prefix` the exponential mean of `mass` along a response
    (weight `prefix_alpha` on the past), which needs `sequence` [N], the response of each position, positions in order.
    Raises DataError for `exact` without cross-scores and `prefix` without sequences.
    """
    if rule == "exact" and lists.teacher_on_student is None:
        raise DataError("rule", rule, "cross-scores in TopLists", "ask the servers for them, or choose rest")
    if compatibility == "prefix" and sequence is None:
        raise DataError("compatibility", compatibility, "`sequence`, the response of each position", "pass it")
    N = len(lists)
    out = np.zeros((5, N))
    for start in range(0, N, _CHUNK):
        part = slice(start, min(start + _CHUNK, N))
        out[:, part] = _chunk(lists, part, rule, compatibility)
    c = out[4]
    if compatibility == "prefix":
        assert sequence is not None
        c = _prefix_mean(c, np.asarray(sequence), prefix_alpha)
    return RawScores(out[0], out[1], out[2], out[3], c)


def _chunk(lists: TopLists, part: slice, rule: MissingMass, compatibility: Compatibility) -> list[FloatArray | Block]:
    (s_ids, s_there), (t_ids, t_there) = _ids(lists.student_ids[part], -1), _ids(lists.teacher_ids[part], -2)
    log_s, s = _probs(lists.student_log_probs[part], s_there)
    log_t, t = _probs(lists.teacher_log_probs[part], t_there)
    new = np.empty(t_ids.shape, dtype=np.bool_)  # the teacher's entries that the student's list lacks
    differs = np.empty(s_ids.shape, dtype=np.bool_)
    for one, out in zip(t_ids, new, strict=True):
        np.not_equal(s_ids, one, out=differs)
        np.minimum.reduce(differs.view(np.uint8), axis=0, out=out.view(np.uint8))  # `all`, in half the time
    if t_there is not None:
        new &= t_there
    if rule == "exact":
        assert lists.teacher_on_student is not None
        assert lists.student_on_teacher is not None
        log_ts, ts = _probs(lists.teacher_on_student[part], s_there)
        log_st, st = _probs(lists.student_on_teacher[part], t_there)
        st *= new
        t_new = t * new
        p, q, forward, reverse = _sums(s, log_s, ts, log_ts) + _sums(st, log_st, t_new, log_t)
        p, q = np.maximum(p, 1e-30), np.maximum(q, 1e-30)  # both lists empty
        gap = np.log(p / q)
        forward, reverse = forward / q + gap, reverse / p - gap
        mass, root, events = ts.sum(0), 1.0 / (np.sqrt(p) * np.sqrt(q)), [(s, ts), (st, t_new)]
    else:
        log_ts, ts, shared = _on_student(s_ids, t_ids, log_t, t)
        mass, root = ts.sum(0), np.float32(1.0)
        if rule == "rest":
            s_shared = s * shared
            p, q, forward, reverse = _sums(s_shared, log_s, ts, log_ts)
            rest_p, rest_q = (np.maximum(1.0 - x, _LEAST_REST)[None] for x in (p, q))
            _, _, more_f, more_r = _sums(rest_p, np.log(rest_p), rest_q, np.log(rest_q))
            forward, reverse = forward + more_f, reverse + more_r
            events = [(s_shared, ts), (rest_p, rest_q)]
        else:
            there = np.True_ if s_there is None else s_there
            a, b = (np.log(np.maximum(x.sum(0), 1e-30)) for x in (s, t))
            entries = [
                (log_s - a, np.where(shared, log_ts - b, _FILL), there),
                (np.full_like(log_t, _FILL), log_t - b, new),
            ]
            logs = [(np.maximum(x, _FILL), np.maximum(y, _FILL), used) for x, y, used in entries]
            events = [(np.exp(x) * used, np.exp(y) * used) for x, y, used in logs]
            sums = sum(
                (_sums(p, x, q, y) for (p, q), (x, y, _) in zip(events, logs, strict=True)), np.zeros(4)[:, None]
            )
            forward, reverse = sums[2:]
    if compatibility == "overlap":
        shared_entries = (len(t_ids) if t_there is None else t_there.sum(0)) - new.sum(0)
        c = shared_entries / max(len(s_ids), 1)
    elif compatibility == "bhattacharyya":
        c = root * sum(np.sqrt(p * q).sum(0) for p, q in events)
    else:
        c = np.minimum(mass, 1.0)
    return [_entropy(s, log_s, s_there), _entropy(t, log_t, t_there), np.maximum(forward, 0), np.maximum(reverse, 0), c]


def _ids(ids: Ids, missing: int) -> tuple[Ids, BoolArray | None]:
    """([K, n], which exist; None: all). What does not exist has another number on either side, so that it never matches."""
    out = np.ascontiguousarray(ids.T)
    if out.min(initial=0) >= 0:
        return out, None
    there = out >= 0
    return np.where(there, out, missing), there


def _probs(log_probs: npt.NDArray[np.floating], there: BoolArray | None) -> tuple[Block, Block]:
    """(log-probs, probabilities) [K, n] of [n, K]; probability 0 where `there` says that there is no entry."""
    log_p = np.ascontiguousarray(log_probs.T, dtype=np.float32)
    if log_p.min(initial=0) < _LEAST:
        log_p = np.maximum(log_p, np.float32(_LEAST))
    p = np.exp(log_p)
    if there is not None:
        p *= there
    return log_p, p


def _sums(p: Block, log_p: Block, q: Block, log_q: Block) -> Block:
    """[4, n]: the sums of p, q, q * log(q / p) and p * log(p / q) over entries, with the logarithms as given."""
    d = log_q - log_p
    return np.stack([p.sum(0), q.sum(0), np.einsum("kn,kn->n", q, d), -np.einsum("kn,kn->n", p, d)])


def _on_student(s_ids: Ids, t_ids: Ids, log_t: Block, t: Block) -> tuple[Block, Block, BoolArray]:
    """(log-probs, probabilities, whether there) [K, n]: the teacher's own entries at the student's."""
    log_ts, ts, shared = np.zeros_like(log_t, shape=s_ids.shape), np.zeros_like(t, shape=s_ids.shape), s_ids < -2
    for j, one in enumerate(t_ids):
        same = s_ids == one
        shared |= same
        log_ts += same * log_t[j]
        ts += same * t[j]
    return log_ts, ts, shared


def _entropy(p: Block, log_p: Block, there: BoolArray | None) -> Block:
    """Of a list renormalised, over ln(entries); 0 for a list of one or none."""
    total = np.maximum(p.sum(0), 1e-30)
    h = np.log(total) - np.einsum("kn,kn->n", p, log_p) / total
    n = np.array(len(p)) if there is None else there.sum(0)
    return np.asarray(np.clip(np.where(n > 1, h, 0.0) / np.log(np.maximum(n, 2)), 0.0, 1.0), dtype=np.float32)


def _prefix_mean(values: FloatArray, sequence: npt.NDArray[np.integer], alpha: float) -> FloatArray:
    """x_0 = v_0, x_t = alpha * x_{t-1} + (1 - alpha) * v_t, anew for each run of equal `sequence`."""
    out = values.copy()
    if not len(out):
        return out
    first = np.concatenate(([True], sequence[1:] != sequence[:-1]))
    starts = np.flatnonzero(first)
    length = np.diff(np.append(starts, len(out)))
    # Column by column over all responses at once: as many steps as the longest has tokens.
    order = np.argsort(-length, kind="stable")
    starts, length = starts[order], length[order]
    for step in range(1, int(length[0])):
        alive = starts[: int(np.searchsorted(-length, -step, side="left"))] + step
        out[alive] = alpha * out[alive - 1] + (1 - alpha) * out[alive]
    return out


@dataclass(frozen=True, slots=True)
class Normalised:
    """`clipped` [N] in [0, 1]; `unclipped` [N], the same line beyond it, so that the largest values keep their order."""

    clipped: FloatArray
    unclipped: FloatArray


def normalise(
    values: FloatArray, valid: BoolArray, mode: Normalisation = "batch_quantile", low: float = 0.05, high: float = 0.95
) -> Normalised:
    """Map the batch to [0, 1] by valid tokens alone: quantiles `low`..`high`, minimum..maximum, or as it is (`none`: by 1).

    Invalid positions are 0. A batch without spread is 0 everywhere; one that is flat between the quantiles alone (a
    student that is sure nearly everywhere) keeps the order beyond them. Raises DataError for values that are not finite.

    >>> n = normalise(np.array([0.0, 1.0, 2.0, 9.0]), np.array([True, True, True, False]), "batch_minmax")
    >>> n.clipped.tolist(), n.unclipped.tolist()
    ([0.0, 0.5, 1.0, 0.0], [0.0, 0.5, 1.0, 0.0])
    """
    used = values[valid]
    if not np.isfinite(used).all():
        i = int(np.flatnonzero(valid)[np.flatnonzero(~np.isfinite(used))[0]])
        raise DataError(f"score[{i}]", float(values[i]), "a finite number", "see the engine's log-probs")
    lo, hi = 0.0, 1.0
    if len(used) and mode == "batch_minmax":
        lo, hi = float(used.min()), float(used.max())
    elif len(used) and mode == "batch_quantile":
        lo, hi = (float(x) for x in np.quantile(used, [low, high]))
    if not len(used) or used.min() == used.max():
        zero = np.zeros(len(values))
        return Normalised(zero, zero)
    line = np.where(valid, (values - lo) / max(hi - lo, 1e-12), 0.0)
    return Normalised(np.clip(line, 0.0, 1.0), line)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Normalised scores of a batch [N]; `valid` are the tokens that may be selected at all."""

    H: Normalised
    D: Normalised
    C: Normalised
    valid: BoolArray

    @property
    def dlearn(self) -> FloatArray:
        """Disagreement within reach."""
        return self.D.clipped * self.C.clipped

    @property
    def dincompat(self) -> FloatArray:
        """Disagreement out of reach; Dlearn + Dincompat = Dn."""
        return self.D.clipped * (1.0 - self.C.clipped)

    @property
    def tip(self) -> FloatArray:
        """Soft-or of entropy and disagreement."""
        return _soft_or(self.H.clipped, self.D.clipped)

    @property
    def ca_softor(self) -> FloatArray:
        """Soft-or of entropy and learnable disagreement."""
        return _soft_or(self.H.clipped, self.dlearn)


def _soft_or(a: FloatArray, b: FloatArray) -> FloatArray:
    return a + b - a * b


def token_scores(
    raw: RawScores,
    valid: BoolArray,
    mode: Normalisation = "batch_quantile",
    *,
    reverse: bool = False,
) -> TokenScores:
    """Normalise H, D (the reverse divergence if `reverse`) and C over the valid tokens of a batch."""
    d = raw.reverse_divergence if reverse else raw.divergence
    H, D, C = (normalise(x, valid, mode) for x in (raw.entropy, d, raw.compatibility))
    return TokenScores(H, D, C, valid)
