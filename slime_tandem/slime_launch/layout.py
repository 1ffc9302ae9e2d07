"""Who gets which GPUs under slime, and the `--sglang-config` file that says so.

slime numbers the GPUs of a job: the trainer's are 0 .. T-1; engines follow behind them, or start again at 0 with `--colocate`
(slime/ray/placement_group.py). Models of the file take their GPUs in its order. A group that starts on a GPU of the trainer is
taken off it while the trainer works (slime/ray/rollout.py, `needs_offload`); only the first model gets its weights back from
the trainer, so the others need `enable_weights_cpu_backup` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slime_tandem.config import ClusterConfig, RunConfig, ServedModel, read_yaml_mapping
from slime_tandem.errors import ConfigError
from slime_tandem.slime_hooks.before import check_backups

ACTOR, JUNIOR, TEACHER = "actor", "junior", "teacher"
"""Names of the models in the file; slime's `get_model_url` finds their routers by them."""


def teacher_models(config: RunConfig) -> dict[str, str]:
    """Folder of each teacher that slime is to serve, by its name in the file: those without a URL of their own.

    Raises ConfigError for a teacher with the name of another model.
    """
    if not config.opd.enabled:
        return {}
    if not config.opd.teachers:
        return {} if config.engine.teacher_url else {TEACHER: config.models.teacher}
    for t in config.opd.teachers:
        if t.name in (ACTOR, JUNIOR, "senior"):
            raise ConfigError("opd.teachers name", t.name, "no name of another model of the job", "rename it")
    return {t.name: t.model for t in config.opd.teachers if t.url is None}


def junior_model(config: RunConfig) -> dict[str, str]:
    """The junior's folder by its name, where it has engines of its own: not in the fused engine, not with a URL."""
    own = config.tandem.enabled and config.engine.mode == "two_servers" and config.engine.junior_url is None
    return {JUNIOR: config.models.junior} if own else {}


def serving_of(config: RunConfig, name: str) -> tuple[str, ServedModel]:
    """(dotted name, settings) of how the group `name` is served."""
    for i, spec in enumerate(config.opd.teachers if config.opd.enabled else ()):
        if spec.name == name:
            return f"opd.teachers.{i}.serving", spec.serving
    role = {ACTOR: "senior"}.get(name, name)
    found: ServedModel = getattr(config.serving, role)
    return f"serving.{role}", found


@dataclass(frozen=True, slots=True)
class Group:
    """One model's engines. `start`: its first GPU, counted over the job; `gpus_per_engine`: tensor parallel size."""

    name: str
    model: str
    start: int
    gpus: int
    gpus_per_engine: int
    shared: bool
    update_weights: bool
    serving: ServedModel = field(default_factory=ServedModel)

    @property
    def engines(self) -> int:
        """How many engines share the requests."""
        return self.gpus // self.gpus_per_engine


@dataclass(frozen=True, slots=True)
class Layout:
    """The trainer's GPUs 0 .. trainer_gpus - 1, and the groups of engines, actor first."""

    nodes: int
    gpus_per_node: int
    trainer_gpus: int
    groups: tuple[Group, ...]

    @property
    def rollout_gpus(self) -> int:
        """GPUs of all engines together, slime's `--rollout-num-gpus`."""
        return sum(group.gpus for group in self.groups)

    @property
    def trainer_nodes(self) -> int:
        """slime's `--actor-num-nodes`."""
        return max(1, self.trainer_gpus // self.gpus_per_node)

    def describe(self) -> list[str]:
        """Lines for a person: who has which GPUs, and which are left over."""
        lines = [f"{self.nodes} x {self.gpus_per_node} GPUs; the trainer has {_span(0, self.trainer_gpus)}"]
        for g in self.groups:
            engines = f"{g.engines} engine{'s' * (g.engines > 1)} of {g.gpus_per_engine}"
            shared = ", in turns with the trainer" if g.shared else ""
            lines.append(f"{g.name}: {_span(g.start, g.gpus)}, {engines}{shared}, {g.model}")
        end = max(self.trainer_gpus, *(g.start + g.gpus for g in self.groups))
        if (idle := self.nodes * self.gpus_per_node - end) > 0:
            lines.append(
                f"idle: {_span(end, idle)}, used by nobody; cluster.trainer_gpus, the models' *_gpus and *_tp divide them"
            )
        return lines


def _span(start: int, count: int) -> str:
    return f"GPU {start}" if count == 1 else f"GPUs {start} to {start + count - 1}"


def layout(config: RunConfig) -> Layout:
    """Place everyone. Raises ConfigError where GPUs do not suffice or sizes do not divide."""
    c = config.cluster
    frozen = {**junior_model(config), **teacher_models(config)}
    own = {t.name: t for t in config.opd.teachers}
    needs = {name: c.junior_gpus if name == JUNIOR else c.teacher_gpus for name in frozen}
    needs |= {name: t.gpus for name, t in own.items() if name in needs and t.gpus is not None}
    trainer, senior = _trainer_and_senior(config, c.nodes * c.gpus_per_node - sum(needs.values()))
    _check_sizes(c, trainer, senior, needs)
    start = 0 if c.colocate else trainer
    groups = []
    for name, model in {ACTOR: config.models.senior, **frozen}.items():
        gpus = needs.get(name, senior)
        size = _engine_size(config, name, gpus)
        shared, how = c.colocate and start < trainer, serving_of(config, name)[1]
        groups.append(Group(name, model, start, gpus, size, shared, name == ACTOR, how))
        start += gpus
    return Layout(c.nodes, c.gpus_per_node, trainer, tuple(groups))


def _trainer_and_senior(config: RunConfig, rest: int) -> tuple[int, int]:
    """(GPUs of the trainer, of the senior's engines); where they are not set, of the `rest` that the frozen models leave.

    The trainer then has as many as its parallel sizes and an update's responses divide into. Either may be 0: nothing fits.
    """
    c, trainer, senior = config.cluster, config.cluster.trainer_gpus, config.cluster.senior_gpus
    if trainer is None:
        _require(c.colocate, "trainer_gpus", None, "a number without colocate", "say how many GPUs train")
        parts = c.tensor_parallel * c.pipeline_parallel * c.context_parallel
        responses = config.train.prompts_per_step * config.train.samples_per_prompt // config.train.updates_per_step
        fitting = (
            n
            for n in range(rest, 0, -1)
            if n % parts == 0 and (n <= c.gpus_per_node or n % c.gpus_per_node == 0) and responses % (n // parts) == 0
        )
        trainer = next(fitting, 0)
    if senior is None:
        left = rest if c.colocate else rest - trainer
        senior = left - left % c.senior_tp
    return trainer, senior


def _check_sizes(c: ClusterConfig, trainer: int, senior: int, needs: Mapping[str, int]) -> None:
    """Raise ConfigError where trainer, senior and the `needs` of the frozen models are more than there is, or the trainer is
    not cut evenly."""
    total, frozen = c.nodes * c.gpus_per_node, sum(needs.values())
    _require(
        trainer > 0 and senior > 0,
        "nodes",
        c.nodes,
        f"more than {total} GPUs: {frozen} serve junior and teachers, {max(0, total - frozen)} are left to train and to write",
        "add GPUs, share them (cluster.trainer_gpus), or serve junior and teachers beside the job (cluster.side_servers=true)",
    )
    used = max(trainer, senior + frozen) if c.colocate else trainer + senior + frozen
    who = ", ".join([f"trainer {trainer}", f"senior {senior}", *(f"{n} {g}" for n, g in needs.items())])
    wanted = f"at least {used} GPUs: {who}"
    _require(used <= total, "nodes", f"{c.nodes} x {c.gpus_per_node}", wanted, "add GPUs, or ask for fewer")
    parts = c.tensor_parallel * c.pipeline_parallel * c.context_parallel
    expected = f"a multiple of {parts} = tensor x pipeline x context parallel size"
    _require(trainer % parts == 0, "trainer_gpus", trainer, expected, "change one of them")
    expected = f"whole nodes of {c.gpus_per_node}, slime spreads the trainer so"
    whole = trainer <= c.gpus_per_node or trainer % c.gpus_per_node == 0
    _require(whole, "trainer_gpus", trainer, expected, "round it")


def sizes_of(config: RunConfig, name: str) -> tuple[str, str]:
    """Dotted names of the settings that say how many GPUs a group has, and of how many an engine is.

    >>> sizes_of(RunConfig(), "junior")
    ('cluster.junior_gpus', 'cluster.junior_tp')
    """
    for i, spec in enumerate(config.opd.teachers if config.opd.enabled else ()):
        if spec.name == name:
            mine = f"opd.teachers.{i}"
            gpus = "cluster.teacher_gpus" if spec.gpus is None else f"{mine}.gpus"
            return gpus, "cluster.teacher_tp" if spec.tp is None else f"{mine}.tp"
    role = {ACTOR: "senior", JUNIOR: "junior"}.get(name, "teacher")
    return f"cluster.{role}_gpus", f"cluster.{role}_tp"


def _engine_size(config: RunConfig, name: str, gpus: int) -> int:
    """GPUs of one engine of a group with `gpus`; raises ConfigError where they do not divide, or not into nodes."""
    c, own = config.cluster, {t.name: t.tp for t in config.opd.teachers}.get(name)
    size = own or {ACTOR: c.senior_tp, JUNIOR: c.junior_tp}.get(name, c.teacher_tp)
    of_group, of_engine = sizes_of(config, name)
    if gpus % size:
        raise ConfigError(of_group, gpus, f"a multiple of {of_engine}={size}", "change one of them")
    if size > c.gpus_per_node and size % c.gpus_per_node:
        raise ConfigError(of_engine, size, f"a part of a node or whole nodes of {c.gpus_per_node}", "change it")
    return size


def _require(holds: bool, field: str, value: object, expected: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"cluster.{field}", value, expected, remedy)


def _overrides(how: ServedModel) -> dict[str, Any]:
    """Settings of one model as fields of SGLang's ServerArgs."""
    said: dict[str, Any] = {"dtype": how.dtype, "quantization": how.quantization, "context_length": how.context_length}
    said |= {"mem_fraction_static": how.mem_fraction, "disable_cuda_graph": how.enforce_eager or None}
    return {name: value for name, value in said.items() if value is not None}


def sglang_config(plan: Layout, *, mem_fraction: float, routes: bool = False) -> dict[str, Any]:
    """The tree of the `--sglang-config` file. `routes`: slime asks every engine for routes through experts; the frozen models,
    which may have none, are told not to."""
    models = []
    for group in plan.groups:
        overrides: dict[str, Any] = {} if group.update_weights else {"mem_fraction_static": mem_fraction}
        overrides |= _overrides(group.serving)
        if routes and not group.update_weights:
            overrides["enable_return_routed_experts"] = False
        if group.shared and not group.update_weights:
            overrides["enable_weights_cpu_backup"] = True
        entry: dict[str, Any] = {
            "name": group.name,
            "model_path": str(group.model),
            "update_weights": group.update_weights,
            "num_gpus_per_engine": group.gpus_per_engine,
            "server_groups": [
                {"worker_type": "regular", "num_gpus": group.gpus, **({"overrides": overrides} if overrides else {})}
            ],
        }
        models.append(entry)
    return {"sglang": models}


def check_sglang_config(config: RunConfig, path: Path, plan: Layout) -> None:
    """Raise ConfigError for a file of the user's that lacks a model, or would give one of them wrong weights.

    slime takes the actor's router for a name that it does not know, without a word.
    """
    tree = read_yaml_mapping(path)
    where = f"--sglang-config {path}"
    models = tree.get("sglang")
    if not isinstance(models, list) or not models or not all(isinstance(m, Mapping) and m.get("name") for m in models):
        raise ConfigError(where, tree.get("sglang"), "a list `sglang` of models with names", "see docs/scaling.md")
    names = [str(model["name"]) for model in models]
    for group in plan.groups:
        if group.name not in names:
            raise ConfigError(where, names, f"a model named {group.name}", f"add it (model_path: {group.model})")
    if names[0] != ACTOR or models[0].get("update_weights") is not True:
        raise ConfigError(
            where, names[0], f"{ACTOR} first, with update_weights: true", "the first model is the one that slime trains"
        )
    if config.cluster.colocate:
        check_backups(models, plan.trainer_gpus, where)
    found = 0
    for model in models:
        if model["name"] != ACTOR and model.get("update_weights") is not False:
            raise ConfigError(
                f"{where} {model['name']}", model.get("update_weights"), "update_weights: false", "it is frozen"
            )
        found += sum(int(g.get("num_gpus", 0)) for g in model.get("server_groups") or model.get("engine_groups") or [])
    if found != plan.rollout_gpus:
        raise ConfigError(where, f"{found} GPUs", f"{plan.rollout_gpus}, as in the cluster section", "make both agree")


def to_yaml(tree: Mapping[str, Any]) -> str:
    """YAML text of a plain tree."""
    return yaml.safe_dump(dict(tree), sort_keys=False)
