"""What decides the function that a llama, qwen2, qwen3 or qwen3_moe checkpoint computes, apart from its weights.

Whatever a config asks for that the Megatron model would not do is refused with the field's name. Mixtures of experts are
described for whoever hands them to slime (`experts=True`); our own Megatron model is dense. No torch is imported here. It reads
no weights and builds no model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slime_tandem.errors import ModelError

_QKV_BIAS = {"llama": False, "qwen2": True, "qwen3": False, "qwen3_moe": False}
_QK_NORM = {"llama": False, "qwen2": False, "qwen3": True, "qwen3_moe": True}
_CAUSAL_LM = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_EXPERTS = {"qwen3_moe": "Qwen3MoeForCausalLM"}
"""Mixtures of experts that slime trains by its own conversion and Megatron's own layers."""
TRAINED = frozenset({*_CAUSAL_LM.values(), *_EXPERTS.values()})
"""Names of their classes, as `architectures` of a config.json has them."""

_OFF: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
}
"""Fields of a config with the values that mean "off"; the first is what an error names."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in every layer's MLP: `count` of them, `active` for a token, each of width `ffn_size`.

    `normalised`: the weights of the active ones sum to 1 (`norm_topk_prob`).
    """

    count: int
    active: int
    ffn_size: int
    normalised: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """What decides the function a checkpoint computes, apart from its weights.

    `rope` is the config's `rope_parameters` as sorted pairs. Sizes are counts of units, `max_positions` is in tokens.
    `experts`: None for a dense model.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    tied: bool
    rope: tuple[tuple[str, float | int | str], ...]
    experts: Experts | None = None

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections carry a bias."""
        return _QKV_BIAS[self.model_type]

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return _QK_NORM[self.model_type]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; equal for equal architectures."""
        tree = {**asdict(self), "rope": dict(self.rope)}
        if self.experts is None:
            del tree["experts"]  # as in every checkpoint of a dense model
        return tree


def architecture_of(hf_config: Any, *, experts: bool = False) -> Architecture:
    """Read and check a transformers config; raises ModelError naming the first field that is not supported.

    `experts`: mixtures of experts, too, which slime trains and our own Megatron model does not.
    """
    if experts and hf_config.model_type in _EXPERTS:
        return _of_experts(hf_config)
    _require_family(hf_config, {*_CAUSAL_LM, *(_EXPERTS if experts else ())})
    return _architecture(hf_config)


def _architecture(hf_config: Any) -> Architecture:
    _require_switched_off(hf_config)
    rope = _rope(hf_config)
    eps = float(hf_config.rms_norm_eps)
    require(0.0 < eps < 1.0, "rms_norm_eps", eps, "a small number above 0", "mend config.json")
    heads, kv_heads, head_dim = _heads(hf_config)
    return Architecture(
        model_type=hf_config.model_type,
        num_layers=int(hf_config.num_hidden_layers),
        hidden_size=int(hf_config.hidden_size),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=int(hf_config.intermediate_size),
        vocab_size=int(hf_config.vocab_size),
        norm_eps=eps,
        max_positions=int(hf_config.max_position_embeddings),
        tied=bool(hf_config.tie_word_embeddings),
        rope=tuple(sorted(rope.items())),
    )


def _of_experts(hf_config: Any) -> Architecture:
    kind, classes = hf_config.model_type, hf_config.architectures
    require(
        classes in (None, [_EXPERTS[kind]]), "architectures", classes, f"[{_EXPERTS[kind]!r}]", "use a causal model"
    )
    dense = list(getattr(hf_config, "mlp_only_layers", None) or [])
    require(not dense, "mlp_only_layers", dense, "[]: experts in every layer", "use a checkpoint without dense layers")
    step = getattr(hf_config, "decoder_sparse_step", 1)
    require(
        step == 1, "decoder_sparse_step", step, "1: experts in every layer", "use a checkpoint without dense layers"
    )
    count = int(getattr(hf_config, "num_experts", None) or hf_config.num_local_experts)
    active = int(hf_config.num_experts_per_tok)
    require(0 < active <= count, "num_experts_per_tok", active, f"1 to num_experts={count}", "mend config.json")
    found = Experts(count, active, int(hf_config.moe_intermediate_size), bool(hf_config.norm_topk_prob))
    return replace(_architecture(hf_config), experts=found)


def _require_family(hf_config: Any, known: set[str]) -> None:
    kind, classes = hf_config.model_type, hf_config.architectures
    require(
        kind in known,
        "model_type",
        kind,
        f"one of {', '.join(sorted(known))} for a model that is trained",
        "train it under slime, our own Megatron model is dense"
        if kind in _EXPERTS
        else "use a model of these families; others can be served, as junior or teacher",
    )
    require(
        classes in (None, [_CAUSAL_LM[kind]]),
        "architectures",
        classes,
        f"[{_CAUSAL_LM[kind]!r}]",
        "use a causal language model",
    )


def _require_switched_off(hf_config: Any) -> None:
    """Refuse what these three families can switch on and Megatron's local layers do not do."""
    for field, allowed in _OFF.items():
        value = getattr(hf_config, field, None)
        require(value in allowed, field, value, repr(allowed[0]), "use a checkpoint without it")
    layer_types = getattr(hf_config, "layer_types", None)
    require(
        layer_types is None or set(layer_types) == {"full_attention"},
        "layer_types",
        layer_types,
        "full_attention in every layer",
        "use a checkpoint without sliding windows",
    )


def _rope(hf_config: Any) -> dict[str, Any]:
    """Its rotary position embedding: the plain one or Llama 3's, over whole heads."""
    rope = dict(hf_config.rope_parameters)
    rope_type = rope.get("rope_type", "default")
    require(
        rope_type in ("default", "llama3"),
        "rope_parameters.rope_type",
        rope_type,
        "default or llama3",
        "use a checkpoint without this position scaling",
    )
    partial = rope.get("partial_rotary_factor", 1.0)
    require(
        partial == 1.0,
        "rope_parameters.partial_rotary_factor",
        partial,
        "1.0",
        "use a checkpoint that rotates whole heads",
    )
    return rope


def _heads(hf_config: Any) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size), which fit each other."""
    heads = int(hf_config.num_attention_heads)
    kv_heads = int(hf_config.num_key_value_heads)
    head_dim = int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads)
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        "num_key_value_heads",
        kv_heads,
        f"a divisor of num_attention_heads={heads}",
        "mend config.json",
    )
    require(head_dim % 2 == 0, "head_dim", head_dim, "an even number, rotary angles come in pairs", "mend config.json")
    return heads, kv_heads, head_dim


def require(holds: bool, field: str, value: object, expected: str, remedy: str) -> None:
    """Raise ModelError about a field of config.json unless the condition holds."""
    if not holds:
        raise ModelError(f"config.json {field}", value, expected, remedy)


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the Hugging Face model, in its order."""
    H, D = arch.hidden_size, arch.head_dim
    q, kv = arch.num_heads * D, arch.num_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, H)}
    for i in range(arch.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q, H),
            "self_attn.k_proj.weight": (kv, H),
            "self_attn.v_proj.weight": (kv, H),
            "self_attn.o_proj.weight": (H, q),
            **_mlp_shapes(arch),
            "input_layernorm.weight": (H,),
            "post_attention_layernorm.weight": (H,),
        }
        if arch.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if arch.qk_norm:
            layer |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (H,)
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab_size, H)
    return shapes


def _mlp_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    H = arch.hidden_size

    def parts(prefix: str, f: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_proj": (f, H), "up_proj": (f, H), "down_proj": (H, f)}
        return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}

    if arch.experts is None:
        return parts("mlp", arch.ffn_size)
    each = [parts(f"mlp.experts.{n}", arch.experts.ffn_size) for n in range(arch.experts.count)]
    return {"mlp.gate.weight": (arch.experts.count, H)} | {name: shape for one in each for name, shape in one.items()}


def load_hf_config(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a local folder, never from the network; raises ModelError if there is none that loads."""
    from transformers import AutoConfig

    from slime_tandem.models.hf import read_model_config, require_sizes  # torch

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError("model folder", str(path), "a folder with config.json", "give a local Hugging Face folder")
    require_sizes(read_model_config(path), path / "config.json")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers checks some fields in its own ways, and stumbles over others
        problem = " ".join(str(error).split())
        raise ModelError(str(path / "config.json"), problem, "a config that transformers loads", "mend it") from error
