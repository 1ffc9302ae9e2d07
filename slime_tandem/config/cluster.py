"""slime's machines: who gets which GPUs, and how the trainer is cut. A local run reads none of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_tandem.config.section import Section


class ClusterConfig(Section):
    """slime only: the machines, who gets which GPUs, and how the trainer is cut (docs/scaling.md)."""

    nodes: int = Field(1, ge=1, le=1024, description="machines")
    gpus_per_node: int = Field(8, ge=1, le=16, description="GPUs of each")
    gpu_memory_gib: float = Field(79.0, gt=0.0, description="memory of a GPU as torch reports it (H100 80GB: 79)")
    host_memory_gib: float = Field(1024.0, gt=0.0, description="main memory of a machine")
    colocate: bool = Field(True, description="trainer and rollout engines take turns on the same GPUs")
    trainer_gpus: int | None = Field(
        None,
        ge=1,
        description="the trainer's, from the first on; null with colocate: what fits of those that the frozen models leave",
    )
    senior_gpus: int | None = Field(
        None,
        ge=1,
        description="the senior's engines, from the first GPU on (colocate) or behind the trainer; null: the rest",
    )
    junior_gpus: int = Field(
        1, ge=1, description="the junior's engines, behind the senior's; unused without engines of its own"
    )
    teacher_gpus: int = Field(1, ge=1, description="the engines of each teacher without a URL, behind the junior's")
    senior_tp: int = Field(1, ge=1, description="GPUs of one engine of the senior")
    junior_tp: int = Field(1, ge=1, description="the same for the junior")
    teacher_tp: int = Field(1, ge=1, description="the same for the teachers")
    mem_fraction: float = Field(0.7, gt=0.0, lt=1.0, description="share of a GPU for weights and KV cache of an engine")
    tensor_parallel: int = Field(1, ge=1, description="the trainer's tensor parallel size")
    pipeline_parallel: int = Field(1, ge=1, description="its pipeline parallel size")
    context_parallel: int = Field(1, ge=1, description="its context parallel size")
    expert_parallel: int = Field(
        1,
        ge=1,
        description="its expert parallel size, for a mixture of experts: ranks among which a layer's experts are divided",
    )
    max_tokens_per_gpu: int = Field(8192, ge=1, description="tokens of a micro-batch on one GPU of the trainer")
    recompute: bool = Field(True, description="compute activations again in the backward pass instead of keeping them")
    reference: str | None = Field(
        None,
        description="the senior's start weights as torch_dist (`slime-tandem convert`); null: the Hugging Face folder",
    )
    loss: Literal["own", "slime"] = Field(
        "own",
        description="slime: its policy_loss and advantages with their flags, without a teacher (docs/slime.md, recipe 1); own: "
        "this package's, with everything in `objective`",
    )
    reward: str | None = Field(
        None,
        description="slime's --rm-type, or a function of slime's signature as module.function (its --custom-rm-path); null: "
        "this package scores the task",
    )
    layer_spec: Literal["transformer_engine", "own"] = Field(
        "transformer_engine", description="own: layers without Transformer Engine, for machines that lack it"
    )
    side_servers: bool = Field(
        False,
        description="for one or two GPUs: the launch scripts serve junior and teachers beside the job, on its last GPU, which "
        "they share with trainer and senior; false: slime serves them, on GPUs of their own",
    )
    side_fraction: float = Field(
        0.12, gt=0.0, lt=1.0, description="share of that GPU for weights and KV cache of each side server"
    )
    side_port: int = Field(30100, ge=1024, le=65000, description="port of the first side server; the next ones follow")
    slime_flags: tuple[str, ...] = Field(
        (), description="further flags of slime, a word each, checked like those after --"
    )
