"""Loss, gradients and metrics do not depend on how a batch is cut up: two gloo processes, all cases in one start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..waiting import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]


def test_tensor_context_data_and_micro_batch_splits_change_nothing(tmp_path: Path) -> None:
    script = Path(__file__).with_name("parallel_cases.py")
    environment = {**os.environ, "PYTHONPATH": str(REPO), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [out.strip() for out, _ in said] == ["all cases hold"] * 2, "\n".join(err[-2500:] for _, err in said)
