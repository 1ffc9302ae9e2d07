"""Real SGLang as a child process, from a Python environment of its own; on a CPU with the flags that work there.

SGLang pins versions that are not this project's, so its interpreter is named, not imported from. `scripts/sglang_cpu.sh`
makes an environment for the CPU; docs/sglang.md says what holds there and what does not.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from slime_tandem.engines import sglang_child
from slime_tandem.engines.processes import ChildServer
from slime_tandem.engines.serve_options import DEFAULT, ServeOptions
from slime_tandem.errors import ConfigError, EngineUnavailableError, PortInUseError

CPU_ARGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32",
    "--disable-cuda-graph", "--mem-fraction-static", "0.3", "--max-total-tokens", "4096", "--sleep-on-idle",
)  # fmt: skip
"""Flags for a CPU without AMX and without the `sgl_kernel` package: no kernel of it is called with these.

Without `--sleep-on-idle` a scheduler that has nothing to do takes a whole core.
"""

_PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to connections (32768 and up): a connection to one of those, before the server listens, can
get the same number at both ends; it then talks to itself, and the server finds its port taken."""

_KEY_FLAGS = ("--api-key", "--admin-api-key")


def refuse_key_flags(args: Sequence[str], field: str) -> None:
    """Raise ConfigError for a flag, or its beginning, that would put a key into a command line and SGLang's log."""
    for arg in args:
        name = arg.partition("=")[0]
        if len(name) > 4 and any(flag.startswith(name) for flag in _KEY_FLAGS):
            expected = f"no {name}: every user of the machine can read a command line, and SGLang logs its arguments"
            raise ConfigError(field, "(not shown)", expected, "put the key into a variable and name that: api_key_env")


class SglangProcess(ChildServer):
    """Real SGLang for the model folder `model`; ends, with all its processes, when this process dies, even by SIGKILL.

    `python` is an interpreter that has SGLang. `device` "cpu" adds CPU_ARGS. `extra_args` win over all others but the port
    (SGLang takes the last of a repeated flag). Of `options` it takes host, port, threads, weight version and key, and raises
    ConfigError for others; port 0 chooses a free one. Raises PortInUseError at launch for a busy port.
    """

    # SGLang 0.5.15 answers /health by generating a token, after a sleep of a second (http_server.py:633).
    health_timeout_s = 10.0

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: ServeOptions = DEFAULT,
        *,
        python: str | os.PathLike[str],
        log_file: str | os.PathLike[str],
        device: Literal["cpu", "cuda"] = "cpu",
        extra_args: Sequence[str] = (),
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(model, options, log_file=log_file, start_timeout_s=start_timeout_s)
        options.only("host", "port", "threads", "weight_version", "api_key", server="SglangProcess")
        options.require_key()
        refuse_key_flags(extra_args, "extra_args")
        self.python = os.fspath(python)
        self._device = device
        self._flags = [
            "--model-path", self.model, "--host", options.host, "--weight-version", options.weight_version,
            *(CPU_ARGS if device == "cpu" else ()), *extra_args,
        ]  # fmt: skip

    def launch(self) -> None:
        """Start without waiting. Raises PortInUseError, and EngineUnavailableError if `python` cannot be run."""
        try:
            super().launch()
        except OSError as error:
            raise EngineUnavailableError("python", self.python, f"an interpreter that has SGLang ({error.strerror})",
                    "make one with scripts/sglang_cpu.sh") from None  # fmt: skip

    def _environment(self) -> Mapping[str, str]:
        if self._device != "cpu":
            return self._options.environment()
        # Nothing is compiled: SGLang's torch.compile'd helpers would want a C++ compiler and half a minute.
        return {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", **self._options.environment()}

    def _command(self) -> list[str]:
        self._port = free_port(self.host, self._port)
        source = Path(sglang_child.__file__).read_text(encoding="utf-8")
        return [self.python, "-c", source, str(os.getpid()), *self._flags, "--port", str(self._port)]

    def _find_port(self) -> bool:
        return True


def free_port(host: str, port: int = 0) -> int:
    """`port`, or any free one for 0. Raises PortInUseError, so that a stranger's server is never taken for ours."""
    # SGLang 0.5.15 adds 10000 to its port for another listener (server_args.py:3003) and refuses what is above 65535 then;
    # the system's own choice of a free port may be too high.
    candidates = [port] if port else random.SystemRandom().sample(_PORTS, 50)
    for candidate in candidates:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, candidate))
            except (OSError, OverflowError) as error:  # OverflowError: no number of a port
                reason = error.strerror if isinstance(error, OSError) else str(error)
                continue
            return candidate
    raise PortInUseError("port", port, f"a free port on {host} ({reason})", "stop the other process, or use 0")
