"""The models' folders, their servers, and how the client treats them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from slime_tandem.config.section import Ignored, Section, http_url

TextMarkers = Literal["allow", "escape", "refuse"]


class ModelsConfig(Section):
    """Who takes part. Each is a local Hugging Face folder, or `builtin:<name>` for a checkpoint that `pretrain` makes."""

    senior: str = Field("builtin:senior", description="trainable policy")
    junior: str = Field("builtin:junior", description="frozen partner that co-writes (same tokenizer as the senior)")
    teacher: str = Field("builtin:teacher", description="frozen scorer, any tokenizer")
    cache_dir: str = Field(".cache/models", description="where built-in checkpoints are made and kept")
    trust_remote_code: bool = Field(False, description="run Python code that a model folder brings")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="engine weights; the trainer keeps float32 masters"
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="passed to the chat templates of senior and junior, e.g. {enable_thinking: false}; "
        "teachers have opd.template_kwargs",
    )
    text_markers: TextMarkers = Field(
        "escape",
        description="control tokens that users, tools or environments have typed (<|im_end|>): escape reads them as plain "
        "text, refuse stops, allow lets them act as templates do; all are counted in rollout/text_markers",
    )


class EngineConfig(Section):
    """The servers, and how the client treats them."""

    mode: Literal["two_servers", "fused"] = Field(
        "two_servers",
        description="fused: senior and junior decode inside one SGLang server, at about the cost of both models "
        "(docs/fused.md); the teacher keeps a server of its own",
    )
    fused_attention: Literal["auto", "every_step", "catch_up"] = Field(
        "auto",
        description="mode fused: catch_up: a model reads a sequence's KV when it writes it, and catches up in the same read "
        "on what the other one wrote; every_step: both models read every sequence in every step (docs/fused.md says where "
        "which pays); auto: catch_up where the heads are of a size that it takes",
    )
    fused_prefill: Literal["auto", "triton", "flashinfer"] = Field(
        "auto",
        description="mode fused: by whose attention both models prefill: flashinfer, which plans a batch once for each number "
        "of query heads, or SGLang's triton; auto: flashinfer where it works (docs/fused.md), the server's log says which",
    )
    sglang_python: str | None = Field(
        None, description="mode fused: the Python that has SGLang; null: the variable SLIME_TANDEM_SGLANG_PYTHON"
    )
    sglang_args: tuple[str, ...] = Field((), description="mode fused: further flags of sglang.launch_server")
    host: str = Field("127.0.0.1", description="address the servers bind to; loopback unless told otherwise")
    senior_url: str | None = Field(
        None, description="use this running server (SGLang or `slime-tandem serve`) for the senior"
    )
    junior_url: str | None = Field(None, description="the same for the junior")
    teacher_url: str | None = Field(None, description="the same for the teacher")
    api_key_env: str | None = Field(
        None,
        description="environment variable that holds the servers' API key; null: servers that a run starts "
        "get a key of that run, those of a URL none",
    )
    start_timeout_s: float = Field(120.0, gt=0.0, description="seconds a server may take to come up")
    request_timeout_s: float = Field(120.0, gt=0.0, description="seconds one request may take")
    environment_timeout_s: float = Field(
        60.0, gt=0.0, description="seconds one answer of a task's environment may take; its response then fails"
    )
    max_retries: int = Field(5, ge=0, description="repeats after disconnects, time-outs and 5xx answers")
    backoff_s: float = Field(0.2, ge=0.0, description="first pause before a repeat; doubles, at most 5 s")
    max_batch: int = Field(256, ge=1, le=2**20, description="sequences an embedded server decodes at once")
    cache_tokens: int = Field(65536, ge=256, le=2**31, description="KV cache of an embedded server, in tokens")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of an embedded server")
    sessions: bool = Field(
        False,
        description="keep contexts on the servers and send new tokens only: traffic grows linearly with the response",
    )
    client_processes: int | None = Field(
        None,
        ge=0,
        le=256,
        description="slime: processes beside its rollout manager that write and score responses; 0: its event loop does it; "
        "null: as many as the rollout GPUs need (docs/results/manager-cost.md)",
    )
    gather_requests: bool = Field(
        False,
        description="slime, two servers: what is asked of a server in one turn of the event loop goes in one HTTP request; a "
        "third of the CPU, but responses fall into step (docs/results/manager-cost.md)",
    )
    tokens_per_request: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="most tokens asked for in one co-writing request; null: whole chains of runs; auto: 6 for up to 128 "
        "responses at once, whole chains beyond (what was fastest on two GPU servers)",
    )

    ignored: ClassVar[tuple[Ignored, ...]] = (
        Ignored("fused_attention", lambda s: s.mode != "fused", "mode", "set mode=fused"),
        Ignored("fused_prefill", lambda s: s.mode != "fused", "mode", "set mode=fused"),
    )

    @field_validator("senior_url", "junior_url", "teacher_url")
    @classmethod
    def _is_http_url(cls, value: str | None) -> str | None:
        return http_url(value)
