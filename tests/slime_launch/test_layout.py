"""Who gets which GPUs, and the file that says so to slime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.slime_launch.layout import check_sglang_config, layout, sglang_config, to_yaml

Sized = Callable[..., RunConfig]


def groups(config: RunConfig) -> dict[str, tuple[int, int, int, bool]]:
    return {g.name: (g.start, g.gpus, g.gpus_per_engine, g.shared) for g in layout(config).groups}


def test_colocated_with_junior_and_teacher_apart(sized: Sized) -> None:
    plan = layout(sized())
    assert (plan.trainer_gpus, plan.rollout_gpus, plan.trainer_nodes) == (6, 8, 1)
    assert groups(sized()) == {"actor": (0, 6, 1, True), "junior": (6, 1, 1, False), "teacher": (7, 1, 1, False)}


def test_the_trainer_takes_as_many_gpus_as_divide_its_batch(sized: Sized) -> None:
    config = sized(cluster={"nodes": 2}, train={"prompts_per_step": 5})
    assert layout(config).trainer_gpus == 8, "14 are left, but slime spreads the trainer over whole nodes"
    assert groups(config)["actor"] == (0, 14, 1, True)
    assert layout(sized(train={"prompts_per_step": 5})).trainer_gpus == 5, "40 responses, 6 GPUs left"
    assert layout(sized(cluster={"tensor_parallel": 4})).trainer_gpus == 4


def test_all_on_the_trainers_gpus(sized: Sized) -> None:
    config = sized(cluster={"trainer_gpus": 8, "teacher_gpus": 2, "teacher_tp": 2})
    assert groups(config) == {"actor": (0, 5, 1, True), "junior": (5, 1, 1, True), "teacher": (6, 2, 2, True)}
    entries = {m["name"]: m for m in sglang_config(layout(config), mem_fraction=0.6)["sglang"]}
    assert [m["update_weights"] for m in entries.values()] == [True, False, False]
    assert "overrides" not in entries["actor"]["server_groups"][0]
    for frozen in ("junior", "teacher"):
        assert entries[frozen]["server_groups"][0]["overrides"] == {
            "mem_fraction_static": 0.6,
            "enable_weights_cpu_backup": True,
        }


def test_apart_from_the_trainer_and_over_nodes(sized: Sized) -> None:
    config = sized(
        cluster={"nodes": 4, "colocate": False, "trainer_gpus": 16, "senior_tp": 2, "teacher_gpus": 4, "teacher_tp": 4}
    )
    plan = layout(config)
    assert (plan.trainer_gpus, plan.trainer_nodes) == (16, 2)
    assert groups(config) == {
        "actor": (16, 10, 2, False),
        "junior": (27 - 1, 1, 1, False),
        "teacher": (27, 4, 4, False),
    }
    assert plan.rollout_gpus == 15


def test_gpus_of_nobody_are_named(sized: Sized) -> None:
    """Eight GPUs, one of the junior: tensor parallel sizes of two leave a seventh over."""
    alone = {"opd": {"enabled": False}}
    assert not [line for line in layout(sized(**alone)).describe() if "idle" in line]
    uneven = layout(sized(**alone, cluster={"tensor_parallel": 2, "senior_tp": 2}))
    assert [line for line in uneven.describe() if "idle" in line] == [
        "idle: GPU 7, used by nobody; cluster.trainer_gpus, the models' *_gpus and *_tp divide them"
    ]


def test_who_is_not_served(sized: Sized) -> None:
    assert list(groups(sized(tandem={"enabled": False}, opd={"enabled": False}))) == ["actor"]
    assert list(groups(sized(engine={"mode": "fused"}))) == ["actor", "teacher"]
    urls = {"junior_url": "http://10.0.0.1:30000", "teacher_url": "http://10.0.0.2:30000"}
    assert list(groups(sized(engine=urls))) == ["actor"]
    teachers = [{"name": "a", "model": "qwen3-8B"}, {"name": "b", "model": "qwen3-8B", "url": "http://10.0.0.2:30000"}]
    several = sized(models={"teacher": "builtin:teacher"}, opd={"teachers": teachers})
    assert list(groups(several)) == ["actor", "junior", "a"]
    for name in ("actor", "junior", "senior"):
        clash = sized(models={"teacher": "builtin:teacher"}, opd={"teachers": [{"name": name, "model": "qwen3-8B"}]})
        with pytest.raises(ConfigError, match="no name of another model"):
            layout(clash)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"gpus_per_node": 2}, "cluster.nodes=1: expected more than 2 GPUs"),
        ({"trainer_gpus": 12}, "at least 12 GPUs"),
        ({"colocate": False}, "cluster.trainer_gpus=None: expected a number without colocate"),
        ({"colocate": False, "trainer_gpus": 4, "senior_gpus": 4}, "at least 10 GPUs"),
        ({"trainer_gpus": 6, "tensor_parallel": 4}, "a multiple of 4"),
        ({"nodes": 2, "trainer_gpus": 12}, "whole nodes of 8"),
        ({"teacher_gpus": 3, "teacher_tp": 2}, "cluster.teacher_gpus=3: expected a multiple of cluster.teacher_tp=2"),
        ({"nodes": 4, "trainer_gpus": 8, "teacher_gpus": 12, "teacher_tp": 12}, "cluster.teacher_tp=12"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(sized: Sized, cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(sized(cluster=cluster))


def test_our_own_file_passes_the_check_of_a_users_file(sized: Sized, tmp_path: Path) -> None:
    for cluster in ({}, {"trainer_gpus": 8}, {"nodes": 2, "colocate": False, "trainer_gpus": 8}):
        config = sized(cluster=cluster)
        (tmp_path / "s.yaml").write_text(to_yaml(sglang_config(layout(config), mem_fraction=0.7)))
        check_sglang_config(config, tmp_path / "s.yaml", layout(config))


def _drop_teacher(models: list[Any]) -> None:
    models.pop()


def _rename(models: list[Any]) -> None:
    models[1]["name"] = "Junior"


def _swap(models: list[Any]) -> None:
    models.reverse()


def _implicit(models: list[Any]) -> None:
    del models[0]["update_weights"]


def _trained(models: list[Any]) -> None:
    models[2]["update_weights"] = True


def _no_backup(models: list[Any]) -> None:
    del models[1]["server_groups"][0]["overrides"]["enable_weights_cpu_backup"]


def _more(models: list[Any]) -> None:
    models[0]["server_groups"][0]["num_gpus"] += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_teacher, "a model named teacher"),
        (_rename, "a model named junior"),
        (_swap, "actor first"),
        (_implicit, "update_weights: true"),
        (_trained, "update_weights: false"),
        (_no_backup, "enable_weights_cpu_backup: true"),
        (_more, "9 GPUs.*8, as in the cluster section"),
        (lambda models: models.clear(), "a list `sglang` of models"),
    ],
)
def test_a_users_file_is_checked(
    sized: Sized, tmp_path: Path, change: Callable[[list[Any]], None], message: str
) -> None:
    config = sized(cluster={"trainer_gpus": 8})
    tree = sglang_config(layout(config), mem_fraction=0.7)
    change(tree["sglang"])
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=message):
        check_sglang_config(config, tmp_path / "s.yaml", layout(config))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"gpus": 3, "tp": 2}, r"opd\.teachers\.0\.gpus=3: expected a multiple of opd\.teachers\.0\.tp=2"),
        ({"tp": 2}, r"cluster\.teacher_gpus=1: expected a multiple of opd\.teachers\.0\.tp=2"),
        ({"gpus": 3}, r"opd\.teachers\.0\.gpus=3: expected a multiple of cluster\.teacher_tp=2"),
    ],
)
def test_the_setting_that_was_written_is_the_one_named(sized: Sized, teacher: dict[str, Any], message: str) -> None:
    two = {} if "tp" in teacher else {"teacher_tp": 2}
    teachers = [{"name": "a", "model": "qwen3-8B", **teacher}]
    with pytest.raises(ConfigError, match=message):
        layout(sized(models={"teacher": "builtin:teacher"}, opd={"teachers": teachers}, cluster=two))
