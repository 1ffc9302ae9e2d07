"""The loss as one pure function over packed tokens. Pure torch.

Three terms, each a mean over its own weights, so that no term's size depends on another's mask:
  pg   clipped surrogate (PPO, arXiv 1707.06347; asymmetric clip of DAPO, arXiv 2503.14476) of the task-reward advantage,
       weight 1 on senior tokens and `junior_token_loss_weight` on junior tokens
  opd  the same surrogate of the distillation advantage -(log pi_student - log pi_teacher), detached; or a divergence over
       candidate tokens (objective/distillation.py); on its own weights of senior-written, aligned tokens
  kl   KL to the start weights, on the pg weights
The denominators are sums of weights over the whole mini-batch and are passed in: micro-batches add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig
from slime_tandem.objective.distillation import candidate_divergence
from slime_tandem.objective.kl import kl_estimate

LOSS_METRICS = ("loss", "pg_loss", "opd_loss", "kl_loss", "entropy", "ratio_mean", "clip_fraction", "logprob_diff")


@dataclass(frozen=True)
class PackedTokens:
    """Response tokens of a micro-batch, one after the other; every tensor is [T].

    `old_log_probs`: behaviour log-probs of the authoring model, nats. `advantages`: task-reward advantage of the sample.
    `weights`: policy-gradient weight (1 senior, `junior_token_loss_weight` junior). `opd_weights`: above 0 where the teacher's
    log-prob counts. `teacher_log_probs`: nats, 0 where masked. `ref_log_probs`: of the start weights, or None.
    `candidate_ids`, `candidate_teacher` [T, K]: candidates (-1: none) and the teacher's log-probs of them, or None.
    """

    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    opd_weights: Tensor
    teacher_log_probs: Tensor
    ref_log_probs: Tensor | None = None
    candidate_ids: Tensor | None = None
    candidate_teacher: Tensor | None = None


@dataclass(frozen=True)
class Denominators:
    """Sums of weights over the mini-batch, at least 1e-8: `pg` of `weights`, `opd` of `opd_weights`."""

    pg: float
    opd: float


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio * A, clip(ratio) * A) per token [T].

    >>> clipped_surrogate(torch.tensor([2.0, 2.0]), torch.tensor([1.0, -1.0]), 0.2, 0.28).tolist()
    [-1.2799999713897705, 2.0]
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def tandem_loss(
    log_probs: Tensor,
    entropy: Tensor,
    batch: PackedTokens,
    denominators: Denominators,
    objective: ObjectiveConfig,
    opd: OpdConfig,
    candidate_log_probs: Tensor | None = None,
    candidate_log_rest: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of one micro-batch; both add up over the micro-batches of a mini-batch.

    `log_probs`, `entropy` [T]: the current policy at the sampled tokens, nats. The gradient flows through `log_probs` only
    and `candidate_log_probs` and `candidate_log_rest` (the current policy's of the candidates [T, K] and of all other
    tokens [T], where `opd.signal` compares distributions) only, and is
    exactly zero on tokens whose weights are zero. Metric keys are `LOSS_METRICS`; all are means over the pg weights
    (`opd_loss` over the OPD weights).
    """
    weights, pg_n, opd_n = batch.weights, denominators.pg, denominators.opd
    # A token without weight may have any ratio (a junior token under the senior); keep inf * 0 out of the sums.
    used = (weights > 0) | (batch.opd_weights > 0)
    log_ratio = torch.where(used, log_probs - batch.old_log_probs, torch.zeros_like(log_probs))
    ratio = log_ratio.exp()

    pg_terms = clipped_surrogate(ratio, batch.advantages, objective.clip_low, objective.clip_high)
    pg_loss = objective.reward_coef * (weights * pg_terms).sum() / pg_n

    opd_loss = torch.zeros_like(pg_loss)
    if opd.enabled and opd.signal != "sampled":
        assert candidate_log_probs is not None, "this signal needs the policy's log-probs of the candidates"
        assert batch.candidate_ids is not None
        assert batch.candidate_teacher is not None
        counts = batch.opd_weights > 0
        known = (batch.candidate_ids >= 0) & counts[:, None]
        log_rest = None
        if candidate_log_rest is not None:
            log_rest = torch.where(counts, candidate_log_rest, 0.0)
        divergence = candidate_divergence(
            candidate_log_probs, batch.candidate_teacher, known, opd.signal, opd.jsd_beta, log_rest
        )
        opd_loss = opd.coef * (batch.opd_weights * torch.where(counts, divergence, 0.0)).sum() / opd_n
    elif opd.enabled:
        delta = (batch.old_log_probs - batch.teacher_log_probs).detach()
        if opd.clip is not None:
            delta = delta.clamp(-opd.clip, opd.clip)
        opd_terms = clipped_surrogate(ratio, -delta, objective.clip_low, objective.clip_high)
        opd_loss = opd.coef * (batch.opd_weights * opd_terms).sum() / opd_n

    kl_loss = torch.zeros_like(pg_loss)
    if batch.ref_log_probs is not None:
        # No gradient from the reference, and none of a huge k3 on tokens that carry no weight.
        pi = torch.where(weights > 0, log_probs, batch.ref_log_probs)
        kl = kl_estimate(pi, batch.ref_log_probs, objective.kl_estimator)
        kl_loss = objective.kl_coef * (weights * kl).sum() / pg_n

    loss = pg_loss + opd_loss + kl_loss
    with torch.no_grad():
        outside = (ratio < 1.0 - objective.clip_low) | (ratio > 1.0 + objective.clip_high)
        metrics = {
            "loss": loss,
            "pg_loss": pg_loss,
            "opd_loss": opd_loss,
            "kl_loss": kl_loss,
            "entropy": (weights * entropy).sum() / pg_n,
            "ratio_mean": (weights * ratio).sum() / pg_n,
            "clip_fraction": (weights * outside).sum() / pg_n,
            "logprob_diff": (weights * log_ratio.abs()).sum() / pg_n,
        }
        assert tuple(metrics) == LOSS_METRICS
        return loss, {name: float(value) for name, value in metrics.items()}
