"""The one list of what this package touches inside SGLang, and the check that it is still there.

Known to work: see `KNOWN_VERSIONS`. Another version is refused unless the user allows it; then this list still has to hold.
`python -m slime_tandem.engines.fused.internals` checks the installed SGLang.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib import metadata

KNOWN_VERSIONS = ("0.5.15.post1", "0.5.17", "0.5.23")
"""Releases on which the tests of this package pass."""

INTERNALS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # (module, object, parameters of the function or fields of the record that are used), stable ones first
    ("sglang.srt.models.qwen3", "Qwen3ForCausalLM.load_weights", ("weights",)),
    ("sglang.srt.models.qwen3", "Qwen3ForCausalLM", ("config", "quant_config", "prefix")),
    ("sglang.srt.models.qwen2", "Qwen2ForCausalLM", ("config", "quant_config", "prefix")),
    ("sglang.srt.models.llama", "LlamaForCausalLM", ("config", "quant_config", "prefix")),
    ("sglang.srt.layers.radix_attention", "RadixAttention", ("layer_id",)),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks", ()),
    ("sglang.srt.plugins.hook_registry", "HookType.AROUND", ()),
    ("sglang.srt.runtime_context", "get_server_args", ()),
    ("sglang.srt.model_executor.forward_context", "get_req_to_token_pool", ()),
    ("sglang.srt.model_executor.forward_context", "get_token_to_kv_pool", ()),
    (
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "positions",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "out_cache_loc",
            "extend_seq_lens_cpu",
            "extend_prefix_lens_cpu",
            "rids",
            "is_prefill_only",
            "next_token_logits_buffer",
        ),
    ),
    (
        "sglang.srt.layers.logits_processor",
        "LogitsMetadata",
        ("next_token_logits_buffer", "extend_return_logprob", "extend_logprob_pruned_lens_cpu"),
    ),
    ("sglang.srt.layers.logits_processor", "LogitsMetadata.from_forward_batch", ("forward_batch",)),
    (
        "sglang.srt.layers.logits_processor",
        "LogitsProcessorOutput",
        (
            "next_token_logits",
            "next_token_logprobs",
            "customized_info",
            "input_token_logprobs",
            "input_top_logprobs_val",
            "input_top_logprobs_idx",
            "input_token_ids_logprobs_val",
            "input_token_ids_logprobs_idx",
        ),
    ),
    (
        "sglang.srt.layers.sampler",
        "Sampler.forward",
        ("self", "logits_output", "sampling_info", "return_logprob"),
    ),
    ("sglang.srt.layers.sampler", "SGLANG_RETURN_ORIGINAL_LOGPROB", ()),
    (
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner",
        "PrefillCudaGraphRunner.execute",
        ("self", "forward_batch"),
    ),
    # What catch-up steps and a prefill by FlashInfer touch beside these.
    ("sglang.srt.model_executor.forward_context", "ForwardContext", ("attn_backend",)),
    ("sglang.srt.model_executor.forward_context", "get_forward_context", ()),
    ("sglang.srt.model_executor.forward_context", "forward_context", ("ctx",)),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.forward",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    ("sglang.srt.mem_cache.memory_pool", "KVWriteLoc", ("loc",)),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer", ("layer", "loc_info", "cache_k", "cache_v")),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_kv_buffer", ("layer_id",)),
    ("sglang.srt.managers.schedule_batch", "Req.update_finish_state", ("self",)),
    # Of its `cache_finished_req`, where that takes no length (0.5.15), unread.py makes use, too; it looks for itself.
    ("sglang.srt.mem_cache.radix_cache", "RadixCache", ()),
    ("sglang.srt.models.qwen3", "Qwen3Model.forward", ("input_ids", "positions", "forward_batch")),
    ("sglang.srt.models.qwen2", "Qwen2Model.forward", ("input_ids", "positions", "forward_batch")),
    ("sglang.srt.models.llama", "LlamaModel.forward", ("input_ids", "positions", "forward_batch")),
)

IN_SOURCE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # (module, classes, an attribute of instances that the code of one of them names)
    ("sglang.srt.managers.schedule_batch", ("Req", "ReqKvInfo"), "kv_committed_len"),
    ("sglang.srt.managers.schedule_batch", ("Req",), "skip_radix_cache_insert"),
    ("sglang.srt.layers.radix_attention", ("RadixAttention",), "tp_q_head_num"),
    ("sglang.srt.layers.radix_attention", ("RadixAttention",), "tp_k_head_num"),
    ("sglang.srt.layers.radix_attention", ("RadixAttention",), "scaling"),
)


def missing(internals: tuple[tuple[str, str, tuple[str, ...]], ...] = INTERNALS) -> list[str]:
    """What is no longer where the list says, in words; empty if all is there."""
    faults = []
    for module, path, names in internals:
        try:
            found: object = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            faults.append(f"{module}.{path} is gone ({error})")
            continue
        lost = [name for name in names if name not in _names(found)]
        if lost:
            faults.append(f"{module}.{path} has no longer {', '.join(lost)}")
    if internals is INTERNALS:
        faults += [
            f"{module} names no longer {name}"
            for module, classes, name in IN_SOURCE
            if not _named(module, classes, name)
        ]
    return faults


def _named(module: str, classes: tuple[str, ...], name: str) -> bool:
    """Whether the source of one of the classes, those that there are, names an attribute."""
    try:
        found = [getattr(importlib.import_module(module), cls, None) for cls in classes]
    except ImportError:
        return False
    return any(name in inspect.getsource(cls) for cls in found if cls is not None)


def _names(found: object) -> set[str]:
    fields = getattr(found, "__dataclass_fields__", None)
    if fields is not None:
        return set(fields)
    return set(inspect.signature(found).parameters) if callable(found) else set()


def installed_version() -> str | None:
    """Version of the installed SGLang, None if there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def require() -> None:
    """Raise ImportError, naming all that moved, if the installed SGLang is not as this package needs it."""
    faults = missing()
    if faults:
        raise ImportError(
            f"SGLang {installed_version()} has moved what the fused engine uses: {'; '.join(faults)}. "
            f"Remedy: use SGLang {' or '.join(KNOWN_VERSIONS)}."
        )


if __name__ == "__main__":
    print(json.dumps({"version": installed_version(), "known": KNOWN_VERSIONS, "missing": missing()}))
    sys.exit(bool(missing()))
