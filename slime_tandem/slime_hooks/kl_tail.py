"""The tail of the KL under slime, `train/kl_p95`: a quantile is no sum, and slime's trainer adds metrics up.

The loss hook is called once per micro-batch, equally often on every rank that has a loss; behind a step's last one the ranks
bring their tokens' values together, and one reports. It knows no tokens and no slime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slime_tandem.types import FloatArray

QUANTILE = 0.95


def tail_of(parts: Sequence[FloatArray]) -> float | None:
    """The 95% quantile over all values; None for none.

    >>> tail_of([np.arange(50.0), np.arange(50.0, 101.0)]), tail_of([np.zeros(0)])
    (95.0, None)
    """
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(np.quantile(values, QUANTILE)) if values.size else None


@dataclass
class KlTail:
    """`gather`: [n] of this rank to those of all ranks, None where another rank gets them. `report(step, value)` logs one."""

    gather: Callable[[FloatArray], Sequence[FloatArray] | None]
    report: Callable[[int, float], None]
    _step: int = 0
    _left: int = 0
    _parts: list[FloatArray] = field(default_factory=list)
    _seen: list[object] = field(default_factory=list)

    def start_step(self, step: int, micro_batches: int) -> None:
        """An optimizer step begins, the `step`-th of the job, with so many micro-batches on this rank."""
        self._step, self._left, self._parts, self._seen = step, micro_batches, [], []

    def after_micro_batch(self, batch: object, kl: FloatArray) -> None:
        """The KL of the weighted tokens [n] of this rank's micro-batch, nats; one that is computed again (`batch` is the same
        object, slime's --recompute-loss-function) counts once."""
        if any(seen is batch for seen in self._seen):
            return
        assert self._left > 0, "one call per micro-batch"
        self._seen.append(batch)
        self._parts.append(kl)
        self._left -= 1
        if self._left:
            return
        gathered = self.gather(np.concatenate(self._parts))
        self._parts = []
        value = None if gathered is None else tail_of(gathered)
        if value is not None:
            self.report(self._step, value)
