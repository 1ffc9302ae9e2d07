"""Calls on text that nobody vouches for, in processes that can be killed: each with a time and a memory limit.

Nothing is lost: a call whose process dies is made again, once; then it has no value, and says so. The order is the calls'.
Processes start when they are first needed, stay until this one ends, and end with it however it ends (`pool_worker`). What is
called is not known here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from slime_tandem import errors
from slime_tandem.errors import EngineUnavailableError
from slime_tandem.tasks.pool_worker import HEAD, MAKING_S, receive, wall_s

_TRIES, _STARTS = 2, 5
"""How often a call is made, and how often a process is started and makes what answers, if it dies over it."""
_GRACE_S = 2.0
"""Seconds for a process to be ended by its own timer before it is ended from here."""


class Call(NamedTuple):
    """`args` for what the `recipe` makes. What was made is kept, so equal recipes must make equal things."""

    recipe: bytes
    args: tuple[Any, ...]


class Reply(NamedTuple):
    """A `value`; or a `problem`: `timeout` or `error` for a call that went past a limit, `raised` with the `error`."""

    value: Any = None
    problem: str | None = None
    error: Exception | None = None


def recipe(module: str, name: str, *args: Any) -> bytes:
    """What a worker makes once: the attribute `name` of `module`, called with `args`. Modules are found as they are here."""
    return pickle.dumps((_search_path(), module, name, args))


def _search_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


@dataclass(frozen=True, slots=True)
class Limits:
    """`timeout_s` of a call; `memory_mib` and number of `processes`; `guarded`: text is not evaluated (`pool_worker`);
    `at_once`: calls that a process is given at a time.

    The seconds of a guarded call are those that its process computes, so that a busy machine changes no reward; on the wall
    it may take twenty times as long. Others wait for what they like, and get so many seconds on the wall.
    """

    timeout_s: float = 5.0
    memory_mib: int | None = 2048
    processes: int = 2
    guarded: bool = True
    at_once: int = 16


class _DiedError(Exception):
    """A process ended before it had answered. `fate`: `timeout`, `making` (it was not ready to answer yet), or `died`."""

    def __init__(self, fate: str) -> None:
        super().__init__(fate)
        self.fate = fate


class _Process:
    """One worker, started when made. Raises _DiedError if it does not come up."""

    def __init__(self, limits: Limits) -> None:
        self._timeout_s = limits.timeout_s
        self._patience_s = wall_s(limits.timeout_s, limits.guarded) + _GRACE_S
        memory = 0 if limits.memory_mib is None else limits.memory_mib * 2**20
        # The thread pool of a numerical library would reserve memory for every core.
        env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
        env["PYTHONPATH"] = os.pathsep.join(_search_path())
        self._line, theirs = socket.socketpair()
        with theirs:
            numbers = (theirs.fileno(), os.getpid(), memory, int(limits.guarded))
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                [sys.executable, "-P", "-W", "ignore", "-m", "slime_tandem.tasks.pool_worker", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if limits.guarded else None,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone
            )
        try:
            self._receive(MAKING_S)
        except _DiedError:
            raise _DiedError("making") from None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, calls: Sequence[tuple[bytes, bytes]]) -> None:
        """Send calls; `reply` gives as many replies."""
        data = pickle.dumps((self._timeout_s, calls))
        self._line.settimeout(MAKING_S)
        try:
            self._line.sendall(HEAD.pack(len(data)) + data)
        except OSError:
            self._fail("died")

    def reply(self) -> dict[str, Any]:
        """The next call's reply. Raises _DiedError."""
        said = self._receive(self._patience_s)
        if said["kind"] == "making":
            try:
                said = self._receive(MAKING_S)
            except _DiedError:
                raise _DiedError("making") from None
        return self._receive(self._patience_s) if said["kind"] == "made" else said

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._line.settimeout(seconds)
        try:
            said: dict[str, Any] = json.loads(receive(self._line))
        except TimeoutError:
            self._fail("timeout")
        except (EOFError, OSError):
            self._fail("died")
        return said

    def _fail(self, fate: str) -> NoReturn:
        self.end()
        timers = (-signal.SIGALRM, -signal.SIGPROF)
        raise _DiedError("timeout" if self._process.returncode in timers else fate)

    def end(self) -> None:
        """End it, if it has not ended, and whatever it has started."""
        self._line.close()
        if self._process.returncode is None:
            until = time.monotonic() + 0.1  # one that is just ending keeps an exit code of its own
            while not _has_ended(self._process.pid) and time.monotonic() < until:
                time.sleep(0.005)
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # not waited for: its number is still its own
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


class Pool:
    """Processes with the same `limits`, started as calls come. Any thread may `ask`, several at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._room = threading.BoundedSemaphore(limits.processes)
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        with self._lock:
            return [process.pid for process in (*self._idle, *self._busy)]

    def ask(self, calls: Sequence[Call]) -> list[Reply]:
        """The reply to each call, in order.

        Raises EngineUnavailableError for a process that does not come up, or that ends again and again while it makes what a
        recipe says, and the TandemError kinds that this making raises.
        """
        work = _Work(calls, self.limits.at_once)
        helpers = [
            threading.Thread(target=self._help, args=(work,), name="scoring", daemon=True)
            for _ in range(min(self.limits.processes, -(-len(calls) // self.limits.at_once)) - 1)
        ]
        try:
            for helper in helpers:
                helper.start()
            self._help(work)
            for helper in helpers:
                helper.join()
        except BaseException:  # an interrupt: nobody waits for what is under way
            work.stop(None)
            self.close()
            raise
        if work.failure is not None:
            raise work.failure
        return [work.replies[i] for i in range(len(calls))]

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        with self._lock:
            gone, self._idle = [*self._idle, *self._busy], []
        for process in gone:
            process.end()

    def _help(self, work: _Work) -> None:
        with self._room:
            while part := work.take():
                try:
                    self._answer(work, part)
                except Exception as error:  # noqa: BLE001 - handed to the thread that asked
                    work.stop(error)

    def _answer(self, work: _Work, left: deque[int]) -> None:
        tries = 0
        while left and not work.stopped:
            process = None
            try:
                process = self._get()
                process.send([work.calls[i] for i in left])
                while left:
                    work.replies[left[0]] = _read(process.reply())
                    left.popleft()
                    tries = 0
                self._put(process)
            except _DiedError as error:
                tries += 1
                if error.fate == "making":
                    if tries >= _STARTS:
                        raise _unavailable("ended") from None
                elif error.fate == "timeout" or tries >= _TRIES:
                    work.replies[left.popleft()] = Reply(problem="timeout" if error.fate == "timeout" else "error")
                    tries = 0
            finally:
                with self._lock:
                    taken = process in self._busy
                    if process is not None:
                        self._busy.discard(process)
                if taken and process is not None:  # dead, or in the middle of something
                    process.end()

    def _get(self) -> _Process:
        process = None
        while process is None:  # one that died while it had nothing to do costs no call a try
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                process = _Process(self.limits)
            elif idle.is_alive():
                process = idle
            else:
                idle.end()
        with self._lock:
            self._busy.add(process)
        return process

    def _put(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
            self._idle.append(process)


class _Work:
    """Calls shared out among threads, and what became of them. `failure`: what to raise."""

    def __init__(self, calls: Sequence[Call], at_once: int) -> None:
        self._at_once = at_once
        self.calls = [(call.recipe, pickle.dumps(call.args)) for call in calls]
        self.replies: dict[int, Reply] = {}
        self.failure: Exception | None = None
        self.stopped = False
        self._left = deque(range(len(calls)))
        self._lock = threading.Lock()

    def take(self) -> deque[int]:
        """The next few calls that nobody has; none once it is stopped."""
        with self._lock:
            count = 0 if self.stopped else min(self._at_once, len(self._left))
            return deque(self._left.popleft() for _ in range(count))

    def stop(self, failure: Exception | None) -> None:
        """Nothing further is begun."""
        with self._lock:
            self.stopped, self.failure = True, self.failure or failure


def _read(said: dict[str, Any]) -> Reply:
    if said["kind"] == "value":
        return Reply(said["value"])
    if said["kind"] == "limit":
        return Reply(problem="error")
    ours = said["ours"] is not None
    error: Exception = getattr(errors, said["ours"])(*said["parts"]) if ours else RuntimeError(said["parts"][0])
    if said["kind"] == "unmade":
        raise error if ours else _unavailable(str(error))
    return Reply(problem="raised", error=error)


def _unavailable(why: str) -> EngineUnavailableError:
    remedy = "read its output above; raise reward.memory_mib if it found no memory"
    return EngineUnavailableError("scoring process", why, "one that comes up and finds what it is to call", remedy)


@functools.cache
def shared(limits: Limits) -> Pool:
    """This process's pool with these limits; its workers end with this process."""
    pool = Pool(limits)
    atexit.register(pool.close)
    return pool
