"""From scored samples to what the trainer eats: rows with per-token weights, mini-batches of whole groups, micro-batches.

Pure. A row's per-token arrays are [R], aligned with the response ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slime_tandem.config import OpdConfig, RunConfig
from slime_tandem.errors import DataError, TeacherScoreError, explain
from slime_tandem.objective.advantages import group_advantages
from slime_tandem.types import SENIOR, AlignedScores, BoolArray, Candidates, FloatArray, ScoredSample, TandemSample


@dataclass(frozen=True)
class TrainRow:
    """One sample for the trainer.

    `tokens` prompt and response; `old_log_probs` [R] nats under the senior that wrote, of the junior itself where its
    tokens carry no weight; `advantage` of the sample; `weights` [R]
    policy-gradient weights; `opd_weights` [R] above 0 on senior-written aligned tokens only (1, or the position's discount);
    `teacher_log_probs` [R] nats; `candidates` for the signals that compare distributions.
    """

    tokens: tuple[int, ...]
    group_id: int
    advantage: float
    old_log_probs: FloatArray
    weights: FloatArray
    opd_weights: FloatArray
    teacher_log_probs: FloatArray
    candidates: Candidates | None = None

    @property
    def response_length(self) -> int:
        """R, tokens."""
        return len(self.weights)


def build_rows(samples: Sequence[ScoredSample], config: RunConfig) -> tuple[list[TrainRow], dict[str, float]]:
    """(rows, metrics): advantages within groups, weights by author, the OPD mask, and the policy for failed samples.

    A dropped sample still counts in its group's mean: the others' advantages do not depend on the teacher's health.
    Raises TeacherScoreError if a sample failed and `opd.on_failed_sample` is `stop`.
    """
    advantages, flat = group_advantages(
        [s.reward for s in samples], [s.sample.group_id for s in samples], config.objective.scale_advantages
    )
    rows: list[TrainRow] = []
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
        rows.append(
            TrainRow(
                tokens=sample.prompt_ids + sample.response_ids,
                group_id=sample.group_id,
                advantage=float(advantage),
                old_log_probs=_old_log_probs(sample, config.tandem.junior_token_loss_weight),
                weights=np.where(senior, 1.0, config.tandem.junior_token_loss_weight) * np.asarray(sample.loss_mask),
                opd_weights=_opd_weights(senior, teacher, config.opd) if teacher else np.zeros(R),
                teacher_log_probs=teacher.log_probs if teacher else np.zeros(R),
                candidates=teacher.candidates if teacher else None,
            )
        )
    return rows, {"group/zero_variance_fraction": flat, "opd/failed_samples": float(failed)}


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
