"""The KL to a frozen reference: estimators on sampled tokens, and the coefficient that follows a target. Pure torch.

With r = log pi - log pi_ref at tokens sampled from pi (J. Schulman, "Approximating KL Divergence", 2020):
k1 = r (unbiased), k2 = r^2 / 2 (biased, low variance), k3 = exp(-r) - 1 + r (unbiased, never negative). Where the reference's
log-probs come from, and which tokens count, is the caller's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime_tandem.config import KlEstimator, ObjectiveConfig
from slime_tandem.errors import DataError, TandemError
from slime_tandem.types import FloatArray

_GUARD = 2.0
"""Times the target: what the guard takes for a policy on its way out."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(pi || pi_ref) per token [T], nats; the gradient flows through `log_probs`.

    >>> p, q = torch.tensor([-1.0]), torch.tensor([-2.0])
    >>> [round(kl_estimate(p, q, k).item(), 4) for k in ("k1", "k2", "k3")]
    [1.0, 0.5, 0.3679]
    """
    r = log_probs - ref_log_probs
    match estimator:
        case "k1":
            return r
        case "k2":
            return 0.5 * r * r
        case "k3":
            return torch.expm1(-r) + r


def sampled_kl(log_probs: FloatArray, ref_log_probs: FloatArray, weights: FloatArray, estimator: KlEstimator) -> float:
    """Weighted sum over one response [R] of the estimate, nats: what `kl_in=reward` takes off its reward per unit of kl_coef.

    Tokens without weight may hold anything. Raises DataError for a sum that is not finite.

    >>> import numpy as np
    >>> sampled_kl(np.array([-1.0, -9.0]), np.array([-2.0, np.nan]), np.array([1.0, 0.0]), "k1")
    1.0
    """
    used = weights > 0
    pi, ref = torch.from_numpy(log_probs[used]), torch.from_numpy(ref_log_probs[used])
    total = float((torch.from_numpy(weights[used]) * kl_estimate(pi, ref, estimator)).sum())
    if not math.isfinite(total):
        raise DataError(
            "KL of a response", total, "finite log-probs", "look for NaN or extreme log-probs, or use k1 or k2"
        )
    return total


def above_guard(kl: float, objective: ObjectiveConfig) -> bool:
    """Whether an update's mean KL per token (nats) is more than twice the target; never without one."""
    return objective.kl_target is not None and kl > _GUARD * objective.kl_target


def left_target(kl: float, objective: ObjectiveConfig) -> TandemError:
    """The error that ends a run with `kl_guard=stop`; `kl` nats per token."""
    expected = f"at most twice objective.kl_target={objective.kl_target:g}"
    remedy = (
        "raise objective.kl_coef or lower optimizer.lr and go on from the last checkpoint, or choose another kl_guard"
    )
    return TandemError("train/kl", kl, expected, remedy)


def adapted_coef(coef: float, kl: float, objective: ObjectiveConfig) -> float:
    """The coefficient after an update whose mean KL per token was `kl` nats.

    coef * exp(clip((kl - target) / target, -kl_step, kl_step)), twice `coef` above the guard, within the bounds. Without a
    target it stays. Raises DataError for a KL that is not finite.

    >>> objective = ObjectiveConfig(kl_coef=0.1, kl_target=0.05)
    >>> [round(adapted_coef(0.1, kl, objective), 4) for kl in (0.0, 0.045, 0.05, 0.09, 0.11)]
    [0.0819, 0.0905, 0.1, 0.1221, 0.2]
    """
    if objective.kl_target is None:
        return coef
    if not math.isfinite(kl):
        raise DataError("KL per token", kl, "a finite number", "lower optimizer.lr, or look for extreme log-probs")
    error = (kl - objective.kl_target) / objective.kl_target
    factor = _GUARD if above_guard(kl, objective) else math.exp(min(max(error, -objective.kl_step), objective.kl_step))
    return min(max(coef * factor, objective.kl_coef_min), objective.kl_coef_max)
