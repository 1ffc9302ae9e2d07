"""slime's and Megatron-LM's own sources and the Python that runs them, where they are at hand.

SLIME_SOURCES names the one folder that holds them; `scripts/slime/cpu_env.sh` makes it and prints the variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "SLIME_SOURCES"
REMEDY = 'eval "$(bash scripts/slime/cpu_env.sh)" makes it'


@dataclass(frozen=True)
class SlimeHere:
    """A folder with checkouts `slime` and `Megatron-LM` and an environment `venv` that has what they need."""

    folder: Path

    @classmethod
    def find(cls) -> SlimeHere:
        """The folder that the environment names; skips the test, and says what is missing, where there is none."""
        value = os.environ.get(VARIABLE)
        if not value:
            pytest.skip(f"{VARIABLE} is not set: {REMEDY}")
        here = cls(Path(value).absolute())  # tests change folders
        for needed in (here.slime / "train.py", here.megatron / "megatron", Path(here.python)):
            if not needed.exists():
                pytest.skip(f"{VARIABLE}={value} has no {needed.relative_to(here.folder)}: {REMEDY}")
        return here

    @property
    def slime(self) -> Path:
        return self.folder / "slime"

    @property
    def megatron(self) -> Path:
        return self.folder / "Megatron-LM"

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    def environment(self) -> dict[str, str]:
        """Variables of a process on a CPU that imports slime, Megatron-LM and this package."""
        paths = (ROOT / "scripts" / "slime" / "shim", ROOT, ROOT / "scripts", self.slime, self.megatron)
        return {
            **os.environ,
            "PYTHONPATH": ":".join(map(str, paths)),
            "SLIME_TANDEM_CPU": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
