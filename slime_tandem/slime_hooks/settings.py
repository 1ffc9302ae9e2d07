"""One configuration out of slime's flags and our section, and what of slime's flags does not go with it.

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

KEY = "slime_tandem"
"""The key of the file that `--custom-config-path` names."""

_FROM_SLIME: dict[str, str] = {
    "seed": "rollout_seed",
    "models.senior": "hf_checkpoint",
    "sampling.temperature": "rollout_temperature",
    "sampling.top_k": "rollout_top_k",
    "sampling.max_new_tokens": "rollout_max_response_len",
    "sampling.stop": "rollout_stop",
    "train.samples_per_prompt": "n_samples_per_prompt",
    "train.prompts_per_step": "rollout_batch_size",
    "objective.clip_low": "eps_clip",
    "objective.clip_high": "eps_clip_high",
    "objective.kl_estimator": "kl_loss_type",
}
"""Our setting -> slime's argument that says it."""
_SLIMES_OWN: dict[str, str] = {
    "name": "--wandb-group or the folder of --save",
    "runs_dir": "--save",
    "optimizer": "--optimizer, --lr and the like",
    "control": "a second launch without our flags",
    "eval": "--eval-prompt-data, --eval-interval and --eval-config",
    "engine.threads": "--sglang-config",
    "engine.max_batch": "--sglang-max-running-requests",
    "engine.cache_tokens": "--sglang-max-total-tokens",
    "train.steps": "--num-rollout",
    "train.save_every": "--save-interval",
    "train.updates_per_step": "--global-batch-size",
    "train.micro_batch_tokens": "--max-tokens-per-gpu",
    "engine.sessions": "nothing: requests go through a router",
}
"""Our settings that have no meaning under slime -> what says it there."""

_OUR_REWARD = "slime_tandem.slime_hooks.hooks.reward"

_held: tuple[Any, RunConfig] | None = None


def use(args: Any, config: RunConfig) -> None:
    """Give `args` this configuration, whatever they hold (a program of one's own around slime, and tests)."""
    global _held
    _held = (args, config)


def forget() -> None:
    """Build the configuration anew when it is asked for next."""
    global _held
    _held = None


def settings(args: Any) -> RunConfig:
    """The configuration of these arguments; built and checked once per process.

    Raises ConfigError for a missing or broken section, and for flags of slime's that do not go with it.
    """
    global _held
    if _held is None or (_held[0] is not args and _held[0] is not ANY):
        config = build(args)
        check_flags(args, config)
        _held = (args, config)
    return _held[1]


ANY = object()
"""For `use`: whatever arguments come."""


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
    for name, flag in _FROM_SLIME.items():
        value = getattr(args, flag, None)
        if value is None:
            continue
        if name == "objective.kl_estimator" and value == "low_var_kl":
            value = "k3"  # slime's other name for it
        if name == "sampling.stop":
            value = [value] if isinstance(value, str) else list(value)
        given = _look_up(tree, name)
        if given is not None and given != value:
            where = f"--{flag.replace('_', '-')}"
            expected = f"{value!r}, what {where} says"
            raise ConfigError(f"{KEY}.{name}", given, expected, f"remove it, or change {where}")
        _put(tree, name, value)
    if _look_up(tree, "objective.scale_advantages") is None and getattr(args, "grpo_std_normalization", False):
        _put(tree, "objective.scale_advantages", "std")
    return RunConfig.from_mapping(tree)


def check_flags(args: Any, config: RunConfig) -> None:
    """Refuse flags of slime's that our hooks do not honour, or that would apply something twice; raises ConfigError.

    A flag that the arguments do not have is one that is not set.
    """
    custom_loss = getattr(args, "loss_type", "policy_loss") == "custom_loss"
    channels = getattr(args, "custom_advantage_function_path", None) is not None
    opd = config.opd.enabled
    on = [name for name in _REFUSED if getattr(args, name, None)]
    for name in on:
        why, remedy = _REFUSED[name]
        raise ConfigError(_flag(name), getattr(args, name), f"not to be set with slime_tandem: {why}", remedy)
    if getattr(args, "use_opd", False):
        expected = "not to be set: the signal would be applied twice"
        raise ConfigError("--use-opd", True, expected, "remove it; slime_tandem.opd does it")
    if opd and not custom_loss:
        raise ConfigError(
            "--loss-type",
            getattr(args, "loss_type", None),
            "custom_loss with slime_tandem.opd.enabled=true, slime's own losses do not know our weights",
            "add --loss-type custom_loss --custom-loss-function-path slime_tandem.slime_hooks.hooks.loss",
        )
    if not custom_loss:
        _refuse_what_needs_our_loss(args, config)
    elif (coef := getattr(args, "kl_loss_coef", None)) and coef != config.objective.kl_coef:
        expected = f"slime_tandem.objective.kl_coef={config.objective.kl_coef:g}, which our loss goes by"
        raise ConfigError("--kl-loss-coef", coef, expected, "set the two alike")
    for name in _OF_SLIMES_LOSS if custom_loss else ():
        if value := getattr(args, name, None):
            why = "not to be set with our loss, which does not have it"
            raise ConfigError(_flag(name), value, why, "remove it; slime_tandem.objective has what our loss has")
    _check_rewards(args, config)
    _check_objective(args, config)
    _check_truncation(args, config, trains=custom_loss and channels)
    if scores_by_id(config) and not getattr(args, "custom_generate_function_path", None):
        raise ConfigError(
            "--custom-generate-function-path",
            None,
            "our generate where servers score given ids: SGLang ends itself when slime's own requests meet these",
            "name it (tandem.enabled=false for the senior alone), or set opd.selection.missing_mass=rest",
        )
    if custom_loss and not channels:
        remedy = "name all hooks of docs/slime.md"
        raise ConfigError("--custom-advantage-function-path", None, "our hook, with our loss", remedy)
    if channels and getattr(args, "normalize_advantages", False):
        expected = "not to be set: whitening behind the advantages would undo groups and weights"
        raise ConfigError("--normalize-advantages", True, expected, "remove it")
    if channels:
        engines = config.objective.rollout_weights == "none"
        if getattr(args, "use_rollout_logprobs", engines) != engines:
            why = "the old policy of our ratio is the one that sampled; it saves a forward pass, too"
            if not engines:
                why = f"{KEY}.objective.rollout_weights compares the trainer's own log-probs, which slime computes without it"
            expected = f"{'set' if engines else 'not to be set'}: {why}"
            remedy = "add it" if engines else "remove it"
            raise ConfigError("--use-rollout-logprobs", not engines, expected, remedy)
    if channels and getattr(args, "calculate_per_token_loss", False):
        expected = "not to be set: our terms are means over weights already"
        raise ConfigError("--calculate-per-token-loss", True, expected, "remove it")
    if channels and config.objective.kl_coef > 0 and not getattr(args, "use_kl_loss", True):
        expected = "set with slime_tandem.objective.kl_coef above 0, it makes slime compute the reference's log-probs"
        raise ConfigError("--use-kl-loss", False, expected, "add it, and --ref-load")
    whole_rows = config.sampling.truncates or (opd and config.opd.signal != "sampled")
    if channels and whole_rows and getattr(args, "allgather_cp", False):
        expected = (
            "not to be set where whole rows of logits are read: those of a rank are not the tokens of its channels"
        )
        raise ConfigError("--allgather-cp", True, expected, "remove it, or set opd.signal=sampled")


def _check_rewards(args: Any, config: RunConfig) -> None:
    """Refuse rewards of tasks beside a reward of slime's, which would be the one that counts."""
    rewards = [task.reward for task in config.tasks if task.reward is not None]
    path, kind = getattr(args, "custom_rm_path", None), getattr(args, "rm_type", None)
    if rewards and (kind or path not in (None, _OUR_REWARD)):
        flag, value = ("--rm-type", kind) if kind else ("--custom-rm-path", path)
        raise ConfigError(flag, value, f"not to be set with {KEY}.tasks[].reward={rewards}", "remove one of the two")


def _check_objective(args: Any, config: RunConfig) -> None:
    """Refuse settings of the objective that slime's trainer has no place for."""
    o = config.objective
    if o.kl_in != "loss":
        expected = "loss under slime: rewards are final, and centred by group, before the trainer scores anything"
        raise ConfigError(f"{KEY}.objective.kl_in", o.kl_in, expected, "set objective.kl_in=loss")
    if o.kl_target is not None and o.kl_guard == "skip_updates":
        expected = "double or stop under slime: its trainer takes every step of a rollout"
        raise ConfigError(f"{KEY}.objective.kl_guard", o.kl_guard, expected, "set objective.kl_guard=double or stop")
    if o.kl_target is not None and getattr(args, "recompute_loss_function", False):
        expected = "not to be set with objective.kl_target: the KL of a micro-batch would count twice"
        raise ConfigError("--recompute-loss-function", True, expected, "remove it")


def _check_truncation(args: Any, config: RunConfig, *, trains: bool) -> None:
    """Refuse truncated sampling that the trainer would not find again, or that slime does its own way."""
    s = config.sampling
    if (top_p := getattr(args, "rollout_top_p", 1.0)) != 1.0:
        expected = (
            f"1: with less slime takes samples only with every token's kept ids; ours goes by {KEY}.sampling.top_p"
        )
        raise ConfigError("--rollout-top-p", top_p, expected, f"move it to {KEY}.sampling.top_p")
    if not s.truncates:
        return
    value = {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    if not trains:
        expected = "top_p 1, top_k -1, min_p 0 with slime's own loss, which has the ratio of the full distribution"
        raise ConfigError("sampling", value, expected, "name our hooks (docs/slime.md)")
    if s.truncation_replay != "recompute":
        expected = "recompute under slime: SGLang does not tell what it drew from"
        raise ConfigError(
            f"{KEY}.sampling.truncation_replay",
            s.truncation_replay,
            expected,
            "set sampling.truncation_replay=recompute",
        )
    if s.min_p > 0 and s.top_p < 1:
        expected = "0 with top_p below 1 under slime: SGLang applies min-p after top-p, not before"
        raise ConfigError(f"{KEY}.sampling.min_p", s.min_p, expected, "set one of the two to its default")
    if not getattr(args, "custom_generate_function_path", None):
        expected = "our generate: slime's own requests truncate by its flags alone"
        raise ConfigError("--custom-generate-function-path", None, expected, "name it")
    if not getattr(args, "custom_megatron_before_train_step_hook_path", None):
        expected = "our hook, it finds the log-probs of the truncated distribution"
        raise ConfigError("--custom-megatron-before-train-step-hook-path", None, expected, "name it")
    if getattr(args, "use_routing_replay", False):
        expected = (
            "not to be set with truncated sampling: our forward pass before the first step would use up its routes"
        )
        raise ConfigError("--use-routing-replay", True, expected, "remove it")


def _refuse_what_needs_our_loss(args: Any, config: RunConfig) -> None:
    """Raise ConfigError for a setting of the loss or the advantages that slime, left to its own functions, never sees."""
    o, usual = config.objective, type(config.objective).model_fields
    hooks = "add --loss-type custom_loss and the hooks of docs/slime.md, or remove it"
    for name in _OF_OUR_LOSS:
        if (value := getattr(o, name)) != usual[name].default:
            expected = f"{usual[name].default} (the default) with slime's own loss, which does not know it"
            raise ConfigError(f"{KEY}.objective.{name}", value, expected, hooks)
    weight = config.tandem.junior_token_loss_weight
    if config.tandem.enabled and weight > 0:
        expected = (
            "0 with slime's own loss, whose masks are whole and whose old log-probs of junior tokens are the junior's"
        )
        raise ConfigError(f"{KEY}.tandem.junior_token_loss_weight", weight, expected, hooks)
    if getattr(args, "custom_reward_post_process_path", None) is None:
        for name in _OF_OUR_ADVANTAGES:
            value, default = getattr(o, name), usual[name].default
            if value != default and (name, value) != ("scale_advantages", "std"):
                expected = f"{default} (the default) without --custom-reward-post-process-path"
                raise ConfigError(f"{KEY}.objective.{name}", value, expected, hooks)


def scores_by_id(config: RunConfig) -> bool:
    """Whether servers are asked for the log-probs of given ids: lists of candidates that one side lacks."""
    opd = config.opd
    by_lists = opd.selection.mask != "full" and opd.selection.missing_mass == "exact"
    return opd.enabled and (by_lists or (opd.signal != "sampled" and opd.support != "teacher"))


_REFUSED: dict[str, tuple[str, str]] = {
    "use_rollout_routing_replay": ("a junior's tokens have no routes to replay", "remove it"),
    "mask_offpolicy_in_partial_rollout": (
        "resumed tokens keep their log-probs and weights, the clip handles them",
        "remove it",
    ),
    "multimodal_keys": ("teachers and juniors are given text alone", "remove it"),
    "custom_convert_samples_to_train_data_path": ("our channels travel in slime's own conversion", "remove it"),
    "rollout_stop_token_ids": ("a turn ends at the ids of the model folder", "put them into generation_config.json"),
    "use_critic": ("advantages are relative to the group", "remove it"),
}


_OF_OUR_LOSS = (
    "reward_coef",
    "surrogate",
    "ratio",
    "dual_clip",
    "reduction",
    "rollout_weights",
    "constant_length",
    "kl_coef",
    "lambda_jun",
    "kl_target",
)
"""Settings of the objective that our loss alone applies."""
_OF_OUR_ADVANTAGES = ("baseline", "scale_advantages", "clip_advantages")
"""Those that our `reward_post_process` applies; slime's own can divide by the standard deviation, too."""
_OF_SLIMES_LOSS = ("entropy_coef", "eps_clip_c", "use_tis", "use_opsm", "custom_pg_loss_reducer_function_path")
"""Flags that slime's policy loss alone applies."""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
