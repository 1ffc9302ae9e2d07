"""From scored samples to what the trainer eats: rows with per-token weights, mini-batches of whole groups, micro-batches.

Pure. A row's per-token arrays are [R], aligned with the response ids. No model and no loss is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from slime_tandem.config import OpdConfig, RunConfig, SelectionRules
from slime_tandem.distill.opd_mask import OPD_MASK_METRICS, OpdMask, opd_mask
from slime_tandem.errors import DataError, TeacherScoreError
from slime_tandem.objective.advantages import clip_advantages, group_advantages
from slime_tandem.objective.kl import sampled_kl
from slime_tandem.types import SENIOR, AlignedScores, BoolArray, Candidates, FloatArray, ScoredSample, TandemSample


@dataclass(frozen=True)
class TrainRow:
    """One sample for the trainer.

    `tokens` prompt and response; `old_log_probs` [R] nats under the senior that wrote, of the junior itself where its
    tokens carry no weight; `advantage` of the sample; `weights` [R]
    policy-gradient weights; `opd_weights` [R] above 0 on selected senior-written aligned tokens only (1, or the position's
    discount); `teacher_log_probs` [R] nats; `candidates` for the signals that compare distributions; `opd_total`: what the row
    adds to the distillation term's denominator, None for the sum of `opd_weights`. `ref_log_probs` [R] nats of the start
    weights, where the run has a KL; `rollout_log_probs` [R] the engine's, once `old_log_probs` are the trainer's own;
    `junior_weights` [R] 1 on tokens that the junior wrote and that `lambda_jun` pulls to, `junior_log_probs` its own of them.
    `replayed` [R]: the senior drew it; `kept_ids` as in `TandemSample`.
    """

    tokens: tuple[int, ...]
    group_id: int
    advantage: float
    old_log_probs: FloatArray
    weights: FloatArray
    opd_weights: FloatArray
    teacher_log_probs: FloatArray
    candidates: Candidates | None = None
    opd_total: float | None = None
    ref_log_probs: FloatArray | None = None
    rollout_log_probs: FloatArray | None = None
    junior_weights: FloatArray | None = None
    junior_log_probs: FloatArray | None = None
    replayed: BoolArray | None = None
    kept_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def response_length(self) -> int:
        """R, tokens."""
        return len(self.weights)

    @property
    def opd_share(self) -> float:
        """Its part of the distillation term's denominator."""
        return float(self.opd_weights.sum()) if self.opd_total is None else self.opd_total


Bank = Callable[[int, Sequence[ScoredSample], Sequence[BoolArray], OpdMask], None]
"""Where a rollout's tokens are written: its number, responses, which tokens might carry the teacher's signal, and which do."""


def build_rows(
    samples: Sequence[ScoredSample],
    config: RunConfig,
    ref_log_probs: Sequence[FloatArray] | None = None,
    kl_coef: float | None = None,
    bank: Bank | None = None,
    rollout_id: int | None = None,
    eos_ids: frozenset[int] | None = None,
) -> tuple[list[TrainRow], dict[str, float | None]]:
    """(rows, metrics): advantages within groups, weights by author, the OPD mask, and the policy for failed samples.

    A dropped sample still counts in its group's mean: the others' advantages do not depend on the teacher's health. One without
    a reward is no part of its group. Where its reward failed it is no part of the KL either: its distillation alone is left.
    `opd.selection` chooses among all rows at once. `ref_log_probs`: the start weights' of each sample, [R] nats; with
    `objective.kl_in=reward` their KL times `kl_coef` (None: `objective.kl_coef`) is taken off the rewards first. `bank` is
    given what is kept of the rollout, whose number is `rollout_id` (None: that of its keys). `eos_ids`: the senior's ends of
    turn, whose part in the choice is reported apart (None: not known). Raises TeacherScoreError if a sample failed and
    `opd.on_failed_sample` is `stop`.
    """
    objective = config.objective
    weights = [_weights(s, config.tandem.junior_token_loss_weight) for s in samples]
    old = [_old_log_probs(s.sample, config.tandem.junior_token_loss_weight) for s in samples]
    has = [i for i, s in enumerate(samples) if s.reward is not None]
    rewards = np.array([0.0 if s.reward is None else s.reward for s in samples])
    if objective.kl_in == "reward":
        assert ref_log_probs is not None, "score the samples with the start weights first"
        beta = objective.kl_coef if kl_coef is None else kl_coef
        parts = zip(old, ref_log_probs, weights, strict=True)
        rewards = rewards - beta * np.array([sampled_kl(*part, objective.kl_estimator) for part in parts])
    groups = [samples[i].sample.group_id for i in has]
    raw, flat = group_advantages(rewards[has], groups, objective.scale_advantages, objective.baseline)
    advantages = np.zeros(len(samples))
    advantages[has], clipped = clip_advantages(raw, objective.clip_advantages)
    kept = [i for i, scored in enumerate(samples) if takes_part(scored, config.opd)]
    rows = [
        _row(
            samples[i],
            float(advantages[i]),
            old[i],
            weights[i],
            None if ref_log_probs is None else ref_log_probs[i],
            config,
        )
        for i in kept
    ]
    metrics: dict[str, float | None] = {
        "group/zero_variance_fraction": flat if groups else None,
        "group/zero_variance_groups": float(round(flat * len(set(groups)))) if groups else None,
        "group/clipped_advantages": clipped if groups else None,
        "opd/failed_samples": float(sum(_failed(s, config.opd) for s in samples)),
    }
    if not config.opd.enabled:
        return rows, metrics | dict.fromkeys(f"selection/{name}" for name in OPD_MASK_METRICS)
    chosen = config.opd.selection
    usable = [row.opd_weights > 0 for row in rows]
    number = rollout_id if rollout_id is not None else samples[kept[0]].sample.key.rollout_id if kept else 0
    mask = opd_mask(
        [samples[i].sample.key for i in kept],
        usable,
        [t.lists if (t := samples[i].teacher) else None for i in kept],
        chosen,
        0 if bank is None else number,
        None if eos_ids is None else [np.isin(samples[i].sample.response_ids, [*eos_ids]) for i in kept],
    )
    if bank is not None:
        bank(number, [samples[i] for i in kept], usable, mask)
    if chosen.mask != "full":
        rows = [_masked(row, m, chosen.rules) for row, m in zip(rows, mask.masks, strict=True)]
    return rows, metrics | mask.metrics


def _failed(scored: ScoredSample, opd: OpdConfig) -> bool:
    return opd.enabled and scored.teacher is None


def takes_part(scored: ScoredSample, opd: OpdConfig) -> bool:
    """Whether a sample becomes a row: not one without a reward where no teacher is heard, nor one without a teacher's scores
    that `opd.on_failed_sample` drops; `stop` raises its error."""
    if scored.reward is None and not opd.enabled:
        return False
    if not _failed(scored, opd):
        return True
    if opd.on_failed_sample == "stop":
        raise scored.teacher_error or TeacherScoreError(
            "teacher answer", None, "scores for every sample", "see its log"
        )
    return opd.on_failed_sample != "drop_sample"


def _row(
    scored: ScoredSample,
    advantage: float,
    old_log_probs: FloatArray,
    weights: FloatArray,
    ref_log_probs: FloatArray | None,
    config: RunConfig,
) -> TrainRow:
    sample, teacher = scored.sample, scored.teacher
    senior = np.asarray(sample.authorship_mask) == SENIOR
    R = len(senior)
    opd_weights = _opd_weights(senior, teacher, config.opd) if teacher else np.zeros(R)
    pulls = config.objective.lambda_jun > 0
    return TrainRow(
        tokens=sample.prompt_ids + sample.response_ids,
        group_id=sample.group_id,
        advantage=advantage,
        old_log_probs=old_log_probs,
        weights=weights,
        opd_weights=opd_weights,
        teacher_log_probs=teacher.log_probs if teacher else np.zeros(R),
        candidates=teacher.candidates if teacher else None,
        opd_total=float(opd_weights.sum()) if config.opd.selection.denominator == "valid" else None,
        ref_log_probs=ref_log_probs,
        junior_weights=(~senior) * np.asarray(sample.loss_mask, dtype=np.float64) if pulls else None,
        junior_log_probs=np.asarray(sample.log_probs, dtype=np.float64) if pulls else None,
        replayed=senior,
        kept_ids=sample.kept_ids,
    )


def _masked(row: TrainRow, mask: BoolArray, rules: SelectionRules) -> TrainRow:
    """The row with the selected tokens' OPD weights; the reference's rule takes the others from the task reward, too."""
    weights = row.weights * mask if rules == "reference" else row.weights
    return replace(row, opd_weights=row.opd_weights * mask, weights=weights)


def _opd_weights(senior: BoolArray, teacher: AlignedScores, opd: OpdConfig) -> FloatArray:
    """Where the teacher's signal counts, and how much: 1, or less and less along the response."""
    used = senior & teacher.mask
    if opd.signal != "sampled":  # a position whose candidates have no counterpart at all compares nothing
        assert teacher.candidates is not None, "this signal asks for candidates"
        used &= (teacher.candidates.ids >= 0).any(axis=1)
    return used * opd.position_discount ** np.arange(len(senior), dtype=np.float64)


def _weights(scored: ScoredSample, junior_weight: float) -> FloatArray:
    """1 on the senior's tokens, `junior_weight` on the junior's, 0 in inserted text, and throughout where the reward failed."""
    sample = scored.sample
    if scored.reward is None and not scored.unasked:
        return np.zeros(len(sample.response_ids))
    by_author = np.where(np.asarray(sample.authorship_mask) == SENIOR, 1.0, junior_weight)
    return by_author * np.asarray(sample.loss_mask, dtype=np.float64)


def _old_log_probs(sample: TandemSample, junior_weight: float) -> FloatArray:
    """The old policy of the ratio: the senior's log-probs, also on junior tokens as soon as these carry weight."""
    if junior_weight > 0 and not sample.senior_log_probs and sample.junior_tokens:
        raise DataError(
            f"TandemSample.senior_log_probs of {sample.key}",
            "none",
            f"one per token, because tandem.junior_token_loss_weight={junior_weight:g}",
            "write the samples with score_junior",
        )
    values = sample.senior_log_probs if junior_weight > 0 and sample.senior_log_probs else sample.log_probs
    return np.asarray(values, dtype=np.float64)


def mini_batches(rows: Sequence[TrainRow], n: int) -> Iterator[list[TrainRow]]:
    """`n` parts of whole groups, in the order of the groups' first rows."""
    groups = list(dict.fromkeys(row.group_id for row in rows))
    part_of = {group: i * n // len(groups) for i, group in enumerate(groups)}
    for part in range(n):
        chosen = [row for row in rows if part_of[row.group_id] == part]
        if chosen:
            yield chosen


class Sequenced(Protocol):
    """What a forward pass needs of a row: prompt and response, the length of the response, and how it was truncated."""

    @property
    def tokens(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def response_length(self) -> int: ...  # noqa: D102
    @property
    def replayed(self) -> BoolArray | None: ...  # noqa: D102
    @property
    def kept_ids(self) -> tuple[tuple[int, ...], ...]: ...  # noqa: D102


@dataclass(frozen=True)
class Response:
    """A sample as a forward pass takes it: prompt and response, of which the last `response_length` are the response."""

    tokens: tuple[int, ...]
    response_length: int
    replayed: BoolArray | None = None
    kept_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, sample: TandemSample) -> Response:
        """The sample's own sampled ids."""
        senior = np.asarray(sample.authorship_mask, dtype=np.bool_)
        return cls(sample.prompt_ids + sample.response_ids, len(sample.response_ids), senior, sample.kept_ids)


Row = TypeVar("Row", bound=Sequenced)


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length together, `longest * count <= max_tokens` (a longer single row goes alone)."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda r: -len(r.tokens)):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
