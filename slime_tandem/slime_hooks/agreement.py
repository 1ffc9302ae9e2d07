"""Whether trainer and engines hold the same senior, judged by the log-probs that both have of a rollout's tokens.

Before the first optimizer step of a rollout the trainer is what the engines sampled with, up to their arithmetic. A larger
difference has causes that no check-sum sees: weights that did not arrive, or engines of another job. It knows no slime.
"""

from __future__ import annotations

import torch

MOST_NATS = 0.1
"""A bfloat16 trainer and engine differ by 0.001 to 0.03 nats a token (docs/results/slime-h100.md); engines that another job's
weights had reached, by 0.02 to 0.25."""


class Agreement:
    """Collects the differences of one rank's micro-batches; nothing is read from the device until `verdict`.

    >>> agreement = Agreement()
    >>> agreement.verdict() is None
    True
    >>> agreement.add(torch.tensor([-1.0, -2.0]), torch.tensor([-1.25, -2.25]), torch.tensor([True, True]))
    >>> agreement.verdict()
    0.25
    >>> agreement.verdict() is None  # each rollout begins anew
    True
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count: torch.Tensor | None = None

    def add(self, trainer: torch.Tensor, engine: torch.Tensor, counted: torch.Tensor) -> None:
        """Log-probs [T] in nats of the same tokens, and which of them count (bool [T])."""
        apart = torch.where(counted, (trainer.detach() - engine).abs(), 0.0).sum()
        n = counted.sum()
        self._sum = apart if self._sum is None else self._sum + apart
        self._count = n if self._count is None else self._count + n

    def verdict(self) -> float | None:
        """Mean difference in nats since the last call; None where no token counted."""
        total, count = self._sum, self._count
        self._sum = self._count = None
        if total is None or count is None or not (n := int(count)):
            return None
        return float(total) / n


def warning(nats: float) -> str | None:
    """What to say of a mean difference, None where it is no more than arithmetic and a few updates make it.

    >>> warning(0.02) is None
    True
    """
    if nats <= MOST_NATS:
        return None
    return (
        f"trainer and engines differ by {nats:.3g} nats a token in the mean, expected at most {MOST_NATS:g}: their answers are "
        "not of this trainer's senior. Look whether the weights reach every engine, and whether each engine is this job's own: "
        "of two jobs that start at once on one machine, slime can give both the same port (docs/slime.md, Two jobs at once)"
    )
