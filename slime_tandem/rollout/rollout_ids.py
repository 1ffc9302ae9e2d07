"""Rollout ids: one table, so that no two readers of a run's models get the same draws by accident.

All draws of a response follow from (seed, rollout id, sample index): authors, tokens, random selections. Who writes responses
for another purpose than training takes an id, or a range of ids, from here. The numbers stand for good: recorded results
depend on them.

>>> EVALUATION in TRAINING, DRIFT - EVALUATION, DOCTOR[0] > BANK
(False, 1, True)
"""

from __future__ import annotations

from typing import Final

# Plain integers, no IntEnum: `range.__contains__` of one would count to 2**62, and a sample's key would not show its number.
TRAINING: Final = range(2**62)
"""Training: the step of a run, or slime's rollout; no run reaches the end."""
EVALUATION: Final = 2**62
"""Held-out prompts, solo and tandem, of `train`, `eval` and slime's evaluations: the same draws before and after training, and
with and without a junior, so that both are paired."""
DRIFT: Final = 2**62 + 1
"""Samples for the KL between senior and junior (`evaluation.run`)."""
BANK: Final = 2**62 + 2
"""Responses of a bank of fixed contexts, and which of its positions are kept (`diagnostics.export`)."""
DOCTOR: Final = range(2**62 + 2**32, 2**62 + 2**33)
"""The first: responses that `doctor` looks at; the others: those of its length probe, one for each update (`doctor.run`)."""
