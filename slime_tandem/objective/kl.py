"""Per-token KL estimators on sampled tokens. Pure torch.

With r = log pi - log pi_ref at tokens sampled from pi (J. Schulman, "Approximating KL Divergence", 2020):
k1 = r (unbiased), k2 = r^2 / 2 (biased, low variance), k3 = exp(-r) - 1 + r (unbiased, never negative).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_tandem.config import KlEstimator


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
