"""How long an event loop is kept from its work, and its processor time: a task that should wake every ten milliseconds.

What blocks a loop (Python code between two waits, the cyclic collector, a thread that holds the interpreter's lock, the machine
itself) delays every response that it follows. It does not know what runs in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

_EVERY_S = 0.01


class Heartbeat:
    """Measures the loop that it was started in, until `stop`.

    >>> async def blocked() -> dict[str, float]:
    ...     beat = Heartbeat()
    ...     await asyncio.sleep(0.03)
    ...     time.sleep(0.2)
    ...     await asyncio.sleep(0.03)
    ...     return beat.take()
    >>> asyncio.run(blocked())["rollout/loop_blocked_s"] > 0.15
    True
    """

    def __init__(self) -> None:
        self._worst, self._cpu, self._busiest = 0.0, 0.0, 0.0
        self._task = asyncio.get_running_loop().create_task(self._beat())

    def take(self) -> dict[str, float]:
        """Since the last call: the longest time (s) that the loop came too late; the most processor time (s) that its thread
        took between two beats, which the machine's other work is no part of; the processor time (s) of all."""
        found = {
            "rollout/loop_blocked_s": self._worst,
            "rollout/loop_busy_s": self._busiest,
            "rollout/loop_cpu_s": self._cpu,
        }
        self._worst, self._cpu, self._busiest = 0.0, 0.0, 0.0
        return found

    async def stop(self) -> None:
        """Measure no longer."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _beat(self) -> None:
        cpu = time.thread_time()
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self._worst = max(self._worst, time.monotonic() - due)
            now = time.thread_time()
            self._busiest = max(self._busiest, now - cpu)
            self._cpu, cpu = self._cpu + now - cpu, now
