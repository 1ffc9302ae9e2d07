"""What can be known before engines and trainer start, in the environment that trains: packages, and the models' file.

The hooks hold the same when they are first called; `slime_launch.real_parser` says it before anything runs. It starts nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig, read_yaml_mapping
from slime_tandem.errors import ConfigError
from slime_tandem.extensions import is_own

_ALWAYS = {"filelock": "filelock", "aiohttp": "aiohttp", "pydantic": "pydantic", "jinja2": "jinja2"}
"""Modules that the hooks import, by the package that has them, beside torch, transformers and safetensors, which slime has."""


def check_packages(config: RunConfig, *, our_reward: bool) -> None:
    """Raise ConfigError for a package that the job would miss; `our_reward`: responses are scored by this package."""
    needed = dict(_ALWAYS)
    if our_reward and any(task.reward in (None, "label") for task in config.tasks):
        needed["math_verify"] = "math-verify"  # compares an answer with a label
    if any(task.family != "jsonl" and not is_own(task.family) for task in config.tasks):
        needed["reasoning_gym"] = "reasoning-gym"
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        expected = f"installed in this environment, which the job runs in: {', '.join(missing)}"
        raise ConfigError("packages", None, expected, f"pip install {' '.join(missing)} (docs/slime.md, Installing)")


def check_servers(args: Any, config: RunConfig) -> None:
    """Raise ConfigError for a junior or teacher that has neither a model in `--sglang-config` nor a URL in the settings.

    slime would ask the senior in its place; our hooks look again when the engines are up.
    """
    from slime_tandem.team.roster import members_of  # torch

    file, names = getattr(args, "sglang_config", None), list[str]()
    if file is not None:
        models = read_yaml_mapping(Path(file)).get("sglang")
        names = [str(m.get("name")) for m in models if isinstance(m, Mapping)] if isinstance(models, list) else []
    inside = {"senior", *(["junior"] if config.engine.mode == "fused" else [])}
    for role, member in members_of(config).items():
        name = role.removeprefix("teacher ")
        if role not in inside and member.url is None and name not in names:
            url = "its url in opd.teachers" if role != name else f"engine.{role}_url"
            expected = f"a model named {name} in --sglang-config, or {url}"
            raise ConfigError(
                f"server of the {role}", names or None, expected, "add the model (docs/slime.md, Servers)"
            )


def check_team(config: RunConfig) -> None:
    """Raise what the hooks would raise of models and the user's own code when the engines are up, where every model is a folder
    of this machine; else what those that are tell. A plan by sizes has none."""
    from slime_tandem.team.roster import Roster, check_models  # torch

    if not check_models(config, elsewhere=lambda _: True):
        Roster(config)


def check_shared_gpus(args: Any) -> None:
    """Raise ConfigError for a frozen model of `--sglang-config` on GPUs of the trainer without a copy of its weights.

    slime frees its memory while the trainer works, and sends weights to the first model alone. Where slime would not give the
    memory up (no colocation, `--no-offload-rollout`), nothing is asked.
    """
    file = getattr(args, "sglang_config", None)
    if file is None or not getattr(args, "colocate", False) or getattr(args, "offload_rollout", None) is False:
        return
    if not Path(file).is_file():  # slime says so, or this machine of several does not see it
        return
    trainer = int(getattr(args, "actor_num_nodes", 1)) * int(getattr(args, "actor_num_gpus_per_node", 8))
    everywhere = getattr(args, "sglang_enable_weights_cpu_backup", False) is True
    tree = read_yaml_mapping(Path(file))
    models = tree.get("sglang")
    if not everywhere and isinstance(models, list):
        check_backups([m for m in models if isinstance(m, Mapping)], trainer, f"--sglang-config {file}")


def check_backups(models: list[Mapping[str, Any]], trainer_gpus: int, where: str) -> None:
    """Raise ConfigError as `check_shared_gpus`, of the models of such a file, which take their GPUs in its order from 0 on."""
    start = 0
    for number, model in enumerate(models):
        for group in model.get("server_groups") or model.get("engine_groups") or []:
            overrides = group.get("overrides") or {}
            backed_up = any(
                str(k).replace("-", "_") == "enable_weights_cpu_backup" and v is True for k, v in overrides.items()
            )
            trained = number == 0 if model.get("update_weights") is None else bool(model["update_weights"])
            if not trained and start < trainer_gpus and not backed_up and group.get("worker_type") != "placeholder":
                expected = "overrides.enable_weights_cpu_backup: true, the trainer uses its GPUs in turns"
                raise ConfigError(f"{where} {model.get('name')}", group.get("overrides"), expected, "add it")
            start += int(group.get("num_gpus", 0))
