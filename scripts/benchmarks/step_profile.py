"""Profiles one step of a run of slime: the rollout manager's Python by py-spy, the senior's engine and the trainer by torch.

`slime_step.py --profile` makes a `StepProfile` beside a run, gives slime its own profiler's flags, and keeps what is found.
The profilers slow that step, so that its seconds are no measurement. It reads the run's log and starts py-spy.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traces import gpu_time, python_time

from slime_tandem.engines.processes import DIRECT

DECODE_STEPS = 10
"""Batches of the engine that SGLang's profiler records."""
AFTER_S = 1.0
"""From the step's begin until then it prefills."""
RATE_HZ = 200
_ENGINE = re.compile(r"Ports for engine 0: \{'host': '([^']+)', 'port': (\d+)")
_NEW_NETWORK = 0x40000000


def slime_flags(step: int, folder: Path) -> list[str]:
    """slime's own flags, with which its trainer records step `step` into `folder`."""
    flags = ["--use-pytorch-profiler", "--profile-target", "train_overall"]
    return [
        *flags,
        "--profile-step-start",
        str(step),
        "--profile-step-end",
        str(step + 1),
        "--tensorboard-dir",
        str(folder),
    ]


class StepProfile:
    """Waits until step `step` of the run in `work` begins, and records it; `result` ends it.

    `processes(name)`: process ids of the run by the beginning of their command line. `begun(log)`: how many steps have ended.
    """

    def __init__(
        self,
        work: Path,
        step: int,
        begun: Callable[[str], int],
        processes: Callable[[bytes], Sequence[int]],
        *,
        gpu: bool,
    ) -> None:
        self._log, self._folder, self._step, self._begun = work / "train.log", work / "profile", step, begun
        self._processes, self._activity = processes, "GPU" if gpu else "CPU"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._ended, self._said = threading.Event(), dict[str, str]()
        self._thread = threading.Thread(target=self._watch, name="step-profile", daemon=True)
        self._thread.start()

    def result(self) -> dict[str, Any]:
        """What was found, by `manager`, `engine`, `trainer`; an `error` where nothing was."""
        self._ended.set()
        self._thread.join(timeout=60)
        raw = self._folder / "manager.raw"
        found: dict[str, Any] = {
            "step": self._step,
            "manager": python_time(raw.read_text(errors="replace").splitlines())
            if raw.exists()
            else {"error": "no samples"},
            "engine": traced(self._folder / "engine", DECODE_STEPS),
            "trainer": traced(self._folder, 1),
        }
        for part, why in self._said.items():
            found[part] |= {"error": why}
        return found

    def _steps_done(self) -> int:
        return self._begun(self._log.read_text(errors="replace")) if self._log.exists() else 0

    def _watch(self) -> None:
        while self._steps_done() < self._step:
            if self._ended.wait(0.5):
                return
        sampler = self._sample()
        time.sleep(AFTER_S)
        self._trace_engine()
        while self._steps_done() <= self._step and not self._ended.wait(0.5):
            pass
        if sampler is not None:
            sampler.send_signal(signal.SIGINT)  # it then writes what it has
            try:
                sampler.wait(timeout=30)
            except subprocess.TimeoutExpired:
                sampler.kill()
                sampler.wait()

    def _sample(self) -> subprocess.Popen[bytes] | None:
        program, found = shutil.which("py-spy"), self._processes(b"ray::RolloutManager")
        if program is None or not found:
            self._said["manager"] = (
                "py-spy is not on the PATH" if program is None else "no process of the rollout manager"
            )
            return None
        command = [program, "record", "--pid", str(found[0]), "--rate", str(RATE_HZ), "--format", "raw", "--gil"]
        with (self._folder / "py-spy.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--output", str(self._folder / "manager.raw")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _trace_engine(self) -> None:
        found, manager = _ENGINE.search(self._log.read_text(errors="replace")), self._processes(b"ray::RolloutManager")
        if found is None or not manager:
            self._said["engine"] = "the log names no engine"
            return
        body = {"output_dir": str(self._folder / "engine"), "num_steps": DECODE_STEPS, "activities": [self._activity]}
        try:
            enter_network(manager[0])
            DIRECT.open(_post(f"http://{found[1]}:{found[2]}/start_profile", body), timeout=60).close()
        except OSError as error:
            self._said["engine"] = str(error)


def _post(url: str, body: Mapping[str, Any]) -> Any:
    import urllib.request

    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def enter_network(pid: int) -> None:
    """Move this thread, and no other, into the network of process `pid`. Raises OSError where that is not allowed."""
    theirs = f"/proc/{pid}/ns/net"
    if os.readlink(theirs) == os.readlink("/proc/thread-self/ns/net"):
        return
    with open(theirs, "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), theirs)


def traced(folder: Path, steps: float) -> dict[str, Any]:
    """`gpu_time` of the one trace that lies in `folder` itself."""
    for pattern, opened in (("*.json.gz", gzip.open), ("*.json", open)):
        for file in sorted(folder.glob(pattern)):
            try:
                with opened(file, "rt", encoding="utf-8", errors="replace") as text:
                    return gpu_time(json.load(text)["traceEvents"], steps)
            except (OSError, EOFError, ValueError, KeyError) as error:
                return {"error": f"{file.name}: {type(error).__name__}: {error}"}
    return {"error": "no trace"}


def table(run: str, found: Mapping[str, Any]) -> str:
    """What was found, as Markdown."""
    lines = [
        f"Step {found['step']} of `{run}`, under the profilers:",
        "",
        "| whose | what | share or ms |",
        "|---|---|---|",
    ]
    for whose in ("engine", "trainer"):
        part = found[whose]
        lines += [f"| {whose} | {part['error']} | |"] if "error" in part else []
        if "by_kind" in part:
            lines.append(f"| {whose} | a step, of the clock; GPU busy | {part['step_ms']}; {part['busy_ms']} |")
            lines += [f"| {whose} | {kind} | {ms} |" for kind, ms in part["by_kind"].items()]
    part = found["manager"]
    lines += [f"| manager | {part['error']} | |"] if "error" in part else []
    for key in ("by_library", "under_ours"):
        lines += [
            f"| manager, {key.replace('_', ' ')} | {name} | {share:.3f} |" for name, share in part.get(key, {}).items()
        ]
    return "\n".join(lines)
