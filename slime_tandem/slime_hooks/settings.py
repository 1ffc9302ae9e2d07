"""One configuration out of slime's flags and our section; refused.py says which of them do not go together.

`--custom-config-path FILE` makes slime set every key of the file on its arguments. Our file has one key, `slime_tandem`: the
tree of `RunConfig`, or the path of a file that holds it. What a flag of slime's says already (models.senior, sampling, clips,
group size, seed) is taken from the flag; a tree that says otherwise is refused, and so is a setting that slime would ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig, read_yaml_mapping
from slime_tandem.errors import ConfigError
from slime_tandem.slime_hooks import before
from slime_tandem.slime_hooks.refused import FOLLOWED, KEY, OUR_REWARD, argument, check_flags
from slime_tandem.slime_hooks.state import STATE

_SLIMES_OWN: dict[str, str] = {
    "name": "--wandb-group or the folder of --save",
    "runs_dir": "--save",
    "optimizer": "--optimizer, --lr and the like",
    "control": "a second launch without our flags",
    "report_to": "--use-wandb and --use-tensorboard",
    "tracking": "--wandb-project, --wandb-team and --wandb-mode",
    "serving": "--sglang-config",
    "eval": "--eval-prompt-data, --eval-interval and --eval-config",
    "engine.threads": "--sglang-config",
    "engine.max_batch": "--sglang-max-running-requests",
    "engine.cache_tokens": "--sglang-max-total-tokens",
    "train.steps": "--num-rollout",
    "train.save_every": "--save-interval",
    "train.updates_per_step": "--global-batch-size",
    "train.micro_batch_tokens": "--max-tokens-per-gpu",
    "train.gradient_checkpointing": "--recompute-granularity",
    "train.threads": "--actor-num-gpus-per-node, a process for each GPU",
    "engine.sessions": "nothing: requests go through a router",
}
"""Our settings that have no meaning under slime -> what says it there."""

ANY = object()
"""For `use`: whatever arguments come."""


def use(args: Any, config: RunConfig) -> None:
    """Give `args` this configuration, whatever they hold (a program of one's own around slime, and tests)."""
    STATE.settings = (args, config)


def settings(args: Any) -> RunConfig:
    """The configuration of these arguments; built and checked once per process.

    Raises ConfigError for a missing or broken section, and for flags of slime's that do not go with it.
    """
    held = STATE.settings
    if held is None or (held[0] is not args and held[0] is not ANY):
        config = build(args)
        check_flags(args, config)
        before.check_packages(config, our_reward=scores_itself(args))
        before.check_shared_gpus(args)
        held = STATE.settings = (args, config)
    return held[1]


def scores_itself(args: Any) -> bool:
    """Whether responses are scored by this package: our reward is named, or none."""
    own = getattr(args, "custom_rm_path", None)
    return bool(own == OUR_REWARD or (own is None and getattr(args, "rm_type", None) is None))


def build(args: Any) -> RunConfig:
    """Our tree completed from slime's arguments; raises ConfigError where the two contradict each other."""
    section = getattr(args, KEY, None)
    if isinstance(section, str):
        section = read_yaml_mapping(Path(section))
    if not isinstance(section, Mapping):
        expected = f"a section `{KEY}` with the settings of slime_tandem"
        raise ConfigError("--custom-config-path", section, expected, "see docs/slime.md")
    tree: dict[str, Any] = _copied(section)
    for name, instead in _SLIMES_OWN.items():
        if (value := _look_up(tree, name)) is not None:
            raise ConfigError(f"{KEY}.{name}", value, f"nothing: slime has {instead}", "remove it")
    for flag, name in FOLLOWED.items():
        value = getattr(args, argument(flag), None)
        if value is None:
            continue
        if name == "objective.kl_estimator" and value == "low_var_kl":
            value = "k3"  # slime's other name for it
        if name == "sampling.stop":
            value = [value] if isinstance(value, str) else list(value)
        given = _look_up(tree, name)
        if given is not None and given != value:
            expected = f"{value!r}, what {flag} says"
            raise ConfigError(f"{KEY}.{name}", given, expected, f"remove it, or change {flag}")
        _put(tree, name, value)
    if _look_up(tree, "objective.scale_advantages") is None and getattr(args, "grpo_std_normalization", False):
        _put(tree, "objective.scale_advantages", "std")
    return RunConfig.from_mapping(tree)


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _look_up(tree: Mapping[str, Any], name: str) -> Any:
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{KEY}.{part}", node, "a section", "give its settings")
    node[leaf] = value
