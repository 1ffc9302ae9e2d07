"""What the trainer needs to replay truncated sampling: the kept sets of a micro-batch.

Only what the senior drew is replayed. Junior tokens that carry weight keep the full distribution on both sides of their
ratio: they were not drawn from the senior's truncated one, and may lie outside of it. What the kept sets do to log-probs is
`objective/truncation.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slime_tandem.config import SamplingConfig
from slime_tandem.errors import DataError
from slime_tandem.objective.truncation import KeptIds, Replay, Truncation
from slime_tandem.training.rows import Sequenced


def replay_of(sampling: SamplingConfig, micro: Sequence[Sequenced], device: torch.device) -> Replay | None:
    """The replay of the rows' response tokens, packed; None where sampling was not truncated.

    Raises DataError for rows without what `sampling.truncation_replay` needs.
    """
    if not sampling.truncates:
        return None
    cut = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    if sampling.truncation_replay == "recompute":
        assert all(row.replayed is not None for row in micro)
        replayed = np.concatenate([row.replayed for row in micro if row.replayed is not None])
        return Replay(cut, torch.from_numpy(replayed).to(device))
    for row in micro:
        if len(row.kept_ids) != row.response_length:
            raise DataError(
                "kept_ids of a sample",
                f"{len(row.kept_ids)} lists",
                f"{row.response_length}, one per response token",
                "write the samples with sampling.truncation_replay=kept_ids, or train with recompute",
            )
    return Replay(cut, kept=KeptIds.of([ids for row in micro for ids in row.kept_ids], device))
