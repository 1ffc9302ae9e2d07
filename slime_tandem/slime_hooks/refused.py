"""One list of what does not go together under slime: its flags, and settings of ours, each with the reason and the remedy.

The hooks walk it when a job starts, the launcher when it plans one (slime_launch/user_flags.py): a flag stands here once, and
both say the same. Beside it: which setting owns a flag that both could set. It knows arguments and a configuration, and nothing
of processes; slime is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_tandem.config import ObjectiveConfig, RunConfig
from slime_tandem.errors import ConfigError

KEY = "slime_tandem"
"""The one key of the file that `--custom-config-path` names. slime sets every key of it on its arguments: a section named
`optimizer` at the top would replace Megatron's `--optimizer`."""


def argument(flag: str) -> str:
    """slime's name of a flag among its arguments.

    >>> argument("--use-opd")
    'use_opd'
    """
    return flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Job:
    """What a rule is asked about: slime's arguments (`planned`: a plan's), and our configuration completed from them."""

    args: Any
    config: RunConfig
    planned: bool = False

    def value(self, name: str) -> Any:
        """Of a flag `--a-b` (None: not among the arguments, so not set), or of a setting `slime_tandem.a.b`.

        >>> from types import SimpleNamespace
        >>> job = Job(SimpleNamespace(use_opd=True), RunConfig())
        >>> job.value("--use-opd"), job.value("--use-tis"), job.value("slime_tandem.tandem.prob_senior")
        (True, None, 0.5)
        """
        if name.startswith("--"):
            return getattr(self.args, argument(name), None)
        found: Any = self.config
        for part in name.removeprefix(f"{KEY}.").split("."):
            found = getattr(found, part)
        return found

    @property
    def our_loss(self) -> bool:
        """Whether slime's loss is left to a hook."""
        return bool(self.value("--loss-type") == "custom_loss")

    @property
    def our_advantages(self) -> bool:
        """Whether the advantages are left to a hook, which the channels travel to."""
        return self.value("--custom-advantage-function-path") is not None

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.config.sampling.truncates


Test = Callable[[Any, Job], bool]
Text = str | Callable[[Job], str]


def given(value: Any, _: Job) -> bool:
    """A flag that is set: not off, empty or zero."""
    return bool(value)


def missing(value: Any, _: Job) -> bool:
    """A flag that is not set."""
    return not value


@dataclass(frozen=True, slots=True)
class Rule:
    """One flag of slime's or setting of ours. `wrong(value, job)`: whether its value is refused, asked only where `when(job)`.

    `expected` and `remedy` are those of the ConfigError; `value(job)` is what it shows, by default the flag's or setting's own.
    `planned`: held against a plan alone (True), whose files and flags the launcher writes, or never against one (False).
    `in_plan`: the remedy there, where no flag that `remedy` names is the user's to add.
    """

    name: str
    expected: Text
    remedy: str = "remove it"
    wrong: Test = given
    when: Callable[[Job], bool] = lambda _: True
    value: Callable[[Job], Any] | None = None
    planned: bool | None = None
    in_plan: str | None = None

    def check(self, job: Job) -> None:
        """Raise ConfigError where the rule is broken."""
        value = job.value(self.name) if self.value is None else self.value(job)
        if self.when(job) and self.wrong(value, job):
            expected = self.expected if isinstance(self.expected, str) else self.expected(job)
            name, remedy = self.name, self.remedy
            if job.planned:  # whose user writes settings of a configuration, not of the file that slime is given
                name, expected, remedy = (
                    text.replace(f"{KEY}.", "") for text in (name, expected, self.in_plan or remedy)
                )
            raise ConfigError(name, value, expected, remedy)


def check_flags(args: Any, config: RunConfig, *, planned: bool = False) -> None:
    """Hold every rule against slime's arguments and our configuration; raises the ConfigError of the first that is broken.

    A flag that the arguments do not have is one that is not set. `planned`: the arguments are a plan's.
    """
    job = Job(args, config, planned)
    for rule in RULES:
        if rule.planned in (None, planned):
            rule.check(job)


def scores_by_id(config: RunConfig) -> bool:
    """Whether servers are asked for the log-probs of given ids: lists of candidates that one side lacks."""
    opd = config.opd
    return opd.enabled and (opd.selection.asks_ids or (opd.signal != "sampled" and opd.support != "teacher"))


# ---- the rules, in the order in which they are held ----


def _never(flag: str, why: str, remedy: str = "remove it", *, planned: bool | None = None) -> Rule:
    return Rule(flag, f"not to be set with slime_tandem: {why}", remedy, planned=planned)


_HOOKS = "add --loss-type custom_loss and the hooks of docs/slime.md, or remove it"
_OUR_LOSS = "remove it, or set cluster.loss=own"
"""The same in a plan, whose hooks follow from that setting."""
_OUR_LOSS_HAS = f"remove it; {KEY}.objective has what our loss has"

_NEVER = (
    Rule(
        "--use-rollout-routing-replay",
        "not to be set with tandem.enabled=true: a junior's tokens have no routes to replay",
        "remove it, or let the senior write alone (tandem.enabled=false)",
        when=lambda job: job.config.tandem.enabled,
    ),
    Rule(
        "--use-rollout-routing-replay",
        "not to be set where servers score given ids: SGLang ends itself when slime's own requests, which bring the routes, "
        "meet these",
        "remove it, or set opd.selection.missing_mass=rest and opd.support=teacher",
        when=lambda job: scores_by_id(job.config),
    ),
    Rule(
        "--use-routing-replay",
        "not to be set with tandem.enabled=true: a junior's tokens have no routes to replay",
        "remove it, or let the senior write alone (tandem.enabled=false)",
        when=lambda job: job.config.tandem.enabled,
        planned=True,
    ),
    Rule(
        "--use-routing-replay",
        f"not to be set alone with {KEY}.objective.rollout_weights=none: slime then runs no forward pass whose routes it could "
        "keep",
        "use --use-rollout-routing-replay, or set objective.rollout_weights",
        when=lambda job: (
            job.config.objective.rollout_weights == "none" and not job.value("--use-rollout-routing-replay")
        ),
        planned=True,
    ),
    _never(
        "--mask-offpolicy-in-partial-rollout", "resumed tokens keep their log-probs and weights, the clip handles them"
    ),
    _never("--multimodal-keys", "teachers and juniors are given text alone"),
    _never("--custom-convert-samples-to-train-data-path", "our channels travel in slime's own conversion"),
    _never(
        "--rollout-stop-token-ids", "a turn ends at the ids of the model folder", "put them into generation_config.json"
    ),
    _never(
        "--use-critic", "advantages are relative to the group", "set --advantage-estimator grpo: slime sets it with ppo"
    ),
    Rule("--use-opd", "not to be set: the signal would be applied twice", f"remove it; {KEY}.opd does it"),
    _never("--prefill-num-servers", "the models are in --sglang-config", planned=True),
    _never(
        "--rollout-external-engine-addrs",
        "slime takes no --sglang-config with it",
        "remove it; name servers of your own by engine.junior_url and engine.teacher_url",
        planned=True,
    ),
)


def _slimes_loss_does_not_know(name: str) -> Rule:
    """A setting of the objective that our loss alone applies."""
    default = ObjectiveConfig.model_fields[name].default
    return Rule(
        f"{KEY}.objective.{name}",
        f"{default} (the default) with slime's own loss, which does not know it",
        _HOOKS,
        in_plan=_OUR_LOSS,
        wrong=lambda value, _: value != default,
        when=lambda job: not job.our_loss,
    )


def _slimes_rewards_do_not_know(name: str) -> Rule:
    """One that our `reward_post_process` applies; slime's own can divide by the standard deviation, too."""
    default = ObjectiveConfig.model_fields[name].default
    return Rule(
        f"{KEY}.objective.{name}",
        f"{default} (the default) without --custom-reward-post-process-path",
        _HOOKS,
        in_plan=_OUR_LOSS,
        wrong=lambda value, _: value != default and (name, value) != ("scale_advantages", "std"),
        when=lambda job: not job.our_loss and job.value("--custom-reward-post-process-path") is None,
    )


def _our_loss_has_none(flag: str, remedy: str = _OUR_LOSS_HAS) -> Rule:
    """A flag that slime's policy loss alone applies."""
    return Rule(flag, "not to be set with our loss, which does not have it", remedy, when=lambda job: job.our_loss)


_LOSS = (
    Rule(
        "--loss-type",
        f"custom_loss with {KEY}.opd.enabled=true (its default), slime's own losses do not know our weights",
        f"set {KEY}.opd.enabled=false for slime's own loss without a teacher, "
        "or add --loss-type custom_loss and the hooks of docs/slime.md",
        wrong=lambda value, _: value != "custom_loss",
        when=lambda job: job.config.opd.enabled,
        planned=False,
    ),
    Rule(
        f"{KEY}.opd.enabled",
        "false with cluster.loss=slime: slime's own losses do not know our weights",
        "set it to false, or cluster.loss=own",
        when=lambda job: not job.our_loss,
        planned=True,
    ),
    *map(
        _slimes_loss_does_not_know,
        ("reward_coef", "surrogate", "ratio", "dual_clip", "reduction", "rollout_weights", "constant_length", "kl_coef",
         "lambda_jun", "kl_target"),
    ),
    Rule(
        f"{KEY}.tandem.junior_token_loss_weight",
        "0 with slime's own loss, whose masks are whole and whose old log-probs of junior tokens are the junior's",
        _HOOKS,
        in_plan=_OUR_LOSS,
        wrong=lambda value, _: value > 0,
        when=lambda job: not job.our_loss and job.config.tandem.enabled,
    ),
    *map(_slimes_rewards_do_not_know, ("baseline", "scale_advantages", "clip_advantages")),
    Rule(
        "--kl-loss-coef",
        lambda job: f"{KEY}.objective.kl_coef={job.config.objective.kl_coef:g}, which our loss goes by",
        "set the two alike",
        wrong=lambda value, job: bool(value) and value != job.config.objective.kl_coef,
        when=lambda job: job.our_loss,
    ),
    _our_loss_has_none("--eps-clip-c", f"remove it; {KEY}.objective.dual_clip does it"),
    _our_loss_has_none("--use-tis", f"remove it; {KEY}.objective.rollout_weights does it"),
    _our_loss_has_none("--use-opsm"),
    _our_loss_has_none("--use-unbiased-kl"),
    _our_loss_has_none("--custom-pg-loss-reducer-function-path", f"remove it; {KEY}.objective.reduction does it"),
)  # fmt: skip

_OBJECTIVE = (
    Rule(
        f"{KEY}.train.epochs_per_step",
        "1 with slime's own loss: --rollout-data-postprocess-path, which goes with ours, repeats a rollout's steps",
        f"{_HOOKS[: -len(', or remove it')]}, or set train.epochs_per_step=1",
        in_plan="set it to 1, or cluster.loss=own",
        wrong=lambda value, job: value != 1 and not (job.our_loss and job.value("--rollout-data-postprocess-path")),
    ),
    *(
        Rule(
            flag,
            f"not to be set with {KEY}.train.epochs_per_step above 1: routes are recorded for one pass",
            "remove it, or set train.epochs_per_step=1",
            when=lambda job: job.config.train.epochs_per_step > 1,
        )
        for flag in ("--use-routing-replay", "--use-rollout-routing-replay")
    ),
    Rule(
        "--lr-decay-style",
        f"constant with {KEY}.train.epochs_per_step above 1: slime counts the steps of one pass, its schedule would end early",
        "set --lr-decay-style constant, or --lr-decay-iters",
        wrong=lambda value, _: value not in (None, "constant"),
        when=lambda job: job.config.train.epochs_per_step > 1 and job.value("--lr-decay-iters") is None,
    ),
    Rule(
        f"{KEY}.opd.teacher_temperature",
        "1 under slime: SGLang scores given tokens at temperature 1 whatever it is asked (slime #2319)",
        "set opd.teacher_temperature=1",
        wrong=lambda value, _: value != 1,
        when=lambda job: job.config.opd.enabled,
    ),
    Rule(
        f"{KEY}.objective.kl_in",
        "loss under slime: rewards are final, and centred by group, before the trainer scores anything",
        "set objective.kl_in=loss",
        wrong=lambda value, _: value != "loss",
    ),
    Rule(
        f"{KEY}.objective.kl_guard",
        "double or stop under slime: its trainer takes every step of a rollout",
        "set objective.kl_guard=double or stop",
        wrong=lambda value, _: value == "skip_updates",
        when=lambda job: job.config.objective.kl_target is not None,
    ),
    Rule(
        "--recompute-loss-function",
        "not to be set with objective.kl_target: the KL of a micro-batch would count twice",
        when=lambda job: job.config.objective.kl_target is not None,
    ),
)

_TRUNCATION = (
    Rule(
        "--rollout-top-p",
        f"1: with less slime takes samples only with every token's kept ids; ours goes by {KEY}.sampling.top_p",
        f"move it to {KEY}.sampling.top_p",
        wrong=lambda value, _: value is not None and value != 1.0,
    ),
    Rule(
        "sampling",
        "top_p 1, top_k -1, min_p 0 with slime's own loss, which has the ratio of the full distribution",
        "name our hooks (docs/slime.md)",
        in_plan="set these, or cluster.loss=own",
        wrong=lambda _, job: not (job.our_loss and job.our_advantages),
        when=lambda job: job.truncates,
        value=lambda job: {name: getattr(job.config.sampling, name) for name in ("top_p", "top_k", "min_p")},
    ),
    Rule(
        f"{KEY}.sampling.truncation_replay",
        "recompute under slime: SGLang does not report what it drew from",
        "set sampling.truncation_replay=recompute",
        wrong=lambda value, _: value != "recompute",
        when=lambda job: job.truncates,
    ),
    Rule(
        f"{KEY}.sampling.min_p",
        "0 with top_p below 1 under slime: SGLang applies min-p after top-p, not before",
        "set one of the two to its default",
        wrong=lambda value, job: value > 0 and job.config.sampling.top_p < 1,
        when=lambda job: job.truncates,
    ),
    Rule(
        "--custom-generate-function-path",
        "our generate: slime's own requests truncate by its flags alone",
        "name it",
        wrong=missing,
        when=lambda job: job.truncates,
    ),
    Rule(
        "--custom-megatron-before-train-step-hook-path",
        "our hook, it finds the log-probs of the truncated distribution",
        "name it",
        wrong=missing,
        when=lambda job: job.truncates,
    ),
    *(
        Rule(
            flag,
            "not to be set with truncated sampling: our forward pass before the first step would use up its routes",
            when=lambda job: job.truncates,
        )
        for flag in ("--use-routing-replay", "--use-rollout-routing-replay")
    ),
)

_ADVANTAGES = (
    Rule(
        "--custom-generate-function-path",
        "our generate where servers score given ids: SGLang ends itself when slime's own requests meet these",
        "name it (tandem.enabled=false for the senior alone), or set opd.selection.missing_mass=rest",
        wrong=missing,
        when=lambda job: scores_by_id(job.config),
    ),
    Rule(
        "--custom-rollout-log-function-path",
        f"our log_rollout with {KEY}.opd.token_bank_dir: it says which rollout a bank is of",
        "name it, or set opd.token_bank_dir=null",
        wrong=missing,
        when=lambda job: job.config.opd.enabled and job.config.opd.token_bank_dir is not None,
    ),
    Rule(
        "--custom-advantage-function-path",
        "our hook, with our loss",
        "name all hooks of docs/slime.md",
        wrong=lambda value, _: value is None,
        when=lambda job: job.our_loss,
    ),
    Rule(
        "--advantage-estimator",
        "grpo (its default) with our advantages, which take the place of slime's",
        f"remove it; {KEY}.objective has baseline, scale_advantages, ratio and surrogate",
        wrong=lambda value, _: value not in (None, "grpo"),
        when=lambda job: job.our_advantages,
    ),
    Rule(
        "--kl-coef",
        "0 with our advantages, which do not take a KL off the rewards",
        f"remove it; {KEY}.objective.kl_coef has the KL of our loss",
        when=lambda job: job.our_advantages,
    ),
    Rule(
        "--normalize-advantages",
        "not to be set: whitening behind the advantages would undo groups and weights",
        when=lambda job: job.our_advantages,
    ),
    Rule(
        "--use-rollout-logprobs",
        "set: the old policy of our ratio is the one that sampled; it saves a forward pass, too",
        "add it",
        wrong=lambda value, _: value is False,
        when=lambda job: job.our_advantages and job.config.objective.rollout_weights == "none",
    ),
    Rule(
        "--use-rollout-logprobs",
        f"not to be set: {KEY}.objective.rollout_weights compares the trainer's own log-probs, "
        "which slime computes without it",
        when=lambda job: job.our_advantages and job.config.objective.rollout_weights != "none",
    ),
    Rule(
        "--calculate-per-token-loss",
        "not to be set: our terms are means over weights already",
        when=lambda job: job.our_advantages,
    ),
    Rule(
        "--use-kl-loss",
        f"set with {KEY}.objective.kl_coef above 0, it makes slime compute the reference's log-probs",
        "add it, and --ref-load",
        wrong=lambda value, _: value is False,
        when=lambda job: job.our_advantages and job.config.objective.kl_coef > 0,
    ),
    Rule(
        "--allgather-cp",
        "not to be set where whole rows of logits are read: those of a rank are not the tokens of its channels",
        "remove it, or set opd.signal=sampled",
        when=lambda job: (
            job.our_advantages and (job.truncates or (job.config.opd.enabled and job.config.opd.signal != "sampled"))
        ),
    ),
)

OUR_REWARD = "slime_tandem.slime_hooks.hooks.reward"
"""What `--custom-rm-path` names where this package scores."""


def _task_rewards(job: Job) -> list[str]:
    return [task.reward for task in job.config.tasks if task.reward is not None]


def _one_reward(flag: str, wrong: Test = given) -> Rule:
    """A reward of slime's beside rewards of tasks: slime's would be the one that counts."""
    return Rule(
        flag,
        lambda job: f"not to be set with {KEY}.tasks[].reward={_task_rewards(job)}",
        "remove one of the two",
        wrong=wrong,
        when=lambda job: bool(_task_rewards(job)),
    )


_REWARD = (
    _one_reward("--rm-type"),
    _one_reward("--custom-rm-path", lambda value, _: value not in (None, OUR_REWARD)),
    Rule(
        "--custom-rm-path",
        lambda job: f"not to be set with cluster.reward={job.config.cluster.reward!r}, which slime would pass over",
        "remove one of the two",
        wrong=lambda value, job: value not in (None, OUR_REWARD, job.config.cluster.reward),
        when=lambda job: job.config.cluster.reward is not None,
        planned=True,
    ),
    Rule(
        "--group-rm",
        "not to be set with evaluations: slime evaluates no groups",
        "set eval.every=null, or remove it",
        when=lambda job: job.value("--eval-interval") is not None,
        planned=True,
    ),
    Rule(
        "--rm-type",
        "cluster.reward to say it",
        "set that instead",
        when=lambda job: job.config.cluster.reward is None,
        planned=True,
    ),
    Rule(
        "--rm-url",
        "the address of the reward's server beside cluster.reward=remote_rm",
        "add it behind --, or to cluster.slime_flags",
        wrong=missing,
        when=lambda job: (job.config.cluster.reward or "").endswith("remote_rm"),
        planned=True,
    ),
)

RULES: tuple[Rule, ...] = (*_NEVER, *_LOSS, *_OBJECTIVE, *_TRUNCATION, *_ADVANTAGES, *_REWARD)
"""All of them; the first that is broken is the one that is reported."""


# ---- who owns a flag ----

FOLLOWED: dict[str, str] = {
    "--rollout-seed": "seed",
    "--hf-checkpoint": "models.senior",
    "--apply-chat-template-kwargs": "models.template_kwargs",
    "--rollout-temperature": "sampling.temperature",
    "--rollout-top-k": "sampling.top_k",
    "--rollout-max-response-len": "sampling.max_new_tokens",
    "--rollout-stop": "sampling.stop",
    "--n-samples-per-prompt": "train.samples_per_prompt",
    "--rollout-batch-size": "train.prompts_per_step",
    "--eps-clip": "objective.clip_low",
    "--eps-clip-high": "objective.clip_high",
    "--entropy-coef": "objective.entropy_coef",
    "--kl-loss-type": "objective.kl_estimator",
}
"""slime's flag -> our setting that the hooks take from it. A plan writes it the other way round."""
PLANNED: dict[str, str] = {
    "--actor-num-nodes": "cluster.nodes",
    "--actor-num-gpus-per-node": "cluster.trainer_gpus",
    "--num-gpus-per-node": "cluster.gpus_per_node",
    "--rollout-num-gpus": "cluster.senior_gpus, cluster.junior_gpus or cluster.teacher_gpus",
    "--rollout-num-gpus-per-engine": "cluster.senior_tp",
    "--colocate": "cluster.colocate",
    "--ref-load": "cluster.reference",
    "--load": "runs_dir and name",
    "--save": "runs_dir and name",
    "--save-interval": "train.save_every",
    "--seed": "seed",
    "--seq-length": "models.senior",
    "--prompt-data": "tasks",
    "--eval-interval": "eval.every",
    "--eval-config": "eval.prompts and eval.samples_per_prompt",
    "--num-rollout": "train.steps",
    "--num-steps-per-rollout": "train.updates_per_step",
    "--rollout-top-p": "sampling.top_p",
    "--rm-type": "cluster.reward",
    "--advantage-estimator": "objective.baseline, objective.scale_advantages, objective.ratio or objective.surrogate",
    "--disable-grpo-std-normalization": "objective.scale_advantages",
    "--use-kl-loss": "objective.kl_coef",
    "--kl-loss-coef": "objective.kl_coef",
    "--use-rollout-logprobs": "objective.rollout_weights",
    "--lr": "optimizer.lr",
    "--lr-warmup-iters": "optimizer.warmup_steps",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.beta1",
    "--adam-beta2": "optimizer.beta2",
    "--adam-eps": "optimizer.eps",
    "--clip-grad": "optimizer.grad_clip",
    "--tensor-model-parallel-size": "cluster.tensor_parallel",
    "--expert-model-parallel-size": "cluster.expert_parallel",
    "--pipeline-model-parallel-size": "cluster.pipeline_parallel",
    "--context-parallel-size": "cluster.context_parallel",
    "--sequence-parallel": "cluster.tensor_parallel",
    "--max-tokens-per-gpu": "cluster.max_tokens_per_gpu",
    "--recompute-granularity": "cluster.recompute",
    "--recompute-method": "cluster.recompute",
    "--recompute-num-layers": "cluster.recompute",
    "--sglang-mem-fraction-static": "cluster.mem_fraction",
    "--loss-type": "cluster.loss",
    "--spec": "cluster.layer_spec",
    "--transformer-impl": "cluster.layer_spec",
}
"""slime's flag -> our setting that a plan writes it from."""
_BY_HAND = "start train.py without a plan (docs/slime.md)"
_ROWS = "remove it: a plan writes the prompts itself; name your file by tasks: [{family: jsonl, path: FILE}]"
REMEDIES: dict[str, str] = {
    "--custom-rm-path": "keep one of the two: tasks[].reward is a function of your own for both runtimes (module:attribute, "
    "docs/extending.md), cluster.reward one of slime's rewards or a function of slime's signature (module.function)",
    "--input-key": f"{_ROWS}, whose lines have `messages` or `prompt`",
    "--label-key": f"{_ROWS}, whose lines have `label`",
    "--metadata-key": _ROWS,
    "--apply-chat-template": _ROWS,
    "--custom-config-path": "remove it: a plan writes that file; settings go by --set",
}
"""slime's flag -> what to do instead of it in a plan, where no setting says it."""


def instead_of(flag: str, *, hook: bool, of_model: bool) -> str:
    """The remedy for a user's flag that says something else than the plan. `hook`: its value is an import string of ours;
    `of_model`: it is one of Megatron's flags for the senior's sizes.

    >>> instead_of("--lr", hook=False, of_model=False)
    'remove it, and set optimizer.lr instead (--set)'
    >>> instead_of("--hidden-dropout", hook=False, of_model=False)
    'remove it: no setting has another value of it'
    """
    if (setting := FOLLOWED.get(flag) or PLANNED.get(flag)) is not None:
        return f"remove it, and set {setting} instead (--set)"
    if of_model:
        return "remove it: the sizes are those of models.senior"
    if flag in REMEDIES:
        return REMEDIES[flag]
    if hook:
        return f"remove it: a plan names this package's hooks; for another {_BY_HAND}"
    return "remove it: no setting has another value of it"
