"""`slime-tandem ARGUMENTS` in a process of its own that need not import torch and Megatron: it is forked from one that has.

A command that starts as users start it (`python -m slime_tandem.cli`) spends seconds on imports, and the runs that are killed,
interrupted and resumed are many. What a process is to the outside stays: an id, signals, an exit code, output, servers as its
children.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from .waiting import PATIENCE_S, wait_until

_PARENT = """
import json, os, signal, sys
import slime_tandem.cli, slime_tandem.local.run, slime_tandem.megatron.policy
alive = set()
for line in sys.stdin:
    order = json.loads(line)
    if "arguments" in order:
        answer = os.fork()
        if answer == 0:
            for number, name in enumerate((os.devnull, order["out"], order["err"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
            if order["ignores_sigint"]:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            code = 1
            try:
                sys.executable = order["python"]
                code = slime_tandem.cli.main(order["arguments"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        alive.add(answer)
    else:
        pid, status = os.waitpid(order["poll"], os.WNOHANG)
        alive.discard(pid)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    print(json.dumps(answer), flush=True)
for pid in alive:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
os._exit(0)
"""


class Command:
    """A running command, as far as tests need a `subprocess.Popen` of one."""

    def __init__(self, parent: Forks, pid: int, out: Path, err: Path) -> None:
        self.pid, self.returncode = pid, None
        self._parent, self._out, self._err = parent, out, err

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode: int | None = self._parent.ask(poll=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        """What it wrote to stdout and stderr, once it has ended."""
        wait_until(lambda: self.poll() is not None)
        return self._out.read_text(errors="replace"), self._err.read_text(errors="replace")


class Forks:
    """The process that has imported everything; a context manager, which leaves no command behind."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-W", "ignore", "-c", _PARENT]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate(timeout=PATIENCE_S)

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, *arguments: str, folder: Path, ignores_sigint: bool = False) -> Command:
        """Start `slime-tandem` with these arguments; its output goes to files in `folder`."""
        out, err = folder / "stdout.txt", folder / "stderr.txt"
        out.unlink(missing_ok=True)
        err.unlink(missing_ok=True)
        how = {"out": str(out), "err": str(err), "python": sys.executable, "ignores_sigint": ignores_sigint}
        return Command(self, self.ask(arguments=arguments, **how), out, err)
