"""How the layers of both models attend in a prefill: by FlashInfer (`flashinfer_prefill`), or by SGLang's own backend.

SGLang's FlashInfer backend plans a batch for one number of query heads; senior and junior may have two. A layer asks the
backend of the current forward context, so another one answers for as long as the stacks run; within a replayed prefill graph,
too, which is broken at every attention. What is captured attends by SGLang's own backend: only a replay has a plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context

from slime_tandem.engines.fused.flashinfer_prefill import SIZES, Heads, Prefill, located
from slime_tandem.errors import ConfigError

logger = logging.getLogger(__name__)


def choose(
    wanted: str, args: Any, layers: Sequence[Any], dtype: torch.dtype, quantized: bool
) -> PrefillAttention | None:
    """FlashInfer's prefill for `layers` (SGLang's attention layers of both models), None where SGLang's own goes on.

    `wanted`: `engine.fused_prefill`; `args`: the server's; `dtype`: of the models. Raises ConfigError if `wanted` is flashinfer
    and it cannot be.
    """
    if wanted == "triton":
        return None
    layouts = [Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.scaling) for layer in layers]
    reason = _unfit(args, layouts, dtype, quantized) or _failure(layouts, dtype)
    if reason is None:
        logger.info("prefill attention of the fused engine: FlashInfer")
        return PrefillAttention(layouts, dtype)
    if wanted == "flashinfer":
        raise ConfigError(
            "engine.fused_prefill", wanted, f"another value: {reason}", "set engine.fused_prefill to auto or triton"
        )
    logger.info("prefill attention of the fused engine: SGLang's own; not FlashInfer: %s", reason)
    return None


def _unfit(args: Any, layouts: Sequence[Heads], dtype: torch.dtype, quantized: bool) -> str | None:
    """Why FlashInfer does not prefill under these settings, or for these models; None if it may."""
    if not str(args.device).startswith("cuda"):
        return f"the device is {args.device}"
    backend = args.prefill_attention_backend or args.attention_backend
    if backend != "triton":
        return f"the attention backend is {backend}, not triton"
    for name in ("enable_deterministic_inference", "enable_unified_memory"):
        if getattr(args, name, None):
            return f"{name} is set"
    if getattr(args, "dcp_size", 1) > 1:
        return f"dcp_size is {args.dcp_size}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the models are in {dtype}"
    if quantized or args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        return "the models or the KV cache are quantized"
    if args.kv_cache_dtype != "auto" and dtype != torch.bfloat16:
        return "the KV cache has another dtype than the models"
    for heads in layouts:
        if heads.size not in SIZES:
            return f"heads have {heads.size} values, not one of {SIZES}"
        if not heads.merges:
            return f"{heads.query} heads of {heads.size} are more than its merge kernel takes"
    return None


def _failure(layouts: Sequence[Heads], dtype: torch.dtype) -> str | None:
    """What went wrong where a few tokens were prefilled; None if it works. FlashInfer compiles its kernels with that."""
    try:
        # SGLang builds a model within a default device, which what follows a start does not have.
        with torch.device("cpu"), torch.no_grad():
            _try(layouts, dtype, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # noqa: BLE001 - no compiler, no kernel for this card: whatever it is, SGLang's own works
        return f"{type(error).__name__}: {str(error).strip()[-300:]}"
    return None


def _try(layouts: Sequence[Heads], dtype: torch.dtype, device: torch.device) -> None:
    """Prefill two sequences, one of them behind a cached token, and hold the result against a plain softmax."""
    prefill = Prefill(layouts, dtype, device)
    prefill.plan([3, 2], [0, 1], torch.tensor([5], dtype=torch.int32, device=device))
    for heads in dict.fromkeys(layouts):
        q = torch.ones(5, heads.query, heads.size, dtype=dtype, device=device)
        k = torch.zeros(5, heads.kv, heads.size, dtype=dtype, device=device)
        v = torch.arange(5.0, device=device).view(5, 1, 1).expand(k.shape).to(dtype).contiguous()
        pool = torch.zeros_like(k).repeat(2, 1, 1), torch.full_like(k, 9.0).repeat(2, 1, 1)
        got = prefill.attend(q, k, v, pool, heads.scale)[:, 0, 0].tolist()
        wanted = [0.0, 0.5, 1.0, 6.0, 16 / 3]  # equal scores: the mean of the values that a token sees
        if not all(math.isclose(a, b, abs_tol=0.05) for a, b in zip(got, wanted, strict=True)):
            raise ArithmeticError(f"a trial gave {got} instead of {wanted}")


class PrefillAttention:
    """FlashInfer's part in one engine."""

    def __init__(self, layouts: Sequence[Heads], dtype: torch.dtype) -> None:
        self._layouts, self._dtype = layouts, dtype
        self._prefill: Prefill | None = None

    def over(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Within it, layers attend by FlashInfer if `batch` is a prefill, for which it is planned here."""
        if not batch.forward_mode.is_extend() or not batch.batch_size or batch.extend_prefix_lens_cpu is None:
            return contextlib.nullcontext()
        context = get_forward_context()
        table = context.attn_backend.req_to_token_pool.req_to_token
        if self._prefill is None:  # not with the models: what SGLang releases with their weights would take it along
            self._prefill = Prefill(self._layouts, self._dtype, table.device)
        new, cached = [int(n) for n in batch.extend_seq_lens_cpu], [int(n) for n in batch.extend_prefix_lens_cpu]
        self._prefill.plan(new, cached, located(table, batch.req_pool_indices, cached))
        planned = _Planned(context.attn_backend, self._prefill)
        return forward_context(dataclasses.replace(context, attn_backend=planned))  # type: ignore[no-any-return]


class _Planned(AttentionBackend):  # type: ignore[misc]
    """The attention of one prefill."""

    def __init__(self, base: Any, prefill: Prefill) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = base.token_to_kv_pool, base.req_to_token_pool
        self._prefill = prefill

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """A layer's attention [T, heads x size] of the new tokens, whose keys and values are stored too."""
        assert not kwargs, "models that need more of their attention are refused"
        pool, heads, size = self.token_to_kv_pool, layer.tp_q_head_num, layer.qk_head_dim
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        out = self._prefill.attend(
            q.reshape(-1, heads, size).contiguous(),
            k.view(-1, layer.tp_k_head_num, size),
            v.view(-1, layer.tp_v_head_num, size),
            pool.get_kv_buffer(layer.layer_id),
            layer.scaling,
        )
        return out.view(-1, heads * size)
