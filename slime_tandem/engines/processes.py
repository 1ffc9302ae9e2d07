"""Starts, watches, stops and restarts a server as a child process; touches no process that it did not start.

`ServerProcess` is the embedded server; `engines.sglang.SglangProcess` is real SGLang, `engines.fused.launch.FusedServer`
SGLang with two models inside. All are `ChildServer`s.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from slime_tandem.engines.serve_options import DEFAULT, ServeOptions
from slime_tandem.errors import EngineUnavailableError

_LOG_LINES = 20
_POLL_S = 0.05
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A server of our own is behind no proxy, whatever http_proxy says."""


class ChildServer(ABC):
    """A server for the model folder `model`, as a child process with a session (so a process group) of its own.

    Ctrl-C in the terminal therefore reaches the parent alone, and `stop` reaches every process that the child started. Its
    output goes to `log_file`, or where this process's own goes for None. `options.port` 0 takes any free port at the first
    start; a restart uses the same one again. `options.threads` bounds OpenMP's threads in each process. Use as a context
    manager, or `start` and `stop`.
    """

    health_timeout_s = 1.0
    """Seconds to wait for one answer of /health."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: ServeOptions,
        *,
        log_file: str | os.PathLike[str] | None,
        start_timeout_s: float,
    ) -> None:
        self.model = os.fspath(model)
        self.log_file = None if log_file is None else Path(log_file)
        self.host = options.host
        self._options = options
        self._port = options.port
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line of the next start; the child must end by itself when this process dies."""

    @abstractmethod
    def _find_port(self) -> bool:
        """Whether `_port` is known to be the child's own port, so that another server there is not taken for it."""

    def _environment(self) -> Mapping[str, str]:
        """Environment variables that the child gets besides this process's own."""
        return {}

    @property
    def url(self) -> str:
        """Base URL of the server; known once it was started."""
        assert self._port, "started servers have a port"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the child, None without one."""
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Whether the child process runs."""
        return self._process is not None and _exit_code(self._process) is None

    def start(self) -> None:
        """Start and wait until healthy. Raises EngineUnavailableError, with the log's last lines, if it does not come up."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the child without waiting; several servers come up faster side by side. `wait_ready` must follow."""
        assert not self.is_alive(), "start of a running server"
        self.stop()  # what a child that died by itself may have left
        if self.log_file is not None:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
        # The thread pool must not spin: several processes share the cores (OpenMP reads these at import).
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(self._options.threads)}
        env["TOKENIZERS_PARALLELISM"] = "false"
        env.update(self._environment())
        command = self._command()
        with contextlib.nullcontext() if self.log_file is None else self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Wait until /health answers 200. Raises EngineUnavailableError and leaves no process behind if it does not."""
        process = self._process
        assert process is not None, "launch comes first"
        end = time.monotonic() + self._start_timeout_s
        try:
            while not self._healthy():
                if (code := _exit_code(process)) is not None:
                    raise self._unavailable(f"exit code {code}", "a server that comes up")
                if time.monotonic() > end:
                    raise self._unavailable("no answer", f"a healthy server within {self._start_timeout_s:g} s")
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 15.0) -> None:
        """SIGTERM to the child, SIGKILL after `timeout_s` seconds, then SIGKILL to what it started; nothing if none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        if _exit_code(process) is None:
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + timeout_s
            while _exit_code(process) is None and time.monotonic() < end:
                time.sleep(_POLL_S)
        if process.returncode is None:
            # Not reaped yet, so its process id, which is the group's too, cannot have passed to a stranger.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait(self) -> int:
        """Wait until the child ends by itself; returns its exit code. `stop` must follow: the child may have left processes."""
        assert self._process is not None, "launch comes first"
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        code = _exit_code(self._process)
        assert code is not None
        return code

    def restart(self) -> None:
        """Stop if need be, and start again on the same port with the weights of `model`."""
        self.stop()
        self.start()

    def _healthy(self) -> bool:
        if not self._find_port():
            return False
        try:
            with DIRECT.open(f"{self.url}/health", timeout=self.health_timeout_s) as response:
                return bool(response.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def _unavailable(self, value: str, expected: str) -> EngineUnavailableError:
        if self.log_file is None:
            return EngineUnavailableError(f"server of {self.model}", value, expected, "read its output above")
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        tail = "\n".join(f"  | {line}" for line in lines)
        remedy = f"read the end of its log {self.log_file}"
        return EngineUnavailableError(f"server of {self.model}", value, expected, remedy, tail)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of `process` (minus the signal if one ended it), None while it runs; left unreaped, see `ChildServer.stop`."""
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class ServerProcess(ChildServer):
    """An embedded server for the model folder `model`, as a child process; it ends when its parent dies, even by SIGKILL.

    `options.port_file` is not the caller's to choose: it gives this process the child's port.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: ServeOptions = DEFAULT,
        *,
        log_file: str | os.PathLike[str],
        start_timeout_s: float = 120.0,
    ) -> None:
        assert options.port_file is None
        super().__init__(model, options, log_file=log_file, start_timeout_s=start_timeout_s)
        self._port_file: Path | None = None

    def _environment(self) -> Mapping[str, str]:
        return self._options.environment()

    def _command(self) -> list[str]:
        handle, port_file = tempfile.mkstemp(prefix="slime-tandem-port-")
        os.close(handle)
        self._port_file = Path(port_file)
        options = replace(self._options, port=self._port, port_file=port_file)
        child = "slime_tandem.engines.embedded.child"
        return [sys.executable, "-m", child, str(os.getpid()), self.model, *options.argv()]

    def wait_ready(self) -> None:
        """As for every server; the file that held the port is gone afterwards."""
        try:
            super().wait_ready()
        finally:
            assert self._port_file is not None
            self._port_file.unlink(missing_ok=True)

    def stop(self, timeout_s: float = 15.0) -> None:
        """As for every server, also of one that nobody waited for."""
        super().stop(timeout_s)
        if self._port_file is not None:
            self._port_file.unlink(missing_ok=True)

    def _find_port(self) -> bool:
        # Written once the child has the port.
        assert self._port_file is not None
        text = self._port_file.read_text(encoding="utf-8").strip()
        if not text:
            return False
        self._port = int(text)
        return True
