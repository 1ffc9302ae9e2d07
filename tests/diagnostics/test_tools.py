"""The commands of tools/ and the wrappers, end to end on tiny models."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.cli import main
from slime_tandem.errors import ConfigError

from ..waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
WRAPPERS = sorted((ROOT / "scripts" / "diagnostics").glob("run_*.sh"))


def tool(name: str, *args: object) -> int:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return main([str(a) for a in args], module.parser())


def test_from_a_bank_to_its_findings(
    trio: Any, same_bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The junior plays the trained senior, and teacher as well: after training nothing is left to learn."""
    for label, student in (("before", trio.senior), ("after", trio.junior)):
        out = tmp_path / f"{label}.parquet"
        options = ("--student", student, "--teacher", trio.junior, "--label", label, "--output", out)
        assert tool("eval_fixed_context_bank", same_bank, *options) == 0
    both = tmp_path / "both.parquet"
    assert tool("merge_token_banks", tmp_path / "before.parquet", tmp_path / "after.parquet", "--output", both) == 0
    capsys.readouterr()
    few = ("--resamples", "50")
    assert tool("analyze_fixed_context_gain", same_bank, both, "--output", tmp_path / "gain", *few) == 0
    text = capsys.readouterr().out
    assert "Gain at fixed contexts, before to after" in text
    assert tool("matched_fixed_context_topn", same_bank, both, "--output", tmp_path / "topn", *few) == 0
    assert (
        tool("support_definition_robustness", same_bank, both, "--output", tmp_path / "support", "--k", "1", *few) == 0
    )
    for name in ("gain", "topn", "support"):
        for ending in ("csv", "json", "svg"):
            assert (tmp_path / f"{name}.{ending}").stat().st_size > 100
    rows = [line.split(",") for line in (tmp_path / "gain.csv").read_text().splitlines()]
    after = next(r for r in rows if r[:2] == ["KL(teacher || student)", "after"])
    assert float(after[2]) == pytest.approx(0.0, abs=1e-9)
    relative = next(r for r in rows if r[:2] == ["relative gain: mean by quadrant", "all"])
    assert float(relative[2]) == pytest.approx(1.0, abs=1e-6)
    capsys.readouterr()
    code = tool("analyze_fixed_context_gain", same_bank, both, "--after", "later", "--output", tmp_path / "x")
    assert code == 2
    assert capsys.readouterr().err.startswith(
        "analyze_fixed_context_gain.py: label='later': expected one of after, before"
    )
    assert not list(tmp_path.glob("x*"))


def test_the_export_command_tells_a_bad_plan(trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("export_fixed_context_bank", "--output", tmp_path / "b.parquet", "--positions", "0") == 2
    assert "--positions=0: expected at least 1" in capsys.readouterr().err
    assert tool("export_fixed_context_bank", "--output", tmp_path / "b", "--set", "nothing=1") == 2


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import slime_tandem.diagnostics as package

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name))
    with pytest.raises(ConfigError, match=r"\['pyarrow'\]: expected none missing.*\[diagnostics\]"):
        importlib.reload(package)
    monkeypatch.undo()
    importlib.reload(package)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda p: p.stem)
def test_a_wrapper_says_what_it_would_do(wrapper: Path, tmp_path: Path) -> None:
    env = {**os.environ, "DRY_RUN": "1", "VENV": str(tmp_path / "venv"), "OUT": str(tmp_path / "my out")}
    env |= {
        "STUDENT_HF": "/m/student",
        "TRAINED_HF": "/m/trained 2",
        "TEACHER_MODEL": "/m/teacher",
        "PROMPT_DATA": "/d/p.jsonl",
    }
    shown = subprocess.run(
        ["bash", wrapper], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    for name in (
        "export_fixed_context_bank", "eval_fixed_context_bank", "merge_token_banks", "analyze_fixed_context_gain",
        "matched_fixed_context_topn", "support_definition_robustness",
    ):  # fmt: skip
        assert name in shown
    assert "/m/trained\\ 2" in shown
    assert "my\\ out" in shown
    assert not list(tmp_path.iterdir())


def test_relative_paths_are_the_callers(tmp_path: Path) -> None:
    for name in ("student", "trained", "teacher"):
        (tmp_path / name).mkdir()
    (tmp_path / "p.jsonl").touch()
    env = {**os.environ, "DRY_RUN": "1", "VENV": str(tmp_path / "venv"), "OUT": "out", "PROMPT_DATA": "p.jsonl"}
    env |= {"STUDENT_HF": "student", "TRAINED_HF": "./trained", "TEACHER_MODEL": "teacher"}
    wrapper = ROOT / "scripts" / "diagnostics" / "run_heldout_fixed_context_300.sh"
    shown = subprocess.run(
        ["bash", wrapper], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    for name in ("student", "trained", "teacher", "p.jsonl", "out/bank.parquet"):
        assert f"{tmp_path}/{name}" in shown, name


@pytest.mark.parametrize("pair", ["4b_to_1p7b_heldout", "8b_to_4b", "14b_to_4b", "heldout"])
def test_a_variable_that_is_not_set_is_one_line(pair: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("STUDENT_HF", "TRAINED_HF", "TEACHER_MODEL", "PROMPT_DATA")}
    script = ROOT / "scripts" / "diagnostics" / f"run_{pair}_fixed_context_300.sh"
    for given, missing in (({}, "STUDENT_HF"), ({"STUDENT_HF": "/a", "TRAINED_HF": "/b"}, "TEACHER_MODEL")):
        done = subprocess.run(
            ["bash", script], env={**env, **given, "DRY_RUN": "1"}, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"{missing}=: expected "), done.stderr
        assert "Remedy: set it to a Hugging Face folder." in done.stderr
