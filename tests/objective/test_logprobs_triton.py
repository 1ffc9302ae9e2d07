"""The GPU's kernels, run by Triton's interpreter on the CPU (and on a GPU where there is one).

triton is no dependency of torch's CPU build; real SGLang's environment, which the conformance tests set up, has it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..waiting import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]


def _python() -> str:
    if importlib.util.find_spec("triton") is not None:
        return sys.executable
    other = os.environ.get("SLIME_TANDEM_SGLANG_PYTHON")
    if other is None:
        pytest.skip("no triton here, and SLIME_TANDEM_SGLANG_PYTHON is not set; scripts/test.sh sets it")
    return other


@pytest.mark.parametrize("where", ["interpreter", *(["gpu"] if torch.cuda.is_available() else [])])
def test_kernels_agree_with_float64(where: str) -> None:
    command = [_python(), str(Path(__file__).with_name("triton_cases.py")), *(["interpret"] if where != "gpu" else [])]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "all cases hold"), done.stderr[-3000:]
