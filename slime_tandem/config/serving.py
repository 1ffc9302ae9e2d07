"""How each model is served: what differs between the senior's, the junior's and the teachers' servers.

GPUs and tensor parallel sizes are in `cluster` (a teacher of `opd.teachers` has its own). It knows no server: `slime_launch`
writes these settings for SGLang, `team.servers` obeys what an embedded server can.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_tandem.config.section import Section


class ServedModel(Section):
    """How one model is served; every default leaves it to the server."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="weights and computation; null: models.dtype here, SGLang's choice under slime (never float32)",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="the commit that its folder must be, a snapshot of a Hugging Face cache (snapshots/<commit>, or what "
        "refs/<name> holds); nothing is fetched",
    )
    quantization: str | None = Field(None, min_length=1, description="SGLang's --quantization; slime only")
    context_length: int | None = Field(
        None, ge=1, description="tokens of prompt and response together; null: the model's positions; slime only"
    )
    mem_fraction: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="share of a GPU for its weights and KV cache; null: cluster.mem_fraction; slime only",
    )
    enforce_eager: bool = Field(False, description="without CUDA graphs (SGLang's --disable-cuda-graph); slime only")
    weights_gib: float | None = Field(
        None, gt=0.0, description="size of its weights for the plan, where neither files nor config.json tell it"
    )
    kv_bytes_per_token: int | None = Field(
        None, ge=1, description="KV cache of a token on one GPU for the plan, where config.json does not tell it"
    )


class ServingConfig(Section):
    """How each model is served. The fused engine is one server: the senior's settings are its own."""

    senior: ServedModel = Field(default_factory=ServedModel)
    junior: ServedModel = Field(default_factory=ServedModel)
    teacher: ServedModel = Field(default_factory=ServedModel)
