"""Flags and our section become one configuration; what contradicts, or does not go together, is refused by name."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tandem.errors import ConfigError
from slime_tandem.slime_hooks import settings as module
from slime_tandem.slime_hooks.refused import check_flags
from slime_tandem.slime_hooks.settings import build, settings

FLAGS = {
    "apply_chat_template_kwargs": {},
    "hf_checkpoint": "/models/senior",
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": 128,
    "rollout_stop": None,
    "n_samples_per_prompt": 8,
    "rollout_batch_size": 16,
    "eps_clip": 0.1,
    "eps_clip_high": 0.3,
    "kl_loss_type": "low_var_kl",
    "grpo_std_normalization": True,
    "loss_type": "custom_loss",
    "custom_advantage_function_path": "slime_tandem.slime_hooks.hooks.advantages",
    "use_rollout_logprobs": True,
}


def arguments(section: Any = None, **flags: Any) -> Namespace:
    return Namespace(**{**FLAGS, **flags, "slime_tandem": {} if section is None else section})


def test_what_flags_say_is_in_the_configuration() -> None:
    c = settings(arguments({"tandem": {"prob_senior": 0.25}}))
    assert (c.models.senior, c.seed, c.tandem.prob_senior) == ("/models/senior", 42, 0.25)
    assert (c.sampling.max_new_tokens, c.train.samples_per_prompt, c.train.prompts_per_step) == (128, 8, 16)
    assert (c.objective.clip_low, c.objective.clip_high, c.objective.kl_estimator) == (0.1, 0.3, "k3")
    assert c.objective.scale_advantages == "std"
    assert settings(arguments(grpo_std_normalization=False)).objective.scale_advantages == "none"
    assert settings(arguments(rollout_stop="\n\n")).sampling.stop == ("\n\n",)
    assert settings(arguments(apply_chat_template_kwargs={})).models.template_kwargs == {}
    kwargs = {"enable_thinking": False}
    assert settings(arguments(apply_chat_template_kwargs=kwargs)).models.template_kwargs == kwargs
    assert settings(arguments({"models": {"template_kwargs": kwargs}}, apply_chat_template_kwargs=kwargs))


def test_it_is_built_once_per_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    args, other = arguments(), arguments(rollout_seed=1)
    first = settings(args)
    assert settings(args) is first
    assert settings(other).seed == 1
    module.use(module.ANY, first)
    assert settings(object()) is first


def test_the_section_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"opd": {"coef": 0.5}}))
    assert settings(arguments(str(file))).opd.coef == 0.5


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tandm": {}}, "did you mean `tandem`"),
        ({"tandem": {"prob_senior": 1.5}}, r"tandem\.prob_senior=1\.5"),
        ({"seed": 7}, r"slime_tandem\.seed=7: expected 42, what --rollout-seed says"),
        ({"models": {"senior": "/other"}}, "--hf-checkpoint"),
        ({"models": {"template_kwargs": {"a": 1}}}, r"expected \{\}, what --apply-chat-template-kwargs says"),
        ({"optimizer": {"lr": 0.1}}, r"slime_tandem\.optimizer=.*--lr"),
        ({"train": {"steps": 3}}, "--num-rollout"),
        ({"models": "x"}, r"slime_tandem\.models='x': expected a section"),
        (7, "--custom-config-path=7"),
    ],
)
def test_a_section_that_does_not_hold_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(arguments(section))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollout_temperature": 0.0}, "temperature above 0"),
        ({"rollout_top_p": 0.9}, r"--rollout-top-p=0\.9: expected 1.*kept ids"),
        ({"rollout_top_k": 5}, "top_k=-1"),
        ({"use_opd": True}, "--use-opd=True.*twice"),
        (
            {"loss_type": "policy_loss"},
            r"--loss-type='policy_loss': expected custom_loss.*set slime_tandem\.opd\.enabled=false",
        ),
        ({"custom_advantage_function_path": None}, "--custom-advantage-function-path=None"),
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"use_rollout_logprobs": False}, "--use-rollout-logprobs"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay.*routes"),
        ({"mask_offpolicy_in_partial_rollout": True}, "--mask-offpolicy-in-partial-rollout"),
        ({"multimodal_keys": {"image": "i"}}, "--multimodal-keys"),
        ({"custom_convert_samples_to_train_data_path": "a.b"}, "--custom-convert-samples-to-train-data-path"),
        ({"rollout_stop_token_ids": [7]}, "--rollout-stop-token-ids"),
        ({"use_critic": True}, "--use-critic"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator='gspo': expected grpo"),
        ({"kl_coef": 0.1}, r"--kl-coef=0\.1: expected 0 with our advantages"),
    ],
)
def test_flags_that_do_not_go_with_the_hooks_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(arguments(**flags))


@pytest.mark.parametrize("flags", [{"rm_type": "math"}, {"custom_rm_path": "somebodys.reward"}])
def test_a_reward_of_a_task_and_one_of_slimes_are_refused_together(flags: dict[str, Any]) -> None:
    section = {"tasks": [{"family": "chain_sum", "reward": "my.rewards:f"}]}
    with pytest.raises(ConfigError, match=r"not to be set with slime_tandem\.tasks\[\]\.reward=\['my\.rewards:f'\]"):
        settings(arguments(section, **flags))
    ours = {"custom_rm_path": "slime_tandem.slime_hooks.hooks.reward"}
    assert settings(arguments(section, **ours)).tasks[0].reward == "my.rewards:f"


@pytest.mark.parametrize(
    ("objective", "flags"),
    [
        ({"ratio": "sequence"}, {}),
        ({"reduction": "sequence_mean"}, {}),
        ({"lambda_jun": 0.1}, {}),
        ({"rollout_weights": "truncated"}, {"use_rollout_logprobs": False}),
        ({"kl_coef": 0.1, "kl_target": 0.02, "kl_guard": "stop"}, {}),
    ],
)
def test_settings_of_our_loss_go_with_it_alone(objective: dict[str, Any], flags: dict[str, Any]) -> None:
    section = {"objective": objective, "opd": {"enabled": False}}
    settings(arguments(section, **flags))
    with pytest.raises(ConfigError, match=r"slime_tandem\.objective\.\w+=.*slime's own loss"):
        settings(arguments(section, loss_type="policy_loss", custom_advantage_function_path=None, **flags))


KL = {"kl_coef": 0.1, "kl_target": 0.02}


@pytest.mark.parametrize(
    ("objective", "flags", "message"),
    [
        ({"kl_coef": 0.1, "kl_in": "reward"}, {}, r"kl_in='reward'.*before the trainer"),
        ({**KL, "kl_guard": "skip_updates"}, {}, r"kl_guard='skip_updates'.*every step"),
        (KL, {"recompute_loss_function": True}, "--recompute-loss-function.*twice"),
    ],
)
def test_what_slime_cannot_do_is_refused(objective: dict[str, Any], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(arguments({"objective": objective}, **flags))


CUT = {"custom_generate_function_path": "g", "custom_megatron_before_train_step_hook_path": "b"}


@pytest.mark.parametrize(
    ("sampling", "flags", "message"),
    [
        ({"top_p": 0.9, "truncation_replay": "kept_ids"}, {}, "truncation_replay='kept_ids'.*SGLang does not report"),
        ({"min_p": 0.1}, {}, "min-p after top-p"),
        ({}, {"custom_generate_function_path": None}, "--custom-generate-function-path=None"),
        ({}, {"custom_megatron_before_train_step_hook_path": None}, "--custom-megatron-before-train-step-hook-path"),
        ({}, {"use_routing_replay": True}, "--use-routing-replay"),
        ({}, {"allgather_cp": True}, "--allgather-cp"),
        ({}, {"loss_type": "policy_loss", "custom_advantage_function_path": None}, "slime's own loss"),
    ],
)
def test_truncated_sampling_needs_what_finds_it_again(
    sampling: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    section = {"opd": {"enabled": False}, "sampling": {"top_p": 0.9, "truncation_replay": "recompute"}}
    assert settings(arguments(section, rollout_top_k=7, **CUT)).sampling.top_k == 7
    section["sampling"] |= sampling
    with pytest.raises(ConfigError, match=message):
        settings(arguments(section, **{**CUT, **flags}))


def test_what_some_settings_need_of_the_flags() -> None:
    kl = {"objective": {"kl_coef": 0.1}}
    with pytest.raises(ConfigError, match="--use-kl-loss"):
        settings(arguments(kl, use_kl_loss=False))
    assert settings(arguments(kl, use_kl_loss=True)).objective.kl_coef == 0.1
    divergence = {"opd": {"signal": "reverse_kl"}}
    settings(arguments(divergence, tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match="--allgather-cp"):
        settings(arguments(divergence, allgather_cp=True))


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_rollout_weights_need_the_trainers_own_log_probs(kind: str) -> None:
    section = {"objective": {"rollout_weights": kind}}
    with pytest.raises(ConfigError, match="--use-rollout-logprobs=True: expected not to be set"):
        settings(arguments(section))
    assert settings(arguments(section, use_rollout_logprobs=False)).objective.rollout_weights == kind


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"objective": {"lambda_jun": 0.5}}, r"objective\.lambda_jun=0\.5: expected 0\.0 .* slime's own loss"),
        ({"objective": {"ratio": "sequence"}}, r"objective\.ratio='sequence': expected token"),
        ({"objective": {"reduction": "constant"}}, r"objective\.reduction='constant'"),
        ({"objective": {"kl_coef": 0.1}}, r"objective\.kl_coef=0\.1"),
        ({"objective": {"surrogate": "cispo"}}, r"objective\.surrogate='cispo'"),
        ({"objective": {"dual_clip": 3.0}}, r"objective\.dual_clip=3\.0"),
        ({"tandem": {"junior_token_loss_weight": 0.5}}, r"tandem\.junior_token_loss_weight=0\.5"),
        ({"objective": {"baseline": "median"}}, r"baseline='median': .* --custom-reward-post-process-path"),
        ({"objective": {"clip_advantages": 2.0}}, "clip_advantages=2"),
        ({"objective": {"scale_advantages": "mad"}}, "scale_advantages='mad'"),
    ],
)
def test_a_setting_that_slimes_own_loss_would_ignore_is_refused(section: dict[str, Any], message: str) -> None:
    alone = {"loss_type": "policy_loss", "custom_advantage_function_path": None}
    with pytest.raises(ConfigError, match=message):
        settings(arguments({"opd": {"enabled": False}, **section}, eps_clip=0.2, **alone))
    assert settings(arguments(section, eps_clip=0.2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eps_clip_c": 3.0}, "--eps-clip-c"),
        ({"use_tis": True}, r"--use-tis.*objective\.rollout_weights does it"),
        ({"use_unbiased_kl": True}, "--use-unbiased-kl"),
        ({"kl_loss_coef": 0.5}, r"--kl-loss-coef=0\.5: expected .*kl_coef=0"),
    ],
)
def test_a_flag_that_our_loss_would_ignore_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(arguments(**flags))
    alone = {"loss_type": "policy_loss", "custom_advantage_function_path": None}
    assert settings(arguments({"opd": {"enabled": False}}, **alone, **flags))


def test_the_entropy_bonus_is_slimes_flag_with_either_loss() -> None:
    alone = {"loss_type": "policy_loss", "custom_advantage_function_path": None}
    assert settings(arguments(entropy_coef=0.01)).objective.entropy_coef == 0.01
    assert settings(arguments({"opd": {"enabled": False}}, **alone, entropy_coef=0.01)).objective.entropy_coef == 0.01
    with pytest.raises(ConfigError, match=r"entropy_coef=0\.02: expected 0\.01, what --entropy-coef says"):
        settings(arguments({"objective": {"entropy_coef": 0.02}}, entropy_coef=0.01))


def test_passes_over_a_rollout_need_our_hook_and_a_schedule_that_counts_them() -> None:
    twice: dict[str, Any] = {"train": {"epochs_per_step": 2}}
    alone = {"loss_type": "policy_loss", "custom_advantage_function_path": None}
    hook = {"rollout_data_postprocess_path": "slime_tandem.slime_hooks.hooks.data_post_process"}
    solo = {**twice, "tandem": {"enabled": False}}
    assert settings(arguments(twice, **hook, lr_decay_style="constant")).train.epochs_per_step == 2
    assert settings(arguments(twice, **hook, lr_decay_style="cosine", lr_decay_iters=40)).train.epochs_per_step == 2
    for tree, flags, message in (
        (twice, {}, r"epochs_per_step=2: expected 1 with slime's own loss"),
        (
            {**twice, "opd": {"enabled": False}},
            {**hook, **alone},
            r"epochs_per_step=2: expected 1 with slime's own loss",
        ),
        (twice, {**hook, "lr_decay_style": "cosine"}, "--lr-decay-style='cosine': expected constant"),
        (solo, {**hook, "use_routing_replay": True}, "--use-routing-replay=True.*recorded for one pass"),
        (
            solo,
            {**hook, "use_rollout_routing_replay": True},
            "--use-rollout-routing-replay=True.*recorded for one pass",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(arguments(tree, **flags))
    for name, value in (("gradient_checkpointing", True), ("threads", 2)):
        with pytest.raises(ConfigError, match=rf"train\.{name}={value}: expected nothing: slime has"):
            settings(arguments({"train": {name: value}}))


def test_the_hooks_of_rollouts_go_alone_with_slimes_own_loss() -> None:
    """The least change: generate alone, junior tokens masked, slime's own GRPO."""
    args = arguments({"opd": {"enabled": False}}, loss_type="policy_loss", custom_advantage_function_path=None)
    check_flags(args, build(args))
