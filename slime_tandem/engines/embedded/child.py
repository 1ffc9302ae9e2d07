"""Entry point of a server that is a child process: `python -m slime_tandem.engines.embedded.child PARENT_PID MODEL ...`.

It watches its parent before anything slow is imported, so that no server outlives a parent that ends while it starts: killed,
or interrupted between the start of the process and the note of its id. Then it is `embedded.main`.
"""

from __future__ import annotations

import os
import sys
import threading
import time


def die_with(parent: int) -> None:
    """End this process when `parent` is no longer its parent, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from slime_tandem.engines.embedded.server import main

    code = main(sys.argv[2:])
    sys.stdout.flush()
    # All is closed and answered by now; taking torch and transformers apart would take another second.
    os._exit(code)
