"""What is said before engines start: packages that the job would miss, frozen models that would come back without weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.slime_hooks.before import check_packages, check_servers, check_shared_gpus

LISTED = [{"family": "jsonl", "path": "x.jsonl"}]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in names else found(name, *a))

    return hide


def test_a_missing_package_is_named_where_the_job_needs_it(without: Any) -> None:
    def config(tasks: Any) -> RunConfig:
        return RunConfig.from_mapping({"tasks": tasks})

    without("math_verify", "reasoning_gym")
    with pytest.raises(ConfigError, match=r"installed .*: math-verify\..*pip install math-verify"):
        check_packages(config(LISTED), our_reward=True)
    check_packages(config(LISTED), our_reward=False)
    check_packages(config([{**LISTED[0], "reward": "my.code:f"}]), our_reward=True)
    with pytest.raises(ConfigError, match="pip install math-verify reasoning-gym"):
        check_packages(config([{"family": "chain_sum"}]), our_reward=True)
    without("filelock")
    with pytest.raises(ConfigError, match="pip install filelock"):
        check_packages(config(LISTED), our_reward=False)


def file_of(path: Path, *models: tuple[str, int, dict[str, Any]]) -> str:
    """An --sglang-config: (name, GPUs, overrides), the first one trained."""
    tree = [
        {
            "name": name,
            "update_weights": i == 0,
            "server_groups": [{"worker_type": "regular", "num_gpus": gpus, "overrides": o}],
        }
        for i, (name, gpus, o) in enumerate(models)
    ]
    (path / "sglang.yaml").write_text(yaml.safe_dump({"sglang": tree}))
    return str(path / "sglang.yaml")


BACKUP = {"enable_weights_cpu_backup": True}


@pytest.mark.parametrize(
    ("junior", "more", "refused"),
    [
        ({}, {}, True),
        ({"mem_fraction_static": 0.5, "enable_weights_cpu_backup": False}, {}, True),
        (BACKUP, {}, False),
        ({"enable-weights-cpu-backup": True}, {}, False),  # slime normalises names
        ({}, {"actor_num_gpus_per_node": 6}, False),  # behind the trainer
        ({}, {"colocate": False}, False),
        ({}, {"offload_rollout": False}, False),
        ({}, {"sglang_enable_weights_cpu_backup": True}, False),
    ],
)
def test_a_frozen_model_on_the_trainers_gpus_needs_a_copy_of_its_weights(
    junior: dict[str, Any], more: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    file = file_of(tmp_path, ("actor", 6, {}), ("junior", 2, junior))
    plain = {"sglang_config": file, "colocate": True, "actor_num_nodes": 1, "actor_num_gpus_per_node": 8}
    args = SimpleNamespace(**{**plain, **more})
    if not refused:
        check_shared_gpus(args)
        return
    with pytest.raises(ConfigError, match=r"sglang\.yaml junior.*enable_weights_cpu_backup: true.*Remedy: add it"):
        check_shared_gpus(args)


def test_a_role_without_a_server_is_named(tmp_path: Path) -> None:
    file = file_of(tmp_path, ("actor", 6, {}), ("junior", 1, {}), ("maths", 1, {}))
    with_file, without_file = SimpleNamespace(sglang_config=file), SimpleNamespace(sglang_config=None)
    alone = RunConfig.load(overrides=["opd.enabled=false"])
    check_servers(with_file, alone)
    with pytest.raises(ConfigError, match="server of the junior=None: expected a model named junior"):
        check_servers(without_file, alone)
    check_servers(without_file, RunConfig.load(overrides=["opd.enabled=false", "engine.junior_url=http://x"]))
    check_servers(without_file, RunConfig.load(overrides=["opd.enabled=false", "engine.mode=fused"]))
    with pytest.raises(ConfigError, match=r"server of the teacher=\['actor', 'junior', 'maths'\].*engine\.teacher_url"):
        check_servers(with_file, RunConfig())
    check_servers(with_file, RunConfig.load(overrides=["opd.teachers=[{name: maths, model: m}]"]))
    with pytest.raises(ConfigError, match="a model named code in --sglang-config, or its url"):
        check_servers(with_file, RunConfig.load(overrides=["opd.teachers=[{name: code, model: m}]"]))


def test_without_such_a_file_nothing_is_asked(tmp_path: Path) -> None:
    check_shared_gpus(SimpleNamespace(colocate=True))
    check_shared_gpus(SimpleNamespace(colocate=True, sglang_config=str(tmp_path / "elsewhere.yaml")))
