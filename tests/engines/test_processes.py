"""Server processes: they die with their parent, come back after a kill, end cleanly, and say why they do not start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.embedded.server import main, serve
from slime_tandem.engines.processes import DIRECT, ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.errors import DataError, EngineUnavailableError, ModelError, PortInUseError
from slime_tandem.protocol import GenerateRequest

from ..in_process import ThreadServer
from ..waiting import PATIENCE_S, wait_until

ASK = GenerateRequest("r", (5, 6, 7), 5, sampling_seed=1)


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_of_our_own_is_behind_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine behind a proxy has http_proxy set, and nothing that excepts the loopback from it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # urlopen keeps its first one, with the proxies of that moment
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        try:
            with DIRECT.open(url, timeout=PATIENCE_S) as answer:
                assert answer.status == 200
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(url, timeout=PATIENCE_S)
        finally:
            server.shutdown()


def test_a_killed_server_is_unavailable_and_a_restart_recovers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also the clean end: a request in flight gets its answer (here 503) and the exit code is 0."""
    server = ServerProcess(folders["llama"], ServeOptions(cache_tokens=1024), log_file=tmp_path / "log.txt")
    server.start()
    pid, url = server.pid, server.url
    assert pid is not None

    async def ask(retries: int) -> object:
        async with EngineClient(url, max_retries=retries, backoff_s=0.01) as client:
            return (await client.generate([ASK]))[0].output_ids

    try:
        first = asyncio.run(ask(0))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not server.is_alive())
        with pytest.raises(EngineUnavailableError, match=url):
            asyncio.run(ask(1))
        server.restart()
        assert server.url == url
        assert asyncio.run(ask(0)) == first

        process = server._process
        assert process is not None

        async def end_in_flight() -> None:
            async with EngineClient(url, max_retries=0) as client:
                many = [GenerateRequest(f"r{i}", (5, 6), 250, sampling_seed=i) for i in range(200)]
                waiting = asyncio.create_task(client.generate(many))
                for _ in range(5):  # when these are answered, the server has long read the others
                    await client.model_info()
                assert not waiting.done()
                process.send_signal(signal.SIGTERM)
                with pytest.raises(EngineUnavailableError, match="503"):
                    await waiting

        asyncio.run(end_in_flight())
        assert process.wait(PATIENCE_S) == 0
    finally:
        server.stop()
    assert not server.is_alive()
    server.stop()


def test_the_server_dies_with_a_killed_parent(folders: dict[str, Path], tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import time
        from slime_tandem.engines.processes import ServerProcess
        from slime_tandem.engines.serve_options import ServeOptions
        options = ServeOptions(cache_tokens=256)
        server = ServerProcess({str(folders["llama"])!r}, options, log_file={str(tmp_path / "log.txt")!r})
        server.launch()
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            log = tmp_path / "log.txt"
            wait_until(lambda: "serving" in log.read_text())
            assert runs(pid)
        finally:
            parent.kill()
    wait_until(lambda: not runs(pid))


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(server: ThreadServer, tmp_path: Path) -> None:
    """Here its port is taken by another healthy server, which must not be mistaken for it."""
    port = int(server.url.rsplit(":", 1)[1])
    late = ServerProcess(server.model, ServeOptions(port=port), log_file=tmp_path / "logs" / "log.txt")
    with pytest.raises(EngineUnavailableError) as caught:
        late.start()
    for part in ("exit code 2", "log.txt", f"PortInUseError: port={port}", "Remedy"):
        assert part in str(caught.value)
    assert not late.is_alive()
    assert server.is_alive()


def test_a_server_that_takes_too_long_is_stopped(folders: dict[str, Path], tmp_path: Path) -> None:
    server = ServerProcess(folders["llama"], log_file=tmp_path / "log.txt", start_timeout_s=0.0)
    server.launch()
    pid = server.pid
    assert pid is not None
    with pytest.raises(EngineUnavailableError, match="within 0 s"):
        server.wait_ready()
    assert not runs(pid)


def test_a_busy_port_is_told_before_anything_is_loaded(folders: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port={port}: .*Remedy"):
            serve(str(folders["llama"]), ServeOptions(port=port))


def test_unusable_settings_are_told(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("max_batch", "cache_tokens", "threads"):
        with pytest.raises(DataError, match=name):
            serve("unused", ServeOptions(**{name: 0}))
    with pytest.raises(ModelError, match="existing folder"):
        serve(str(tmp_path / "nothing"))
    with pytest.raises(EngineUnavailableError, match="host"):
        serve(str(folders["llama"]), ServeOptions(host="192.0.2.1", api_key="k"))


def test_the_command_line_prints_one_line_for_a_user_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    try:
        assert main([str(tmp_path), "--port", "0"]) == 2
        assert main([str(tmp_path), "--port", "0", "--api-key-env", "NO_SUCH_KEY"]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "ModelError: model=" in lines[0]
    assert "DataError: --api-key-env='NO_SUCH_KEY'" in lines[1]


def test_what_is_not_http_is_not_healthy(tmp_path: Path) -> None:
    """Before a server listens, a connection to its port can be connected to itself: it reads what it wrote."""

    class Waiting(ServerProcess):
        def _find_port(self) -> bool:
            return True

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def echo() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(connection.recv(4096))

        thread = threading.Thread(target=echo)
        thread.start()
        server = Waiting(tmp_path, ServeOptions(port=listener.getsockname()[1]), log_file=tmp_path / "log")
        assert not server._healthy()
        thread.join()
