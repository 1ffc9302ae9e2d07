"""A process that answers calls for `pool.Pool`: `python -m slime_tandem.tasks.pool_worker SOCKET PARENT MEMORY GUARDED`.

It is made to be killed: it holds nothing that cannot be made again. The system's own timer ends it when a call takes too long,
whatever that call does to the interpreter, and an orphan ends when it looks at its socket. With GUARDED=1 no text may be
evaluated as code, and none may start a process, write a file or reach a network: Python's audit events tell of it, and it is
refused. What is called is not known here. No torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from slime_tandem.errors import TandemError
from slime_tandem.extensions import said

HEAD = struct.Struct("!Q")
MAKING_S = 300.0
"""Seconds that making what answers may take: imports, a family of the user's."""
_LOOKS_S = 1.0
_BUSIEST = 20
"""How much slower than alone a busy machine may be."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_REFUSED = frozenset(
    {
        "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen", "os.kill",
        "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "shutil.rmtree", "os.remove", "os.rename",
        "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "pickle.find_class", "code.__new__",
        "function.__new__",
    }
)  # fmt: skip
"""Audit events (docs.python.org/3/library/audit_events.html) that reading an answer gives no reason for."""


_OF_NUMBERS = frozenset({("sympy.polys.monomials", "_build")})
"""Functions (module, name) that write a program of nothing but a count of variables, and evaluate that."""


class Guard:
    """The audit hook of a guarded worker. `on`: somebody's text is being read; `refused`: what it was about to do, or None."""

    def __init__(self) -> None:
        self.on, self.refused = False, ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Raises RuntimeError for what no text may do. Making scorers, and imports on the way, are free: they read files."""
        if not self.on:
            return
        writes = event == "open" and bool(args[2] & _WRITES)
        # eval, exec and compile of text alike.
        text = event == "compile" and args[0] is not None
        if (event in _REFUSED or writes or text) and not _is_library(sys._getframe(1)):
            self.refused = event
            raise RuntimeError(f"refused: {event}")


def _is_library(frame: FrameType | None) -> bool:
    """Whether a library is about its own: one of `_OF_NUMBERS`, or an import of what it now needs for the first time."""
    if frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _OF_NUMBERS:
        return True
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _parts(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its class and its parts if it is one of ours, else what it says."""
    if isinstance(error, TandemError):
        plain = isinstance(error.value, (str, int, float, bool, type(None)))
        value = error.value if plain else repr(error.value)
        return {"ours": type(error).__name__, "parts": [error.field, value, error.expected, error.remedy]}
    return {"ours": None, "parts": [said(error)[:500]]}


class Worker:
    """Answers on a socket, one call after the other."""

    def __init__(self, line: socket.socket, guard: Guard, *, guarded: bool) -> None:
        self._line, self._guard, self._guarded = line, guard, guarded
        self._made: dict[bytes, Callable[..., Any]] = {}

    def say(self, kind: str, **more: Any) -> None:
        """Send one message."""
        data = json.dumps({"kind": kind, **more}).encode()
        self._line.sendall(HEAD.pack(len(data)) + data)

    def serve(self) -> None:
        """Answer until the parent closes its side: EOFError."""
        self.say("ready")
        while True:
            timeout_s, calls = pickle.loads(receive(self._line))  # noqa: S301 - the parent's
            for recipe, args in calls:
                self._answer(recipe, args, timeout_s)

    def _answer(self, recipe: bytes, args: bytes, timeout_s: float) -> None:
        try:
            function = self._find(recipe)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, or a broken installation
            self.say("unmade", **_parts(error))
            return
        given, guard = pickle.loads(args), self._guard  # noqa: S301 - the parent's
        guard.refused = ""
        raised: BaseException | None = None
        value = None
        self._set_timers(timeout_s)
        try:
            guard.on = True
            value = function(*given)
        except BaseException as error:  # noqa: BLE001 - libraries raise time-outs past Exception
            raised = error
        guard.on = False
        self._set_timers(0.0)
        if guard.refused or isinstance(raised, (MemoryError, RecursionError)):
            self.say("limit")
        elif raised is None:
            self.say("value", value=value)
        elif isinstance(raised, (Exception, SystemExit)):
            self.say("raised", **_parts(raised))
        else:
            self.say("limit")

    def _set_timers(self, timeout_s: float) -> None:
        """Have the system end this process after so many seconds; 0: not any more."""
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)  # a library may have taken it
        if self._guarded:  # of its own time: what else the machine has to do must not change a reward
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s(timeout_s, self._guarded))

    def _find(self, recipe: bytes) -> Callable[..., Any]:
        if (made := self._made.get(recipe)) is None:
            self.say("making")
            signal.setitimer(signal.ITIMER_REAL, MAKING_S)
            try:
                path, module, name, args = pickle.loads(recipe)  # noqa: S301 - the parent's
                sys.path.extend(entry for entry in path if entry not in sys.path)
                made = self._made[recipe] = getattr(importlib.import_module(module), name)(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self.say("made")
        return made


def wall_s(timeout_s: float, guarded: bool) -> float:
    """Seconds on the wall that a call may take. A guarded one computes: its limit counts the process's own time."""
    return timeout_s * (_BUSIEST if guarded else 1)


def receive(line: socket.socket) -> bytes:
    """One message; raises EOFError where the other side has ended."""
    return _exactly(line, HEAD.unpack(_exactly(line, HEAD.size))[0])


def _exactly(line: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = line.recv(min(count - len(found), 2**20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOKS_S)
    if os.getpgid(0) == os.getpid():  # what the user's code has started ends, too
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(argv: list[str]) -> None:
    """Be a worker until the parent closes its side or ends."""
    number, parent, memory, guarded = map(int, argv)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()  # also in the middle of a call
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    guard = Guard()
    if guarded:
        sys.addaudithook(guard)
    with socket.socket(fileno=number) as line:
        Worker(line, guard, guarded=bool(guarded)).serve()


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed its side
        main(sys.argv[1:])
    os._exit(0)
