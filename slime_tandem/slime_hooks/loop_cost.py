"""What following responses costs the rollout manager's event loop, as measured, and how many processes share it.

The one place of these figures: `runtime.py` starts processes by them, `slime_launch/scaling.py` sizes jobs. Seconds of CPU per
million response tokens, responses of 8,192 tokens (docs/results/manager-cost.md, which says how, and how uncertain they are).
It asks nobody and starts nothing.
"""

from __future__ import annotations

import math

from slime_tandem.config import RunConfig

FUSED = 3.2
"""Without a teacher: one request a response."""
SAMPLED = 3.8 - FUSED
"""A teacher's sampled-token signal, beside writing."""
LISTS = 67.6 - FUSED
"""Exact lists of 8 on both sides, beside writing."""
PAIRS = 63.0
"""Two servers, three tokens a request, 32 responses at once."""
GATHERED = 27.0
"""The same with `engine.gather_requests`."""
FUSED_TOKENS_PER_S = 5788.0
"""Of a GPU with 4B + 0.6B inside (docs/results/fused.md, one H100, 64 at once)."""
PAIR_TOKENS_PER_S = 9507.0 / 4.00
"""Of two GPUs, one model each (docs/results/tandem-rollout.md, 2 x H200, free-running, 64 at once: solo rate, and what
co-writing makes of it)."""
HALF = 0.5
"""How busy a loop or a process is planned to be: what waits for it waits little."""


def loop_seconds(config: RunConfig) -> float:
    """CPU seconds per million response tokens of a loop that does it all.

    >>> loop_seconds(RunConfig.load(overrides=["opd.enabled=false"]))
    63.0
    """
    opd, pairs = config.opd, config.tandem.enabled and config.engine.mode == "two_servers"
    writing = (GATHERED if config.engine.gather_requests else PAIRS) if pairs else FUSED
    if not opd.enabled:
        return writing
    return writing + (LISTS if opd.signal != "sampled" or opd.list_length > 0 else SAMPLED)


def processes(config: RunConfig, gpus: int) -> int:
    """How many processes write and score beside the loop, each busy for half of its time; 0 where the loop is, too, or less.

    `gpus`: those that write, at the rates that were measured on one or two.
    """
    pairs = config.tandem.enabled and config.engine.mode == "two_servers"
    tokens = gpus * (PAIR_TOKENS_PER_S / 2 if pairs else FUSED_TOKENS_PER_S)
    busy = loop_seconds(config) * tokens / 1e6
    return 0 if busy <= HALF else math.ceil(busy / HALF)
