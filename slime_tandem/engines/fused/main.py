"""Runs SGLang's own server in SGLang's own Python, and ends with the process that started it, even after its SIGKILL.

`python -m slime_tandem.engines.fused.main PARENT_PID ARGUMENTS OF sglang.launch_server`

A key comes in the environment (`serve_options.API_KEY_ENV`) and becomes a flag only within this process.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

_WATCH_EVERY_S = 0.5


def _end_with(parent: int) -> None:
    """Kill this process group once its parent is gone: SGLang's workers are in it and share no other fate."""
    while os.getppid() == parent:
        time.sleep(_WATCH_EVERY_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    from slime_tandem.engines.serve_options import API_KEY_ENV

    key = os.environ.pop(API_KEY_ENV, None)  # SGLang's workers need none
    if key is not None:
        sys.argv[1:1] = ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__")
