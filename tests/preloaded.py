"""A Python that has imported what servers need: each server is forked from it, and real SGLang forks its own processes.

SGLang is three processes, and each takes ten CPU seconds and more to import; an embedded server takes four. The suite starts
dozens. What runs is the server's own code with the command, environment and files of a start as users make it; it is a
process with signals, an exit code and a group of its own. Servers that must start as users start them take the plain
interpreter: one of the conformance tests' two, those of tests/engines/test_processes.py, one of those that shall not come up.

Run by the tests' Python it is `python`, a program that takes a Python's arguments; `serve` runs in the servers'. Standard
library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

READ_AT_IMPORT = ("SGLANG_", "TORCH_", "OMP_")
MODULES = "PRELOADED_MODULES"
"""Not in a command line, where tests look for servers."""
RETRACT = "SGLANG_TEST_RETRACT"
"""SGLang's own switch: every few steps a response is thrown out and prefilled again, however much room there is."""
READ_LATER = {"SGLANG_CPU_OMP_THREADS_BIND", RETRACT}
ON_A_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)
EMBEDDED = (
    "slime_tandem.engines.embedded.server",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k not in READ_LATER}


class Preloaded:
    """Starts the process that imports `modules`; a context manager. `python` is the interpreter to name in a server's command.

    What is no server, or has other settings that are read at import than `environment`, is run by `real` itself.
    """

    def __init__(self, real: str, modules: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._real, self._modules, self._environment = real, modules, environment
        self._socket, script = folder / "socket", folder / "python"
        words = (sys.executable, "-IS", __file__, "ask", str(self._socket), real)
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o700)
        self.python = str(script)

    def __enter__(self) -> Self:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._socket))
        listener.listen()
        self._process = subprocess.Popen(
            [self._real, "-W", "ignore", __file__, "serve", str(listener.fileno())],
            env={**self._environment, MODULES: " ".join(self._modules)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
        listener.close()
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()  # the end of its input is its end


def ask(path: str, real: str, arguments: list[str]) -> int:
    """`real ARGUMENTS` in a fork of the process behind the socket `path`; its exit code. Its life hangs on this process's."""
    server = arguments[:1] in (["-m"], ["-c"]) and any(a.startswith("--port") for a in arguments)
    if not server:
        os.execv(real, [real, *arguments])
    order = {"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd(), "parent": os.getppid()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(order).encode() + b"\n"], [0, 1, 2])
        answers = connection.makefile()
        pid = int(answers.readline())
        if not pid:
            os.execv(real, [real, *arguments])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: os.kill(pid, n))
        while not select.select([connection], [], [], 0.2)[0]:
            if os.getppid() != order["parent"]:
                return 1  # and with this process its server
        return int(answers.readline() or 1)


def serve(descriptor: int) -> None:
    """Import, then fork a server for each connection, until standard input ends."""
    import importlib

    for name in os.environ[MODULES].split():
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as listener:
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _watch_over(connection)
    os._exit(0)  # an interpreter that has SGLang takes seconds to tear itself down


def _watch_over(connection: socket.socket) -> None:
    """The process between: it has a server as its child, and tells of its start and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    order = json.loads(data)
    same = _settings(order["environment"]) == _settings(os.environ)
    pid = os.fork() if same else 0
    if same and pid == 0:
        _be_server(connection, order, descriptors)
    with contextlib.suppress(BrokenPipeError):  # who asked may be gone
        connection.sendall(b"%d\n" % pid)
        if same:
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _be_server(connection: socket.socket, order: dict[str, Any], descriptors: list[int]) -> None:
    import multiprocessing
    import runpy
    import threading

    def end_with_asker() -> None:
        connection.recv(1)  # nothing is ever sent: the end
        os.killpg(0, signal.SIGKILL)

    code: Any = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        if RETRACT in os.environ:  # read at import, but what it sets can still be set
            sys.modules["sglang.srt.managers.scheduler"].TEST_RETRACT = True  # type: ignore[attr-defined]
        os.getppid = lambda: order["parent"]  # what the server is told to live as long as
        threading.Thread(target=end_with_asker, daemon=True).start()
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[attr-defined]
        way, what, *arguments = order["arguments"]
        sys.argv = [way, *arguments]
        if way == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "-c", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter: the traceback, and exit code 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3], sys.argv[4:]))
