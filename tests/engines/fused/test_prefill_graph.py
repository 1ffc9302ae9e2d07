"""Prefill graphs of the fused engine, as far as a machine without a GPU can play them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from slime_tandem.engines.fused.launch import environment

from ...waiting import PATIENCE_S


def test_a_replay_knows_its_requests_and_hands_on_the_report(sglang_python: str) -> None:
    """And the two stacks of layers are one module, whose parameters keep their names; what is refused."""
    script = Path(__file__).with_name("prefill_cases.py")
    done = subprocess.run(
        [sglang_python, "-W", "ignore", str(script)],
        env=environment({"PATH": "/usr/bin:/bin"}, cuda=False),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "all cases hold" in done.stdout
