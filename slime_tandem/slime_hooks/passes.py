"""Several passes over a rollout (`train.epochs_per_step`) by slime's trainer, whose `train` makes one.

slime's train_actor takes three lists out of a rollout's data, the schedule of its steps, before it calls our hook, and its
iterator keeps one of them: what is appended to these very lists is trained, too. The data get copies of one pass in their
place, so that logs, dumps and forward passes see each sample once. It knows nothing of tokens and weights.

Checked against THUDM/slime 624b824a (backends/megatron_utils/{actor,model,data}.py).
"""

from __future__ import annotations

from typing import Any

from slime_tandem.errors import DataError

SCHEDULE = ("num_microbatches", "global_batch_sizes", "micro_batch_indices")
"""Micro-batches and rollouts of each step, samples of each micro-batch."""


def repeat(rollout_data: dict[str, Any], passes: int) -> None:
    """Let the steps of `rollout_data` be taken `passes` times. Raises DataError for a schedule that is no list.

    >>> held = [2, 2]
    >>> data = {"num_microbatches": held, "global_batch_sizes": [4, 4], "micro_batch_indices": [[0], [1], [2], [3]]}
    >>> repeat(data, 2)
    >>> held, data["num_microbatches"]
    ([2, 2, 2, 2], [2, 2])
    """
    if passes == 1:
        return
    for key in SCHEDULE:
        held = rollout_data[key]
        if not isinstance(held, list):
            raise DataError(
                f"rollout_data[{key!r}]",
                type(held).__name__,
                "a list, as in slime 624b824a",
                "set train.epochs_per_step=1",
            )
        once = rollout_data[key] = list(held)
        held.extend(once * (passes - 1))


def check_taken(steps: int, of_pass: int, passes: int) -> None:
    """Raise DataError where a rollout's trainer took `steps` steps and not all of `passes` times `of_pass` (0: none yet)."""
    if steps not in (0, of_pass * passes):
        raise DataError(
            "steps of the last rollout",
            steps,
            f"{of_pass * passes}, train.epochs_per_step={passes} passes",
            "report this with slime's version; train.epochs_per_step=1 does not need it",
        )
