"""Whether a plan fits: the trainer's cut divides the model, and trainer, engines and main memory stay within what there is.

memory.py has the formulas and layout.py the places; here they are held against the machines, and become lines for a person.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime_tandem.config import ClusterConfig, RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.megatron.architecture import Architecture
from slime_tandem.slime_launch.layout import ACTOR, JUNIOR, Group, Layout, serving_of, sizes_of
from slime_tandem.slime_launch.memory import (
    ENGINE_RESERVED,
    GIB,
    RESERVED,
    SCORED_AT_ONCE,
    EngineMemory,
    TrainerMemory,
    engine_memory,
    host_bytes,
    trainer_memory,
)
from slime_tandem.slime_launch.served import Served


def check_context(config: RunConfig, served: Mapping[str, Served], junior: Served | None) -> None:
    """SGLang refuses a request of more tokens than the model has positions for: every response would fail.

    `served`: by the name of the group that serves it; `junior`: the one inside the fused engine. Raises ConfigError.
    """
    writers = {"senior": served[ACTOR], "junior": junior or (served.get(JUNIOR) if config.tandem.enabled else None)}
    for role, model in writers.items():
        cap = config.sampling.max_new_tokens
        if model is not None and model.max_positions is not None and cap >= model.max_positions:
            expected = f"below the {model.max_positions} positions of the {role}, which prompt and response share"
            raise ConfigError("sampling.max_new_tokens", cap, expected, "lower it")


def check_memory(
    config: RunConfig, place: Layout, arch: Architecture, served: Mapping[str, Served], junior: Served | None
) -> list[str]:
    """One line for the trainer, for each group of engines, and for the main memory of a machine; GiB. `arch`: the senior's.

    Raises ConfigError where sizes do not divide, or where one of the three does not suffice.
    """
    c = config.cluster
    _check_cut(config, place, arch)
    trainer = trainer_memory(arch, c, place.trainer_gpus)
    lines = [_trainer_line(trainer, c)]
    on_host = host_bytes(trainer, offloaded=c.colocate, reference=config.objective.kl_coef > 0) * min(
        place.trainer_gpus, c.gpus_per_node
    )
    for group in place.groups:
        models = [served[group.name]] + ([junior] if junior is not None and group.name == ACTOR else [])
        _check_heads(config, models, group)
        engine = engine_memory(models, group.gpus_per_engine, c, group.serving.mem_fraction)
        lines.append(_engine_line(engine, group, config))
        lines += [f"{group.name}, {note}" for model in models for note in model.notes]
        if group.shared and (not group.update_weights or junior is not None):
            on_host += engine.weights * min(group.gpus, c.gpus_per_node)
    return [*lines, _host_line(on_host, c)]


def _check_cut(config: RunConfig, place: Layout, arch: Architecture) -> None:
    """Raise ConfigError where the parallel sizes do not divide the senior, or the data parallel size an update's responses."""
    c = config.cluster
    for field, value, of, what in (
        ("tensor_parallel", c.tensor_parallel, arch.num_heads, "the senior's attention heads"),
        ("tensor_parallel", c.tensor_parallel, arch.num_kv_heads, "its KV heads"),
        *((("tensor_parallel", c.tensor_parallel, arch.ffn_size, "its MLP"),) if arch.experts is None else ()),
        ("pipeline_parallel", c.pipeline_parallel, arch.num_layers, "its layers"),
    ):
        if of % value:
            raise ConfigError(f"cluster.{field}", value, f"a divisor of {of}, {what}", "change it")
    _check_experts(config, place, arch)
    data_parallel = place.trainer_gpus // (c.tensor_parallel * c.pipeline_parallel * c.context_parallel)
    batch = config.train.prompts_per_step * config.train.samples_per_prompt // config.train.updates_per_step
    if batch % data_parallel:
        expected = f"a multiple of {data_parallel}, the data parallel size, in each of the updates"
        remedy = "change train.prompts_per_step, samples_per_prompt or updates_per_step, or cluster.trainer_gpus"
        raise ConfigError("responses of an update", batch, expected, remedy)


def _check_experts(config: RunConfig, place: Layout, arch: Architecture) -> None:
    """Raise ConfigError where expert parallel ranks are no share of a pipeline stage, or not what the layers can."""
    c = config.cluster
    if arch.experts is None:
        if c.expert_parallel > 1:
            raise ConfigError("cluster.expert_parallel", c.expert_parallel, "1, the senior has no experts", "remove it")
        return
    stage = place.trainer_gpus // c.pipeline_parallel
    if arch.experts.count % c.expert_parallel or stage % c.expert_parallel:
        expected = f"a divisor of its {arch.experts.count} experts, and of the {stage} GPUs of a pipeline stage"
        raise ConfigError("cluster.expert_parallel", c.expert_parallel, expected, "change it")
    if c.layer_spec == "own" and c.expert_parallel > 1:
        expected = "1 with cluster.layer_spec=own, whose ranks have all experts each"
        raise ConfigError("cluster.expert_parallel", c.expert_parallel, expected, "set it to 1")


def _check_heads(config: RunConfig, models: list[Served], group: Group) -> None:
    for model in models:
        if model.heads is not None and model.heads % group.gpus_per_engine:
            expected = f"a divisor of {model.heads} attention heads"
            raise ConfigError(sizes_of(config, group.name)[1], group.gpus_per_engine, expected, "change it")


def _trainer_line(t: TrainerMemory, c: ClusterConfig) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "logits", *(("step",) if t.step else ()))
    shown = ", ".join(f"{name} {getattr(t, name) / GIB:.1f}" for name in parts) + f", reserve {RESERVED / GIB:.1f}"
    total = t.total + RESERVED
    if total > int(c.gpu_memory_gib * GIB):
        expected = f"at most {c.gpu_memory_gib:g}: {shown}"
        remedy = "raise cluster.tensor_parallel, pipeline_parallel or trainer_gpus, lower max_tokens_per_gpu, or set recompute"
        raise ConfigError("memory of the trainer, GiB a GPU", round(total / GIB, 1), expected, remedy)
    return f"memory, GiB a GPU of {c.gpu_memory_gib:g}: trainer {shown}: {total / GIB:.1f}"


def _engine_line(e: EngineMemory, group: Group, config: RunConfig) -> str:
    c, wanted = config.cluster, config.sampling.max_new_tokens
    if e.kv_tokens < wanted:
        room = (group.serving.mem_fraction or c.mem_fraction) * c.gpu_memory_gib
        expected = f"at least sampling.max_new_tokens={wanted}; weights take {e.weights / GIB:.1f} of {room:.1f} GiB"
        remedy = f"raise {sizes_of(config, group.name)[1]} or {_fraction_of(config, group)}"
        raise ConfigError(f"KV cache of {group.name}, tokens", e.kv_tokens, expected, remedy)
    share = group.serving.mem_fraction or c.mem_fraction
    if e.scoring + ENGINE_RESERVED > (1 - share) * c.gpu_memory_gib * GIB:
        needs = f"{e.scoring / GIB:.1f} for the logits of {SCORED_AT_ONCE} positions, {ENGINE_RESERVED / GIB:.1f} in reserve"
        most = 1 - (e.scoring + ENGINE_RESERVED) / (c.gpu_memory_gib * GIB)
        expected = f"at most {most:.2f}: beside weights and KV cache {needs}"
        raise ConfigError(f"mem_fraction of {group.name}", share, expected, f"lower {_fraction_of(config, group)}")
    return (
        f"{group.name}: weights {e.weights / GIB:.1f} GiB, KV cache {e.kv_tokens * e.kv_per_token / GIB:.1f} GiB a GPU: "
        f"{e.kv_tokens:,} tokens an engine, {e.kv_per_token:,} bytes a token and GPU"
    )


def _fraction_of(config: RunConfig, group: Group) -> str:
    """Dotted name of the setting that says which share of a GPU a group's engines take."""
    if group.serving.mem_fraction is None:
        return "cluster.mem_fraction"
    return f"{serving_of(config, group.name)[0]}.mem_fraction"


def _host_line(on_host: int, c: ClusterConfig) -> str:
    if on_host > c.host_memory_gib * GIB:
        expected = f"at most {c.host_memory_gib:g} (cluster.host_memory_gib)"
        remedy = "raise cluster.nodes" + (", or set cluster.colocate=false" if c.colocate else "")
        raise ConfigError("main memory of a machine, GiB", round(on_host / GIB, 1), expected, remedy)
    return (
        f"main memory of a machine: {on_host / GIB:.1f} GiB of {c.host_memory_gib:g} (weights of trainer and frozen models"
        f"{', optimizer while engines write' if c.colocate else ''})"
    )
