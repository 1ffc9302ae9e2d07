"""The plan as a library gives it: the same as the command's, nothing on disk before `write`, models held against each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tandem import cli
from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, ModelError, TokenizerMismatchError
from slime_tandem.local.suite import Suite, parse_methods, run_suite
from slime_tandem.slime_hooks.before import check_team
from slime_tandem.slime_launch.plan import launch_plan


def sized(tmp_path: Path, mode: str, junior: str = "qwen3-0.6B") -> RunConfig:
    file = tmp_path / "c.yaml"
    tree = {
        "models": {"senior": "qwen3-4B", "junior": junior, "teacher": "llama3.1-8B"},
        "tasks": [{"family": "chain_sum"}],
        "train": {"steps": 1, "prompts_per_step": 6, "samples_per_prompt": 8},
        "engine": {"mode": mode},
        "control": False,
    }
    file.write_text(yaml.safe_dump(tree))
    return RunConfig.load(file)


@pytest.mark.parametrize("mode", ["two_servers", "fused"])
def test_published_sizes_need_no_folder_and_leave_none(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "launch"
    launch = launch_plan(sized(tmp_path, mode), folder, ["--use-tensorboard"])
    assert not folder.exists()
    assert launch.flags[-1] == "--use-tensorboard"
    assert ("SGLANG_EXTERNAL_MODEL_PACKAGE" in launch.environment) == (mode == "fused")
    launch.write()
    assert set(folder.iterdir()) == set(launch.files)


def test_a_fused_pair_of_sizes_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model_type"):
        launch_plan(sized(tmp_path, "fused", "llama3.2-1B"), tmp_path / "launch")


@pytest.fixture
def written(trio: Any, tmp_path: Path) -> Callable[..., Path]:
    """A configuration's file: the trio's senior, its teacher as junior, whose tokenizer is another."""

    def write(**sections: Any) -> Path:
        models = {"senior": str(trio.senior), "junior": str(trio.teacher), "teacher": str(trio.teacher)}
        tree = {
            "models": models, "tasks": [{"family": "chain_sum"}], "control": False, "opd": {"enabled": False},
            "train": {"prompts_per_step": 6}, "sampling": {"max_new_tokens": 64}, "runs_dir": str(tmp_path / "runs"),
        }  # fmt: skip
        file = tmp_path / "c.yaml"
        file.write_text(yaml.safe_dump({**tree, **{k: {**tree.get(k, {}), **v} for k, v in sections.items()}}))  # type: ignore[dict-item]
        return file

    return write


MISMATCH = r"models\.junior=.*expected the senior's tokenizer.*set tandem\.junior_tokenizer=any"


def test_a_junior_with_another_tokenizer_is_refused_before_anything_starts(
    written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every way to a launch: the plan, the command's two forms, a suite on this machine, and the job's own environment."""
    file, launch = written(), tmp_path / "launch"
    with pytest.raises(TokenizerMismatchError, match=MISMATCH):
        launch_plan(RunConfig.load(file), launch)
    for argv in (["config", "--check", str(file)], ["config", "--check", str(file), "--slime", str(launch)]):
        assert cli.main(argv) == 2
        assert "set tandem.junior_tokenizer=any" in capsys.readouterr().err
    methods = parse_methods("solo_grpo:1.0:10 tandem_word:0.5:20")
    with pytest.raises(TokenizerMismatchError, match=MISMATCH):
        run_suite(Suite(tmp_path / "suite", methods, [1], file), dry_run=True)
    with pytest.raises(TokenizerMismatchError, match=MISMATCH):
        check_team(RunConfig.load(file))
    assert not launch.exists()
    assert not (tmp_path / "suite").exists()


def test_what_the_setting_allows_is_planned(written: Callable[..., Path], tmp_path: Path) -> None:
    file = written(tandem={"junior_tokenizer": "any"})
    assert not [note for note in launch_plan(RunConfig.load(file), tmp_path).notes if "not compared" in note]
    check_team(RunConfig.load(file))
    assert cli.main(["config", "--check", str(file)]) == 0
    alone = written(tandem={"enabled": False})
    launch_plan(RunConfig.load(alone), tmp_path)


def test_a_folder_without_a_tokenizer_is_planned_by_its_size_and_said(
    trio: Any, written: Callable[..., Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(trio.junior / "config.json", bare)
    launch = launch_plan(RunConfig.load(written(models={"junior": str(bare)})), tmp_path / "launch")
    assert [note for note in launch.notes if "not compared" in note] == [
        f"not compared: the tokenizer of the junior, no file of it is in {bare}"
    ]
    away = written(models={"junior": "/on/the/cluster"})
    assert cli.main(["config", "--check", str(away)]) == 0
    with pytest.raises(ModelError, match="/on/the/cluster"):
        launch_plan(RunConfig.load(away), tmp_path / "launch")
    url = written(models={"junior": "/on/the/cluster"}, engine={"junior_url": "http://10.0.0.1:1"})
    with pytest.raises(ModelError, match=r"models\.junior.*/on/the/cluster"):  # its tokenizer is read here
        launch_plan(RunConfig.load(url), tmp_path / "launch")


def test_lists_longer_than_a_vocabulary_are_refused_in_a_plan(written: Callable[..., Path], tmp_path: Path) -> None:
    file = written(opd={"enabled": True, "signal": "reverse_kl", "top_k": 100000}, tandem={"junior_tokenizer": "any"})
    with pytest.raises(ConfigError, match=r"opd\.top_k=100000: .*smallest vocabulary"):
        launch_plan(RunConfig.load(file), tmp_path)
