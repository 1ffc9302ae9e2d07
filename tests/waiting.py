"""Waiting for what another process does: for the event itself, and as long as the busiest machine may take over it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 900.0
"""Seconds after which a child process counts as hung. No test measures time by it: one that passes never waits so long."""


def wait_until(true: Callable[[], object]) -> None:
    """Return when `true()` holds; fail after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
