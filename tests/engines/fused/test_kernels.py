"""The kernels of a catch-up step, run by Triton's interpreter (and on a GPU where there is one)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime_tandem.engines.fused.launch import PYTHON_ENV

from ...waiting import PATIENCE_S


@pytest.mark.parametrize("where", ["interpret", *(["gpu"] if torch.cuda.is_available() else [])])
def test_kernels_agree_with_plain_tensor_operations(where: str) -> None:
    python = sys.executable if importlib.util.find_spec("triton") else os.environ.get(PYTHON_ENV)
    if not python:
        pytest.skip(f"no triton here, and {PYTHON_ENV} is not set; scripts/test.sh sets it")
    command = [python, str(Path(__file__).with_name("kernel_cases.py")), *(["interpret"] if where != "gpu" else [])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "all cases hold"), done.stderr[-3000:]
