"""One of `client_processes.ClientProcesses`: `python -m slime_tandem.slime_hooks.client_process SOCKET`.

It holds a `runtime.Runtime`, does what it is told over its socket, many calls at once, and ends when its parent has ended.
It knows nothing of slime: a sample is a record with slime's field names.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

from slime_tandem.extensions import said
from slime_tandem.slime_hooks import runtime, settings
from slime_tandem.slime_hooks.client_processes import GIVEN, Setup, receive, send


class Status(Enum):
    """The states of slime's samples (slime/utils/types.py)."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Sample(SimpleNamespace):
    """slime's sample, as far as our hooks know it."""

    Status = Status


class _Server:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._sending = writer, asyncio.Lock()
        self._made: runtime.Runtime | None = None
        self._stop = runtime.Stop()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the parent has ended: asyncio.IncompleteReadError."""
        while True:
            number, what, *given = await receive(reader)
            if what == "aborted":
                await self._stop.set(given[0])
            elif what == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
            else:
                task = self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, what, *given))
                task.add_done_callback(partial(self._forget, number))

    def _forget(self, number: int, _: object) -> None:
        self._tasks.pop(number, None)

    async def _answer(self, number: int, what: str, *given: Any) -> None:
        value, error = None, None
        try:
            value = await getattr(self, f"_{what}")(*given)
        except Exception as raised:  # noqa: BLE001 - handed to who asked
            error = _that_travels(raised)
        async with self._sending:
            await send(self._writer, (number, value, error))

    async def _setup(self, setup: Setup) -> None:
        ip, port = setup.senior
        args = SimpleNamespace(
            sglang_router_ip=ip,
            sglang_router_port=port,
            sglang_model_routers=dict(setup.routers),
        )
        settings.use(settings.ANY, setup.config)
        self._made = await runtime.connect_here(args, self._stop)

    async def _write(
        self, fields: dict[str, Any], aborted: bool, params: dict[str, Any], tandem: bool, evaluation: bool
    ) -> dict[str, Any]:
        assert self._made is not None
        await self._stop.set(aborted)
        sample = _sample(fields)
        await self._made.write(sample, params, tandem=tandem, evaluation=evaluation)
        return {name: getattr(sample, name) for name in GIVEN} | {"status": sample.status.value}

    async def _score(self, fields: dict[str, Any], aborted: bool) -> dict[str, Any]:
        assert self._made is not None
        sample = _sample(fields)
        await self._made.score(sample)
        metadata: dict[str, Any] = sample.metadata
        return metadata


def _that_travels(error: Exception) -> Exception:
    """The error as the other side can make it again; one of a user's code or a library may only come as its words."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever its own pickling raises
        return RuntimeError(said(error))
    return error


def _sample(fields: dict[str, Any]) -> Sample:
    return Sample(**{**fields, "status": Status(fields["status"])})


async def _main(number: int) -> None:
    line = socket.socket(fileno=number)
    line.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=line, limit=2**20)
    await _Server(writer).serve(reader)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    try:
        asyncio.run(_main(int(sys.argv[1])))
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)  # the parent has ended; nobody waits for what is under way
