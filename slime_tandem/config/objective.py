"""What is minimised, and by which optimizer."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from slime_tandem.config.section import Ignored, Section

KlEstimator = Literal["k1", "k2", "k3"]
Baseline = Literal["mean", "leave_one_out", "median"]
AdvantageScale = Literal["none", "std", "mad"]
Surrogate = Literal["clip", "cispo"]
RatioLevel = Literal["token", "sequence"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
RolloutWeights = Literal["none", "truncated", "masked"]
KlGuard = Literal["double", "skip_updates", "stop"]


class ObjectiveConfig(Section):
    """GRPO: group-relative advantages and a clipped surrogate on weighted tokens (docs/objective.md)."""

    reward_coef: float = Field(1.0, ge=0.0, description="weight of the task-reward advantage; 0: distillation alone")
    baseline: Baseline = Field(
        "mean",
        description="what a reward is compared with: its group's mean, the mean of the others (leave_one_out), or the median",
    )
    scale_advantages: AdvantageScale = Field(
        "none", description="divide group-centred rewards by the group's std, or by its scaled MAD (robust)"
    )
    clip_advantages: float | None = Field(
        None, gt=0.0, description="clamp advantages to +- this, last of all; null: no clip"
    )
    surrogate: Surrogate = Field(
        "clip",
        description="clip: min of raw and clipped ratio (PPO); cispo: clipped ratio as a constant weight of log pi",
    )
    ratio: RatioLevel = Field(
        "token", description="importance ratio of the task reward: of each token, or of the whole response (GSPO)"
    )
    clip_low: float = Field(0.2, gt=0.0, lt=1.0, description="ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0.0, description="ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1.0, description="negative advantages: the ratio counts at most this much; null: without bound"
    )
    reduction: Reduction = Field(
        "token_mean",
        description="token_mean: over all weighted tokens; sequence_mean: over responses of each one's mean; constant: sum "
        "over (responses * constant_length) (Dr. GRPO)",
    )
    constant_length: int | None = Field(
        None, ge=1, description="reduction constant: tokens that each response counts; null: sampling.max_new_tokens"
    )
    rollout_weights: RolloutWeights = Field(
        "none",
        description="none: the engine's log-probs are the old policy; truncated, masked: the trainer computes its own, and "
        "trainer/engine weights each token, cut at rollout_weight_max, or 0 outside [rollout_weight_min, rollout_weight_max]",
    )
    rollout_weight_max: float = Field(2.0, ge=1.0, description="largest weight of a token between engine and trainer")
    rollout_weight_min: float = Field(0.5, ge=0.0, le=1.0, description="rollout_weights masked: smallest weight")
    kl_coef: float = Field(0.0, ge=0.0, description="weight of the KL to the frozen start weights")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of its own; reward: taken off each response's reward, summed over its tokens"
    )
    kl_estimator: KlEstimator = Field(
        "k3", description="k1 = r, k2 = r^2/2, k3 = exp(-r) - 1 + r, r = log pi - log ref"
    )
    kl_target: float | None = Field(
        None, gt=0.0, description="nats per token; kl_coef then adapts to it after each update; null: kl_coef stays"
    )
    kl_step: float = Field(
        0.2, gt=0.0, description="with kl_target: kl_coef *= exp(clip((KL - target) / target, -kl_step, kl_step))"
    )
    kl_coef_min: float = Field(1e-4, gt=0.0, description="with kl_target: least kl_coef")
    kl_coef_max: float = Field(10.0, gt=0.0, description="with kl_target: greatest kl_coef")
    kl_guard: KlGuard = Field(
        "double",
        description="with kl_target, when an update's KL exceeds twice the target: double kl_coef at once, also skip the "
        "rollout's remaining updates, or stop the run",
    )
    entropy_coef: float = Field(
        0.0,
        ge=0.0,
        description="weight of an entropy bonus: entropy of the senior's full distribution where it learns, off the loss",
    )
    lambda_jun: float = Field(
        0.0,
        ge=0.0,
        description="weight of the senior's KL pull toward the junior on junior-written tokens, a loss term",
    )

    ignored: ClassVar = (
        Ignored("kl_step", lambda s: s.kl_target is None, "kl_target", "set kl_target"),
        Ignored("kl_coef_min", lambda s: s.kl_target is None, "kl_target", "set kl_target"),
        Ignored("kl_coef_max", lambda s: s.kl_target is None, "kl_target", "set kl_target"),
        Ignored("kl_guard", lambda s: s.kl_target is None, "kl_target", "set kl_target"),
        Ignored("kl_in", lambda s: s.kl_coef == 0, "kl_coef", "raise kl_coef"),
        Ignored("kl_target", lambda s: s.kl_coef == 0, "kl_coef", "raise kl_coef, from where it adapts"),
        Ignored("dual_clip", lambda s: s.surrogate == "cispo", "surrogate", "choose clip"),
        Ignored("clip_low", lambda s: s.surrogate == "cispo", "surrogate", "choose clip"),
        Ignored("constant_length", lambda s: s.reduction != "constant", "reduction", "choose constant"),
        Ignored(
            "rollout_weight_max", lambda s: s.rollout_weights == "none", "rollout_weights", "choose truncated or masked"
        ),
        Ignored("rollout_weight_min", lambda s: s.rollout_weights != "masked", "rollout_weights", "choose masked"),
    )


class OptimizerConfig(Section):
    """AdamW on float32 master weights."""

    lr: float = Field(1e-3, gt=0.0, description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up, in optimizer steps")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="first-moment decay")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="second-moment decay")
    eps: float = Field(1e-8, gt=0.0, description="denominator floor")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled, on matrices only")
    grad_clip: float = Field(1.0, gt=0.0, description="global gradient norm is clipped to this")
