"""The plan as a library gives it: the same as the command's, and nothing on disk before `write`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.errors import ModelError
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
