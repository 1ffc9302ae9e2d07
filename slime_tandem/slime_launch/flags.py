"""One configuration as slime's flags: what `slime-tandem config --slime FOLDER` prints, and the files that the flags name.

Checked against THUDM/slime 624b824a (2026-08-21) and NVIDIA/Megatron-LM 1dcf0daf. slime ignores flags that it does not know;
with a checkout at hand, `slime_launch.real_parser` asks its own parser.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime_tandem.config import RunConfig
from slime_tandem.config.section import set_in
from slime_tandem.errors import ConfigError
from slime_tandem.files import whole_file
from slime_tandem.report.trackers import run_id
from slime_tandem.slime_hooks.refused import KEY, OUR_REWARD
from slime_tandem.slime_launch.budgets import check_context, check_memory
from slime_tandem.slime_launch.layout import ACTOR, Layout, layout, serving_of, sglang_config, to_yaml
from slime_tandem.slime_launch.memory import SCORED_AT_ONCE, engine_memory, trainer_memory
from slime_tandem.slime_launch.prompts import Text, prompt_data
from slime_tandem.slime_launch.served import in_context, of_architecture, served
from slime_tandem.slime_launch.side import Side, beside, check_sides
from slime_tandem.slime_launch.sizes import PUBLISHED, architecture, model_flags
from slime_tandem.slime_launch.user_flags import accepted, split

PACKAGE = "slime_tandem.slime_hooks"
HOOKS: dict[str, str] = {
    "--data-source-path": "data_source.MessagesDataSource",
    "--custom-generate-function-path": "hooks.generate",
    "--rollout-sample-hook-path": "hooks.score_sample",
    "--custom-reward-post-process-path": "hooks.reward_post_process",
    "--custom-advantage-function-path": "hooks.advantages",
    "--rollout-data-postprocess-path": "hooks.data_post_process",
    "--custom-megatron-before-train-step-hook-path": "hooks.before_train_step",
    "--custom-loss-function-path": "hooks.loss",
    "--custom-rollout-log-function-path": "hooks.log_rollout",
    "--custom-eval-rollout-log-function-path": "hooks.log_eval",
    "--custom-megatron-init-path": "hooks.megatron_init",
}
"""Every import string of ours, by slime's flag."""
_WRITING = {
    "--data-source-path",
    "--custom-generate-function-path",
    "--custom-rollout-log-function-path",
    "--custom-eval-rollout-log-function-path",
}
"""Those that stay beside slime's own loss."""
REWARD = "hooks.reward"
"""The same for `--custom-rm-path`, where `cluster.reward` names none of slime's."""
WITH_JUNIOR = "hooks.generate_with_junior"
"""The same for an evaluation set that senior and junior write together."""
LAYER_SPEC = ("spec", "layer_spec")
"""Module under `PACKAGE` and function of our layers without Transformer Engine."""
LAUNCHING = (
    "name", "runs_dir", "report_to", "tracking", "optimizer", "train", "eval", "control", "serving", "cluster"
)  # fmt: skip
"""Sections that slime has by flags alone: its hooks refuse them in the settings file."""
_CHUNKED = {
    "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1",
    "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": str(SCORED_AT_ONCE),
}
"""Of every engine of a job whose prompts are scored: their logits in pieces, so that memory.py's estimate holds."""
_SETTINGS_BY_FLAG = {
    "sampling": ("temperature", "top_k", "max_new_tokens", "stop"),
    "engine": ("threads", "max_batch", "cache_tokens"),
}

_LOCAL_ALONE = {"train.micro_batch_tokens", "train.threads"}
_FUSED_DEFAULTS = ("--sglang-attention-backend", "--sglang-sampling-backend", "--sglang-grammar-backend")
"""What the fused engine takes on a GPU unless the user says otherwise."""
RM_TYPES = ("remote_rm", "deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "random")
"""slime's rewards (slime/rollout/rm_hub/__init__.py, async_rm), each also behind `boxed_`; another fails at the first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a launch needs. `notes`: what a person should read, one line each."""

    layout: Layout
    environment: Mapping[str, str]
    flags: Sequence[str]
    files: Mapping[Path, Text]
    urls: Sequence[str]
    notes: Sequence[str]
    sides: Sequence[Side] = ()

    def write(self) -> None:
        """Write the files that the flags name; raises ConfigError where that cannot be done, DataError for a bad row that is
        read only now."""
        for path, text in self.files.items():
            try:
                with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
                    file.writelines((text,) if isinstance(text, str) else text)
            except OSError as error:
                raise ConfigError.of_os_error(path, error) from None

    def shell(self) -> str:
        """Text that bash can source: comments, exports, SLIME_FLAGS, and SERVER_URLS, servers that must answer before."""
        lines = [f"# {note}" for note in self.notes]
        # A path goes before what the shell has: slime's and Megatron's sources are found by it.
        more = {"PYTHONPATH": "${PYTHONPATH:+:$PYTHONPATH}"}
        lines += [f"export {name}={shlex.quote(value)}{more.get(name, '')}" for name, value in self.environment.items()]
        words = " ".join(shlex.quote(word) for word in self.flags)
        lines += [f"SLIME_FLAGS=({words})", f"SERVER_URLS=({shlex.join(self.urls)})"]
        if self.sides:
            lines.append("side_servers() {")
            for side in self.sides:
                command = " ".join(
                    '"$SLIME_PYTHON"' if word == "$SLIME_PYTHON" else shlex.quote(word) for word in side.command()
                )
                lines.append(f"  start {side.name} {side.url}/health {command}")
            lines.append("}")
        return "\n".join(lines) + "\n"


def plan(
    config: RunConfig, folder: Path, *, fused: tuple[dict[str, str], list[str]] | None = None, extra: Sequence[str] = ()
) -> Plan:
    """The launch of a configuration; `folder`, which every node must see, is where its files go.

    `fused`: environment and flags of the fused engine (`engines.fused.launch.slime_settings`, or `slime_sizes` where a model is
    a published size), needed with engine.mode=fused.
    `extra`: further flags of slime. Raises ConfigError for whatever does not fit together, ModelError for a missing model.
    """
    assert (config.engine.mode == "fused") == (fused is not None)
    config, extra = _with_reward(config, [*config.cluster.slime_flags, *extra])
    _not_under_slime(config)
    config, sides = beside(config)
    place = layout(config)
    senior = architecture(config.models.senior)
    models = {
        group.name: served(group.model, group.serving, field=serving_of(config, group.name)[0])
        for group in place.groups[1:]
    }
    models = {ACTOR: in_context(of_architecture(senior), config.serving.senior), **models}
    junior = of_architecture(architecture(config.models.junior)) if fused else None
    check_context(config, models, junior)
    notes = [*place.describe(), *check_memory(config, place, senior, models, junior)]
    if sides:
        of_sides = {s.name: served(s.model, s.serving, field=serving_of(config, s.name)[0]) for s in sides}
        actor, card = place.groups[0], sides[0].gpu
        notes += check_sides(
            config,
            sides,
            of_sides,
            trainer_memory(senior, config.cluster, place.trainer_gpus),
            engine_memory([models[ACTOR], *([junior] if junior else [])], actor.gpus_per_engine, config.cluster),
            trains=card < place.trainer_gpus,
            writes=actor.start <= card < actor.start + actor.gpus,
        )
    folder = folder.resolve()
    routes = "--use-rollout-routing-replay" in split(extra)
    settings, servers = folder / "tandem.yaml", folder / "sglang.yaml"
    data, prompt_files = prompt_data(config, folder, with_junior=f"{PACKAGE}.{WITH_JUNIOR}")
    files: dict[Path, Text] = {
        settings: yaml.safe_dump({KEY: _settings(config)}, sort_keys=False, allow_unicode=True),
        servers: to_yaml(sglang_config(place, mem_fraction=config.cluster.mem_fraction, routes=routes)),
        **prompt_files,
    }
    sizes = _sizes(config)
    flags = [
        *_placement(config, place),
        *_checkpoints(config),
        *sizes,
        *data,
        *_rollout(config),
        *_objective(config),
        *_trainer(config),
        *("--sglang-config", str(servers)),
        *("--sglang-mem-fraction-static", f"{config.cluster.mem_fraction:g}"),
        *("--custom-config-path", str(settings)),
        *_hooks(config),
        *_tracking(config, split(extra)),
    ]
    environment: dict[str, str] = dict(_CHUNKED) if config.opd.enabled else {}
    if "wandb" in config.report_to and "WANDB_RUN_ID" not in os.environ:
        # slime's primary process has no flag for an id of its own (--wandb-run-id is what it tells the others), W&B's does.
        number, kept, text = run_id(config.run_dir.resolve())
        environment |= {"WANDB_RUN_ID": number, "WANDB_RESUME": "allow"}
        files |= {} if text is None else {kept: text}
    to_tensorboard = "tensorboard" in config.report_to or "--use-tensorboard" in split(extra)
    if to_tensorboard and "TENSORBOARD_DIR" not in os.environ:
        # slime's own default lies in whatever folder the job is in.
        environment["TENSORBOARD_DIR"] = str(config.run_dir.resolve() / "tb")
    if fused is not None:
        variables, more = fused
        environment |= variables
        flags += _of_fused_engine(more, split(extra), shared=any(group.shared for group in place.groups))
    extra = accepted(config, flags, extra, place, of_model=sizes, hooks=f"{PACKAGE}.")
    patience, variables = _patience(split(extra))
    flags += patience
    environment |= variables
    if alone := [f"{name}={value!r}" for name, value in set_in(config.train, "train") if name in _LOCAL_ALONE]:
        notes.append(
            f"a local run alone reads {', '.join(alone)}; slime has cluster.max_tokens_per_gpu, and its processes"
        )
    notes += _sizes_only(config, place, flags, fused=fused is not None)
    return Plan(place, environment, [*flags, *extra], files, _server_urls(config), notes, sides)


def _sizes(config: RunConfig) -> list[str]:
    """The senior's, for Megatron."""
    arch = architecture(config.models.senior)
    # slime fills in 4096, which Megatron compares with the model's positions; the packed sequences are as long as they are.
    length = ("--seq-length", str(arch.max_positions)) if arch.max_positions < 4096 else ()
    flags = model_flags(arch)
    if config.cluster.layer_spec == "own":
        flags = [word for word in flags if word not in ("--moe-grouped-gemm", "--moe-permute-fusion")]
    return [*flags, *length]


def _tracking(config: RunConfig, theirs: Mapping[str, Sequence[str]]) -> list[str]:
    """slime's flags for `report_to`, without those of which the user gives one."""
    to, tracking = config.report_to, config.tracking
    flags: dict[str, tuple[str, ...]] = {}
    project = tracking.project_of("wandb", os.environ)
    if "tensorboard" in to:
        flags |= {
            "--use-tensorboard": (),
            "--tb-project-name": (project,),
            "--tb-experiment-name": (config.name,),
        }
    if "wandb" in to:
        # The run is named by the group; without a suffix, so that a launch that goes on has the name that it had.
        flags |= {"--use-wandb": (), "--wandb-project": (project,), "--wandb-group": (config.name,)}
        flags |= {"--disable-wandb-random-suffix": (), "--wandb-dir": (str(config.run_dir.resolve()),)}
        flags |= {"--wandb-team": (tracking.entity,)} if tracking.entity else {}
        flags |= {"--wandb-mode": (tracking.mode,)} if tracking.mode else {}
    return [word for name, values in flags.items() if name not in theirs for word in (name, *values)]


def _hooks(config: RunConfig) -> list[str]:
    """Every import string of ours; with `cluster.layer_spec=own` our layers, without what Transformer Engine or Apex fuse."""
    named = {flag: path for flag, path in HOOKS.items() if config.cluster.loss == "own" or flag in _WRITING}
    flags = [word for flag, path in named.items() for word in (flag, f"{PACKAGE}.{path}")]
    if config.cluster.layer_spec == "own":
        flags += ["--spec", f"{PACKAGE}.{LAYER_SPEC[0]}", LAYER_SPEC[1], "--transformer-impl", "local"]
        flags += ["--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-rope-fusion"]
        flags += ["--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"]
        flags += ["--cp-comm-type", "all_gather"]  # what the layer does, and all that Megatron takes with a local one
    return flags


def _of_fused_engine(more: Sequence[str], theirs: Mapping[str, Sequence[str]], *, shared: bool) -> list[str]:
    """The fused engine's flags, without defaults that the user's replace; a copy of the weights in main memory where GPUs are
    `shared` with the trainer. Raises ConfigError for a backend that it cannot take."""
    for phase in ("", "decode-", "prefill-"):
        if theirs.get(name := f"--sglang-{phase}attention-backend") == ["flashinfer"]:
            expected = "another: its planner knows one model's heads, the fused engine refuses it"
            raise ConfigError(name, "flashinfer", expected, "remove it")
    for name in _FUSED_DEFAULTS:
        if name in theirs and not "".join(theirs[name]):
            raise ConfigError(name, "", "a backend of SGLang", "name one, or remove it")
    flags: list[str] = []
    for name, values in split(more[2:] if more[0] == "--hf-checkpoint" else more).items():  # that one is named already
        left = name in _FUSED_DEFAULTS and name in theirs
        if not left and (shared or name != "--sglang-enable-weights-cpu-backup"):
            flags += [name, *values]
    return flags


_COMPILES_S = 60.0
"""Seconds that an engine may take over its first answers: three times what kernels took to compile (results/slime-scale.md)."""
_HEALTH = "--rollout-health-check-"


def _patience(theirs: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, str]]:
    """(flags, environment) with which slime's health check does not kill an engine that still compiles; nothing without it.

    By a long time-out: an engine that is gone refuses the connection at once, whatever it is. Not by the first wait, which
    slime begins anew with every rollout: a shorter rollout is never checked, and dead engines stay. SGLang's answer has a
    limit of its own, 20 s by default. Raises ConfigError for a patience of the user's that is too short.
    """
    if "--use-fault-tolerance" not in theirs:
        return [], {}
    seconds: dict[str, float] = {}
    for name, default in (("timeout", 2 * _COMPILES_S), ("first-wait", 0.0)):
        given = theirs.get(_HEALTH + name, [f"{default:g}"])
        try:
            seconds[name] = float(given[0])
        except (IndexError, ValueError):
            raise ConfigError(_HEALTH + name, " ".join(given), "seconds", "correct it, or leave it out") from None
    if sum(seconds.values()) < _COMPILES_S:
        expected = f"at least {_COMPILES_S:g} s with the first wait: an engine that still compiles is killed"
        raise ConfigError(
            f"{_HEALTH}timeout", f"{seconds['timeout']:g}", expected, f"raise it, or leave it out ({2 * _COMPILES_S:g})"
        )
    flags = [] if f"{_HEALTH}timeout" in theirs else [f"{_HEALTH}timeout", f"{seconds['timeout']:g}"]
    return flags, {"SGLANG_HEALTH_CHECK_TIMEOUT": f"{math.ceil(seconds['timeout'])}"}


def _server_urls(config: RunConfig) -> list[str]:
    """Servers of the user's own that the run asks: junior's, teacher's, teachers'."""
    e = config.engine
    own = [e.junior_url if config.tandem.enabled else None]
    if config.opd.enabled:
        own += [e.teacher_url, *(t.url for t in config.opd.teachers)]
    return [url for url in own if url]


def _sizes_only(config: RunConfig, place: Layout, flags: Sequence[str], *, fused: bool) -> list[str]:
    """Notes of a plan that cannot be started, because models are named by a published size."""
    inside = (config.models.junior,) if fused else ()
    models = (config.models.senior, *inside, *(group.model for group in place.groups[1:]))
    notes = [
        f"sizes only: {model} is a published size, name its folder to train" for model in models if model in PUBLISHED
    ]
    if fused and "--sglang-json-model-override-args" not in flags:
        missing = "--sglang-json-model-override-args and the boundary tables"
        notes.append(f"sizes only: {missing} of the fused engine are made from the folders of senior and junior")
    return notes


def _not_under_slime(config: RunConfig) -> None:
    e, factor = config.engine, dict(architecture(config.models.senior).rope).get("factor", 8.0)
    reward, reference = config.cluster.reward, config.cluster.reference
    for name, value, bad, expected in (
        ("engine.senior_url", e.senior_url, e.senior_url is not None, "null: slime serves and updates the senior"),
        ("engine.sessions", e.sessions, e.sessions, "false: requests go through slime's routers"),
        (
            "rope_parameters.factor",
            factor,
            factor != 8.0,
            "8: slime 624b824a hands no other to Megatron (model_provider.py)",
        ),
        ("train.steps", config.train.steps, config.train.steps < 1, "at least 1 with slime"),
        (
            "train.gradient_checkpointing",
            config.train.gradient_checkpointing,
            config.train.gradient_checkpointing,
            "false: cluster.recompute does it (true by default)",
        ),
        (
            "cluster.reward",
            reward,
            reward is not None and reward.removeprefix("boxed_") not in RM_TYPES and not _is_dotted(reward),
            f"null (this package's), one of slime's {', '.join(RM_TYPES)}, also behind boxed_, or module.function of slime's "
            "signature (a function of this package's is named by tasks[].reward, as module:function)",
        ),
        (
            "report_to",
            [*config.report_to],
            "trackio" in config.report_to,
            "tensorboard or wandb: slime's trackers",
        ),
        (
            "cluster.reference",
            reference,
            reference is not None and not _holds_weights(Path(reference)),
            "a folder of Hugging Face weights or torch_dist",
        ),
        (
            "control",
            config.control,
            config.control,
            "false (--set control=false): launch the control as a run of its own",
        ),
    ):
        if bad:
            raise ConfigError(name, value, expected, "change it for slime")


def _holds_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ".metadata", "latest_checkpointed_iteration.txt"))


def _settings(config: RunConfig) -> dict[str, Any]:
    tree: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True, exclude=set(LAUNCHING))
    for section, names in _SETTINGS_BY_FLAG.items():
        kept = {k: v for k, v in tree.pop(section, {}).items() if k not in names}
        tree |= {section: kept} if kept else {}
    tree.pop("seed", None)
    if config.train.epochs_per_step > 1:  # the rest of `train` is said by flags
        tree["train"] = {"epochs_per_step": config.train.epochs_per_step}
    for name in ("senior", "template_kwargs"):
        tree.get("models", {}).pop(name, None)
    return tree


def _placement(config: RunConfig, place: Layout) -> list[str]:
    c = config.cluster
    per_node = min(place.trainer_gpus, place.gpus_per_node)
    flags = ["--actor-num-nodes", str(place.trainer_nodes), "--actor-num-gpus-per-node", str(per_node)]
    flags += ["--num-gpus-per-node", str(place.gpus_per_node), "--rollout-num-gpus", str(place.rollout_gpus)]
    flags += ["--rollout-num-gpus-per-engine", str(c.senior_tp)]
    return [*flags, "--colocate"] if c.colocate else flags


def _checkpoints(config: RunConfig) -> list[str]:
    senior, save = config.models.senior, str(config.run_dir.resolve() / "slime")
    return [
        *("--hf-checkpoint", senior),
        *("--ref-load", str(Path(config.cluster.reference).resolve()) if config.cluster.reference else senior),
        *("--load", save),
        *("--save", save),
        *("--save-interval", str(config.train.save_every)),
        *("--seed", str(config.seed)),
    ]


def _rollout(config: RunConfig) -> list[str]:
    s, t = config.sampling, config.train
    flags = ["--num-rollout", str(t.steps), "--rollout-batch-size", str(t.prompts_per_step)]
    flags += ["--n-samples-per-prompt", str(t.samples_per_prompt), "--num-steps-per-rollout", str(t.updates_per_step)]
    flags += ["--rollout-max-response-len", str(s.max_new_tokens), "--rollout-temperature", _number(s.temperature)]
    flags += ["--rollout-top-p", "1", "--rollout-top-k", str(s.top_k)]  # top_p stays in our section: docs/slime.md
    if s.stop:
        flags += ["--rollout-stop", *s.stop]
    if config.models.template_kwargs:
        flags += ["--apply-chat-template-kwargs", json.dumps(config.models.template_kwargs)]
    reward = config.cluster.reward
    if reward is None or _is_dotted(reward):
        return [*flags, "--custom-rm-path", reward or f"{PACKAGE}.{REWARD}"]
    return [*flags, "--rm-type", reward]


def _is_dotted(reward: str) -> bool:
    """Whether a reward is a function of slime's signature by its import path."""
    return "." in reward and all(part.isidentifier() for part in reward.split("."))


def _with_reward(config: RunConfig, extra: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """A reward of slime's that the user's own flags name, as `cluster.reward`; and the other flags."""
    given, settled = split(extra), config.cluster.reward is not None or any(t.reward is not None for t in config.tasks)
    named = [name for name in ("--custom-rm-path", "--rm-type") if name in given]
    if settled or len(named) != 1 or len(values := given[named[0]]) != 1 or values[0] == OUR_REWARD:
        return config, list(extra)
    if (named[0] == "--custom-rm-path") != _is_dotted(values[0]):
        return config, list(extra)
    cluster = config.cluster.model_copy(update={"reward": values[0]})
    rest = [word for name, words in given.items() if name != named[0] for word in (name, *words)]
    return config.model_copy(update={"cluster": cluster}), rest


def _objective(config: RunConfig) -> list[str]:
    o, own = config.objective, config.cluster.loss == "own"
    # Beside slime's own loss the user's flags choose the estimator and whose log-probs are the old policy's.
    flags = ["--advantage-estimator", "grpo"] if own else []
    if own or o.entropy_coef > 0:
        flags += ["--entropy-coef", _number(o.entropy_coef)]
    flags += ["--loss-type", "custom_loss" if own else "policy_loss"]
    if own and o.rollout_weights == "none":
        flags.append("--use-rollout-logprobs")
    flags += ["--eps-clip", _number(o.clip_low), "--eps-clip-high", _number(o.clip_high)]
    if o.scale_advantages == "none":
        flags.append("--disable-grpo-std-normalization")
    if o.kl_coef > 0:
        flags += ["--use-kl-loss", "--kl-loss-coef", _number(o.kl_coef), "--kl-loss-type", o.kl_estimator]
    return flags


def _trainer(config: RunConfig) -> list[str]:
    c, o = config.cluster, config.optimizer
    flags = ["--optimizer", "adam", "--lr", _number(o.lr), "--lr-decay-style", "constant"]
    flags += ["--lr-warmup-iters", str(o.warmup_steps), "--weight-decay", _number(o.weight_decay)]
    flags += ["--adam-beta1", _number(o.beta1), "--adam-beta2", _number(o.beta2), "--adam-eps", _number(o.eps)]
    flags += ["--clip-grad", _number(o.grad_clip)]
    flags += ["--tensor-model-parallel-size", str(c.tensor_parallel)]
    flags += ["--pipeline-model-parallel-size", str(c.pipeline_parallel)]
    flags += ["--context-parallel-size", str(c.context_parallel)]
    # Rows that fill a vocabulary up to a round size are never cut off again by slime: they would take part in every softmax.
    flags += ["--make-vocab-size-divisible-by", "1"]
    if c.tensor_parallel > 1:
        flags.append("--sequence-parallel")
    if architecture(config.models.senior).experts is not None:
        flags += ["--expert-model-parallel-size", str(c.expert_parallel), "--expert-tensor-parallel-size", "1"]
    flags += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(c.max_tokens_per_gpu)]
    if c.recompute:
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    return [*flags, "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"]


def _number(value: float) -> str:
    """The shortest text that is read back as this number: the hooks compare flags with the settings.

    >>> _number(1.0), _number(0.12345678)
    ('1', '0.12345678')
    """
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def with_folders(config: RunConfig) -> RunConfig:
    """The same with absolute folders of models; published sizes stay names. Raises ModelError for a model that is neither."""

    def folder(model: str) -> str:
        if model in PUBLISHED:
            return model
        from slime_tandem.models.builtin import resolve_model  # torch: not for those who only ask for sizes

        return str(resolve_model(model, config.models.cache_dir).resolve())

    tandem = config.tandem.enabled
    own = config.opd.enabled and not config.opd.teachers and config.engine.teacher_url is None
    roles = {"senior": True, "junior": tandem and config.engine.junior_url is None, "teacher": own}
    models = {role: folder(getattr(config.models, role)) for role, used in roles.items() if used}
    teachers = tuple(t if t.url else t.model_copy(update={"model": folder(t.model)}) for t in config.opd.teachers)
    return config.model_copy(
        update={
            "models": config.models.model_copy(update=models),
            "opd": config.opd.model_copy(update={"teachers": teachers}),
        }
    )
