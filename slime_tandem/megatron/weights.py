"""Hugging Face <-> Megatron: the architecture, the weight names and layouts, the reading of safetensors folders.

Covers dense llama, qwen2 and qwen3 decoders at tensor-parallel size 1, so the vocabulary is never padded. The conversion
only renames, splits and joins tensors: it is exact in both directions, whatever the dtype. Whatever a config asks for that
the Megatron model would not do is refused with the field's name; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from slime_tandem.errors import ModelError
from slime_tandem.megatron.architecture import Architecture, architecture_of, hf_shapes, require
from slime_tandem.megatron.core import (
    CheckpointedLayer,
    GPTModel,
    GroupedRowParallelLinear,
    InverseFrequencyRope,
    SdpaCoreAttention,
    TransformerConfig,
    get_gpt_layer_local_spec,
)
from slime_tandem.models.weight_files import hf_weight_files, require_listed, require_once

StateDict = dict[str, torch.Tensor]


def transformer_config_from_hf(hf_config: Any) -> TransformerConfig:
    """Megatron's config for a supported transformers config: float32, no dropout, no fused or CUDA-only paths.

    Raises ModelError as `architecture_of` does.
    """
    arch = architecture_of(hf_config)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        # Weights are loaded, never drawn: drawing them needs the CUDA random-number tracker.
        perform_initialization=False,
        use_cpu_initialization=True,
        # The fused variants are `torch.compile`d or CUDA kernels (core/jit.py); at these sizes they cost more than they give.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        # The default, "full", is deprecated: Megatron warns of its own default (transformer_config.py:1705).
        cuda_graph_scope=[],
    )


def inverse_frequencies(hf_config: Any) -> torch.Tensor:
    """Rotary inverse frequencies `[head_dim / 2]`, float32, equal bit for bit to transformers'.

    For llama3 scaling transformers' own function is called: Megatron's (rotary_pos_embedding.py:96) fixes three of the four
    factors.
    """
    arch = architecture_of(hf_config)
    rope = dict(arch.rope)
    if rope.get("rope_type", "default") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](hf_config)
        assert attention_factor == 1.0
        assert isinstance(frequencies, torch.Tensor)
        return frequencies
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float) / arch.head_dim
    return 1.0 / (float(rope["rope_theta"]) ** exponents)


def build_model(hf_config: Any, *, checkpointed: bool = False) -> GPTModel:
    """A float32 Megatron GPTModel on the CPU with uninitialised weights: load them with `load_weights`.

    `checkpointed`: its layers compute their activations again in the backward pass instead of keeping them.
    `megatron.core.ensure_initialized` must have been called. Raises ModelError as `architecture_of` does.
    """
    arch = architecture_of(hf_config)
    spec = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp
    if checkpointed:
        spec.module = CheckpointedLayer
    attention.core_attention = SdpaCoreAttention
    attention.linear_proj = mlp.submodules.linear_fc2 = GroupedRowParallelLinear
    # Left out, it is taken from the config with a deprecation warning (transformer/mlp.py:95).
    mlp.params["ffn_hidden_size"] = arch.ffn_size
    model = GPTModel(
        config=transformer_config_from_hf(hf_config),
        transformer_layer_spec=spec,
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = InverseFrequencyRope(inverse_frequencies(hf_config))
    return model


def load_weights(model: GPTModel, hf_state: Mapping[str, torch.Tensor], hf_config: Any) -> None:
    """Copy a Hugging Face state dict into the model, cast to the model's dtype; raises ModelError as `hf_to_megatron`."""
    converted = hf_to_megatron(hf_state, hf_config)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == converted.keys(), parameters.keys() ^ converted.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(converted[name])


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a weight of one format comes from weights of the other: `make` of the tensors that `sources` name."""

    sources: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]


def _itself(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _qkv_part(tensors: Sequence[torch.Tensor], *, arch: Architecture, n: int) -> torch.Tensor:
    return _split_qkv(_itself(tensors), arch)[n]


def _half(tensors: Sequence[torch.Tensor], *, n: int) -> torch.Tensor:
    return _itself(tensors).chunk(2)[n]


# Weights that only change their names, as (Hugging Face, Megatron), inside a layer and outside of the layers.
_IN_LAYER = (
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("self_attn.o_proj.weight", "self_attention.linear_proj.weight"),
    ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),
    ("mlp.down_proj.weight", "mlp.linear_fc2.weight"),
)
_QK_NORMS = (
    ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight"),
    ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight"),
)
_GATE, _UP, _FC1 = "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.linear_fc1.weight"


def _renamed(arch: Architecture) -> list[tuple[str, str]]:
    pairs = [("model.embed_tokens.weight", "embedding.word_embeddings.weight")]
    for i in range(arch.num_layers):
        inside = (*_IN_LAYER, *_QK_NORMS) if arch.qk_norm else _IN_LAYER
        pairs += [(f"model.layers.{i}.{hf}", f"decoder.layers.{i}.{megatron}") for hf, megatron in inside]
    pairs.append(("model.norm.weight", "decoder.final_layernorm.weight"))
    return pairs if arch.tied else [*pairs, ("lm_head.weight", "output_layer.weight")]


def megatron_recipes(arch: Architecture) -> dict[str, Recipe]:
    """Of every Megatron parameter (names of the local layer spec, tensor-parallel size 1), from Hugging Face weights."""
    out = {megatron: Recipe((hf,), _itself) for hf, megatron in _renamed(arch)}
    for i in range(arch.num_layers):
        old, new = f"model.layers.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            parts = tuple(f"{old}self_attn.{p}_proj.{kind}" for p in "qkv")
            out[f"{new}self_attention.linear_qkv.{kind}"] = Recipe(parts, lambda tensors: _join_qkv(tensors, arch))
        out[new + _FC1] = Recipe((old + _GATE, old + _UP), lambda tensors: torch.cat(list(tensors)))
    return out


def hf_recipes(arch: Architecture) -> dict[str, Recipe]:
    """Of every Hugging Face weight, from Megatron's parameters: the inverse of `megatron_recipes`."""
    out = {hf: Recipe((megatron,), _itself) for hf, megatron in _renamed(arch)}
    for i in range(arch.num_layers):
        old, new = f"decoder.layers.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            for n, p in enumerate("qkv"):
                joined = (f"{old}self_attention.linear_qkv.{kind}",)
                out[f"{new}self_attn.{p}_proj.{kind}"] = Recipe(joined, partial(_qkv_part, arch=arch, n=n))
        for n, half in enumerate((_GATE, _UP)):
            out[new + half] = Recipe((old + _FC1,), partial(_half, n=n))
    return out


def hf_to_megatron(state_dict: Mapping[str, torch.Tensor], hf_config: Any) -> StateDict:
    """Megatron's parameters from a Hugging Face state dict, bit for bit, in the dtype they come in.

    Raises ModelError for missing, unknown or misshapen weights. Two kinds of extra entries of old checkpoints are known:
    `rotary_emb.inv_freq` buffers, which follow from the config, and the `lm_head` of a tied model, which must equal the
    embedding.
    """
    arch = architecture_of(hf_config)
    weights = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    if arch.tied and "lm_head.weight" in weights:
        head, embedding = weights.pop("lm_head.weight"), weights.get("model.embed_tokens.weight")
        require(
            embedding is not None and torch.equal(head, embedding),
            "tie_word_embeddings",
            True,
            "lm_head.weight equal to model.embed_tokens.weight",
            "set it to false in config.json: this checkpoint is not tied",
        )
    check_names_and_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, hf_shapes(arch))
    recipes = megatron_recipes(arch)
    return {name: recipe.make([weights[source] for source in recipe.sources]) for name, recipe in recipes.items()}


def megatron_to_hf(state_dict: Mapping[str, torch.Tensor], hf_config: Any) -> StateDict:
    """The Hugging Face state dict of Megatron's parameters: the exact inverse of `hf_to_megatron`.

    All tensors are contiguous and share no memory with each other. Takes `dict(model.named_parameters())`.
    """
    arch = architecture_of(hf_config)
    recipes, shapes = hf_recipes(arch), hf_shapes(arch)
    out = {name: recipes[name].make([state_dict[source] for source in recipes[name].sources]) for name in shapes}
    out = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in out.items()}
    check_names_and_shapes({name: tuple(tensor.shape) for name, tensor in out.items()}, shapes)
    return out


def _join_qkv(parts: Sequence[torch.Tensor], arch: Architecture) -> torch.Tensor:
    # Megatron interleaves by query group: the group's query heads, then its key head, then its value head.
    rest = parts[0].shape[1:]
    grouped = [part.reshape(arch.num_kv_heads, -1, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def _split_qkv(joined: torch.Tensor, arch: Architecture) -> list[torch.Tensor]:
    rest = joined.shape[1:]
    D, per_group = arch.head_dim, arch.num_heads // arch.num_kv_heads
    grouped = joined.reshape(arch.num_kv_heads, (per_group + 2) * D, *rest)
    return [part.reshape(-1, *rest) for part in torch.split(grouped, [per_group * D, D, D], dim=1)]


def check_names_and_shapes(found: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless weights of just these names and shapes were found."""
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing:
        raise ModelError(
            "weights",
            f"{len(missing)} missing: {', '.join(missing[:3])}",
            "every weight of config.json",
            "fetch it anew",
        )
    if unknown:
        raise ModelError(
            "weights",
            f"{len(unknown)} unknown: {', '.join(unknown[:3])}",
            "only weights of config.json",
            "see config.json",
        )
    for name, shape in shapes.items():
        if found[name] != shape:
            raise ModelError(f"weights {name}", found[name], f"shape {shape} from config.json", "mend config.json")


def load_hf_folder(folder: str | Path) -> StateDict:
    """All weights of a Hugging Face folder, on the CPU, from one safetensors file or a sharded index.

    Pickled weights (`pytorch_model.bin`) are never read. Raises ModelError if weights are missing or a file is damaged.
    """
    path = Path(folder)
    files, listed = hf_weight_files(path)
    weights: StateDict = {}
    for file in files:
        for name, weight in _read_safetensors(file).items():
            require_once(file, name, weights)
            weights[name] = weight
    require_listed(path, listed, weights)
    return weights


def _read_safetensors(file: Path) -> StateDict:
    try:
        return dict(load_file(file))
    except (SafetensorError, OSError) as error:
        raise ModelError(str(file), str(error), "a whole safetensors file", "fetch it anew") from error
