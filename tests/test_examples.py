"""Each script of examples/ runs as its first line says, on tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slime_tandem

from .waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("forked_servers")

EXAMPLES = Path(__file__).parents[1] / "examples"
AS_SCRIPT = (
    "import pathlib, runpy, sys; sys.executable = sys.argv.pop(1); del sys.argv[0]; "
    "sys.path[0] = str(pathlib.Path(sys.argv[0]).parent); runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run(name: str, *arguments: object) -> str:
    path = [str(Path(slime_tandem.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", AS_SCRIPT, sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tiny(trio: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(a run's folder, what train_tiny.py printed)."""
    runs = tmp_path_factory.mktemp("runs")
    return runs / "tiny", run("train_tiny.py", trio.senior.parent, runs)


def test_every_script_is_listed_and_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for script in EXAMPLES.glob("*.py"):
        assert f'"{script.name}"' in tested
        assert f"`{script.name}" in listed


def test_train_tiny(tiny: tuple[Path, str]) -> None:
    assert "opd/teacher_kl" in tiny[1]
    assert len(slime_tandem.open_run(tiny[0]).steps) == 2


def test_scripts_about_a_run(tiny: tuple[Path, str]) -> None:
    out = run("read_a_run.py", tiny[0])
    assert "prob_senior: 0.5" in out
    assert " -> " in out
    masks = run("recompute_authorship.py", tiny[0]).splitlines()
    assert [line[:10] for line in masks] == ["sample 0: ", "sample 1: ", "sample 2: "]
    assert {len(line) for line in masks} == {len("sample 0: ") + 8}


def test_scripts_about_two_tokenizers(trio: Any) -> None:
    assert "% of" in run("align_two_texts.py", trio.senior, trio.teacher)
    out = run("score_responses.py", trio.senior, trio.teacher)
    assert out.startswith("right: -")
    assert "wrong: -" in out


def test_the_loss() -> None:
    assert run("loss_in_a_notebook.py").startswith("loss -0.2998 = task -0.8027 + teacher 0.5028")


def test_own_reward(trio: Any, tmp_path: Path) -> None:
    out = run("own_reward.py", trio.senior.parent, tmp_path)
    found = {name: float(value) for name, value in (line.split(": ") for line in out.splitlines()[-4:])}
    assert found["mean reward"] == pytest.approx(found["correct"] + 0.1 * found["brief"], abs=1e-3)
    assert 0 < found["senior"] < 1
