"""SIGTERM ends a server of which nothing can run any more, and one whose engine is in an endless call."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ...waiting import PATIENCE_S, wait_until

HELD = """
import os, re, signal, sys, threading, time
from slime_tandem.engines.embedded.last_resort import LastResort
handled = []
# No print: the signal may come while one is still on its way out.
signal.signal(signal.SIGTERM, lambda *_: handled.append(os.write(1, b"handled\\n")))
watching = LastResort(0.3)
if sys.argv[1] == "end":
    watching.end()
def hold():  # never returns, and lets no other thread run
    print(watching._watcher.pid, flush=True)
    re.search("(a+)+$", "a" * 100 + "!")
if sys.argv[1] == "hold":
    threading.Thread(target=hold, daemon=True).start()
else:
    print(watching._watcher.pid, flush=True)
while not handled:
    time.sleep(0.01)
"""


def _cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_it_ends_a_process_whose_interpreter_is_held() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD, "hold"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watcher = Path(f"/proc/{int(process.stdout.readline())}/cmdline")
        began = _cpu_ticks(process.pid)
        assert watcher.exists()
        wait_until(lambda: _cpu_ticks(process.pid) > began + 20)  # at work, so the interpreter is held
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert process.stdout.read() == "", "no handler of Python's came to run"


def test_it_leaves_a_process_alone_that_it_does_not_watch_any_more() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD, "end"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert not Path(f"/proc/{int(process.stdout.readline())}").exists()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "handled\n"
        assert process.wait(PATIENCE_S) == 0


def test_an_engine_in_an_endless_call_does_not_keep_the_server(folders: dict[str, Path], tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, time
        from slime_tandem.engines.embedded import server
        from slime_tandem.engines.serve_options import ServeOptions
        load, server.load_model = server.load_model, None
        calls = []
        def once(*args):
            calls.append(args)
            if len(calls) > 1:
                print("loading", flush=True)
                time.sleep(3600)
            return load(*args)
        server.load_model = once
        server._GRACE_S = 600.0  # on a busy machine the answer may take longer than it has
        server.serve(sys.argv[1], ServeOptions(cache_tokens=256, port_file=sys.argv[2]))
        """
    )
    port = tmp_path / "port"
    command = [sys.executable, "-c", code, str(folders["llama"]), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            url = f"http://127.0.0.1:{int(port.read_text())}"
            body = json.dumps({"model_path": str(folders["other"])}).encode()
            update = urllib.request.Request(
                f"{url}/update_weights_from_disk", body, {"Content-Type": "application/json"}
            )
            with pytest.raises(urllib.error.HTTPError, match="503") as stopped:
                _until_loading(process, update)
            stopped.value.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def _until_loading(process: subprocess.Popen[str], update: urllib.request.Request) -> None:
    """Send the update, and SIGTERM as soon as it is being worked on; what waits is answered."""
    import threading

    def stop() -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        urllib.request.urlopen(update, timeout=PATIENCE_S).close()
    finally:
        thread.join()
