"""Runs SGLang's own server in SGLang's own Python, and ends with the process that started it, even after its SIGKILL.

`python -m slime_tandem.engines.fused.main PARENT_PID ARGUMENTS OF sglang.launch_server`

A key comes in the environment; `sglang_child` says what becomes of it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from slime_tandem.engines.sglang_child import main

    main()
