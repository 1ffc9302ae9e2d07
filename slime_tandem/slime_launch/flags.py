"""One configuration as slime's flags: what `slime-tandem config --slime FOLDER` prints, and the files that the flags name.

Checked against THUDM/slime 624b824a (2026-08-21) and NVIDIA/Megatron-LM 1dcf0daf. slime ignores flags that it does not know;
with a checkout at hand, `slime_launch.real_parser` asks its own parser.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.files import whole_file
from slime_tandem.megatron.architecture import Architecture
from slime_tandem.slime_hooks.settings import check_flags
from slime_tandem.slime_launch.layout import ACTOR, JUNIOR, Layout, check_sglang_config, layout, sglang_config, to_yaml
from slime_tandem.slime_launch.memory import GIB, RESERVED, engine_memory, host_bytes, trainer_memory
from slime_tandem.slime_launch.sizes import PUBLISHED, architecture, model_flags
from slime_tandem.types import Prompt

PACKAGE = "slime_tandem.slime_hooks"
SETTINGS_KEY = "slime_tandem"
"""The one key of the `--custom-config-path` file. slime sets every key of it on its arguments: a section named `optimizer` at
the top would replace Megatron's `--optimizer`."""
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
REWARD = "hooks.reward"
"""The same for `--custom-rm-path`, where `cluster.reward` names none of slime's."""
WITH_JUNIOR = "hooks.generate_with_junior"
"""The same for an evaluation set that senior and junior write together."""
LAYER_SPEC = ("spec", "layer_spec")
"""Module under `PACKAGE` and function of our layers without Transformer Engine."""
LAUNCHING = ("name", "runs_dir", "optimizer", "train", "eval", "control", "cluster")
"""Sections that are told to slime by flags alone: its hooks refuse them in the settings file."""
_SETTINGS_BY_FLAG = {
    "sampling": ("temperature", "top_k", "max_new_tokens", "stop"),
    "engine": ("threads", "max_batch", "cache_tokens"),
}
_FORBIDDEN: dict[str, str] = {
    "--use-routing-replay": "a junior's tokens have no routes to replay",
    "--use-rollout-routing-replay": "a junior's tokens have no routes to replay",
    "--normalize-advantages": "whitening behind the advantages would undo groups and weights",
    "--calculate-per-token-loss": "our terms are means over weights already",
    "--use-opd": "the teacher's signal would be applied twice, opd.enabled does it",
    "--use-tis": "our loss does not read it, objective.rollout_weights does it",
    "--prefill-num-servers": "the models are in --sglang-config",
    "--rollout-external-engine-addrs": "slime takes no --sglang-config with it; name servers of your own by engine.*_url",
}
"""Flags of slime that do not go with this package, and why."""


_FUSED_DEFAULTS = ("--sglang-attention-backend", "--sglang-sampling-backend", "--sglang-grammar-backend")
"""What the fused engine is told on a GPU unless the user says otherwise."""
RM_TYPES = ("remote_rm", "deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "random")
"""slime's rewards (slime/rollout/rm_hub/__init__.py, async_rm), each also behind `boxed_`; another fails at the first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a launch needs. `notes`: what a person should read, one line each."""

    layout: Layout
    environment: Mapping[str, str]
    flags: Sequence[str]
    files: Mapping[Path, str]
    urls: Sequence[str]
    notes: Sequence[str]

    def write(self) -> None:
        """Write the files that the flags name; raises ConfigError where that cannot be done."""
        for path, text in self.files.items():
            try:
                with whole_file(path) as file:
                    file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError.of_os_error(path, error) from None

    def shell(self) -> str:
        """Text that bash can source: comments, exports, SLIME_FLAGS, and SERVER_URLS, servers that must answer before."""
        lines = [f"# {note}" for note in self.notes]
        # A path goes before what the shell has: slime's and Megatron's sources are found by it.
        more = {"PYTHONPATH": "${PYTHONPATH:+:$PYTHONPATH}"}
        lines += [f"export {name}={shlex.quote(value)}{more.get(name, '')}" for name, value in self.environment.items()]
        words = " ".join(shlex.quote(word) for word in self.flags)
        return "\n".join([*lines, f"SLIME_FLAGS=({words})", f"SERVER_URLS=({shlex.join(self.urls)})"]) + "\n"


def plan(
    config: RunConfig, folder: Path, *, fused: tuple[dict[str, str], list[str]] | None = None, extra: Sequence[str] = ()
) -> Plan:
    """The launch of a configuration; `folder`, which every node must see, is where its files go.

    `fused`: environment and flags of the fused engine (`engines.fused.launch.slime_settings`, or `slime_sizes` where a model is
    a published size), needed with engine.mode=fused.
    `extra`: further flags of slime. Raises ConfigError for whatever does not fit together, ModelError for a missing model.
    """
    assert (config.engine.mode == "fused") == (fused is not None)
    _not_under_slime(config)
    place = layout(config)
    arches = {group.name: architecture(group.model) for group in place.groups}
    junior = architecture(config.models.junior) if fused else None
    _within_context(config, arches, junior)
    notes = [*_describe(place), *_memory(config, place, arches, junior)]
    folder = folder.resolve()
    settings, servers = folder / "tandem.yaml", folder / "sglang.yaml"
    files = {
        settings: yaml.safe_dump({SETTINGS_KEY: _settings(config)}, sort_keys=False, allow_unicode=True),
        servers: to_yaml(sglang_config(place, mem_fraction=config.cluster.mem_fraction)),
    }
    data, prompt_files = _prompts(config, folder)
    files |= prompt_files
    arch = arches[ACTOR]
    flags = [
        *_placement(config, place),
        *_checkpoints(config),
        *model_flags(arch),
        # slime fills in 4096, which Megatron compares with the model's positions; the packed sequences are as long as they are.
        *(("--seq-length", str(arch.max_positions)) if arch.max_positions < 4096 else ()),
        *data,
        *_rollout(config),
        *_objective(config),
        *_trainer(config),
        *("--sglang-config", str(servers)),
        *("--sglang-mem-fraction-static", f"{config.cluster.mem_fraction:g}"),
        *("--custom-config-path", str(settings)),
    ]
    for flag, path in HOOKS.items():
        flags += [flag, f"{PACKAGE}.{path}"]
    if config.cluster.layer_spec == "own":
        flags += ["--spec", f"{PACKAGE}.{LAYER_SPEC[0]}", LAYER_SPEC[1], "--transformer-impl", "local"]
        flags += ["--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-rope-fusion"]
        flags += ["--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"]
        flags += ["--cp-comm-type", "all_gather"]  # what the layer does, and all that Megatron takes with a local one
    environment: dict[str, str] = {}
    if fused is not None:
        environment, more = fused
        shared = any(group.shared for group in place.groups)
        given = more[2:] if more[0] == "--hf-checkpoint" else more  # named above
        theirs = split([*config.cluster.slime_flags, *extra])
        for phase in ("", "decode-", "prefill-"):
            if theirs.get(name := f"--sglang-{phase}attention-backend") == ["flashinfer"]:
                expected = "another: its planner knows one model's heads, the fused engine refuses it"
                raise ConfigError(name, "flashinfer", expected, "remove it")
        for name in _FUSED_DEFAULTS:
            if name in theirs and not "".join(theirs[name]):
                raise ConfigError(name, "", "a backend of SGLang", "name one, or remove it")
        for name, values in split(given).items():
            left = name in _FUSED_DEFAULTS and name in theirs
            if not left and (shared or name != "--sglang-enable-weights-cpu-backup"):
                flags += [name, *values]
    extra = _accepted(config, flags, [*config.cluster.slime_flags, *extra], place)
    e = config.engine
    urls = [
        url
        for url in (e.junior_url if config.tandem.enabled else None, e.teacher_url if config.opd.enabled else None)
        if url
    ]
    urls += [t.url for t in config.opd.teachers if config.opd.enabled and t.url]
    inside = (config.models.junior,) if fused else ()
    for model in (config.models.senior, *inside, *(group.model for group in place.groups[1:])):
        if model in PUBLISHED:
            notes.append(f"sizes only: {model} is a published size, name its folder to train")
    if fused and "--sglang-json-model-override-args" not in flags:
        missing = "--sglang-json-model-override-args and the boundary tables"
        notes.append(f"sizes only: {missing} of the fused engine are made from the folders of senior and junior")
    return Plan(place, environment, [*flags, *extra], files, urls, notes)


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
            "cluster.reward",
            reward,
            reward is not None and reward.removeprefix("boxed_") not in RM_TYPES,
            f"null (this package's), or one of slime's {', '.join(RM_TYPES)}, also behind boxed_",
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


def _within_context(config: RunConfig, arches: Mapping[str, Architecture], junior: Architecture | None) -> None:
    """SGLang refuses a request of more tokens than the model has positions for: every response would fail."""
    writers = {"senior": arches[ACTOR], "junior": junior or (arches.get(JUNIOR) if config.tandem.enabled else None)}
    for role, arch in writers.items():
        cap = config.sampling.max_new_tokens
        if arch is not None and cap >= arch.max_positions:
            expected = f"below the {arch.max_positions} positions of the {role}, which prompt and response share"
            raise ConfigError("sampling.max_new_tokens", cap, expected, "lower it")


def _settings(config: RunConfig) -> dict[str, Any]:
    tree: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True, exclude=set(LAUNCHING))
    for section, names in _SETTINGS_BY_FLAG.items():
        kept = {k: v for k, v in tree.pop(section, {}).items() if k not in names}
        tree |= {section: kept} if kept else {}
    tree.pop("seed", None)
    tree.get("models", {}).pop("senior", None)
    return tree


def _prompts(config: RunConfig, folder: Path) -> tuple[list[str], dict[Path, str]]:
    """Flags of the prompt data, and the files: the run's own prompts, so that both runtimes train and test on the same."""
    from slime_tandem.tasks.families import TaskSet  # reasoning-gym: not for those who only ask for sizes
    from slime_tandem.tasks.family import is_held_out

    tasks = TaskSet(config.tasks, config.seed)
    if all(spec.family == "jsonl" for spec in config.tasks):
        train = [p for p in tasks.listed_prompts if not is_held_out(p.messages)]
    else:
        train = [
            p for step in range(config.train.steps) for p in tasks.train_prompts(step, config.train.prompts_per_step)
        ]
    if not train:
        raise ConfigError("tasks", len(train), "at least one prompt that is not held out", "add lines to the file")
    by_label = {i for i, spec in enumerate(config.tasks) if spec.reward in (None, "label")}
    unlabelled = next((p for p in train if p.label is None and p.metadata["spec"] in by_label), None)
    if unlabelled is not None and config.cluster.reward is None:
        expected = "a label on every prompt, which the reward compares answers with"
        raise ConfigError(
            "tasks", unlabelled.task, expected, "choose another data set, or set tasks[].reward or cluster.reward"
        )
    files = {folder / "prompts.jsonl": train}
    flags = [
        "--prompt-data",
        str(folder / "prompts.jsonl"),
        "--input-key",
        "messages",
        "--label-key",
        "label",
        "--metadata-key",
        "metadata",
    ]
    flags += ["--apply-chat-template", "--rollout-seed", str(config.seed)]
    if all(spec.family == "jsonl" for spec in config.tasks):
        flags.append("--rollout-shuffle")
    if config.eval.every is not None:
        files[folder / "heldout.jsonl"] = tasks.heldout_prompts(config.eval.prompts)
        flags += ["--eval-interval", str(config.eval.every), "--eval-config", str(folder / "eval.yaml")]
    texts = {path: "".join(map(_line, prompts)) for path, prompts in files.items()}
    if config.eval.every is not None:
        texts[folder / "eval.yaml"] = to_yaml(_evaluation(config, folder / "heldout.jsonl"))
    return flags, texts


def _evaluation(config: RunConfig, prompts: Path) -> dict[str, Any]:
    both: dict[str, Any] = {"path": str(prompts), "input_key": "messages", "label_key": "label"}
    both["n_samples_per_eval_prompt"] = config.eval.samples_per_prompt
    sets = [{"name": "solo", **both}]
    if config.tandem.enabled or config.eval.tandem:
        sets.append({"name": "tandem", **both, "custom_generate_function_path": f"{PACKAGE}.{WITH_JUNIOR}"})
    return {"eval": {"datasets": sets}}


def _line(prompt: Prompt) -> str:
    row = {
        "messages": [m.as_dict() for m in prompt.messages],
        "label": prompt.label,
        "metadata": {**prompt.metadata, "task": prompt.task, "prompt_id": prompt.prompt_id},
    }
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except TypeError as error:
        expected = f"prompts that JSON can hold ({error})"
        raise ConfigError("tasks", prompt.task, expected, "choose another data set for slime") from None


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
    reward = config.cluster.reward
    return [*flags, *(("--custom-rm-path", f"{PACKAGE}.{REWARD}") if reward is None else ("--rm-type", reward))]


def _objective(config: RunConfig) -> list[str]:
    o = config.objective
    flags = ["--advantage-estimator", "grpo", "--loss-type", "custom_loss"]
    if o.rollout_weights == "none":
        flags.append("--use-rollout-logprobs")
    flags += ["--eps-clip", _number(o.clip_low), "--eps-clip-high", _number(o.clip_high), "--entropy-coef", "0"]
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


def split(flags: Sequence[str]) -> dict[str, list[str]]:
    """Flags with their values; `--flag=value` too. Raises ConfigError for a word in front of the first flag.

    >>> split(["--a", "1", "--b", "--lr=-3"])
    {'--a': ['1'], '--b': [], '--lr': ['-3']}
    """
    found: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, eq, value = word.partition("=")
            found[name] = [value] if eq else []
        elif not found:
            raise ConfigError("slime flags", word, "a flag first", "e.g. -- --use-tensorboard")
        else:
            found[next(reversed(found))].append(word)
    return found


def _accepted(config: RunConfig, ours: Sequence[str], extra: Sequence[str], place: Layout) -> list[str]:
    """The user's own flags, without those that repeat ours; raises ConfigError for one that contradicts us."""
    mine, given, kept = split(ours), split(extra), list[str]()
    for name, values in given.items():
        if name in _FORBIDDEN:
            raise ConfigError(name, " ".join(values), f"not to be set: {_FORBIDDEN[name]}", "remove it")
        if name == "--sglang-config":
            check_sglang_config(config, Path(values[0] if values else ""), place)
            kept += [name, *values]
        elif name in mine and mine[name] != values:
            expected = f"{' '.join(mine[name]) or 'as a flag'}, what the configuration says"
            raise ConfigError(name, " ".join(values), expected, "remove it, and change the setting instead (--set)")
        elif name not in mine:
            kept += [name, *values]
    reward = config.cluster.reward
    if "--rm-type" in given and reward is None:
        raise ConfigError("--rm-type", " ".join(given["--rm-type"]), "cluster.reward to say it", "set that instead")
    if reward is not None and reward.endswith("remote_rm") and not "".join(given.get("--rm-url", ())):
        expected = "the address of the reward's server beside cluster.reward=remote_rm"
        raise ConfigError("--rm-url", None, expected, "add it behind --, or to cluster.slime_flags")
    # What the hooks themselves would refuse when the job has started.
    check_flags(SimpleNamespace(**_as_arguments({**mine, **split(kept)})), config)
    return kept


def _as_arguments(flags: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        name.removeprefix("--").replace("-", "_"): True if not values else _value(values[0])
        for name, values in flags.items()
    }


def _value(text: str) -> Any:
    try:
        return float(text)  # YAML takes 1e-05 for text
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # a name, a pattern
        return text


def _describe(place: Layout) -> list[str]:
    lines = [f"{place.nodes} x {place.gpus_per_node} GPUs; the trainer has {_span(0, place.trainer_gpus)}"]
    for g in place.groups:
        engines = f"{g.engines} engine{'s' * (g.engines > 1)} of {g.gpus_per_engine}"
        shared = ", in turns with the trainer" if g.shared else ""
        lines.append(f"{g.name}: {_span(g.start, g.gpus)}, {engines}{shared}, {g.model}")
    return lines


def _span(start: int, count: int) -> str:
    return f"GPU {start}" if count == 1 else f"GPUs {start} to {start + count - 1}"


def _memory(
    config: RunConfig, place: Layout, arches: Mapping[str, Architecture], junior: Architecture | None
) -> list[str]:
    c = config.cluster
    arch, limit = arches[ACTOR], int(c.gpu_memory_gib * GIB)
    for field, value, of, what in (
        ("tensor_parallel", c.tensor_parallel, arch.num_heads, "the senior's attention heads"),
        ("tensor_parallel", c.tensor_parallel, arch.num_kv_heads, "its KV heads"),
        ("tensor_parallel", c.tensor_parallel, arch.ffn_size, "its MLP"),
        ("pipeline_parallel", c.pipeline_parallel, arch.num_layers, "its layers"),
    ):
        if of % value:
            raise ConfigError(f"cluster.{field}", value, f"a divisor of {of}, {what}", "change it")
    data_parallel = place.trainer_gpus // (c.tensor_parallel * c.pipeline_parallel * c.context_parallel)
    batch = config.train.prompts_per_step * config.train.samples_per_prompt // config.train.updates_per_step
    if batch % data_parallel:
        expected = f"a multiple of {data_parallel}, the data parallel size, in each of the updates"
        raise ConfigError("responses of an update", batch, expected, "change train.prompts_per_step or the cluster")
    t = trainer_memory(arch, c, place.trainer_gpus)
    parts = {
        "weights": t.weights,
        "gradients": t.gradients,
        "optimizer": t.optimizer,
        "activations": t.activations,
        "logits": t.logits,
    }
    total = t.total + RESERVED
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    lines = [
        f"memory, GiB a GPU of {c.gpu_memory_gib:g}: trainer {shown}, reserve {RESERVED / GIB:.1f}: {total / GIB:.1f}"
    ]
    if total > limit:
        expected = f"at most {c.gpu_memory_gib:g}: {shown}, reserve {RESERVED / GIB:.1f}"
        remedy = "raise cluster.tensor_parallel, pipeline_parallel or trainer_gpus, lower max_tokens_per_gpu, or set recompute"
        raise ConfigError("memory of the trainer, GiB a GPU", round(total / GIB, 1), expected, remedy)
    on_host = host_bytes(t, offloaded=c.colocate, reference=config.objective.kl_coef > 0) * min(
        place.trainer_gpus, c.gpus_per_node
    )
    for group in place.groups:
        models = [arches[group.name]] + ([junior] if junior is not None and group.name == ACTOR else [])
        for model in models:
            if model.num_heads % group.gpus_per_engine:
                field = {ACTOR: "senior_tp", JUNIOR: "junior_tp"}.get(group.name, "teacher_tp")
                raise ConfigError(
                    f"cluster.{field}",
                    group.gpus_per_engine,
                    f"a divisor of {model.num_heads} attention heads",
                    "change it",
                )
        e = engine_memory(models, group.gpus_per_engine, c)
        lines.append(
            f"{group.name}: weights {e.weights / GIB:.1f} GiB, KV cache {e.kv_tokens * e.kv_per_token / GIB:.1f} GiB a GPU: "
            f"{e.kv_tokens:,} tokens an engine, {e.kv_per_token:,} bytes a token and GPU"
        )
        if e.kv_tokens < config.sampling.max_new_tokens:
            wanted, room = config.sampling.max_new_tokens, c.mem_fraction * c.gpu_memory_gib
            expected = (
                f"at least sampling.max_new_tokens={wanted}; weights take {e.weights / GIB:.1f} of {room:.1f} GiB"
            )
            raise ConfigError(
                f"KV cache of {group.name}, tokens", e.kv_tokens, expected, "raise its tp or cluster.mem_fraction"
            )
        if group.shared and (not group.update_weights or junior is not None):
            on_host += e.weights * min(group.gpus, c.gpus_per_node)
    lines.append(
        f"main memory of a machine: {on_host / GIB:.1f} GiB of {c.host_memory_gib:g} (weights of trainer and frozen models"
        f"{', optimizer while engines write' if c.colocate else ''})"
    )
    if on_host > c.host_memory_gib * GIB:
        expected = f"at most {c.host_memory_gib:g}"
        raise ConfigError(
            "main memory of a machine, GiB", round(on_host / GIB, 1), expected, "use more machines, or do not colocate"
        )
    return lines


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
