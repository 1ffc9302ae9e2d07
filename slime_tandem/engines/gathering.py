"""One HTTP request for all that is asked of a server in the same turn of the event loop.

Responses that are written side by side, each in a task of its own, then cost the client and the server's front end one request
for many of them. What an answer brings comes when all of its batch is written, so responses fall into step (as
`rollout.drive.write_lockstep` does from the start): docs/results/manager-cost.md says what it saves,
docs/results/tandem-rollout.md what keeping step costs on two GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from slime_tandem.engines.client import EngineClient
from slime_tandem.errors import EngineError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest, GenerateResult


class GatheringClient(EngineClient):
    """An `EngineClient` that joins calls of `generate` into one, which begin before it next gives the loop away.

    A request that its server refuses fails alone: the others of its batch are asked again without it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().__aexit__(*error)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `EngineClient.generate`; a single request travels with others."""
        if len(requests) != 1 or requests[0].session_params is not None:
            return await super().generate(requests)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[GenerateResult] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((requests[0], answer))
        try:
            return [await answer]
        except asyncio.CancelledError:
            answer.cancel()  # the others go on; who cancels aborts by name where he wants that
            raise

    def _send(self) -> None:
        batch, self._waiting = [item for item in self._waiting if not item[1].done()], []
        if batch:
            task = asyncio.get_running_loop().create_task(self._ask(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, batch: Sequence[tuple[GenerateRequest, asyncio.Future[GenerateResult]]]) -> None:
        try:
            results = await super().generate([request for request, _ in batch])
        except BaseException as error:
            if isinstance(error, EngineError) and not isinstance(error, EngineUnavailableError) and len(batch) > 1:
                await asyncio.gather(*(self._ask([item]) for item in batch))
                return
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error) if isinstance(error, Exception) else answer.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
