"""Processes that write and score responses beside slime's rollout manager, whose event loop then only hands samples about.

One event loop follows every response of a job. What a response costs there (JSON, the writer, a teacher's tokenizer, lists of
candidates, HTTP itself) bounds the tokens per second of all its GPUs together. Here each process holds a `runtime.Runtime` of
its own, asks the servers by itself, and gives back the fields of slime's sample. A response's draws depend on its key alone, so
one whose process died is written again with the same tokens. What a response is, is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.errors import EngineUnavailableError

HEAD = struct.Struct("!Q")
_TRIES = 3
"""How often a call is made whose process dies over it."""
_LOOK_S = 0.02
"""How often the manager is asked whether it wants the rollout to end."""
GIVEN = (
    "index", "group_index", "prompt", "tokens", "response", "response_length", "label", "metadata", "loss_mask",
    "rollout_log_probs", "weight_versions", "reward", "remove_sample",
)  # fmt: skip
"""The fields of slime's sample that our hooks read or write, beside its status."""


@dataclass(frozen=True)
class Setup:
    """What a process needs of slime's arguments to make a runtime: pickled, nothing of slime's among it."""

    config: RunConfig
    routers: Mapping[str, tuple[str, int]]
    senior: tuple[str, int]


async def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """One message, and wait where the other side reads too slowly."""
    data = pickle.dumps(message, protocol=5)
    writer.write(HEAD.pack(len(data)))
    writer.write(data)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Any:
    """One message; raises asyncio.IncompleteReadError where the other side has ended."""
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    return pickle.loads(await reader.readexactly(size))  # noqa: S301 - our own process


class _DiedError(Exception):
    """The process ended before it had answered."""


class _Process:
    """One process and the calls that it has under way."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.process, self._line = process, line
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._sending = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.dead = False

    @classmethod
    async def start(cls, setup: Setup) -> _Process:
        """A process that has connected to the servers. Raises what its connecting raised, _DiedError if it ended."""
        line, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                [sys.executable, "-P", "-m", "slime_tandem.slime_hooks.client_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=(theirs.fileno(),),
            )
        line.setblocking(False)
        self = cls(line, process)
        reader, self._writer = await asyncio.open_connection(sock=line, limit=2**20)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        try:
            await self.call("setup", setup)
        except BaseException:
            self.end()
            raise
        return self

    async def call(self, what: str, *given: Any) -> Any:
        """The answer to one call; raises what it raised there, _DiedError if the process ended."""
        if self.dead:
            raise _DiedError
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.tell(number, what, *given)
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(_DiedError):
                await self.tell(number, "cancel")
            raise
        finally:
            self._waiting.pop(number, None)

    async def tell(self, *message: Any) -> None:
        """Send a message; raises _DiedError if the process has ended."""
        assert self._writer is not None
        try:
            async with self._sending:
                await send(self._writer, message)
        except (ConnectionError, RuntimeError):
            raise _DiedError from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, value, error = await receive(reader)
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)
        self.dead = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_DiedError())

    def end(self) -> None:
        """End it."""
        self.dead = True
        if self._writer is not None:
            self._writer.close()
        self.process.kill()
        self.process.wait()


class ClientProcesses:
    """So many processes in the place of one `Runtime`: the same `write` and `score`.

    `places`: samples that are scored at once. Started when the first call comes. Raises what `runtime.connect` raises there;
    EngineUnavailableError for a call whose process died three times.
    """

    def __init__(self, setup: Setup, count: int, aborted: Callable[[], bool], places: int) -> None:
        self._setup, self._aborted = setup, aborted
        self._processes: list[_Process | None] = [None] * count
        self._starting = [asyncio.Lock() for _ in range(count)]
        self._places = asyncio.Semaphore(places)
        self._told = False
        self._under_way = 0
        self._watch: asyncio.Task[None] | None = None
        self.died = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of those that run."""
        return [p.process.pid for p in self._processes if p is not None and not p.dead]

    async def write(
        self, sample: Any, sampling_params: Mapping[str, Any], *, tandem: bool, evaluation: bool = False
    ) -> None:
        """As `Runtime.write`."""
        fields = await self._call(sample, "write", dict(sampling_params), tandem, evaluation)
        status = fields.pop("status")
        for name, value in fields.items():
            setattr(sample, name, value)
        sample.status = type(sample).Status(status)

    async def score(self, sample: Any) -> None:
        """As `Runtime.score`."""
        async with self._places:
            sample.metadata = await self._call(sample, "score")

    async def close(self) -> None:
        """End all processes."""
        if self._watch is not None:
            self._watch.cancel()
        for process in self._processes:
            if process is not None:
                process.end()

    async def _call(self, sample: Any, what: str, *given: Any) -> Any:
        fields = {name: getattr(sample, name, None) for name in GIVEN} | {"status": sample.status.value}
        place = (sample.index or 0) % len(self._processes)
        self._under_way += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._tell_aborts())
        try:
            for _ in range(_TRIES):
                try:
                    process = await self._process(place)
                    return await process.call(what, fields, self._aborted(), *given)
                except _DiedError:
                    self.died += 1
        finally:
            self._under_way -= 1
        raise EngineUnavailableError(
            f"client process of sample {sample.index}",
            f"ended {_TRIES} times",
            "one that stays until it has answered",
            "see its output above; set engine.client_processes=0 to do its work in the rollout manager",
        )

    async def _process(self, place: int) -> _Process:
        async with self._starting[place]:
            process = self._processes[place]
            if process is None or process.dead:
                if process is not None:
                    process.end()
                process = self._processes[place] = await _Process.start(self._setup)
                if self._told:
                    await process.tell(-1, "aborted", True)
            return process

    async def _tell_aborts(self) -> None:
        """slime sets a flag and asks its engines to abort; a request sent just then would go on: the processes are told."""
        while self._under_way:
            if (now := self._aborted()) != self._told:
                self._told = now
                for process in self._processes:
                    if process is not None and not process.dead:
                        with contextlib.suppress(_DiedError):
                            await process.tell(-1, "aborted", now)
            await asyncio.sleep(_LOOK_S)
