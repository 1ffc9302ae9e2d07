"""The doctor on real servers and models: sound ones, another model behind the senior's URL, models that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.cli import main

SMALL = (
    "sampling.max_new_tokens=12", "train.samples_per_prompt=3", "train.threads=1", "engine.cache_tokens=4096",
    'tasks=[{"family": "chain_sum"}]',
)  # fmt: skip


def doctor(trio, tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str, flags: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    models = [f"models.{role}={getattr(trio, role)}" for role in ("senior", "junior", "teacher")]
    command = [
        "doctor",
        "--prompts",
        "2",
        *flags,
        "--set",
        f"runs_dir={tmp_path / 'runs'}",
        *models,
        *SMALL,
        *overrides,
    ]
    code = main(command)
    return code, capsys.readouterr().out


def statuses(out: str) -> dict[str, Any]:
    return {f["name"]: f["status"] for f in json.loads(out)["findings"]}


def test_sound_models_pass(trio, side_url, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    code, out = doctor(
        trio,
        tmp_path,
        capsys,
        "objective.kl_coef=0.1",
        "objective.lambda_jun=0.1",
        *(f"engine.{role}_url={side_url(role)}" for role in ("junior", "teacher")),
        flags=("--json", "--length-updates", "2"),
    )
    found = statuses(out)
    # Random models end no turn, and are right by no chance: their rewards are all equal, which a job could not learn from.
    assert code == 3, out
    assert json.loads(out)["passed"] is False
    assert {name for name, status in found.items() if status == "fail"} == {"reward signal"}
    assert {name for name, status in found.items() if status not in ("pass", "warn", "fail")} <= {"length reward"}
    for name in (
        "group sums",
        "models",
        "sampled log-probs",
        "given log-probs",
        "replay ratio",
        "KL parity",
        "masking",
        "padding",
    ):
        assert found[name] == "pass", out
    for role in ("senior", "junior", "teacher"):
        assert found[f"tokenizer of the {role}"] == "pass"
    assert not list((tmp_path / "runs").rglob("*.safetensors")), "nothing of the trained policy stays"


def test_another_model_behind_the_seniors_url_is_found(
    trio, side_url, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    alone = (f"engine.senior_url={side_url('junior')}", "tandem.enabled=false", "opd.enabled=false")
    code, out = doctor(trio, tmp_path, capsys, *alone)
    assert code == 3
    assert "fail  sampled log-probs: |trainer - engine|" in out
    assert "fail  given log-probs: |trainer - engine|" in out
    assert "fail  replay ratio:" in out
    assert "remedy: check that both have the same weights" in out
    assert "pass  group sums:" in out


def test_models_that_do_not_fit_are_found_before_any_server(
    trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    code, out = doctor(trio, tmp_path, capsys, f"models.junior={trio.teacher}")
    assert code == 3
    assert "fail  models and servers: models.junior=" in out
    assert "remedy: use a junior of the senior's model family, or set tandem.junior_tokenizer=any" in out
    code, out = doctor(trio, tmp_path, capsys, "sampling.temperature=0", "train.steps=0", "opd.enabled=false")
    assert code == 3
    assert "fail  sampling: sampling.temperature=0" in out


def test_a_folder_that_cannot_be_written_is_a_finding_in_the_json(
    trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "runs").write_text("a file stands here")
    code, out = doctor(trio, tmp_path, capsys, flags=("--json",))
    assert code == 3
    assert statuses(out)["models and servers"] == "fail"
    assert "a folder, no file" in out
