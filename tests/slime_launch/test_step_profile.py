"""The profile of a step: samples and kernels counted by hand, and each part recorded when its step begins, with stand-ins."""

from __future__ import annotations

import doctest
import gzip
import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ..waiting import wait_until

SCRIPTS = Path(__file__).parents[2] / "scripts"
KERNELS = [
    {"cat": "kernel", "ts": 1000, "dur": 300, "name": "nvjet_hsh_128"},
    {"cat": "kernel", "ts": 1200, "dur": 200, "name": "_read"},
    {"cat": "cpu_op", "ts": 0, "dur": 9000, "name": "aten::mm"},
    {"cat": "gpu_memcpy", "ts": 1900, "dur": 100, "name": "Memcpy DtoH"},
]
STAND_IN = """#!{python}
import signal, sys
def end(*_):
    open(sys.argv[sys.argv.index("--output") + 1], "w").write("run (slime/a.py:1);generate (/r/slime_tandem/b.py:2) 4\\n")
    sys.exit(0)
signal.signal(signal.SIGINT, end)
open(sys.argv[sys.argv.index("--output") + 1] + ".begun", "w").write(" ".join(sys.argv[1:4]))
signal.pause()
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS / "benchmarks"))
    return importlib.import_module("step_profile")


@pytest.fixture
def engine() -> Iterator[tuple[str, list[Any]]]:
    """(how slime logs its address, what was asked) of a server that writes a trace, as SGLang does."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            Path(body["output_dir"]).mkdir(parents=True)
            with gzip.open(Path(body["output_dir"]) / "x.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": KERNELS}, file)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"{{'host': '127.0.0.1', 'port': {server.server_port}, 'nccl_port': 1}}", asked
        server.shutdown()
        thread.join()


def test_examples_and_kernels_by_hand(module: Any) -> None:
    traces = importlib.import_module("traces")
    assert doctest.testmod(traces).failed == 0
    found = traces.gpu_time(KERNELS, 2)
    assert (found["step_ms"], found["busy_ms"], found["kernels"]) == (0.5, 0.25, 1.5), (
        "300 + 100 of 200 + 100 us, by two"
    )
    assert found["by_kind"] == {"matrix products": 0.15, "attention": 0.1, "copies": 0.05}
    assert "error" in traces.gpu_time(KERNELS[2:3], 1)


def begun(log: str) -> int:
    return log.count("step done")


def test_a_step_is_recorded_when_it_begins(
    module: Any, engine: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, asked = engine
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "AFTER_S", 0.0)
    log, folder = tmp_path / "train.log", tmp_path / "profile"
    profile = module.StepProfile(tmp_path, 1, begun, lambda name: [os.getpid()], gpu=True)
    log.write_text(f"Ports for engine 0: {address}\n")
    sampled = folder / "manager.raw.begun"
    assert not sampled.exists()
    log.write_text(f"{log.read_text()}step done\n")
    wait_until(lambda: asked and sampled.exists())
    assert sampled.read_text() == f"record --pid {os.getpid()}"
    assert asked == [("/start_profile", {"output_dir": str(folder / "engine"), "num_steps": 10, "activities": ["GPU"]})]
    (folder / "train_overall_rank_0.pt.trace.json").write_text(json.dumps({"traceEvents": KERNELS}))
    log.write_text(f"{log.read_text()}step done\n")
    wait_until((folder / "manager.raw").exists)
    found = profile.result()
    assert found["manager"]["under_ours"] == {"b.py generate": 1.0}
    assert found["engine"]["by_kind"]["attention"] == 0.02
    assert found["trainer"]["busy_ms"] == 0.5
    shown = module.table("plain", found)
    assert "| engine | matrix products | 0.03 |" in shown
    assert "| manager, under ours | b.py generate | 1.000 |" in shown


def test_what_could_not_be_recorded_says_why(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "AFTER_S", 0.0)
    (tmp_path / "train.log").write_text("step done\nstep done\n")
    profile = module.StepProfile(tmp_path, 0, begun, lambda name: [], gpu=True)
    found = profile.result()
    assert found["manager"] == {"error": "py-spy is not on the PATH"}
    assert found["engine"] == {"error": "the log names no engine"}
    assert found["trainer"] == {"error": "no trace"}
    assert "| manager | py-spy is not on the PATH | |" in module.table("plain", found)


def test_a_run_that_ended_before_its_step_has_no_profile(module: Any, tmp_path: Path) -> None:
    found = module.StepProfile(tmp_path, 3, begun, lambda name: [], gpu=False).result()
    assert [found[part]["error"] for part in ("manager", "engine", "trainer")] == ["no samples", "no trace", "no trace"]
