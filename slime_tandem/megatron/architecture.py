"""What decides the function that a dense llama, qwen2 or qwen3 checkpoint computes, apart from its weights.

Whatever a config asks for that the Megatron model would not do is refused with the field's name. No torch is imported here. It
reads no weights and builds no model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_tandem.errors import ModelError

_QKV_BIAS = {"llama": False, "qwen2": True, "qwen3": False}
_QK_NORM = {"llama": False, "qwen2": False, "qwen3": True}
_CAUSAL_LM = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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
class Architecture:
    """What decides the function a checkpoint computes, apart from its weights.

    `rope` is the config's `rope_parameters` as sorted pairs. Sizes are counts of units, `max_positions` is in tokens.
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
        return {**asdict(self), "rope": dict(self.rope)}


def architecture_of(hf_config: Any) -> Architecture:
    """Read and check a transformers config; raises ModelError naming the first field that is not supported."""
    _require_family(hf_config)
    _require_switched_off(hf_config)
    rope = _rope(hf_config)
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
        norm_eps=float(hf_config.rms_norm_eps),
        max_positions=int(hf_config.max_position_embeddings),
        tied=bool(hf_config.tie_word_embeddings),
        rope=tuple(sorted(rope.items())),
    )


def _require_family(hf_config: Any) -> None:
    kind, classes = hf_config.model_type, hf_config.architectures
    require(
        kind in _CAUSAL_LM, "model_type", kind, f"one of {', '.join(_CAUSAL_LM)}", "use a dense model of these families"
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
    H, D, f = arch.hidden_size, arch.head_dim, arch.ffn_size
    q, kv = arch.num_heads * D, arch.num_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, H)}
    for i in range(arch.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q, H),
            "self_attn.k_proj.weight": (kv, H),
            "self_attn.v_proj.weight": (kv, H),
            "self_attn.o_proj.weight": (H, q),
            "mlp.gate_proj.weight": (f, H),
            "mlp.up_proj.weight": (f, H),
            "mlp.down_proj.weight": (H, f),
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


def load_hf_config(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a local folder, never from the network; raises ModelError if there is none that loads."""
    from transformers import AutoConfig

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError("model folder", str(path), "a folder with config.json", "give a local Hugging Face folder")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers checks some fields in its own ways, and stumbles over others
        problem = " ".join(str(error).split())
        raise ModelError(str(path / "config.json"), problem, "a config that transformers loads", "mend it") from error
