"""The junior inside a fused engine, as an engine of its own: it writes and scores alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slime_tandem.engines.client import EngineClient
from slime_tandem.protocol import GenerateRequest, GenerateResult, Handoff

ALONE = Handoff(akey=0, threshold=0, alternate=False, cap=None, table="", junior_scores=True)
"""The rule by which the junior writes every token, and gives the input log-probs."""


class FusedJunior(EngineClient):
    """A client of a fused engine whose requests the junior alone answers."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `EngineClient.generate`."""
        return await super().generate([dataclasses.replace(r, handoff=ALONE) for r in requests])
