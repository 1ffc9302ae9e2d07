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
  renormalised rest   shared candidates one by one, all else as one event: a lower bound of the divergence, nothing invented
  fill   1e-12 for what a list lacks, as the reference implementation does: a teacher-only token then costs 27.6 * p nats and
         membership of lists dominates D; for reproduction only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from slime_tandem.errors import DataError, explain
from slime_tandem.types import BoolArray, FloatArray

MissingMass = Literal["exact", "rest", "fill"]
Compatibility = Literal["mass", "overlap", "bhattacharyya", "prefix"]
Normalisation = Literal["batch_quantile", "batch_minmax", "none"]

_CHUNK = 8192
"""Positions worked on at once: their K x K comparisons stay in the processor's cache."""
_FILL = 1e-12
_LEAST_REST = 1e-6
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class TopLists:
    """Lists of student and teacher at N positions, all in the student's ids, -1 for an entry that does not exist.

    `*_ids`, `*_log_probs` [N, K], nats of the full distributions. `teacher_on_student` [N, K]: the teacher's log-probs of the
    student's candidates, `student_on_teacher` the reverse; both or none (only `exact` needs them).

    >>> lists = TopLists(np.array([[1, 2]]), np.log([[0.6, 0.2]]), np.array([[2, 3]]), np.log([[0.5, 0.3]]))
    >>> scores = raw_scores(lists, "rest")
    >>> [round(float(x[0]), 4) for x in (scores.entropy, scores.divergence, scores.compatibility)]
    [0.8113, 0.2231, 0.5]
    """

    student_ids: npt.NDArray[np.integer]
    student_log_probs: Floats
    teacher_ids: npt.NDArray[np.integer]
    teacher_log_probs: Floats
    teacher_on_student: Floats | None = None
    student_on_teacher: Floats | None = None

    def __post_init__(self) -> None:
        pairs = {
            "student_log_probs": (self.student_log_probs, self.student_ids),
            "teacher_log_probs": (self.teacher_log_probs, self.teacher_ids),
            "teacher_on_student": (self.teacher_on_student, self.student_ids),
            "student_on_teacher": (self.student_on_teacher, self.teacher_ids),
        }
        if self.student_ids.ndim != 2 or self.teacher_ids.ndim != 2 or len(self.student_ids) != len(self.teacher_ids):
            shapes = f"{self.student_ids.shape} and {self.teacher_ids.shape}"
            raise DataError(explain("TopLists ids", shapes, "[N, K] for both, with the same N", "pass whole batches"))
        for name, (values, ids) in pairs.items():
            if values is None:
                continue
            if values.shape != ids.shape:
                raise DataError(
                    explain(f"TopLists.{name}", values.shape, f"the shape of its ids {ids.shape}", "pass both")
                )
            bad = (ids >= 0) & ~(values <= 1e-3)  # NaN and +inf as well
            if bad.any():
                n, k = np.argwhere(bad)[0]
                raise DataError(
                    explain(
                        f"TopLists.{name}[{n}, {k}]",
                        float(values[n, k]),
                        "a log-probability of at most 0",
                        "see the engine",
                    )
                )
        if (self.teacher_on_student is None) != (self.student_on_teacher is None):
            raise DataError(
                explain("TopLists", "one cross-score", "both or none", "ask both sides for the other's ids")
            )

    def __len__(self) -> int:
        return len(self.student_ids)


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
        raise DataError(explain("rule", rule, "cross-scores in TopLists", "ask the servers for them, or choose rest"))
    if compatibility == "prefix" and sequence is None:
        raise DataError(explain("compatibility", compatibility, "`sequence`, the response of each position", "pass it"))
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


def _probs(ids: npt.NDArray[np.integer], log_probs: Floats) -> npt.NDArray[np.float32]:
    p = np.exp(log_probs.astype(np.float32))
    p[ids < 0] = 0.0
    return p


def _chunk(lists: TopLists, part: slice, rule: MissingMass, compatibility: Compatibility) -> FloatArray:
    s_ids, t_ids = lists.student_ids[part], lists.teacher_ids[part]
    s, t = _probs(s_ids, lists.student_log_probs[part]), _probs(t_ids, lists.teacher_log_probs[part])
    same = (s_ids[:, :, None] == t_ids[:, None, :]) & (s_ids >= 0)[:, :, None]
    if rule == "exact":
        assert lists.teacher_on_student is not None
        assert lists.student_on_teacher is not None
        new = ~same.any(1) & (t_ids >= 0)  # the teacher's candidates that the student's list lacks
        t_on_s = _probs(s_ids, lists.teacher_on_student[part])
        p = np.concatenate([s, np.where(new, _probs(t_ids, lists.student_on_teacher[part]), 0.0)], axis=1)
        q = np.concatenate([t_on_s, np.where(new, t, 0.0)], axis=1)
        p, q = _normalised(p), _normalised(q)
    else:
        t_on_s = np.einsum("nst,nt->ns", same.astype(np.float32), t)
        if rule == "rest":
            shared = same.any(2)
            p, q = np.where(shared, s, 0.0), np.where(shared, t_on_s, 0.0)
            p, q = _with_rest(p), _with_rest(q)
        else:
            new = ~same.any(1) & (t_ids >= 0)
            there = np.concatenate([s_ids >= 0, new], axis=1)
            p = _normalised(np.concatenate([s, np.zeros_like(t)], axis=1))
            q = _normalised(np.concatenate([t_on_s, np.where(new, t, 0.0)], axis=1))
            p, q = (np.where(there, np.maximum(x, _FILL), 0.0) for x in (p, q))
    if compatibility == "overlap":
        c = same.any(2).sum(1) / max(s_ids.shape[1], 1)
    elif compatibility == "bhattacharyya":
        c = np.sqrt(p * q).sum(1)
    else:
        c = np.clip(t_on_s.sum(1), 0.0, 1.0)
    return np.stack([_entropy(s), _entropy(t), _kl(q, p), _kl(p, q), c]).astype(np.float64)


def _normalised(p: Floats) -> npt.NDArray[np.float32]:
    total = p.sum(1, keepdims=True)
    return np.asarray(np.divide(p, total, out=np.zeros_like(p), where=total > 0), dtype=np.float32)


def _with_rest(p: Floats) -> npt.NDArray[np.float32]:
    rest = np.maximum(1.0 - p.sum(1, keepdims=True), _LEAST_REST)
    return np.asarray(np.concatenate([p, rest], axis=1), dtype=np.float32)


def _entropy(p: npt.NDArray[np.float32]) -> Floats:
    """Of a list renormalised, over ln(entries); 0 for a list of one or none."""
    q = _normalised(p)
    n = np.maximum((p > 0).sum(1), 2)
    h = -(q * np.log(np.where(q > 0, q, 1.0))).sum(1) / np.log(n)
    return np.asarray(np.clip(h, 0.0, 1.0))


def _kl(p: Floats, q: Floats) -> Floats:
    there = p > 0
    least = np.float32(1e-30)  # an exact score of 0 has log-prob -inf; the divergence stays finite
    log_ratio = np.log(np.where(there, p, 1.0)) - np.log(np.where(there, np.maximum(q, least), 1.0))
    return np.asarray(np.maximum((p * log_ratio).sum(1), 0.0))


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

    Invalid positions are 0. A batch without spread is 0 everywhere. Raises DataError for values that are not finite.

    >>> n = normalise(np.array([0.0, 1.0, 2.0, 9.0]), np.array([True, True, True, False]), "batch_minmax")
    >>> n.clipped.tolist(), n.unclipped.tolist()
    ([0.0, 0.5, 1.0, 0.0], [0.0, 0.5, 1.0, 0.0])
    """
    used = values[valid]
    if not np.isfinite(used).all():
        i = int(np.flatnonzero(valid)[np.flatnonzero(~np.isfinite(used))[0]])
        raise DataError(explain(f"score[{i}]", float(values[i]), "a finite number", "see the engine's log-probs"))
    lo, hi = 0.0, 1.0
    if len(used) and mode == "batch_minmax":
        lo, hi = float(used.min()), float(used.max())
    elif len(used) and mode == "batch_quantile":
        lo, hi = (float(x) for x in np.quantile(used, [low, high]))
    if hi - lo < 1e-12:
        zero = np.zeros(len(values))
        return Normalised(zero, zero)
    line = np.where(valid, (values - lo) / (hi - lo), 0.0)
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
    return TokenScores(
        normalise(raw.entropy, valid, mode), normalise(d, valid, mode), normalise(raw.compatibility, valid, mode), valid
    )
