"""The KL coefficient that follows `objective.kl_target`, over the steps of a slime trainer, and the file that keeps it.

slime has no hook behind an optimizer step. The loss hook is called once per micro-batch, equally often on every rank that has
a loss; behind a step's last one each rank adds up the KL over all ranks and moves the coefficient, so that all move alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slime_tandem.config import ObjectiveConfig
from slime_tandem.errors import DataError
from slime_tandem.files import parse_json, read_text, record_of
from slime_tandem.objective.kl import above_guard, adapted_coef, left_target

logger = logging.getLogger(__name__)
FILE = "slime_tandem_kl_coef.jsonl"
"""Beside slime's checkpoints: a line per rollout, `rollout_id` and the `kl_coef` behind its last update."""


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    rollout_id: int = Field(ge=0)
    kl_coef: float = Field(ge=0)


def kept_coef(folder: Path | None, rollout_id: int) -> float | None:
    """The coefficient behind a rollout's last update, the newest where a rollout was trained twice; None without one.

    Raises DataError for a line that cannot be read.
    """
    file = None if folder is None else folder / FILE
    if file is None or not file.exists():
        return None
    found = None
    for number, line in enumerate(read_text(file, "kept KL coefficients").split("\n"), 1):
        if not line:
            continue
        try:
            row = record_of(_Kept, parse_json(line))
            if row.rollout_id == rollout_id:
                found = row.kl_coef
        except ValueError as error:
            expected = f"an object with rollout_id and kl_coef ({error})"
            raise DataError(f"{file}, line {number}", line[:80], expected, "remove the line") from error
    return found


@dataclass
class AdaptiveCoef:
    """`value` now. `total` adds a number up over the ranks; `keep`: the file that this rank appends to, None for no file;
    `logs`: whether this rank does."""

    objective: ObjectiveConfig
    total: Callable[[float], float]
    keep: Path | None = None
    logs: bool = True
    value: float = field(init=False)
    _rollout_id: int = -1
    _left: int = 0
    _rollouts: int = 1
    _last: bool = False
    _weighted: bool = False
    _kl: float = 0.0

    def __post_init__(self) -> None:
        self.value = self.objective.kl_coef

    def restore(self, value: float | None) -> None:
        """Go on from a kept coefficient, moved into the bounds of now."""
        if value is not None:
            self.value = min(max(value, self.objective.kl_coef_min), self.objective.kl_coef_max)

    def start_step(self, rollout_id: int, micro_batches: int, rollouts: int, *, last: bool, weighted: bool) -> None:
        """An optimizer step begins: its micro-batches on this rank, the rollouts that slime divides by, whether it is the last
        of `rollout_id`, and whether any token carries weight (an update without one measures no KL)."""
        self._rollout_id, self._left, self._rollouts = rollout_id, micro_batches, rollouts
        self._last, self._weighted, self._kl = last, weighted, 0.0

    def after_micro_batch(self, kl: float) -> None:
        """This rank's part of the step's mean KL times the rollouts, nats; behind the last micro-batch the coefficient moves.

        Raises TandemError where the KL left its target and `objective.kl_guard` is stop.
        """
        assert self._left > 0, "one call per micro-batch"
        self._kl += kl
        self._left -= 1
        if self._left:
            return
        mean = self.total(self._kl) / self._rollouts
        if above_guard(mean, self.objective) and self.objective.kl_guard == "stop":
            raise left_target(mean, self.objective)
        before = self.value
        if self._weighted:
            self.value = adapted_coef(before, mean, self.objective)
        if self.logs:
            change = f"kl_coef {before:.6g} -> {self.value:.6g}"
            logger.info(f"slime_tandem rollout {self._rollout_id}: KL {mean:.6g}, {change}")
        if self._last and self.keep is not None:
            self.keep.parent.mkdir(parents=True, exist_ok=True)
            with self.keep.open("a") as file:
                file.write(json.dumps({"rollout_id": self._rollout_id, "kl_coef": self.value}) + "\n")
