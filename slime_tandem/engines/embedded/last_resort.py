"""Ends the server a while after SIGTERM even where nothing of it can run any more.

Python's own handler of a signal runs when the interpreter is free: never, while some library holds it. But its part in C writes
the signal's number into a pipe at once (`signal.set_wakeup_fd`). A process of a few megabytes waits at the other end: it kills
the server that is still there `grace_s` seconds after a signal, and ends with it, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_WATCH = """
import os, select, signal, sys, time
server, grace_s = int(sys.argv[1]), float(sys.argv[2])
signal.signal(signal.SIGINT, signal.SIG_IGN)
while (told := os.read(0, 1)) and told[0] not in (signal.SIGTERM, signal.SIGINT):
    pass
end = time.monotonic() + grace_s
while told and (left := end - time.monotonic()) > 0:
    if select.select([0], [], [], left)[0]:
        told = os.read(0, 1)
if told:
    os.kill(server, signal.SIGKILL)
"""


class LastResort:
    """Watches this process from its making until `end`. To be made in the main thread, after the handlers of signals."""

    def __init__(self, grace_s: float) -> None:
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(grace_s)]
        nothing = subprocess.DEVNULL
        # Of this process's environment, in which a key may be, no more than an interpreter may need.
        env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            self._watcher = subprocess.Popen(command, stdin=read, stdout=nothing, stderr=nothing, env=env)  # noqa: S603
        finally:
            os.close(read)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def end(self) -> None:
        """Stop watching."""
        signal.set_wakeup_fd(self._before)
        os.close(self._write)  # the watcher reads the end, and ends
        self._watcher.wait()
