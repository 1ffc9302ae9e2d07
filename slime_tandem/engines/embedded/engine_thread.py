"""Owns the runner in a thread of its own and talks to asyncio: units of jobs in, futures out.

Units and weight updates keep their order: an update waits until everything before it has been answered, and what comes after
it waits for the update. Aborts and flushes act at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from slime_tandem.engines.embedded.runner import Job, Output, Runner
from slime_tandem.errors import EngineUnavailableError, TandemError

_MOST_JOBS = 2**16
"""Sequences at work and waiting; more are refused until some have ended."""


class _Unit:
    """Jobs that were sent together and are answered together."""

    def __init__(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = jobs
        self.outputs: dict[int, Output] = {}
        self.aborts: list[tuple[Callable[[Job], bool], str]] = []  # asked for before the runner had the jobs
        self.loop = loop
        self.future: asyncio.Future[list[Output]] = loop.create_future()


class _Update:
    def __init__(self, folder: str, weight_version: str, loop: asyncio.AbstractEventLoop) -> None:
        self.folder, self.weight_version, self.loop = folder, weight_version, loop
        self.future: asyncio.Future[None] = loop.create_future()


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
    def act() -> None:
        if not future.done():
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    # The loop may be gone when the process ends; nobody waits for the answer then.
    if not loop.is_closed():
        loop.call_soon_threadsafe(act)


class EngineThread:
    """Runs a `Runner`. Methods are called from the asyncio thread; `on_death` is called there if the thread breaks.

    `load` makes a model from a folder. It runs in the engine's thread while that is idle: transformers changes torch's
    global default dtype while it loads.
    """

    def __init__(self, runner: Runner, load: Callable[[str], Any], on_death: Callable[[], None]) -> None:
        self._runner = runner
        self._load = load
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[_Unit | _Update | Callable[[], None]] = queue.SimpleQueue()
        self._backlog: deque[_Unit | _Update] = deque()
        self._owner: dict[int, _Unit] = {}
        self._waited_for: dict[asyncio.Future[Any], int] = {}  # sequences behind each; the asyncio thread's own
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still being worked on."""
        return self._thread.is_alive() and not self._stopping

    @property
    def weight_version(self) -> str:
        """The version of the weights being served."""
        return self._runner.weight_version

    @property
    def patterns_stopped(self) -> int:
        """Requests that were ended because their patterns took too long."""
        return self._runner.patterns_stopped

    async def generate(self, jobs: Sequence[Job]) -> list[Output]:
        """Answer jobs as one unit. Being cancelled aborts them. Raises EngineUnavailableError when stopping, or too full."""
        if (busy := sum(self._waited_for.values())) + len(jobs) > _MOST_JOBS:
            expected = f"at most {_MOST_JOBS} at once"
            raise EngineUnavailableError("sequences", busy + len(jobs), expected, "send the request again later")
        unit = _Unit(jobs, self._loop)
        self._send(unit, len(jobs))
        try:
            return await unit.future
        except asyncio.CancelledError:
            mine = set(map(id, jobs))
            self.abort(lambda job: id(job) in mine, "the client went away")
            raise

    def abort(self, wanted: Callable[[Job], bool], message: str) -> None:
        """End matching jobs; they are answered with finish type abort."""
        self._inbox.put(lambda: self._abort(wanted, message))

    def flush(self) -> None:
        """Forget all kept prefixes."""
        self._inbox.put(self._runner.flush)

    async def update(self, folder: str, weight_version: str | None) -> None:
        """Serve the weights in `folder` once everything sent before has been answered. Raises ModelError if it does not fit."""
        item = _Update(folder, weight_version if weight_version is not None else self.weight_version, self._loop)
        self._send(item)
        await item.future

    async def stop(self, timeout_s: float) -> bool:
        """Answer all that wait with EngineUnavailableError at once, and end the thread; whether it ended in time."""
        self._stopping = True
        for future in list(self._waited_for):
            if not future.done():
                future.set_exception(_shutting_down())
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _send(self, item: _Unit | _Update, jobs: int = 0) -> None:
        if self._stopping:
            item.future.set_exception(_shutting_down())
            return
        self._waited_for[item.future] = jobs
        item.future.add_done_callback(lambda future: self._waited_for.pop(future, None))
        self._inbox.put(item)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take(wait=not self._runner.busy and not self._backlog)
                self._feed()
                if self._runner.busy:
                    self._deliver(self._runner.step())
            self._end(_shutting_down())
        except BaseException as error:
            self._stopping = True
            self._end(error if isinstance(error, TandemError) else RuntimeError(f"engine thread: {error!r}"))
            self._loop.call_soon_threadsafe(self._on_death)
            raise

    def _take(self, wait: bool) -> None:
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(item, (_Unit, _Update)):
                self._backlog.append(item)
            else:
                item()

    def _feed(self) -> None:
        while self._backlog:
            item = self._backlog[0]
            if isinstance(item, _Update):
                if self._runner.busy:
                    return
                try:
                    self._runner.swap_weights(self._load(item.folder), item.weight_version)
                    result: BaseException | None = None
                except Exception as error:  # noqa: BLE001 - reported to the caller, the old weights stay
                    result = error
                _resolve(item.loop, item.future, result)
            else:
                for job in item.jobs:
                    self._owner[id(job)] = item
                self._runner.submit(item.jobs)
                for wanted, message in item.aborts:
                    self._abort_of(item, wanted, message)
            self._backlog.popleft()

    def _deliver(self, finished: Sequence[tuple[Job, Output]]) -> None:
        for job, output in finished:
            unit = self._owner.pop(id(job))
            unit.outputs[id(job)] = output
            if len(unit.outputs) == len(unit.jobs):
                _resolve(unit.loop, unit.future, [unit.outputs[id(j)] for j in unit.jobs])

    def _abort_of(self, unit: _Unit, wanted: Callable[[Job], bool], message: str) -> None:
        mine = set(map(id, unit.jobs))
        self._deliver(self._runner.abort(lambda job: id(job) in mine and wanted(job), message))

    def _abort(self, wanted: Callable[[Job], bool], message: str) -> None:
        for item in self._backlog:
            if isinstance(item, _Unit):
                item.aborts.append((wanted, message))
        self._deliver(self._runner.abort(wanted, message))

    def _end(self, error: BaseException) -> None:
        waiting = {id(unit): unit for unit in self._owner.values()}
        self._take(wait=False)
        for item in [*waiting.values(), *self._backlog]:
            _resolve(item.loop, item.future, error)


def _shutting_down() -> EngineUnavailableError:
    return EngineUnavailableError("server", "stopping", "a running server", "send the request again")
