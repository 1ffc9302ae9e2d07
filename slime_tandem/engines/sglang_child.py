"""What SGLang's own Python runs: SGLang's server, with its key, until the process that started it is gone.

Standard library alone: `engines.sglang` hands the text of this file to another interpreter (`-c`), `engines.fused.main`
imports it. Arguments: the parent's process id, then those of `sglang.launch_server`.

The key comes in the environment (`API_KEY_ENV`), which only this user can read, and leaves it at once. It is set behind
SGLang's parser, so it stands in no command line; SGLang 0.5.15 writes its arguments into the log (`{server_args=}`,
engine.py:796), there the key shows as `***`; and SGLang's other processes, which check no key, are handed something else.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time

API_KEY_ENV = "SLIME_TANDEM_API_KEY"
"""The environment variable in which a child finds its key."""
_WATCH_EVERY_S = 0.5


class HiddenKey(str):
    """A key that compares, encodes and joins as the text it is, and neither shows in a `repr` nor goes to other processes.

    >>> HiddenKey("open sesame") == "open sesame", HiddenKey("open sesame")
    (True, ***)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> tuple[object, ...]:
        # No key of anybody's, so that what is handed on opens nothing.
        return str, (f"not the key {secrets.token_hex(8)}",)

    def __reduce_ex__(self, _: object) -> tuple[object, ...]:
        return self.__reduce__()


def _end_with(parent: int) -> None:
    """Kill this process group once its parent is gone: SGLang's workers are in it and share no other fate."""
    while os.getppid() == parent:
        time.sleep(_WATCH_EVERY_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve, with the arguments of this process."""
    parent = int(sys.argv.pop(1))
    threading.Thread(target=_end_with, args=(parent,), name="parent-watch", daemon=True).start()
    key = os.environ.pop(API_KEY_ENV, None)
    from sglang import launch_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    server_args = launch_server.prepare_server_args(sys.argv[1:])
    if key is not None:
        # Past `__setattr__`: SGLang 0.5.17 lets nobody assign behind its parser.
        object.__setattr__(server_args, "api_key", HiddenKey(key))
    try:
        launch_server.run_server(server_args)
    finally:
        launch_server.kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
