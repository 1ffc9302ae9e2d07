"""Large answers that came at once are read one in each turn of the event loop.

Responses of one length end in the same decode step. Read in one turn, sixty-four answers keep a loop for a tenth of a second
(docs/results/slime-scale.md), in which no other response is followed; so does what their tasks do before they next wait.
"""

from __future__ import annotations

import asyncio
from collections import deque


class OneByOne:
    """`await turn()`: go on when it is this task's turn; the loop serves everything else between two of them.

    >>> async def order() -> str:
    ...     turn, done = OneByOne(), []
    ...     async def read(name: str) -> None:
    ...         await turn()
    ...         done.append(name)
    ...     async def beat() -> None:
    ...         while len(done) < 6:
    ...             done.append(".")
    ...             await asyncio.sleep(0)
    ...     await asyncio.gather(*map(read, "abc"), beat())
    ...     return "".join(done).strip(".")
    >>> "ab" in asyncio.run(order())
    False
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self) -> None:
        """Wait for this task's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next, loop)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._waiting[0].done():  # cancelled
            self._waiting.popleft()
        if self._waiting:
            self._waiting[0].set_result(None)
            self._waiting.popleft()
        if self._waiting:
            loop.call_soon(self._next, loop)
