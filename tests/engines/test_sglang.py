"""The launcher of real SGLang, with a stand-in package that starts a process of its own; SGLang itself: tests/conformance."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.engines.sglang import CPU_ARGS, SglangProcess
from slime_tandem.errors import ConfigError, DataError, EngineUnavailableError, PortInUseError

from ..waiting import wait_until

FAKE = """
import http.server, os, pathlib, pickle, subprocess, sys, types
API_KEY = "SLIME_TANDEM_API_KEY"
def prepare_server_args(argv):
    return types.SimpleNamespace(argv=argv, api_key=None)
def kill_process_tree(pid, include_parent):
    pass
def run_server(server_args):
    print(f"{server_args=}", API_KEY in os.environ, pickle.loads(pickle.dumps(server_args.api_key)), flush=True)
    serve(server_args.argv, server_args.api_key)
def serve(args, key):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(os.environ["FAKE_NOTE"]).write_text(f"{sleeper.pid}\\n" + " ".join(args))
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = key is None or self.path == "/health" or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if known else 401)
            self.end_headers()
    if "--fail" in args:
        sys.exit("no such model")
    last = len(args) - 1 - args[::-1].index("--port")
    http.server.HTTPServer(("127.0.0.1", int(args[last + 1])), Handler).serve_forever()
"""


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in notes its own child's process id and its arguments."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    for package in ("sglang", "sglang/srt"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "plugins.py").write_text("def load_plugins(): pass\n")
    (tmp_path / "sglang" / "launch_server.py").write_text(FAKE)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}" if path else str(tmp_path))
    monkeypatch.setenv("FAKE_NOTE", str(tmp_path / "note"))
    return tmp_path / "note"


def test_stopping_ends_the_whole_tree_and_a_restart_keeps_the_port(note: Path, tmp_path: Path) -> None:
    extra = ["--dtype", "bfloat16"]
    with SglangProcess("a model", python=sys.executable, log_file=tmp_path / "log", extra_args=extra) as server:
        child, args = note.read_text().split("\n")
        assert args.startswith("--model-path a model --host 127.0.0.1")
        assert " ".join(CPU_ARGS) in args
        assert args.index("--dtype bfloat16") > args.index("--dtype float32")
        assert runs(int(child))
        url = server.url
        server.restart()
        assert server.url == url
        wait_until(lambda pid=int(child): not runs(pid))
        child = note.read_text().split("\n")[0]
    assert not server.is_alive()
    wait_until(lambda pid=int(child): not runs(pid))


def test_the_key_is_checked_and_shown_nowhere(note: Path, tmp_path: Path) -> None:
    key = "a-key-that-shows"
    options = ServeOptions(api_key=key)
    with SglangProcess("m", options, python=sys.executable, log_file=tmp_path / "log") as server:
        asked = urllib.request.Request(f"{server.url}/model_info", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{server.url}/model_info")
        refused.value.close()
        for pid in (server.pid, int(note.read_text().split("\n")[0])):
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert key not in Path(f"/proc/{note.read_text().split(chr(10))[0]}/environ").read_text()
    log = (tmp_path / "log").read_text()
    assert "api_key=***" in log
    assert "False not the key" in log, "out of the environment, and not handed on"
    assert key not in log


@pytest.mark.parametrize("flag", ["--api-key", "--api-key=x", "--api-k", "--admin-api-key"])
def test_a_key_among_the_flags_is_refused_unseen(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match=r"extra_args='\(not shown\)'.*api_key_env"):
        SglangProcess("m", python=sys.executable, log_file=tmp_path / "log", extra_args=[flag, "x"])
    with pytest.raises(DataError, match=r"host='0\.0\.0\.0'"):
        SglangProcess("m", ServeOptions(host="0.0.0.0"), python=sys.executable, log_file=tmp_path / "log")


def test_what_a_failed_server_left_is_ended_too(note: Path, tmp_path: Path) -> None:
    server = SglangProcess("m", python=sys.executable, log_file=tmp_path / "log", device="cuda", extra_args=["--fail"])
    with pytest.raises(EngineUnavailableError, match=r"exit code 1.*[\s\S]*no such model"):
        server.start()
    child, args = note.read_text().split("\n")
    assert "--device" not in args
    wait_until(lambda pid=int(child): not runs(pid))


def test_the_tree_dies_with_a_killed_parent(note: Path, tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import sys, time
        from slime_tandem.engines.sglang import SglangProcess
        server = SglangProcess("m", python=sys.executable, log_file={str(tmp_path / "log")!r})
        server.start()
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()), int(note.read_text().split("\n")[0])]
        assert all(map(runs, pids))
        parent.kill()
    wait_until(lambda: not any(map(runs, pids)))


def test_unusable_settings_are_told(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match=r"python='/no/python'.*sglang_cpu\.sh"):
        SglangProcess("m", python="/no/python", log_file=tmp_path / "log").start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port={port}"):
            SglangProcess("m", ServeOptions(port=port), python=sys.executable, log_file=tmp_path / "log").start()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(tmp_path: Path, port: int) -> None:
    server = SglangProcess("m", ServeOptions(port=port), python=sys.executable, log_file=tmp_path / "log")
    with pytest.raises(PortInUseError, match=f"port={port}: .*0-65535"):
        server.launch()
