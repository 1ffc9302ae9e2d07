"""Starts, watches, stops and restarts an embedded server as a child process; touches no process that it did not start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from slime_tandem.errors import EngineUnavailableError, explain

_API_KEY_ENV = "SLIME_TANDEM_API_KEY"
_LOG_LINES = 20


class ServerProcess:
    """An embedded server for the model folder `model`, as a child process.

    The child has its own session, so that Ctrl-C in the terminal reaches the parent alone, and it ends by itself when the
    parent dies, even by SIGKILL. Its output goes to `log_file`. `port` 0 takes any free port at the first start; a restart
    uses the same one again. Use as a context manager, or `start` and `stop`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        log_file: str | os.PathLike[str],
        host: str = "127.0.0.1",
        port: int = 0,
        dtype: str = "float32",
        max_batch: int = 256,
        cache_tokens: int = 65536,
        threads: int = 1,
        api_key: str | None = None,
        served_name: str | None = None,
        weight_version: str = "default",
        trust_remote_code: bool = False,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.model = os.fspath(model)
        self.log_file = Path(log_file)
        self.host = host
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._api_key = api_key
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._options = [
            "--host", host, "--dtype", dtype, "--max-batch", str(max_batch), "--cache-tokens", str(cache_tokens),
            "--threads", str(threads), "--weight-version", weight_version,
        ]  # fmt: skip
        if served_name is not None:
            self._options += ["--served-name", served_name]
        if trust_remote_code:
            self._options.append("--trust-remote-code")
        if api_key is not None:
            self._options += ["--api-key-env", _API_KEY_ENV]

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base URL of the server; known once it was started."""
        assert self._port, "started servers have a port"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running child, None without one."""
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Whether the child process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until healthy. Raises EngineUnavailableError, with the log's last lines, if it does not come up."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the child without waiting; several servers come up faster side by side. `wait_ready` must follow."""
        assert not self.is_alive(), "start of a running server"
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        # The thread pool must not spin: several processes share the cores (OpenMP reads these at import).
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(self._threads)}
        env["TOKENIZERS_PARALLELISM"] = "false"
        if self._api_key is not None:
            env[_API_KEY_ENV] = self._api_key
        handle, port_file = tempfile.mkstemp(prefix="slime-tandem-port-")
        os.close(handle)
        self._port_file = Path(port_file)
        command = [
            sys.executable, "-m", "slime_tandem.engines.child", str(os.getpid()), self.model, "--port", str(self._port),
            "--port-file", port_file, *self._options,
        ]  # fmt: skip
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Wait until /health answers 200. Raises EngineUnavailableError and leaves no process behind if it does not."""
        process = self._process
        assert process is not None, "launch comes first"
        end = time.monotonic() + self._start_timeout_s
        try:
            while not self._healthy():
                if process.poll() is not None:
                    raise self._unavailable(f"exit code {process.returncode}", "a server that comes up")
                if time.monotonic() > end:
                    raise self._unavailable("no answer", f"a healthy server within {self._start_timeout_s:g} s")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        finally:
            self._port_file.unlink(missing_ok=True)

    def stop(self, timeout_s: float = 15.0) -> None:
        """SIGTERM, then SIGKILL after `timeout_s` seconds, to the child that we started; nothing if none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

    def restart(self) -> None:
        """Stop if need be, and start again on the same port with the weights of `model`."""
        self.stop()
        self.start()

    def _healthy(self) -> bool:
        # Written once the child has the port: another server on a port we asked for must not be taken for ours.
        text = self._port_file.read_text(encoding="utf-8").strip()
        if not text:
            return False
        self._port = int(text)
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1.0) as response:  # noqa: S310 - our own http URL
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _unavailable(self, value: str, expected: str) -> EngineUnavailableError:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        tail = "\n".join(f"  | {line}" for line in lines)
        message = explain(f"server of {self.model}", value, expected, f"read the end of its log {self.log_file}")
        return EngineUnavailableError(f"{message}\n{tail}" if tail else message)
