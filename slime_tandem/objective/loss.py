"""The loss as one pure function over packed tokens. Pure torch.

Five terms, each with its own weights, values and denominator, so that no term's size depends on another's mask:
  pg      surrogate of the task-reward advantage, weight 1 on senior tokens and `junior_token_loss_weight` on junior tokens:
          clipped (PPO, arXiv 1707.06347; asymmetric clip of DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729) or CISPO
          (arXiv 2506.13585), with the ratio of the token or of the whole response (GSPO, arXiv 2507.18071)
  opd     the clipped surrogate of the distillation advantage -(log pi_student - log pi_teacher), detached, with the token's
          ratio; or a divergence over candidate tokens (objective/divergence.py); on senior-written, aligned tokens
  kl      KL to the start weights, weighted and reduced like pg
  entropy a bonus: the entropy of the policy's distribution, taken off the loss, weighted and reduced like pg
  junior  KL from the junior to the senior on the tokens that the junior wrote (lambda_jun)
The denominators are sums over the whole mini-batch and are passed in: micro-batches add up exactly. Formulas, choices and
sources: docs/objective.md. It knows no model, no optimizer and no text: numbers per token in, one number out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig, Reduction
from slime_tandem.errors import DataError
from slime_tandem.objective.divergence import candidate_divergence
from slime_tandem.objective.kl import kl_estimate

LOSS_METRICS = (
    "loss", "pg_loss", "opd_loss", "kl_loss", "entropy_bonus", "junior_kl_loss", "entropy", "ratio_mean", "clip_fraction",
    "logprob_diff", "kl", "junior_kl", "rollout_weight_mean", "rollout_weight_cut",
)  # fmt: skip
_LEAST = 1e-8
SequenceSums = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PackedTokens:
    """Response tokens of a micro-batch, one after the other; every tensor is [T].

    `old_log_probs`: of the old policy, nats: what the engine reported of the authoring model, or the trainer's own of the
    weights that sampled (`rollout_log_probs` are then the engine's). `advantages`: task-reward advantage of the sample.
    `weights`: policy-gradient weight (1 senior, `junior_token_loss_weight` junior). `opd_weights`: above 0 where the teacher's
    log-prob counts. `teacher_log_probs`: nats, 0 where masked. `ref_log_probs`: of the start weights, or None.
    `candidate_ids`, `candidate_teacher` [T, K]: candidates (-1: none) and the teacher's log-probs of them, or None.
    `junior_weights`: above 0 on tokens that the junior wrote, `junior_log_probs`: its own of them; or None both.
    `sequences`: int64 numbers from 0 of the responses that the tokens belong to; needed by ratio and reductions of responses.
    `reduced`: what each token counts in pg and kl, where the caller has worked out `objective.reduction` over whole responses.
    """

    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    opd_weights: Tensor
    teacher_log_probs: Tensor
    ref_log_probs: Tensor | None = None
    candidate_ids: Tensor | None = None
    candidate_teacher: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    junior_weights: Tensor | None = None
    junior_log_probs: Tensor | None = None
    sequences: Tensor | None = None
    reduced: Tensor | None = None

    @property
    def engine_log_probs(self) -> Tensor:
        """What the engine reported of the sampled tokens [T], nats."""
        return self.old_log_probs if self.rollout_log_probs is None else self.rollout_log_probs


@dataclass(frozen=True)
class Denominators:
    """What the terms' sums over the mini-batch are divided by, each at least 1e-8; `over` makes them.

    `pg`: sum of `weights`, `opd` of `opd_weights`, `junior` of `junior_weights`. `reduced`: what `objective.reduction` divides
    pg and kl by, None for `pg`. Metrics are means over `pg` whatever the reduction.
    """

    pg: float
    opd: float
    junior: float = _LEAST
    reduced: float | None = None

    @classmethod
    def over(
        cls, weights: Sequence[float], opd: float, junior: float, reduction: Reduction, constant_length: int
    ) -> Denominators:
        """Of a mini-batch: `weights` are each response's sum of policy-gradient weights, `opd` and `junior` whole sums.

        token_mean divides by the sum of weights, sequence_mean by the number of responses with any, constant by the number of
        responses times `constant_length` tokens.

        >>> [Denominators.over([3, 0], 1, 0, r, 8).reduced for r in ("token_mean", "sequence_mean", "constant")]
        [3.0, 1.0, 16.0]
        """
        pg = max(float(sum(weights)), _LEAST)
        reduced = {
            "token_mean": pg,
            "sequence_mean": max(float(sum(w > 0 for w in weights)), _LEAST),
            "constant": max(float(len(weights) * constant_length), _LEAST),
        }[reduction]
        return cls(pg, max(opd, _LEAST), max(junior, _LEAST), reduced)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(ratio * A, clip(ratio) * A) per token [T]; with `dual_clip` c, for A < 0 at most -c * A.

    >>> ratio, advantages = torch.tensor([2.0, 2.0, 9.0]), torch.tensor([1.0, -1.0, -1.0])
    >>> clipped_surrogate(ratio, advantages, 0.2, 0.28, dual_clip=3.0).tolist()
    [-1.2799999713897705, 2.0, 3.0]
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    raw = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    return -torch.minimum(raw * advantages, clipped * advantages)


def bounded_rollout_weights(raw: Tensor, objective: ObjectiveConfig) -> Tensor:
    """What the weights `raw` [T] = trainer's old policy / engine's become by `objective.rollout_weights`.

    none: 1. truncated: at most `rollout_weight_max` (truncated importance sampling). masked: 0 outside [`rollout_weight_min`,
    `rollout_weight_max`]; whoever adds up denominators leaves these tokens out.

    >>> objective = ObjectiveConfig(rollout_weights="masked")
    >>> bounded_rollout_weights(torch.tensor([1.25, 5.0, 0.25]), objective).tolist()
    [1.25, 0.0, 0.0]
    """
    match objective.rollout_weights:
        case "none":
            return torch.ones_like(raw)
        case "truncated":
            return raw.clamp(max=objective.rollout_weight_max)
        case "masked":
            inside = (raw >= objective.rollout_weight_min) & (raw <= objective.rollout_weight_max)
            return torch.where(inside, raw, 0.0)


def kept_by_weights(own: Tensor, engine: Tensor, used: Tensor, objective: ObjectiveConfig) -> Tensor:
    """[T] bool: the tokens that `objective.rollout_weights` leaves, for sums of weights. `own`, `engine` [T]: log-probs of the
    trainer's old policy and of the engine, nats; what is not `used` stays.

    Raises DataError for a log-prob that is not finite where it is used: masked out, broken weights would look like caution.

    >>> objective = ObjectiveConfig(rollout_weights="masked")
    >>> own, engine, used = torch.tensor([-1.0, -9.0, -9.0]), torch.full((3,), -1.0), torch.tensor([True, True, False])
    >>> kept_by_weights(own, engine, used, objective).tolist()
    [True, False, True]
    """
    log_ratio = torch.where(used, own - engine, 0.0)
    if len(bad := (~log_ratio.isfinite()).nonzero()):
        i = int(bad[0])
        found = f"{float(own[i])} (trainer), {float(engine[i])} (engine)"
        raise DataError(f"log-probs of response token {i}", found, "finite numbers", "look for NaN in the weights")
    return bounded_rollout_weights(log_ratio.float().exp(), objective) > 0


def sequence_sums(values: Tensor, sequences: Tensor, count: int | None = None) -> Tensor:
    """Sum of `values` [T] per response; [count], by default the highest number plus 1.

    >>> sequence_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])).tolist()
    [5.0, 2.0]
    """
    n = count if count is not None else int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(n).index_add(0, sequences, values)


def token_kl(log_probs: Tensor, batch: PackedTokens, objective: ObjectiveConfig) -> Tensor:
    """Estimate of KL(pi || start) per token [T], nats, 0 on tokens without policy-gradient weight."""
    assert batch.ref_log_probs is not None
    # No gradient from the reference, and none of a huge k3 on tokens that carry no weight.
    used = batch.weights > 0
    ref = torch.where(used, batch.ref_log_probs, 0.0)
    return kl_estimate(torch.where(used, log_probs, ref), ref, objective.kl_estimator)


@dataclass(frozen=True)
class Term:
    """A term of the loss: coef * sum(`weights` * `values`) / `denominator`; `weights` and `values` are [T].

    >>> Term(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3.0, 9.0, 1.0]), 2.0).total(0.5).item()
    1.0
    """

    weights: Tensor
    values: Tensor
    denominator: float

    def total(self, coef: float = 1.0) -> Tensor:
        """What it adds to the loss of the mini-batch, a scalar."""
        return coef * (self.weights * self.values).sum() / self.denominator


@dataclass(frozen=True)
class Ratios:
    """Importance ratios of a micro-batch; every tensor is [T].

    `log_token`: log(pi / old policy) of each token, 0 where neither the policy gradient nor the distillation counts; `token`:
    its exp; `pg`: the ratio of the task reward, the token's or its response's (`objective.ratio`). `raw`: old policy / engine,
    1 without `objective.rollout_weights`; `rollout`: what these make of it.
    """

    log_token: Tensor
    token: Tensor
    pg: Tensor
    raw: Tensor
    rollout: Tensor


def pg_term(
    log_probs: Tensor,
    batch: PackedTokens,
    ratios: Ratios,
    reduced: Tensor,
    reduced_n: float,
    objective: ObjectiveConfig,
) -> Term:
    """The surrogate of the task-reward advantage; `reduced` [T] and `reduced_n` as `objective.reduction` weighs and divides."""
    learns = batch.weights > 0
    advantages = torch.where(learns, batch.advantages, 0.0)
    if objective.surrogate == "clip":
        values = clipped_surrogate(ratios.pg, advantages, objective.clip_low, objective.clip_high, objective.dual_clip)
    else:
        constant = ratios.pg.detach().clamp(max=1.0 + objective.clip_high)
        values = -constant * advantages * torch.where(learns, log_probs, 0.0)
    return Term(reduced * ratios.rollout, values, reduced_n)


def opd_term(
    batch: PackedTokens,
    ratios: Ratios,
    denominators: Denominators,
    objective: ObjectiveConfig,
    opd: OpdConfig,
    candidate_log_probs: Tensor | None,
    candidate_log_rest: Tensor | None,
) -> Term | None:
    """The distillation signal where `opd_weights` count, of the sampled token or of candidates; None without distillation."""
    if not opd.enabled:
        return None
    counts = batch.opd_weights > 0
    if opd.signal == "sampled":
        delta = torch.where(counts, (batch.old_log_probs - batch.teacher_log_probs).detach(), 0.0)
        if opd.clip is not None:
            delta = delta.clamp(-opd.clip, opd.clip)
        values = clipped_surrogate(ratios.token, -delta, objective.clip_low, objective.clip_high)
        return Term(batch.opd_weights * ratios.rollout, values, denominators.opd)
    assert candidate_log_probs is not None, "this signal needs the policy's log-probs of the candidates"
    assert batch.candidate_ids is not None
    assert batch.candidate_teacher is not None
    known = (batch.candidate_ids >= 0) & counts[:, None]
    log_rest = None if candidate_log_rest is None else torch.where(counts, candidate_log_rest, 0.0)
    divergence = candidate_divergence(
        candidate_log_probs, batch.candidate_teacher, known, opd.signal, opd.jsd_beta, log_rest
    )
    return Term(batch.opd_weights, torch.where(counts, divergence, 0.0), denominators.opd)


def kl_term(
    log_probs: Tensor, batch: PackedTokens, reduced: Tensor, reduced_n: float, objective: ObjectiveConfig
) -> Term:
    """KL to the start weights, reduced as pg is; values are 0 without reference log-probs."""
    if batch.ref_log_probs is None:
        return Term(reduced, torch.zeros_like(log_probs), reduced_n)
    return Term(reduced, token_kl(log_probs, batch, objective), reduced_n)


def entropy_term(entropy: Tensor, batch: PackedTokens, reduced: Tensor, reduced_n: float) -> Term:
    """The entropy of the policy where it learns, reduced as pg is; what it adds is taken off the loss."""
    return Term(reduced, torch.where(batch.weights > 0, entropy, 0.0), reduced_n)


def junior_term(log_probs: Tensor, batch: PackedTokens, denominators: Denominators) -> Term | None:
    """KL(junior || senior) on tokens that the junior wrote; None where nothing pulls towards it."""
    if batch.junior_weights is None:
        return None
    assert batch.junior_log_probs is not None
    written = batch.junior_weights > 0
    junior = torch.where(written, batch.junior_log_probs, 0.0)
    # Sampled from the junior, so the estimate is of KL(junior || senior): the roles of `kl_estimate` swapped.
    pull = kl_estimate(junior, torch.where(written, log_probs, junior), "k3")
    return Term(batch.junior_weights, pull, denominators.junior)


def tandem_loss(
    log_probs: Tensor,
    entropy: Tensor,
    batch: PackedTokens,
    denominators: Denominators,
    objective: ObjectiveConfig,
    opd: OpdConfig,
    candidate_log_probs: Tensor | None = None,
    candidate_log_rest: Tensor | None = None,
    *,
    kl_coef: float | None = None,
    sums: SequenceSums = sequence_sums,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of one micro-batch; both add up over the micro-batches of a mini-batch.

    `log_probs`, `entropy` [T]: the current policy at the sampled tokens, nats. The gradient flows through `log_probs`
    and `candidate_log_probs` and `candidate_log_rest` (the current policy's of the candidates [T, K] and of all other
    tokens [T], where `opd.signal` compares distributions) only, and through `entropy` with `objective.entropy_coef`; it is
    exactly zero on tokens whose weights are zero.
    `kl_coef`: the coefficient where it adapts, None for `objective.kl_coef`. `sums(values [T], sequences [T])` gives the sums
    per response; where tokens of a response lie on several ranks it must add up over these (no gradient passes through it).
    Metric keys are `LOSS_METRICS`; all but the losses are means over the pg weights (`opd_loss` over the OPD weights,
    `junior_kl` over the junior's). Raises DataError for a log-prob or advantage that is not finite on a token that counts.
    """
    reduced, reduced_n = _reduction(batch, denominators, objective, sums)
    ratios = _ratios(log_probs, batch, objective, sums)
    pg = pg_term(log_probs, batch, ratios, reduced, reduced_n, objective)
    distilled = opd_term(batch, ratios, denominators, objective, opd, candidate_log_probs, candidate_log_rest)
    kl = kl_term(log_probs, batch, reduced, reduced_n, objective)
    junior = junior_term(log_probs, batch, denominators)

    pg_loss = pg.total(objective.reward_coef)
    nothing = torch.zeros_like(pg_loss)
    opd_loss = nothing if distilled is None else distilled.total(opd.coef)
    kl_loss = nothing
    if objective.kl_in == "loss":
        kl_loss = kl.total(objective.kl_coef if kl_coef is None else kl_coef)
    bonus = nothing
    if objective.entropy_coef > 0:
        bonus = entropy_term(entropy, batch, reduced, reduced_n).total(objective.entropy_coef)
    junior_kl = nothing if junior is None else junior.total()
    junior_kl_loss = objective.lambda_jun * junior_kl
    loss = pg_loss + opd_loss + kl_loss - bonus + junior_kl_loss

    with torch.no_grad():
        measured = {
            "loss": loss,
            "pg_loss": pg_loss,
            "opd_loss": opd_loss,
            "kl_loss": kl_loss,
            "entropy_bonus": bonus,
            "junior_kl_loss": junior_kl_loss,
            "junior_kl": junior_kl,
            **_token_means(log_probs, entropy, kl.values, batch, ratios, objective, denominators.pg),
        }
        assert measured.keys() == set(LOSS_METRICS)
        # An infinite ratio on a token of the distillation alone shows in no metric, but 0 * inf in its gradient.
        fine = ratios.log_token.isfinite() & (ratios.token.isfinite() | ~(batch.opd_weights > 0))
        # One wait for the device: everything is read at once.
        *values, sound = torch.stack([*(measured[m].double() for m in LOSS_METRICS), fine.all().double()]).tolist()
    if not sound or not all(map(math.isfinite, values)):
        _explain_fault(log_probs, entropy, batch, candidate_log_probs, values[0])
    return loss, dict(zip(LOSS_METRICS, values, strict=True))


def _reduction(
    batch: PackedTokens, denominators: Denominators, objective: ObjectiveConfig, sums: SequenceSums
) -> tuple[Tensor, float]:
    """(what each token counts in pg and kl [T], what their sums are divided by)."""
    n = denominators.pg if denominators.reduced is None else denominators.reduced
    if batch.reduced is not None:
        return batch.reduced, n
    assert denominators.reduced is not None or objective.reduction == "token_mean", "made by Denominators.over"
    if objective.reduction != "sequence_mean":
        return batch.weights, n
    sequences = _sequences(batch)
    return batch.weights / sums(batch.weights, sequences).clamp(min=_LEAST)[sequences], n


def _ratios(log_probs: Tensor, batch: PackedTokens, objective: ObjectiveConfig, sums: SequenceSums) -> Ratios:
    # A token without weight may have any ratio (a junior token under the senior); keep inf * 0 out of the sums.
    used = (batch.weights > 0) | (batch.opd_weights > 0)
    log_token = torch.where(used, log_probs - batch.old_log_probs, 0.0)
    token = pg = log_token.exp()
    raw = torch.ones_like(token)
    if objective.rollout_weights != "none":
        raw = torch.where(used, batch.old_log_probs - batch.engine_log_probs, 0.0).detach().exp()
    if objective.ratio == "sequence":
        pg = _sequence_ratio(log_token, batch.weights, _sequences(batch), sums)
    return Ratios(log_token, token, pg, raw, bounded_rollout_weights(raw, objective))


def _token_means(
    log_probs: Tensor,
    entropy: Tensor,
    kl: Tensor,
    batch: PackedTokens,
    ratios: Ratios,
    objective: ObjectiveConfig,
    denominator: float,
) -> dict[str, Tensor]:
    """The metrics that are means over the policy-gradient weights, by name."""
    clipped = ratios.pg > 1.0 + objective.clip_high
    if objective.surrogate == "clip":
        clipped |= ratios.pg < 1.0 - objective.clip_low
    values = {
        "entropy": entropy,
        "ratio_mean": ratios.pg,
        "clip_fraction": clipped,
        "logprob_diff": (log_probs - batch.engine_log_probs).abs(),
        "kl": kl,
        "rollout_weight_mean": ratios.rollout,
        "rollout_weight_cut": ratios.rollout != ratios.raw,
    }
    learns, weights = batch.weights > 0, batch.weights
    return {name: torch.where(learns, weights * v, 0.0).sum() / denominator for name, v in values.items()}


def _sequences(batch: PackedTokens) -> Tensor:
    assert batch.sequences is not None, "this reduction or ratio needs PackedTokens.sequences"
    return batch.sequences


def _sequence_ratio(log_ratio: Tensor, weights: Tensor, sequences: Tensor, sums: SequenceSums) -> Tensor:
    """exp of the response's weighted mean log-ratio, at each of its tokens [T].

    The value is the response's, the gradient passes through the token's own log-ratio alone (GSPO-token): over a response with
    one advantage it adds up to the gradient of the response's ratio, and no gradient has to pass between ranks.
    """
    with torch.no_grad():
        mean = sums(weights * log_ratio, sequences) / sums(weights, sequences).clamp(min=_LEAST)
    return (mean[sequences] + (log_ratio - log_ratio.detach())).exp()


def _explain_fault(
    log_probs: Tensor, entropy: Tensor, batch: PackedTokens, candidates: Tensor | None, loss: float
) -> NoReturn:
    """Raise DataError for the first value that is not finite where it counts."""
    learns, aligned = batch.weights > 0, batch.opd_weights > 0
    nothing = torch.zeros_like(learns)
    if candidates is not None and batch.candidate_ids is not None:
        candidates = torch.where(batch.candidate_ids >= 0, candidates, 0.0).sum(-1)
    inputs = (
        ("log_probs", log_probs, learns | aligned),
        ("old_log_probs", batch.old_log_probs, learns | aligned),
        ("rollout_log_probs", batch.rollout_log_probs, learns | aligned),
        ("advantages", batch.advantages, learns),
        ("teacher_log_probs", batch.teacher_log_probs, aligned),
        ("ref_log_probs", batch.ref_log_probs, learns),
        (
            "junior_log_probs",
            batch.junior_log_probs,
            nothing if batch.junior_weights is None else batch.junior_weights > 0,
        ),
        (
            "log_probs of junior tokens",
            log_probs,
            nothing if batch.junior_weights is None else batch.junior_weights > 0,
        ),
        ("entropy", entropy, learns),
        ("sum of candidates' log_probs", candidates, aligned),
    )
    for name, values, where in inputs:
        if values is not None and (bad := (where & ~values.isfinite()).nonzero()).numel():
            i = int(bad[0])
            raise DataError(
                f"{name}[{i}]",
                float(values[i]),
                f"a finite number on every token that counts ({len(bad)} are not)",
                "look for NaN in the weights, extreme logits, candidate ids beyond the vocabulary, or sampling that the "
                "trainer does not replay",
            )
    remedy = (
        "lower optimizer.lr, set objective.dual_clip, or use kl_estimator k1 or k2: a ratio has left the number range"
    )
    raise DataError("loss", loss, "finite terms and ratios", remedy)
