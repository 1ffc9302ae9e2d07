"""From scored samples to what the trainer eats: rows with per-token weights, mini-batches of whole groups, micro-batches.

Pure. A row's per-token arrays are [R], aligned with the response ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_tandem.config import OpdConfig, RunConfig, SelectionRules
from slime_tandem.distill.opd_mask import OPD_MASK_METRICS, opd_mask
from slime_tandem.errors import DataError, TeacherScoreError, explain
from slime_tandem.objective.advantages import group_advantages
from slime_tandem.types import SENIOR, AlignedScores, BoolArray, Candidates, FloatArray, ScoredSample, TandemSample


@dataclass(frozen=True)
class TrainRow:
    """One sample for the trainer.

    `tokens` prompt and response; `old_log_probs` [R] nats under the senior that wrote, of the junior itself where its
    tokens carry no weight; `advantage` of the sample; `weights` [R]
    policy-gradient weights; `opd_weights` [R] above 0 on selected senior-written aligned tokens only (1, or the position's
    discount); `teacher_log_probs` [R] nats; `candidates` for the signals that compare distributions; `opd_total`: what the row
    adds to the distillation term's denominator, None for the sum of `opd_weights`. `replayed` [R]: the senior drew it;
    `kept_ids` as in
    `TandemSample`.
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


def build_rows(samples: Sequence[ScoredSample], config: RunConfig) -> tuple[list[TrainRow], dict[str, float | None]]:
    """(rows, metrics): advantages within groups, weights by author, the OPD mask, and the policy for failed samples.

    A dropped sample still counts in its group's mean: the others' advantages do not depend on the teacher's health.
    `opd.selection` chooses among all rows at once. Raises TeacherScoreError if a sample failed and `opd.on_failed_sample` is
    `stop`.
    """
    advantages, flat = group_advantages(
        [s.reward for s in samples], [s.sample.group_id for s in samples], config.objective.scale_advantages
    )
    chosen = config.opd.selection
    rows: list[TrainRow] = []
    kept: list[ScoredSample] = []
    failed = 0
    for scored, advantage in zip(samples, advantages, strict=True):
        sample, teacher = scored.sample, scored.teacher
        if config.opd.enabled and teacher is None:
            failed += 1
            if config.opd.on_failed_sample == "stop":
                raise TeacherScoreError(
                    scored.teacher_error or explain("teacher answer", None, "scores for every sample", "see its log")
                )
            if config.opd.on_failed_sample == "drop_sample":
                continue
        senior = np.asarray(sample.authorship_mask) == SENIOR
        R = len(senior)
        opd_weights = _opd_weights(senior, teacher, config.opd) if teacher else np.zeros(R)
        kept.append(scored)
        rows.append(
            TrainRow(
                tokens=sample.prompt_ids + sample.response_ids,
                group_id=sample.group_id,
                advantage=float(advantage),
                old_log_probs=_old_log_probs(sample, config.tandem.junior_token_loss_weight),
                weights=np.where(senior, 1.0, config.tandem.junior_token_loss_weight) * np.asarray(sample.loss_mask),
                opd_weights=opd_weights,
                teacher_log_probs=teacher.log_probs if teacher else np.zeros(R),
                candidates=teacher.candidates if teacher else None,
                opd_total=float(opd_weights.sum()) if chosen.denominator == "valid" else None,
                replayed=senior,
                kept_ids=sample.kept_ids,
            )
        )
    metrics: dict[str, float | None] = {"group/zero_variance_fraction": flat, "opd/failed_samples": float(failed)}
    if not config.opd.enabled:
        return rows, metrics | dict.fromkeys(f"selection/{name}" for name in OPD_MASK_METRICS)
    mask = opd_mask(
        [s.sample.key for s in kept],
        [row.opd_weights > 0 for row in rows],
        [s.teacher.lists if s.teacher else None for s in kept],
        chosen,
    )
    if chosen.mask != "full":
        rows = [_masked(row, m, chosen.rules) for row, m in zip(rows, mask.masks, strict=True)]
    return rows, metrics | mask.metrics


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


def _old_log_probs(sample: TandemSample, junior_weight: float) -> FloatArray:
    """The old policy of the ratio: the senior's log-probs, also on junior tokens as soon as these carry weight."""
    if junior_weight > 0 and not sample.senior_log_probs and sample.junior_tokens:
        raise DataError(
            explain(
                f"TandemSample.senior_log_probs of {sample.key}",
                "none",
                f"one per token, because tandem.junior_token_loss_weight={junior_weight:g}",
                "write the samples with score_junior",
            )
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


def micro_batches(rows: Sequence[TrainRow], max_tokens: int) -> Iterator[list[TrainRow]]:
    """Rows of similar length together, `longest * count <= max_tokens` (a longer single row goes alone)."""
    batch: list[TrainRow] = []
    for row in sorted(rows, key=lambda r: -len(r.tokens)):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
